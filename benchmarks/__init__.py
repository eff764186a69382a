"""Benchmarks: ``python -m benchmarks.<name> [--json]``, one row a figure."""
