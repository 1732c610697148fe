"""Data sets that the experiments train on."""
