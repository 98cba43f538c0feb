"""Benchmarks: each measures its peer in the same run and prints a ratio."""
