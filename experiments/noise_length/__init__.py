"""The best learning rates of private runs differ far more than the best lengths of their noise.

    dpkfc reproduce noise-length

With sweeps that other studies recorded:

    python -m experiments.noise_length --results docs/results --out runs/noise-length.jsonl
"""
