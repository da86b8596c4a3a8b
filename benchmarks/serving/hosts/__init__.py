"""Benchmarks of clusters of several hosts."""
