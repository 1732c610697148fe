"""Correlated noise of Toeplitz form: the banded square root and its rivals.

All of them shape the noise so that it largely cancels in the parameters: a little more of it in each gradient, which
the next ones take back. The mechanism of the matrix C with noise N(0, σ² sens(C)² C²) costs ``sens(C) ‖A C⁻¹‖_F`` of
root mean square error in θ at the privacy of a single Gaussian with multiplier σ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import Buffered, Factorization, InverseToeplitz, Toeplitz
from dpkfc.noise.sensitivity import Participation
from dpkfc.noise.series import Array, filtered, power, quotient
from dpkfc.noise.workload import Workload


@dataclass(frozen=True)
class BandedSquareRoot:
    """BSR (Kalinin & Lampert, 2024): the first `bands` coefficients of the square root C of the workload, C² = A.

    Closed form, ready in no time for any number of steps. The workload is that of the optimizer unless given.
    `normalise` scales up the columns that the end of the run cuts short, if bands do not overlap: up to 1.5 % less
    error.
    """

    bands: int = 16
    workload: Workload | None = None
    normalise: bool = False

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        c = power(*workload.generating_function(), 0.5, _bands(self.bands, n))
        return _toeplitz(
            f"square root, {len(c)} bands", c, n, self.normalise and len(c) <= separation
        )


@dataclass(frozen=True)
class BandedToeplitz:
    """The Toeplitz matrix with `bands` bands that has the least error ``‖c‖ ‖A C⁻¹‖_F`` (as long as b ≥ p)."""

    bands: int = 16
    workload: Workload | None = None
    normalise: bool = True

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        c = optimal_coefficients(workload, n, _bands(self.bands, n))
        return _toeplitz(
            f"optimised Toeplitz, {len(c)} bands", c, n, self.normalise and len(c) <= separation
        )


@dataclass(frozen=True)
class InverseSquareRoot:
    """BISR: the first `bands` coefficients of the *inverse* square root are C⁻¹. Up to 4 bands need no buffers."""

    bands: int = 4
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        d = power(*workload.generating_function(), -0.5, _bands(self.bands, n))
        return InverseToeplitz(f"inverse square root, {len(d)} bands", tuple(d.tolist()))


@dataclass(frozen=True)
class LambdaCGD:
    """``w_t = z_t - λ z_{t-1}``: each step takes back a part λ of the last noise. No buffers.

    λ is chosen for the least error unless given.
    """

    decay: float | None = None  # λ
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        from scipy.optimize import minimize_scalar

        participation = Participation.every(min(separation, n), n)

        def form(decay: float) -> InverseToeplitz:
            return InverseToeplitz(f"anticorrelated, λ = {decay:.4g}", (1.0, -decay))

        if self.decay is not None:
            if not 0 <= self.decay < 1:
                raise PrivacyError(f"decay={self.decay}: must lie in [0, 1)")
            return form(self.decay)

        def cost(logit: float) -> float:
            return _cost(form(1 - np.exp(logit)), workload, n, participation)

        return form(
            1 - float(np.exp(minimize_scalar(cost, bounds=(-12.0, -1e-6), method="bounded").x))
        )


@dataclass(frozen=True)
class BufferedToeplitz:
    """BLT: ``c_k = Σ_i ω_i λ_i^{k-1}``, all ω and λ chosen for the least error. One buffer a pole does much."""

    buffers: int = 2
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        from scipy.optimize import minimize

        if self.buffers < 1:
            raise PrivacyError(f"buffers={self.buffers}: must be at least 1")
        participation = Participation.every(min(separation, n), n)
        name = f"buffered Toeplitz, {self.buffers} buffer{'s' if self.buffers > 1 else ''}"

        def form(x: Array) -> Buffered:
            """c is non-negative and does not increase: 0 < λ < 1, 0 < ω, Σ ω < 1."""
            rates, shares = np.exp(-np.abs(x[: self.buffers])), np.exp(x[self.buffers :])
            return Buffered(name, tuple(shares / (1 + shares.sum())), tuple(1 - 0.9 * rates))

        def as_streamed(found: Buffered) -> Buffered:
            """The stream computes in float32; over many steps, poles close to 1 must be the very same numbers."""
            weights, poles = (
                np.array(numbers, dtype=np.float32).tolist()
                for numbers in (found.weights, found.poles)
            )
            return Buffered(name, tuple(weights), tuple(poles))

        def cost(x: Array) -> float:
            return float(np.log(_cost(form(x), workload, n, participation)))

        tries = []
        for slowest in (3.0, 6.0):
            start = np.concatenate(
                [np.linspace(slowest, 0.5, self.buffers), np.full(self.buffers, 0.0)]
            )
            tries.append(
                minimize(
                    cost,
                    start,
                    method="L-BFGS-B",
                    bounds=[(0, 14)] * self.buffers + [(-14, 9)] * self.buffers,
                )
            )
        return as_streamed(form(min(tries, key=lambda found: found.fun).x))


@dataclass(frozen=True)
class OutputPerturbation:
    """The trivial factorization C = A, B = I: independent noise on every *model*. A yardstick, seldom a choice."""

    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        numerator, denominator = workload.generating_function()
        d = np.trim_zeros(
            np.where(np.abs(d := quotient(denominator, numerator, n)) > 1e-15, d, 0.0), "b"
        )
        return InverseToeplitz("output perturbation", tuple(d.tolist()))


def optimal_coefficients(workload: Workload, n: int, bands: int) -> Array:
    """c with c_0 = 1 that minimises ``log ‖c‖² + log ‖A C⁻¹‖_F²``, by L-BFGS with the exact gradient.

    With b = a/c and h = b/c (as series), ``‖A C⁻¹‖_F² = Σ_j (n-j) b_j²`` and
    ``∂/∂c_i = -2 Σ_j (n-j) b_j h_{j-i}``: two filters and p inner products, O(np).
    """
    from scipy.optimize import minimize

    a, remaining = workload.coefficients(n), np.arange(n, 0, -1)

    def objective(tail: Array) -> tuple[float, Array]:
        c = np.concatenate([[1.0], tail])
        b = filtered([1.0], c, a)
        weighted = remaining * b
        squares = float(weighted @ b)
        if not np.isfinite(squares):
            return 1e3, np.zeros_like(tail)  # too far; much more would lead the line search astray
        h = filtered([1.0], c, b)
        gradient = np.array([-2 * (weighted[i:] @ h[: n - i]) for i in range(1, bands)])
        return float(np.log(squares) + np.log(c @ c)), gradient / squares + 2 * tail / (c @ c)

    start = power(*workload.generating_function(), 0.5, bands)
    start /= start[0]
    if bands == 1:
        return start
    with np.errstate(over="ignore", invalid="ignore"):
        found = minimize(
            objective,
            start[1:],
            jac=True,
            method="L-BFGS-B",
            options={"maxcor": 20, "ftol": 1e-10, "maxiter": 2000},
        )
    return np.asarray(np.concatenate([[1.0], found.x]))


def _toeplitz(name: str, c: Array, n: int, normalise: bool) -> Toeplitz:
    return Toeplitz(name, tuple(c.tolist()), n if normalise else None)


def _cost(form: Factorization, workload: Workload, n: int, participation: Participation) -> float:
    return form.sensitivity(n, participation).value * form.error(workload, n)


def _bands(bands: int, n: int) -> int:
    if bands < 1:
        raise PrivacyError(f"bands={bands}: must be at least 1 (1 is independent noise)")
    return min(bands, n)
