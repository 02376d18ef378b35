"""Benchmarks and device checks. Not installed: run them from the repository's root."""
