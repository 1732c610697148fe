"""How far one record can move ``C x``, when it may take part in several steps.

The record adds vectors of norm at most 1 to the steps of a pattern π, so it moves C x by at most
``sens(C) = max_π max ‖Σ_{t∈π} C[:, t] v_tᵀ‖``. Under *b-min-separation* a pattern is any set of at most k
steps that are at least b apart. Any subset of a pattern is a pattern, so a record that sits out is covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpkfc.errors import PrivacyError
from dpkfc.noise.series import Array

DENSE = 4096  # above this many steps, no n x n matrix is made


@dataclass(frozen=True)
class Participation:
    """At most `times` steps, at least `separation` apart. `Participation.once(n)` is a single pass over the data."""

    separation: int
    times: int

    def __post_init__(self) -> None:
        if self.separation < 1 or self.times < 1:
            raise PrivacyError(f"{self}: separation and times must be at least 1")

    @staticmethod
    def once(n: int) -> Participation:
        return Participation(n, 1)

    @staticmethod
    def every(separation: int, n: int) -> Participation:
        """As often as n steps allow."""
        return Participation(separation, -(-n // separation))

    def within(self, n: int) -> Participation:
        """The same among the first `n` steps."""
        return Participation(self.separation, min(self.times, -(-n // self.separation)))


@dataclass(frozen=True)
class Sensitivity:
    """A sensitivity, and whether it is attained (`exact`) or an upper bound. Both are sound."""

    value: float
    exact: bool


def heaviest_pattern(weights: Array, participation: Participation) -> float:
    """``max_π Σ_{t∈π} weights_t`` for weights ≥ 0: by dynamic programming over the number of participations."""
    b, n = participation.separation, len(weights)
    if (np.diff(weights) <= 0).all():  # the earliest steps are the heaviest
        return float(weights[::b][: participation.times].sum())
    best = np.zeros(n + 1)  # best[t]: with the steps before t, and so far many participations
    for _ in range(participation.within(n).times):
        before = np.concatenate([np.zeros(min(b, n)), best[1 : max(0, n - b) + 1]])
        best = np.maximum(best, np.concatenate([[0.0], np.maximum.accumulate(weights + before)]))
    return float(best[-1])


def of_columns(norms: Array, bands: int, participation: Participation) -> Sensitivity | None:
    """Exact for a banded C whose bands do not reach from one participation to the next.

    If ``C[i, j] = 0`` for i-j ≥ p and p ≤ b, the columns of a pattern have no row in common:
    ``sens² = max_π Σ_{t∈π} ‖C[:, t]‖²``, whatever the signs.
    """
    if bands > participation.separation and participation.times > 1:
        return None
    return Sensitivity(heaviest_pattern(norms**2, participation) ** 0.5, exact=True)


def of_toeplitz(coefficients: Array, participation: Participation) -> Sensitivity:
    """For C[i, j] = c_{i-j} among n = len(c) steps: exact if c ≥ 0 does not increase, else an upper bound.

    Kalinin & Lampert (2024): for non-increasing c ≥ 0 the earliest pattern is the worst, ``‖Σ_{i<k} C[:, ib]‖``.
    For any other c, ``|⟨C[:,s], C[:,t]⟩|`` grows if |c| is replaced by the non-increasing envelope
    ``ĉ_j = max_{m≥j} |c_m|``, so sens(ĉ) bounds it; for few steps `of_gram` is tighter.
    """
    c = np.abs(coefficients)
    envelope = np.maximum.accumulate(c[::-1])[::-1]
    n, b, k = len(c), participation.separation, participation.times
    exact = bool((coefficients >= 0).all() and (envelope == c).all())
    rows = np.pad(envelope, (0, -n % b)).reshape(
        -1, b
    )  # Σ_{i<k} ĉ_{t-ib} is a running sum of k rows
    total = np.cumsum(rows, axis=0)
    total[k:] -= total[:-k].copy()
    return Sensitivity(float(np.linalg.norm(total.ravel()[:n])), exact)


def of_gram(matrix: Array, participation: Participation) -> Sensitivity:
    """An upper bound for any C, from G = CᵀC: ``sens² ≤ max_π Σ_{s∈π} max_{π'∋s} Σ_{t∈π'} |G_st|``.

    Both maxima are found by dynamic programming; the pattern inside may differ from row to row, which is
    what makes it a bound. Where the earliest pattern, taken alone, reaches it, it is exact.
    """
    signed, n = matrix.T @ matrix, len(matrix)
    gram, b = np.abs(signed), participation.separation
    rows = np.empty(n)
    for s in range(n):
        others = gram[s].copy()
        others[max(0, s - b + 1) : s + b] = 0  # too close to s
        others[s] = 2 * gram[s].sum()  # larger than all the rest: s is in the pattern
        rows[s] = heaviest_pattern(others, participation) - others[s] + gram[s, s]
    bound = heaviest_pattern(rows, participation)
    earliest = np.arange(participation.within(n).times) * b
    return Sensitivity(
        bound**0.5, exact=bool(signed[np.ix_(earliest, earliest)].sum() >= bound * (1 - 1e-12))
    )
