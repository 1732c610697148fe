"""Tables 1 and 6 of the paper: private optimizers on MNIST at epsilon 1, 2, 5 and 8.

    dpkfc reproduce table1 --data-dir DATA

Parts of it, and the table of several results files:

    python -m experiments.table1 --data-dir DATA --out runs/optimizers.jsonl
    python -m experiments.table1 --stage table --out runs
"""
