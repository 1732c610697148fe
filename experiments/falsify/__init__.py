"""Is geometry from noise as good as geometry from the private records?

    dpkfc reproduce falsify --data-dir DATA

This experiment could refute the claim that DP-KFC needs no data for its geometry. One task alone:

    python -m experiments.falsify --data-dir DATA --task "mnist mlp" --out runs/falsify.jsonl
"""
