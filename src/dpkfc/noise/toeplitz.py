"""Correlated noise with a Toeplitz strategy matrix: the banded square root and alternatives.

All of them shape the noise so that it largely cancels in the parameters: each gradient gets a
little more noise, which later gradients subtract again. With noise ``C⁻¹ z``,
``z ~ N(0, (σ R sens(C))² I)``, the root mean square error in θ is ``σ R sens(C) ‖A C⁻¹‖_F / √n``,
at the privacy of a single Gaussian mechanism with multiplier σ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpkfc.noise.factorization import (
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.noise.sensitivity import Participation
from dpkfc.noise.series import Array, filtered, power, quotient
from dpkfc.noise.workload import Workload


@dataclass(frozen=True)
class BandedSquareRoot:
    """BSR (Kalinin & Lampert, 2024): the first coefficients of the square root of A, C² = A.

    It has a closed form, so it is ready at once for any number of steps.

    Args:
        bands: the number p of coefficients. The noise keeps p-1 buffers.
        workload: A; by default that of the optimizer.
        normalise: scale up the columns that the end of the run cuts off, if bands do not overlap.
            The error is up to 1.5 % smaller.

    >>> noise = BandedSquareRoot(bands=3).factorize(Workload.sgd(), n=100, separation=10)
    >>> noise.c
    (1.0, 0.5, 0.375)
    """

    bands: int = 16
    workload: Workload | None = None
    normalise: bool = False

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        c = power(*workload.generating_function(), 0.5, _check_bands(self.bands, n))
        name = f"square root, {len(c)} bands"
        return _toeplitz(name, c, n, self.normalise and len(c) <= separation)


@dataclass(frozen=True)
class BandedToeplitz:
    """The banded Toeplitz matrix with the smallest error ``‖c‖ ‖A C⁻¹‖_F``, as long as p ≤ b.

    Args:
        bands: the number p of coefficients. The noise keeps p-1 buffers.
        workload: A; by default that of the optimizer.
        normalise: as for `BandedSquareRoot`.

    >>> noise = BandedToeplitz(bands=2).factorize(Workload.sgd(), n=100, separation=10)
    >>> [round(coefficient, 3) for coefficient in noise.c]
    [1.0, 0.761]
    """

    bands: int = 16
    workload: Workload | None = None
    normalise: bool = True

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        c = optimal_coefficients(workload, n, _check_bands(self.bands, n))
        name = f"optimised Toeplitz, {len(c)} bands"
        return _toeplitz(name, c, n, self.normalise and len(c) <= separation)


@dataclass(frozen=True)
class InverseSquareRoot:
    """BISR: C⁻¹ has the first coefficients of the *inverse* square root of A.

    Up to 4 bands need no buffers.

    >>> noise = InverseSquareRoot(bands=3).factorize(Workload.sgd(), n=100, separation=10)
    >>> noise.d, noise.buffers
    ((1.0, -0.5, -0.125), 0)
    """

    bands: int = 4
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        d = power(*workload.generating_function(), -0.5, _check_bands(self.bands, n))
        return InverseToeplitzStrategy(f"inverse square root, {len(d)} bands", tuple(d.tolist()))


@dataclass(frozen=True)
class LambdaCGD:
    """``w_t = z_t - λ z_{t-1}``: each step subtracts a share λ of the previous normals. No buffers.

    Args:
        decay: λ in [0, 1). By default the λ with the smallest error.
        workload: A; by default that of the optimizer.

    >>> LambdaCGD(decay=0.5).factorize(Workload.sgd(), n=100, separation=10).d
    (1.0, -0.5)
    """

    decay: float | None = None
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        from scipy.optimize import minimize_scalar

        participation = Participation.every(min(separation, n), n)

        def strategy(decay: float) -> InverseToeplitzStrategy:
            return InverseToeplitzStrategy(f"anticorrelated, λ = {decay:.4g}", (1.0, -decay))

        if self.decay is not None:
            if not 0 <= self.decay < 1:
                raise ValueError(f"decay={self.decay}: must lie in [0, 1)")
            return strategy(self.decay)

        def cost(log_gap: float) -> float:
            return _cost(strategy(1 - np.exp(log_gap)), workload, n, participation)

        best = minimize_scalar(cost, bounds=(-12.0, -1e-6), method="bounded")
        return strategy(1 - float(np.exp(best.x)))


@dataclass(frozen=True)
class BufferedToeplitz:
    """BLT: ``c_k = Σ_i ω_i λ_i^{k-1}`` with the ω and λ of the smallest error.

    Args:
        buffers: the number of poles λ_i. Few are enough for most of the gain.
        workload: A; by default that of the optimizer.

    >>> BufferedToeplitz(buffers=1).factorize(Workload.sgd(), n=50, separation=50).name
    'buffered Toeplitz, 1 buffer'
    """

    buffers: int = 2
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        from scipy.optimize import minimize

        if self.buffers < 1:
            raise ValueError(f"buffers={self.buffers}: must be at least 1")
        participation = Participation.every(min(separation, n), n)
        name = f"buffered Toeplitz, {self.buffers} buffer{'s' if self.buffers > 1 else ''}"

        def strategy(x: Array) -> BufferedStrategy:
            """0 < λ < 1, 0 < ω, Σ ω < 1: c is non-negative and non-increasing."""
            rates = np.exp(-np.abs(x[: self.buffers]))
            shares = np.exp(x[self.buffers :])
            weights = shares / (1 + shares.sum())
            return BufferedStrategy(name, tuple(weights), tuple(1 - 0.9 * rates))

        def in_float32(exact: BufferedStrategy) -> BufferedStrategy:
            """The numbers of the stream. Over many steps, poles close to 1 must be the same."""
            weights = np.array(exact.weights, dtype=np.float32).tolist()
            poles = np.array(exact.poles, dtype=np.float32).tolist()
            return BufferedStrategy(name, tuple(weights), tuple(poles))

        def cost(x: Array) -> float:
            return float(np.log(_cost(strategy(x), workload, n, participation)))

        bounds = [(0, 14)] * self.buffers + [(-14, 9)] * self.buffers
        results = []
        for slowest in (3.0, 6.0):
            rates = np.linspace(slowest, 0.5, self.buffers)
            start = np.concatenate([rates, np.full(self.buffers, 0.0)])
            results.append(minimize(cost, start, method="L-BFGS-B", bounds=bounds))
        return in_float32(strategy(min(results, key=lambda result: result.fun).x))


@dataclass(frozen=True)
class OutputPerturbation:
    """The trivial factorization C = A, B = I: independent noise on every *model*.

    It is a baseline for comparison, seldom the best choice.
    """

    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        numerator, denominator = workload.generating_function()
        d = quotient(denominator, numerator, n)
        d = np.trim_zeros(np.where(np.abs(d) > 1e-15, d, 0.0), "b")
        return InverseToeplitzStrategy("output perturbation", tuple(d.tolist()))


def optimal_coefficients(workload: Workload, n: int, bands: int) -> Array:
    """c with c_0 = 1 that minimises ``log ‖c‖² + log ‖A C⁻¹‖_F²``, by L-BFGS.

    The gradient is exact: with b = a/c and h = b/c (as series),
    ``‖A C⁻¹‖_F² = Σ_j (n-j) b_j²`` and ``∂/∂c_i = -2 Σ_j (n-j) b_j h_{j-i}``. It takes two filters
    and p inner products, O(np).
    """
    from scipy.optimize import minimize

    a = workload.coefficients(n)
    remaining_steps = np.arange(n, 0, -1)

    def objective(tail: Array) -> tuple[float, Array]:
        c = np.concatenate([[1.0], tail])
        b = filtered([1.0], c, a)
        weighted = remaining_steps * b
        squares = float(weighted @ b)
        if not np.isfinite(squares):
            # The step was too long. A much larger value would mislead the line search.
            return 1e3, np.zeros_like(tail)
        h = filtered([1.0], c, b)
        gradient = np.array([-2 * (weighted[i:] @ h[: n - i]) for i in range(1, bands)])
        return float(np.log(squares) + np.log(c @ c)), gradient / squares + 2 * tail / (c @ c)

    start = power(*workload.generating_function(), 0.5, bands)
    start /= start[0]
    if bands == 1:
        return start
    options = {"maxcor": 20, "ftol": 1e-10, "maxiter": 2000}
    with np.errstate(over="ignore", invalid="ignore"):
        best = minimize(objective, start[1:], jac=True, method="L-BFGS-B", options=options)
    return np.asarray(np.concatenate([[1.0], best.x]))


def _toeplitz(name: str, c: Array, n: int, normalise: bool) -> ToeplitzStrategy:
    return ToeplitzStrategy(name, tuple(c.tolist()), n if normalise else None)


def _cost(
    strategy: Factorization, workload: Workload, n: int, participation: Participation
) -> float:
    """The noise in θ at equal privacy: sens · error."""
    return strategy.sensitivity(n, participation).value * strategy.error(workload, n)


def _check_bands(bands: int, n: int) -> int:
    if bands < 1:
        raise ValueError(f"bands={bands}: must be at least 1 (1 is independent noise)")
    return min(bands, n)
