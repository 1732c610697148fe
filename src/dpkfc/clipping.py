"""Clip weights from per-sample norms."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6  # the usual relative error of a float32 norm
MARGIN = 1e-4  # and what no norm exceeds, by which the noise is larger than the clip asks for


def clip_weights(squared_norms: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """``min(1, C (1 - ROUNDING) / ‖g_i‖)`` for each sample, and which samples are finite.

    A sample whose norm is NaN or infinite gets weight exactly 0. The caller must also drop its vectors,
    since 0 · NaN is NaN.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    finite = torch.isfinite(squared_norms)
    weights = (clip * (1 - ROUNDING) / norms).clamp(max=1.0)
    return torch.where(finite, weights, torch.zeros_like(weights)), finite
