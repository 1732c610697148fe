"""Table 2 of the paper: is geometry from the wrong public data worse than geometry from noise?

    dpkfc reproduce table2 --data-dir DATA

One task alone:

    python -m experiments.table2 --data-dir DATA --task "pneumonia <- mnist" \\
        --out runs/pneumonia.jsonl
"""
