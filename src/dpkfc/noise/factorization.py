"""Factorizations ``A = B C`` of a workload, in forms whose noise can be streamed step by step.

The matrix mechanism releases ``C x + z``. Multiplied by C⁻¹ this is ``x + C⁻¹ z``, a stream of
gradient sums with correlated noise, and the parameters are ``θ = A (x + C⁻¹ z) = A x + B z``.

======  ==========================================================================================
symbol  meaning
======  ==========================================================================================
n       steps of the run; every matrix here is n x n and lower triangular
x       gradient sums, one row per step: clipped, preconditioned, norm at most R per record
A       workload: maps gradients to parameters, ``θ = A x`` (`dpkfc.noise.workload`)
C       strategy matrix; independent noise is the identity factorization, C = I
B       ``A C⁻¹``, how the noise reaches the parameters
z       independent normals, one row per step
w       ``C⁻¹ z``, the noise that is added to x
c, d    first columns of a Toeplitz C and of C⁻¹, read as power series ``c(ζ) = Σ_j c_j ζʲ``
p       bands: ``C[i, j] = 0`` for i-j ≥ p
b, k    separation and number of participations of a record (`dpkfc.noise.sensitivity`)
sens    sensitivity of C: how far one record can move C x, per unit of R
error   ``‖B‖_F / √n``: root mean square of the noise in θ, over steps and coordinates, for
        ``z ~ N(0, I)``. At equal privacy the noise in θ is proportional to sens · error
======  ==========================================================================================

**Guarantee.** With ``z ~ N(0, (σ R sens)² I)``, the stream ``x + C⁻¹ z`` is as private as one
Gaussian mechanism with noise multiplier σ, also for gradients that depend on earlier releases
(Denisov et al., 2022), under adding or removing one record. A does not enter: privacy does not
depend on the workload.

A factorization is given by its strategy matrix, in one of four forms:

=========================  =====================================  =================================
`ToeplitzStrategy`         C has p bands, ``C[i, j] = c_{i-j}``   keeps p-1 past w
`InverseToeplitzStrategy`  C⁻¹ has p bands d_{i-j}; C is full     keeps or recomputes p-1 past z
`BufferedStrategy`         ``c_k = Σ_i ω_i λ_i^{k-1}``            keeps one buffer per pole λ_i
`BandedStrategy`           C has p bands, entries may differ      keeps p-1 past w
=========================  =====================================  =================================

One buffer is a vector of the model's size. ``materialize(n)`` writes C as a dense matrix, to test
the streams against ``C⁻¹ z``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dpkfc.errors import PrivacyError
from dpkfc.noise.sensitivity import (
    MAX_DENSE_STEPS,
    Participation,
    Sensitivity,
    banded_sensitivity,
    gram_sensitivity,
    toeplitz_sensitivity,
)
from dpkfc.noise.series import Array, filtered, lower_toeplitz, quotient
from dpkfc.noise.workload import Workload

if TYPE_CHECKING:
    import torch

    from dpkfc.noise.stream import Stream  # needs torch, which a plan does not

# A banded C⁻¹ with at most so many bands recomputes past normals from their keys, without buffers.
MAX_REGENERATED_BANDS = 4


class Factorization(Protocol):
    """A strategy matrix C, for a run of at most `steps` steps if that is not None."""

    @property
    def name(self) -> str: ...

    @property
    def bands(self) -> int | None:
        """p with ``C[i, j] = 0`` for i-j ≥ p; None if C is full."""

    @property
    def steps(self) -> int | None: ...

    @property
    def buffers(self) -> int:
        """Vectors of the model's size that the stream keeps."""

    def non_negative(self, n: int) -> bool:
        """Whether C ≥ 0. Then a restart never raises the sensitivity (`stream.Stream.restart`)."""

    def materialize(self, n: int) -> Array:
        """C as an n x n matrix."""

    def column_norm(self, n: int) -> float:
        """The largest norm of a column of C: the sensitivity to one participation."""

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        """The sensitivity of the first n steps."""

    def error(self, workload: Workload, n: int) -> float:
        """``‖A C⁻¹‖_F / √n``: the root mean square of the noise in θ, for z ~ N(0, I)."""

    def stream(self, ranges: Sequence[range], device: torch.device) -> Stream:
        """The noise ``w = C⁻¹ z`` of the positions that this process owns.

        Args:
            ranges: stretches of the flat vector of all trainable parameters, in the order of the
                model. They are listed in the order of the sums that will be passed to `add_`. One
                process alone owns ``[range(0, size)]``.
            device: where the noise is computed and kept; best where the parameters are.
        """


