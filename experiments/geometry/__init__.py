"""DP-SGD and DP-KFC on MNIST and FashionMNIST, tuned alike.

    dpkfc reproduce geometry --data-dir DATA

One data set alone, and the table of several results files:

    python -m experiments.geometry --data-dir DATA --task mnist --out runs/mnist.jsonl
    python -m experiments.geometry --stage table --out runs
"""
