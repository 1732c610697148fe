"""Compare the per-sample gradients of two passes.

Two things are compared: the norm of each record's gradient, and one weighted sum of all gradients.
With random weights, differences of several records cancel in the sum only by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.per_sample.base import ParamKey
from dpkfc.per_sample.capture import CapturedGrads
from dpkfc.per_sample.rounding import full_precision
from dpkfc.sharding import own_part

# norms below this fraction of the largest norm are compared on the scale of that fraction
SMALL = 1e-2
# rounding errors of a sum that cancels, in units of the dtype's eps and of the whole gradient
ROUNDINGS = 16


@dataclass
class Fingerprint:
    """Norms and a weighted sum of per-sample gradients."""

    norms: Tensor  # [batch]
    weights: Tensor  # [batch]
    # Σ_i weight_i g_i; of a sharded parameter, the part that this rank holds
    sums: dict[ParamKey, list[Tensor]]
    eps: float  # of the coarsest dtype that the gradients were computed in

    @staticmethod
    def of(captured: CapturedGrads, weights: Tensor, scale: float = 1.0) -> Fingerprint:
        """Fingerprint of the captured gradients, multiplied by `scale`."""
        squared = captured.squared_norms
        assert squared is not None
        with full_precision(squared.device):
            weights = weights.to(squared.device, squared.dtype)
            finite = torch.isfinite(squared)
            all_finite = bool(finite.all())
            sums = {}
            for key, grad in captured.grads.items():
                kept = grad if all_finite else grad.masked(finite)
                parts = kept.weighted_sum(weights * finite * scale)
                sums[key] = [own_part(p, x) for p, x in zip(key, parts, strict=True)]
            return Fingerprint(squared.clamp(min=0).sqrt() * scale, weights, sums, captured.eps)


@dataclass(frozen=True)
class Difference:
    """How the gradients of one pass differ from those of another."""

    norm_ratio: float  # median over the records
    share: float  # of the gradient that differs
    key: ParamKey | None  # the parameters that differ most


@dataclass(frozen=True)
class Tolerance:
    """The part of a gradient that may differ: `least`, or more where a coarse dtype rounds more."""

    least: float
    roundings: float  # in units of the dtype's eps

    def limit(self, eps: float) -> float:
        return max(self.least, self.roundings * eps)


# the same computation, value by value: 0.4 % in bfloat16
EXACT = Tolerance(1e-4, roundings=0.5)
# kernels, or the extent of autocast, may differ: 12 % in bfloat16
SAME = Tolerance(1e-3, roundings=16)


def difference(one: Fingerprint, other: Fingerprint, tolerance: Tolerance) -> Difference | None:
    """How the gradients of the records with a nonzero weight differ; None if they agree."""
    limit = tolerance.limit(max(one.eps, other.eps))
    rows = one.weights != 0
    norms, others = one.norms[rows], other.norms[rows]
    finite = torch.isfinite(norms) & torch.isfinite(others)
    same_rows = bool((torch.isfinite(norms) == torch.isfinite(others)).all())
    norms, others = norms[finite], others[finite]
    larger = torch.maximum(norms, others)
    size = float((larger * one.weights[rows][finite].abs()).norm())
    distances = {
        key: _distance(one.sums.get(key), other.sums.get(key)) for key in {**one.sums, **other.sums}
    }
    worst = max(distances, key=lambda key: distances[key], default=None)
    total = sum(distance**2 for distance in distances.values()) ** 0.5
    same = same_rows and total <= limit * size
    if same and len(norms):
        allowed = limit * larger.clamp(min=SMALL * float(larger.max()))
        same = bool(((norms - others).abs() <= allowed).all())
    if same:
        return None
    ratios = (norms / others)[others > 0]
    median_ratio = float(ratios.median()) if len(ratios) else float("nan")
    return Difference(median_ratio, total / size if size else 1.0, worst)


def differing_keys(one: Fingerprint, other: Fingerprint, tolerance: Tolerance) -> list[ParamKey]:
    """The parameters whose weighted sums differ, each on its own scale, the largest first.

    Sums below `SMALL` of the whole gradient are compared on the scale of that fraction. Where the
    dtype is so coarse that a sum may cancel to rounding errors, on the scale of the whole gradient.
    """
    eps = max(one.eps, other.eps)
    norms = {key: max(_norm(one.sums.get(key)), _norm(other.sums.get(key))) for key in one.sums}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    distances = {key: _distance(parts, other.sums.get(key)) for key, parts in one.sums.items()}
    limit = tolerance.limit(eps)
    allowed = {
        key: max(limit * max(norm, SMALL * whole), ROUNDINGS * eps * whole)
        for key, norm in norms.items()
    }
    differing = [key for key, distance in distances.items() if distance > allowed[key]]
    return sorted(differing, key=lambda key: -distances[key])


def _norm(parts: list[Tensor] | None) -> float:
    return 0.0 if parts is None else float(torch.stack([x.norm() for x in parts]).norm())


def _distance(one: list[Tensor] | None, other: list[Tensor] | None) -> float:
    if one is None or other is None:
        return _norm(one or other)
    return float(torch.stack([(x - y).norm() for x, y in zip(one, other, strict=True)]).norm())