@dataclass(frozen=True)
class ToeplitzStrategy:
    """``C[i, j] = c_{i-j}``, with bands p = len(c).

    With `normalised_for`, every column is scaled to the norm of the first. Only the last p-1
    columns, cut off by the end of the run, are shorter: ``C' = C S⁻¹`` with
    ``S_t = ‖C[:, t]‖ / ‖c‖``, and the stream is ``S C⁻¹ z``. The last p-1 steps have a little less
    noise, at the same sensitivity as long as bands do not overlap.

    >>> ToeplitzStrategy("two bands", (1.0, 0.5)).materialize(3)
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    """

    name: str
    c: tuple[float, ...]
    normalised_for: int | None = None  # steps of the run

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
    def _squared_norms(self) -> Array:
        """``c_0² + ... + c_k²``: the squared norm of a column with k+1 entries."""
        return np.cumsum(np.square(self.c))

    def scale(self, t: int) -> float:
        """S_t."""
        _check_planned(self.steps, t + 1)
        if self.normalised_for is None or t + self.bands <= self.normalised_for:
            return 1.0
        entries = self.normalised_for - t
        return float(np.sqrt(self._squared_norms[entries - 1] / self._squared_norms[-1]))

    def _scales(self, n: int) -> Array:
        _check_planned(self.steps, n)
        scales = np.ones(n)
        for t in range(max(0, (self.normalised_for or n) - self.bands), n):
            scales[t] = self.scale(t)
        return scales

    def _column_norms(self, n: int) -> Array:
        entries = np.minimum(np.arange(n, 0, -1), self.bands)
        return np.asarray(np.sqrt(self._squared_norms[entries - 1]) / self._scales(n))

    def materialize(self, n: int) -> Array:
        return np.asarray(lower_toeplitz(np.array(self.c), n) / self._scales(n))

    def column_norm(self, n: int) -> float:
        return float(self._column_norms(n).max())

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        exact = banded_sensitivity(self._column_norms(n), self.bands, participation)
        if exact is not None:
            return exact
        if self.normalised_for is None:
            return _toeplitz_sensitivity(quotient(self.c, [1.0], n), participation)
        if n > MAX_DENSE_STEPS:
            raise PrivacyError(
                f"{self.name}: the sensitivity of normalised columns that overlap is not known for "
                f"{n} steps. Use at most {participation.separation} bands, or normalise=False"
            )
        return gram_sensitivity(self.materialize(n), participation)

    def error(self, workload: Workload, n: int) -> float:
        _check_planned(self.steps, n)
        if workload.matrix is not None:
            rows = workload.materialize(n) * self._scales(n)
            return _rms(_multiply_right([1.0], self.c, rows))
        a = workload.coefficients(n)
        # Rows before the last p-1 contain no scaled column, so there B is Toeplitz.
        unscaled = n if self.normalised_for is None else max(0, n - self.bands + 1)
        squares = _toeplitz_squares(filtered([1.0], self.c, a)[:unscaled])
        if unscaled < n:
            last_rows = range(unscaled, n)
            rows = np.array(
                [np.concatenate([a[: t + 1][::-1], np.zeros(n - t - 1)]) for t in last_rows]
            )
            rows[:, unscaled:] *= [self.scale(t) for t in last_rows]
            squares += float(np.square(_multiply_right([1.0], self.c, rows)).sum())
        return float((squares / n) ** 0.5)

    def stream(self, ranges: Sequence[range], device: torch.device) -> Stream:
        from dpkfc.noise.stream import RingBufferStream

        lags = np.array(self.c[1:]) / -self.c[0]
        return RingBufferStream(
            ranges,
            device,
            self.buffers,
            lambda t: (1 / self.c[0], lags),
            self.scale,
            keeps="outputs",
        )


class _RationalToeplitz:
    """``C[i, j] = c_{i-j}`` with ``c(ζ) = P(ζ) / Q(ζ)``: a full matrix given by few numbers."""

    bands = None
    steps = None

    @property
    def fraction(self) -> tuple[Array, Array]:
        """P and Q."""
        raise NotImplementedError

    def coefficients(self, n: int) -> Array:
        """c_0 ... c_{n-1}."""
        return quotient(*self.fraction, n)

    def non_negative(self, n: int) -> bool:
        return bool(self.coefficients(n).min() >= 0)

    def materialize(self, n: int) -> Array:
        return lower_toeplitz(self.coefficients(n), n)

    def column_norm(self, n: int) -> float:
        return float(np.linalg.norm(self.coefficients(n)))

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        return _toeplitz_sensitivity(self.coefficients(n), participation)

    def error(self, workload: Workload, n: int) -> float:
        p, q = self.fraction
        if workload.matrix is not None:
            return _rms(_multiply_right(q, p, workload.materialize(n)))
        return _toeplitz_rms(filtered(q, p, workload.coefficients(n)))


@dataclass(frozen=True)
class InverseToeplitzStrategy(_RationalToeplitz):
    """``C⁻¹[i, j] = d_{i-j}``, banded, so that ``c(ζ) = 1 / d(ζ)``.

    >>> InverseToeplitzStrategy("anticorrelated", (1.0, -0.5)).materialize(3)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    """

    name: str
    d: tuple[float, ...]

    @property
    def fraction(self) -> tuple[Array, Array]:
        return np.ones(1), np.array(self.d)

    @property
    def buffers(self) -> int:
        return 0 if len(self.d) <= MAX_REGENERATED_BANDS else len(self.d) - 1

    def stream(self, ranges: Sequence[range], device: torch.device) -> Stream:
        from dpkfc.noise.stream import RegeneratedStream, RingBufferStream

        if len(self.d) <= MAX_REGENERATED_BANDS:
            return RegeneratedStream(ranges, device, np.array(self.d))
        lags = np.array(self.d[1:])
        return RingBufferStream(
            ranges,
            device,
            self.buffers,
            lambda t: (self.d[0], lags),
            lambda t: 1.0,
            keeps="inputs",
        )


