"""Data sets that only the experiments use."""
