"""Independent and correlated noise, with and without DP-KFC, on FashionMNIST.

    dpkfc reproduce correlated --data-dir DATA

One task alone, and the table of several results files:

    python -m experiments.correlated --data-dir DATA --task "little noise" --out runs/little.jsonl
    python -m experiments.correlated --stage table --out runs
"""
