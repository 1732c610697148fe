"""Table 5 and Figures 4 and 5 of the paper: accuracy against epsilon on four tasks.

    dpkfc reproduce table5 --data-dir DATA

Some tasks alone:

    python -m experiments.table5 --data-dir DATA --out runs/table5 --task imdb,stackoverflow
"""
