"""The accuracy of the preset: fixed features, a linear model, no private tuning.

    dpkfc reproduce preset --data-dir DATA

Parts of it:

    python -m experiments.preset --data-dir DATA --out runs/preset.jsonl
"""
