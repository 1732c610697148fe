"""Factorizations ``A = B C`` of a workload, in the forms in which their noise can be streamed.

The matrix mechanism releases ``C x + z`` with independent z; multiplied by C⁻¹, that is the stream ``x + C⁻¹ z`` of
gradients with correlated noise, and ``θ = A (x + C⁻¹ z) = A x + B z``. A form knows C, how to compute C⁻¹ z step by
step, and what that costs:

==================  =========================================  ===================================
`Toeplitz`          C has p bands, ``C[i, j] = c_{i-j}``       keeps p-1 past outputs
`InverseToeplitz`   C⁻¹ has p bands, ``C⁻¹[i, j] = d_{i-j}``   keeps or regenerates p-1 past inputs
`Buffered`          ``c_k = Σ_i ω_i λ_i^{k-1}``                keeps one buffer a pole λ_i
`BandedMatrix`      C has p bands, all different               keeps p-1 past outputs
==================  =========================================  ===================================

Independent noise is the identity, ``Toeplitz((1,))``. "Past" is in units of the model: every buffer has its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from dpkfc.errors import PrivacyError
from dpkfc.noise.sensitivity import (
    DENSE,
    Participation,
    Sensitivity,
    of_columns,
    of_gram,
    of_toeplitz,
)
from dpkfc.noise.series import Array, filtered, lower_toeplitz, quotient
from dpkfc.noise.stream import Regenerated, Ring, States, Stream
from dpkfc.noise.workload import Workload

REGENERATED = (
    4  # an inverse with at most so many bands is computed anew from old keys, without buffers
)


class Factorization(Protocol):
    """C, for a run of at most `steps` steps if that is not None."""

    @property
    def name(self) -> str: ...

    @property
    def bands(self) -> int | None:
        """p with ``C[i, j] = 0`` for i-j ≥ p; None if C is full."""

    @property
    def steps(self) -> int | None: ...

    @property
    def buffers(self) -> int:
        """Vectors of the size of the model that the stream keeps."""

    def non_negative(self, n: int) -> bool:
        """Is C ≥ 0? Then forgetting the past never raises the sensitivity (see `stream.Stream.restart`)."""

    def materialize(self, n: int) -> Array:
        """C as an n x n matrix."""

    def column_norm(self, n: int) -> float:
        """The largest norm of a column of C: the sensitivity to one participation."""

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        """The sensitivity of the first n steps."""

    def error(self, workload: Workload, n: int) -> float:
        """``‖A C⁻¹‖_F / √n``: the root mean square over steps and coordinates of the noise in θ, for z = N(0, I)."""

    def stream(self, size: int) -> Stream:
        """The stream C⁻¹ z for a model of `size` numbers."""


@dataclass(frozen=True)
class Toeplitz:
    """``C[i, j] = c_{i-j}``, banded. Normalised, every column is scaled up to the norm of the first.

    Only the last p-1 columns, cut by the end of the run, are shorter: ``C' = C S⁻¹`` with
    ``S_t = ‖C[:, t]‖ / ‖c‖``, and the stream is ``S C⁻¹ z``: a little less noise in the last p-1 steps, at
    the same sensitivity as long as bands do not overlap.
    """

    name: str
    c: tuple[float, ...]
    normalised_for: int | None = None  # steps

    @property
    def bands(self) -> int:
        return len(self.c)

    @property
    def steps(self) -> int | None:
        return self.normalised_for

    @property
    def buffers(self) -> int:
        return len(self.c) - 1

    def non_negative(self, n: int) -> bool:
        return min(self.c) >= 0

    @cached_property
    def _sums(self) -> Array:
        return np.cumsum(np.square(self.c))

    def scale(self, t: int) -> float:
        """S_t."""
        _within(self.steps, t + 1)
        if self.normalised_for is None or t + self.bands <= self.normalised_for:
            return 1.0
        return float(np.sqrt(self._sums[self.normalised_for - t - 1] / self._sums[-1]))

    def _scales(self, n: int) -> Array:
        _within(self.steps, n)
        scales = np.ones(n)
        for t in range(max(0, (self.normalised_for or n) - self.bands), n):
            scales[t] = self.scale(t)
        return scales

    def _column_norms(self, n: int) -> Array:
        return np.asarray(
            np.sqrt(self._sums[np.minimum(np.arange(n, 0, -1), self.bands) - 1]) / self._scales(n)
        )

    def materialize(self, n: int) -> Array:
        return np.asarray(lower_toeplitz(np.array(self.c), n) / self._scales(n))

    def column_norm(self, n: int) -> float:
        return float(self._column_norms(n).max())

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        exact = of_columns(self._column_norms(n), self.bands, participation)
        if exact is not None:
            return exact
        if self.normalised_for is None:
            return _of_toeplitz(quotient(self.c, [1.0], n), participation)
        if n > DENSE:
            raise PrivacyError(
                f"{self.name}: normalised columns that overlap have no known sensitivity for {n} steps. Use at most "
                f"{participation.separation} bands, or normalise=False"
            )
        return of_gram(self.materialize(n), participation)

    def error(self, workload: Workload, n: int) -> float:
        _within(self.steps, n)
        if workload.matrix is not None:
            return _rms(_from_the_right([1.0], self.c, workload.materialize(n) * self._scales(n)))
        a = workload.coefficients(n)
        first = (
            n if self.normalised_for is None else max(0, n - self.bands + 1)
        )  # rows with nothing scaled down
        squares = _toeplitz_squares(filtered([1.0], self.c, a)[:first])
        if first < n:
            rows = np.array(
                [np.concatenate([a[: t + 1][::-1], np.zeros(n - t - 1)]) for t in range(first, n)]
            )
            rows[:, first:] *= [self.scale(t) for t in range(first, n)]
            squares += float(np.square(_from_the_right([1.0], self.c, rows)).sum())
        return float((squares / n) ** 0.5)

    def stream(self, size: int) -> Stream:
        lags = np.array(self.c[1:]) / -self.c[0]
        return Ring(
            size, self.buffers, lambda t: (1 / self.c[0], lags), self.scale, keeps="outputs"
        )


class _Rational:
    """``C[i, j] = c_{i-j}`` with the generating function ``P(z) / Q(z)``: full, but given by few numbers."""

    bands = None
    steps = None

    @property
    def fraction(self) -> tuple[Array, Array]:
        """P and Q."""
        raise NotImplementedError

    def coefficients(self, n: int) -> Array:
        return quotient(*self.fraction, n)

    def non_negative(self, n: int) -> bool:
        return bool(self.coefficients(n).min() >= 0)

    def materialize(self, n: int) -> Array:
        return lower_toeplitz(self.coefficients(n), n)

    def column_norm(self, n: int) -> float:
        return float(np.linalg.norm(self.coefficients(n)))

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        return _of_toeplitz(self.coefficients(n), participation)

    def error(self, workload: Workload, n: int) -> float:
        p, q = self.fraction
        if workload.matrix is not None:
            return _rms(_from_the_right(q, p, workload.materialize(n)))
        return _toeplitz_rms(filtered(q, p, workload.coefficients(n)))


@dataclass(frozen=True)
class InverseToeplitz(_Rational):
    """``C⁻¹[i, j] = d_{i-j}``, banded: C(z) = 1 / d(z)."""

    name: str
    d: tuple[float, ...]

    @property
    def fraction(self) -> tuple[Array, Array]:
        return np.ones(1), np.array(self.d)

    @property
    def buffers(self) -> int:
        return 0 if len(self.d) <= REGENERATED else len(self.d) - 1

    def stream(self, size: int) -> Stream:
        if len(self.d) <= REGENERATED:
            return Regenerated(size, np.array(self.d))
        lags = np.array(self.d[1:])
        return Ring(size, self.buffers, lambda t: (self.d[0], lags), lambda t: 1.0, keeps="inputs")


@dataclass(frozen=True)
class Buffered(_Rational):
    """A buffered linear Toeplitz matrix: ``c_0 = 1``, ``c_k = Σ_i ω_i λ_i^{k-1}``.

    ``C(z) = 1 + Σ_i ω_i z / (1 - λ_i z) = P(z) / Q(z)``, and the stream needs one buffer for every pole.
    """

    name: str
    weights: tuple[float, ...]  # ω
    poles: tuple[float, ...]  # λ

    @property
    def buffers(self) -> int:
        return len(self.poles)

    @cached_property
    def fraction(self) -> tuple[Array, Array]:
        q = np.ones(1)
        for pole in self.poles:
            q = np.convolve(q, [1.0, -pole])
        p = q.copy()
        for i, weight in enumerate(self.weights):
            rest = np.ones(1)
            for j, pole in enumerate(self.poles):
                rest = np.convolve(rest, [1.0, -pole]) if i != j else rest
            p[1:] += weight * rest
        return p, q

    def stream(self, size: int) -> Stream:
        return States(size, np.array(self.weights), np.array(self.poles))


@dataclass(frozen=True, eq=False)
class BandedMatrix:
    """Any banded C: ``diagonals[j, t] = C[t + j, t]``, p x n."""

    name: str
    diagonals: Array

    @property
    def bands(self) -> int:
        return len(self.diagonals)

    @property
    def steps(self) -> int:
        return int(self.diagonals.shape[1])

    @property
    def buffers(self) -> int:
        return self.bands - 1

    def non_negative(self, n: int) -> bool:
        return bool((self.diagonals >= 0).all())

    def materialize(self, n: int) -> Array:
        _within(self.steps, n)
        matrix = np.zeros((n, n))
        for j in range(min(self.bands, n)):
            matrix[np.arange(j, n), np.arange(n - j)] = self.diagonals[j, : n - j]
        return matrix

    def column_norm(self, n: int) -> float:
        return float(np.linalg.norm(self.materialize(n), axis=0).max())

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        matrix = self.materialize(n)
        exact = of_columns(np.linalg.norm(matrix, axis=0), self.bands, participation)
        return exact if exact is not None else of_gram(matrix, participation)

    def error(self, workload: Workload, n: int) -> float:
        from scipy.linalg import solve_triangular

        c, a = self.materialize(n), workload.materialize(n)
        return _rms(solve_triangular(c, a.T, lower=True, trans="T"))

    def stream(self, size: int) -> Stream:
        def row(t: int) -> tuple[float, Array]:
            _within(self.steps, t + 1)
            lags = np.zeros(self.bands - 1)
            for j in range(1, min(self.bands, t + 1)):
                lags[j - 1] = -self.diagonals[j, t - j] / self.diagonals[0, t]
            return 1 / float(self.diagonals[0, t]), lags

        return Ring(size, self.buffers, row, lambda t: 1.0, keeps="outputs")


IDENTITY = Toeplitz("independent Gaussian", (1.0,))


def _of_toeplitz(c: Array, participation: Participation) -> Sensitivity:
    found = of_toeplitz(c, participation)
    if found.exact or len(c) > DENSE:
        return found
    tighter = of_gram(lower_toeplitz(c, len(c)), participation)
    return min(found, tighter, key=lambda s: s.value)


def _toeplitz_squares(b: Array) -> float:
    """The squared Frobenius norm of the n x n Toeplitz matrix of b: ``Σ_j (n - j) b_j²``."""
    return float(np.arange(len(b), 0, -1) @ np.square(b))


def _toeplitz_rms(b: Array) -> float:
    return float((_toeplitz_squares(b) / len(b)) ** 0.5)


def _from_the_right(numerator: object, denominator: object, rows: Array) -> Array:
    """``rows · T`` for the Toeplitz matrix T of numerator / denominator: Tᵀ is T read backwards."""
    from scipy.signal import lfilter

    return np.asarray(lfilter(numerator, denominator, rows[:, ::-1], axis=1))


def _rms(matrix: Array) -> float:
    """``‖M‖_F / √n``."""
    return float(np.linalg.norm(matrix) / len(matrix) ** 0.5)


def _within(steps: int | None, n: int) -> None:
    if steps is not None and n > steps:
        raise PrivacyError(f"the factorization was made for {steps} steps, not for {n}")
