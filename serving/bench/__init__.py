"""Benchmarks behind `pdserve bench`."""