@dataclass(frozen=True)
class BufferedStrategy(_RationalToeplitz):
    """A buffered linear Toeplitz matrix (BLT): ``c_0 = 1``, ``c_k = Σ_i ω_i λ_i^{k-1}``.

    ``c(ζ) = 1 + Σ_i ω_i ζ / (1 - λ_i ζ) = P(ζ) / Q(ζ)``. The stream needs one buffer per pole.

    >>> BufferedStrategy("one pole", weights=(0.5,), poles=(0.9,)).coefficients(4).round(4).tolist()
    [1.0, 0.5, 0.45, 0.405]
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
            other_poles = np.ones(1)
            for j, pole in enumerate(self.poles):
                other_poles = np.convolve(other_poles, [1.0, -pole]) if i != j else other_poles
            p[1:] += weight * other_poles
        return p, q

    def stream(self, ranges: Sequence[range], device: torch.device) -> Stream:
        from dpkfc.noise.stream import RecurrentStream

        return RecurrentStream(ranges, device, np.array(self.weights), np.array(self.poles))


@dataclass(frozen=True, eq=False)
class BandedStrategy:
    """Any banded C, given by its p diagonals: ``diagonals[j, t] = C[t + j, t]``, p x n."""

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
        _check_planned(self.steps, n)
        matrix = np.zeros((n, n))
        for j in range(min(self.bands, n)):
            matrix[np.arange(j, n), np.arange(n - j)] = self.diagonals[j, : n - j]
        return matrix

    def column_norm(self, n: int) -> float:
        return float(np.linalg.norm(self.materialize(n), axis=0).max())

    def sensitivity(self, n: int, participation: Participation) -> Sensitivity:
        strategy = self.materialize(n)
        column_norms = np.linalg.norm(strategy, axis=0)
        exact = banded_sensitivity(column_norms, self.bands, participation)
        return exact if exact is not None else gram_sensitivity(strategy, participation)

    def error(self, workload: Workload, n: int) -> float:
        from scipy.linalg import solve_triangular

        strategy = self.materialize(n)
        return _rms(solve_triangular(strategy, workload.materialize(n).T, lower=True, trans="T"))

    def stream(self, ranges: Sequence[range], device: torch.device) -> Stream:
        from dpkfc.noise.stream import RingBufferStream

        def row(t: int) -> tuple[float, Array]:
            _check_planned(self.steps, t + 1)
            lags = np.zeros(self.bands - 1)
            for j in range(1, min(self.bands, t + 1)):
                lags[j - 1] = -self.diagonals[j, t - j] / self.diagonals[0, t]
            return 1 / float(self.diagonals[0, t]), lags

        return RingBufferStream(ranges, device, self.buffers, row, lambda t: 1.0, keeps="outputs")


IDENTITY = ToeplitzStrategy("independent Gaussian", (1.0,))


def _toeplitz_sensitivity(c: Array, participation: Participation) -> Sensitivity:
    """The tighter of two upper bounds, if the first is not exact."""
    bound = toeplitz_sensitivity(c, participation)
    if bound.exact or len(c) > MAX_DENSE_STEPS:
        return bound
    gram_bound = gram_sensitivity(lower_toeplitz(c, len(c)), participation)
    return min(bound, gram_bound, key=lambda sensitivity: sensitivity.value)


def _toeplitz_squares(b: Array) -> float:
    """The squared Frobenius norm of the n x n Toeplitz matrix of b: ``Σ_j (n - j) b_j²``."""
    return float(np.arange(len(b), 0, -1) @ np.square(b))


def _toeplitz_rms(b: Array) -> float:
    return float((_toeplitz_squares(b) / len(b)) ** 0.5)


def _multiply_right(numerator: object, denominator: object, rows: Array) -> Array:
    """``rows · T`` for the Toeplitz matrix T of numerator / denominator.

    Tᵀ is T in reverse order. The result is in reverse order too.
    """
    from scipy.signal import lfilter

    return np.asarray(lfilter(numerator, denominator, rows[:, ::-1], axis=1))


def _rms(matrix: Array) -> float:
    """``‖M‖_F / √n``."""
    return float(np.linalg.norm(matrix) / len(matrix) ** 0.5)


def _check_planned(steps: int | None, n: int) -> None:
    if steps is not None and n > steps:
        raise PrivacyError(
            f"the factorization was computed for {steps} steps, not for {n}: its sensitivity is "
            "not known beyond. Plan a run with more steps"
        )
