"""The sensitivity of a strategy matrix: how far one record can move ``C x``.

A record adds vectors v_t of norm at most 1 to the steps t of a participation pattern π. So it
moves C x by at most ``sens(C) = max_π max_v ‖Σ_{t∈π} C[:, t] v_tᵀ‖``. Under *b-min-separation* a
pattern is any set of at most k steps that are at least b apart. Every subset of a pattern is a
pattern, so a record that skips steps is covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpkfc.noise.series import Array

MAX_DENSE_STEPS = 4096  # for longer runs no n x n matrix is computed


@dataclass(frozen=True)
class Participation:
    """Which steps a record may join: at most `times` steps, at least `separation` apart.

    >>> Participation.every(separation=10, n=25)
    Participation(separation=10, times=3)
    """

    separation: int
    times: int

    def __post_init__(self) -> None:
        if self.separation < 1 or self.times < 1:
            raise ValueError(f"{self}: separation and times must be at least 1")

    @staticmethod
    def once(n: int) -> Participation:
        """One step of n: a single pass over the data."""
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
    """A sensitivity; `exact` if it is attained, otherwise an upper bound. Both are sound."""

    value: float
    exact: bool


def heaviest_pattern(weights: Array, participation: Participation) -> float:
    """``max_π Σ_{t∈π} weights_t`` for weights ≥ 0.

    Computed by dynamic programming over the number of participations.

    >>> heaviest_pattern(np.array([1.0, 5.0, 1.0, 4.0]), Participation(separation=2, times=2))
    9.0
    """
    b, n = participation.separation, len(weights)
    if (np.diff(weights) <= 0).all():  # the earliest steps are the heaviest
        return float(weights[::b][: participation.times].sum())
    # After i rounds, best[t] is the weight of the best at most i participations before step t.
    best = np.zeros(n + 1)
    for _ in range(participation.within(n).times):
        before = np.concatenate([np.zeros(min(b, n)), best[1 : max(0, n - b) + 1]])
        best = np.maximum(best, np.concatenate([[0.0], np.maximum.accumulate(weights + before)]))
    return float(best[-1])


def banded_sensitivity(
    column_norms: Array, bands: int, participation: Participation
) -> Sensitivity | None:
    """The exact sensitivity of a banded C; None if bands overlap between participations.

    If ``C[i, j] = 0`` for i-j ≥ p and p ≤ b, the columns of a pattern have no row in common, so
    ``sens² = max_π Σ_{t∈π} ‖C[:, t]‖²``, whatever the signs.
    """
    if bands > participation.separation and participation.times > 1:
        return None
    return Sensitivity(heaviest_pattern(column_norms**2, participation) ** 0.5, exact=True)


def toeplitz_sensitivity(coefficients: Array, participation: Participation) -> Sensitivity:
    """The sensitivity of ``C[i, j] = c_{i-j}`` over n = len(c) steps.

    It is exact if c is non-negative and non-increasing: then the earliest pattern is the worst,
    ``‖Σ_{i<k} C[:, ib]‖`` (Kalinin & Lampert, 2024). Otherwise it is an upper bound:
    ``|⟨C[:,s], C[:,t]⟩|`` grows if |c| is replaced by its non-increasing envelope
    ``ĉ_j = max_{m≥j} |c_m|``, so sens(C) ≤ sens(Ĉ). For few steps `gram_sensitivity` is tighter.
    """
    c = np.abs(coefficients)
    envelope = np.maximum.accumulate(c[::-1])[::-1]
    n, b, k = len(c), participation.separation, participation.times
    exact = bool((coefficients >= 0).all() and (envelope == c).all())
    # In rows of length b, Σ_{i<k} ĉ_{t-ib} is a running sum over k rows.
    rows = np.pad(envelope, (0, -n % b)).reshape(-1, b)
    total = np.cumsum(rows, axis=0)
    total[k:] -= total[:-k].copy()
    return Sensitivity(float(np.linalg.norm(total.ravel()[:n])), exact)


def gram_sensitivity(strategy: Array, participation: Participation) -> Sensitivity:
    """An upper bound for any C, from G = CᵀC.

    ``sens² ≤ max_π Σ_{s∈π} max_{π'∋s} Σ_{t∈π'} |G_st|``. Both maxima are computed by dynamic
    programming. The inner pattern may differ between rows, so this is a bound. It is exact where
    the earliest pattern attains it.
    """
    signed, n = strategy.T @ strategy, len(strategy)
    gram, b = np.abs(signed), participation.separation
    rows = np.empty(n)
    for s in range(n):
        others = gram[s].copy()
        others[max(0, s - b + 1) : s + b] = 0  # too close to s
        others[s] = 2 * gram[s].sum()  # larger than all others together: the pattern contains s
        rows[s] = heaviest_pattern(others, participation) - others[s] + gram[s, s]
    bound = heaviest_pattern(rows, participation)
    earliest = np.arange(participation.within(n).times) * b
    attained = signed[np.ix_(earliest, earliest)].sum()
    return Sensitivity(bound**0.5, exact=bool(attained >= bound * (1 - 1e-12)))
