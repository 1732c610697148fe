"""Table 7, Figures 10 and 11 of the paper: the importance of hyperparameters, by Optuna.

    dpkfc reproduce table7 --data-dir DATA

The paper's protocol takes many hours. A smaller one:

    python -m experiments.table7 --trials 30 --records 10000 --validation 2000 --epochs 2 \\
        --probe-batch 32 --datasets mnist,fashion-mnist --data-dir DATA --out runs/table7
"""
