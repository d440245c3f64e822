"""Benchmarks: variants run alternately, and results have a median, minimum and maximum."""
