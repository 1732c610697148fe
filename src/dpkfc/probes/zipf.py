"""The Zipf-Mandelbrot law: the frequency of the r-th most frequent word of natural text."""

from __future__ import annotations

import torch
from torch import Tensor

OFFSET = 2.7  # Mandelbrot's correction for the highest ranks


def zipf(size: int, exponent: float) -> Tensor:
    """``p_r ∝ 1 / (r + 2.7)^exponent`` for the ranks r = 1..size; exponent 0 is uniform.

    >>> p = zipf(100, 1.0)
    >>> round(float(p[0] / p[9]), 3), round(float(p.sum()), 6)
    (3.432, 1.0)
    """
    ranks = torch.arange(1, size + 1, dtype=torch.float64)
    return torch.softmax(-exponent * torch.log(ranks + OFFSET), dim=0)
