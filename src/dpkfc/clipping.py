"""Clip weights from per-sample norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6  # the usual relative error of a float32 norm
MARGIN = 1e-4  # and what no norm exceeds, by which the noise is larger than the clip asks for
SMALLEST = 1e-6  # far below it squares begin to underflow in float32, and a norm may be wrong altogether


@dataclass(frozen=True)
class Automatic:
    """Automatic clipping (Bu et al., 2023): ``C g / (‖g‖ + γ)``, for every record, however small its gradient.

    One number less to tune: with plain clipping at a small C nearly every gradient is clipped anyway, and C only scales
    the step. γ = 0 normalises every gradient to C; a positive γ lets vanishing ones vanish.
    """

    norm: float = 1.0  # C
    gamma: float = 0.01


def clip_weights(squared_norms: Tensor, clip: float, gamma: float | None = None) -> tuple[Tensor, Tensor]:
    """``min(1, C (1 - ROUNDING) / ‖g_i‖)`` for each sample, and which samples are finite.

    With `gamma`, ``C (1 - ROUNDING) / (‖g_i‖ + γ)`` instead: without the bound of 1, a norm that has underflowed must
    not be divided by; a gradient below `SMALLEST` gets weight 0. Either way ``‖weight · g‖ ≤ C``.

    A sample whose norm is NaN or infinite gets weight exactly 0. The caller must also drop its vectors,
    since 0 · NaN is NaN.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    finite = torch.isfinite(squared_norms)
    if gamma is None:
        weights = (clip * (1 - ROUNDING) / norms).clamp(max=1.0)
    else:
        weights = torch.where(norms > SMALLEST, clip * (1 - ROUNDING) / (norms + gamma), 0.0)
    return torch.where(finite, weights, torch.zeros_like(weights)), finite
