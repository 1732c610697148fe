"""Where does data-free geometry break: on images whose statistics pink noise does not share?

    dpkfc reproduce non-stationary --data-dir DATA

One task alone:

    python -m experiments.non_stationary --data-dir DATA --task "blue mlp" \\
        --out runs/non-stationary.jsonl
"""
