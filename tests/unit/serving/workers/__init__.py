"""Tests of serving.workers."""
