"""Tests of serving.metrics."""
