"""Tests of kvtransfer, one module each."""
