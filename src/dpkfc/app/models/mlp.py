"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them; inputs are flattened first.

    >>> [tuple(p.shape) for p in mlp([784, 512, 10]).parameters()]
    [(512, 784), (512,), (10, 512), (10,)]
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes={list(sizes)}: give at least the input and the output width")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
