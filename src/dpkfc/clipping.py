"""Clip weights from per-sample norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Typical relative error of a float32 norm. Samples are clipped to R (1 - ROUNDING).
ROUNDING = 1e-6

# Upper bound on the relative error of a computed norm; the noise is scaled by 1 + MARGIN.
MARGIN = 1e-4

# Below 1e-6 the rounding error of products of very small and very large float32 numbers is no
# longer negligible: use a larger clip and a smaller learning rate.
SMALLEST_CLIP = 1e-6

# Smallest γ of automatic clipping, see `AutomaticClipping`.
SMALLEST_GAMMA = 1e-4


@dataclass(frozen=True)
class AutomaticClipping:
    """Automatic clipping (Bu et al., 2023): every gradient g becomes ``R g / (‖g‖ + γ)``.

    There is no threshold to tune. With plain clipping at a small R nearly every gradient is clipped
    anyway, and R only scales the step. A small γ normalises every gradient to R; a larger γ keeps
    small gradients small.

    Args:
        norm: the clip norm R.
        gamma: γ, at least 1e-4. A vector computed with error e has norm at most
            ``R (‖g‖ + e) / (‖g‖ + γ) ≤ R max(1, e/γ)`` after clipping. With γ = 0, rounding alone
            could exceed R where large parts of a gradient cancel or where a norm underflows.

    >>> import dpkfc
    >>> dpkfc.AutomaticClipping(norm=0.5)
    AutomaticClipping(norm=0.5, gamma=0.01)
    """

    norm: float = 1.0
    gamma: float = 0.01


def clip_weights(
    squared_norms: Tensor, clip: float, gamma: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one weight per sample that clips its gradient to norm R = `clip`.

    Args:
        squared_norms: [batch], the squared norms ``‖g_i‖²``.
        clip: the clip norm R.
        gamma: γ of automatic clipping; None clips plainly.

    Returns:
        weights: ``min(1, R (1 - ROUNDING) / ‖g_i‖)``, or ``R (1 - ROUNDING) / (‖g_i‖ + γ)``.
        finite: True for samples whose norm is finite.

    **Guarantee.** ``‖weight_i g_i‖ ≤ R`` up to `MARGIN`. A sample whose norm is NaN or infinite has
    weight exactly 0. The caller must also drop its vectors, since 0 · NaN is NaN.

    >>> weights, finite = clip_weights(torch.tensor([0.25, 16.0, float("inf")]), clip=1.0)
    >>> [round(weight, 3) for weight in weights.tolist()], finite.tolist()
    ([1.0, 0.25, 0.0], [True, True, False])
    """
    norms = squared_norms.clamp(min=0).sqrt()
    finite = torch.isfinite(squared_norms)
    if gamma is None:
        weights = (clip * (1 - ROUNDING) / norms).clamp(max=1.0)
    else:
        weights = clip * (1 - ROUNDING) / (norms + gamma)
    return torch.where(finite, weights, torch.zeros_like(weights)), finite
