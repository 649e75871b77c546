"""Benchmarks: each compares, in one run, with what a user would otherwise use, and prints ratios."""
