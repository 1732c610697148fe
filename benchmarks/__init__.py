"""Benchmarks beside ordinary training and Opacus; every figure is a ratio within one run."""
