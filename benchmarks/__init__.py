"""Benchmarks against ordinary training and Opacus; results are ratios within one run."""
