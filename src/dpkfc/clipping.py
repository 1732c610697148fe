"""Automatic clipping, and the limits within which clipping holds in floating point.

The clip itself is `engine.step.clip_factors`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
