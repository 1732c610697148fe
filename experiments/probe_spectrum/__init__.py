"""What must probes look like: their spectrum 1/f^alpha, brightness, and correlated channels?

    dpkfc reproduce probe-spectrum --data-dir DATA

One task alone:

    python -m experiments.probe_spectrum --data-dir DATA --task "mnist mlp" \\
        --out runs/probe-spectrum.jsonl
"""
