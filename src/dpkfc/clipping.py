"""Clip weights from per-sample norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6  # the usual relative error of a float32 norm
MARGIN = 1e-4  # and what no norm exceeds, by which the noise is larger than the clip asks for
SMALLEST_CLIP = (
    1e-6  # what float32 loses of products of very small and very large numbers is far below
)
SMALLEST_GAMMA = 1e-4


@dataclass(frozen=True)
class AutomaticClipping:
    """Automatic clipping (Bu et al., 2023): ``C g / (‖g‖ + γ)``, for every record, however small its gradient.

    One number less to tune: with plain clipping at a small C nearly every gradient is clipped anyway, and C only scales
    the step. A small γ normalises every gradient to C; a larger one lets small gradients stay small.

    γ is at least 1e-4. A vector that is computed with an error e is scaled to at most
    ``C (‖g‖ + e) / (‖g‖ + γ) ≤ C max(1, e/γ)``: were γ = 0, rounding alone, where large parts of a gradient cancel, or
    a norm that underflows, could leave the ball.
    """

    norm: float = 1.0  # C
    gamma: float = 0.01


def clip_weights(
    squared_norms: Tensor, clip: float, gamma: float | None = None
) -> tuple[Tensor, Tensor]:
    """``min(1, C (1 - ROUNDING) / ‖g_i‖)`` for each sample, and which samples are finite.

    With `gamma`, ``C (1 - ROUNDING) / (‖g_i‖ + γ)`` instead. Either way ``‖weight · g‖ ≤ C``.

    A sample whose norm is NaN or infinite gets weight exactly 0. The caller must also drop its vectors,
    since 0 · NaN is NaN.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    finite = torch.isfinite(squared_norms)
    if gamma is None:
        weights = (clip * (1 - ROUNDING) / norms).clamp(max=1.0)
    else:
        weights = clip * (1 - ROUNDING) / (norms + gamma)
    return torch.where(finite, weights, torch.zeros_like(weights)), finite
