"""The banded matrix with the least error, the "approximately optimal factorization" (Choquette-Choo et al., 2023):

    minimise ``tr(AᵀA S⁻¹) = ‖A C⁻¹‖_F²`` over ``S = CᵀC`` with ``diag(S) = 1`` and ``S_ij = 0`` for |i-j| ≥ p.

The columns of C have norm 1, so its sensitivity is √k as long as p ≤ b. The problem is convex in S; it is solved for
C, lower triangular with p bands, whose columns are kept at norm 1 by dividing by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import BandedMatrix, Factorization
from dpkfc.noise.sensitivity import DENSE
from dpkfc.noise.series import Array, quotient
from dpkfc.noise.toeplitz import optimal_coefficients
from dpkfc.noise.workload import Workload

NARROW = 32  # blocks are at least so wide


@dataclass(frozen=True)
class Banded:
    """The matrix with `bands` bands and columns of norm 1 that has the least error, for any workload.

    It takes seconds to find for thousands of steps; its error is one or two percent below that of `BandedToeplitz`.
    """

    bands: int = 16
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        if self.bands < 1:
            raise PrivacyError(f"bands={self.bands}: must be at least 1 (1 is independent noise)")
        if n > DENSE:
            raise PrivacyError(
                f"Banded is for at most {DENSE} steps; the run has {n}. BandedToeplitz(bands={self.bands}) takes any "
                "number of them, and its error is only one or two percent larger"
            )
        diagonals = optimal_diagonals(workload, n, min(self.bands, n))
        return BandedMatrix(f"approximately optimal, {len(diagonals)} bands", diagonals)


def optimal_diagonals(workload: Workload, n: int, bands: int, tolerance: float = 2e-7) -> Array:
    """C by its diagonals, ``C[t+j, t]`` at j, t; its error is within about 1e-4 of the least.

    L-BFGS on ``log F``, ``F = ‖A C⁻¹‖_F²`` with ``C[:, t] = X[:, t] / ‖X[:, t]‖``, from the best Toeplitz matrix if
    there is one. Changes of column t weigh as much as d_t, the multiplier of S_tt = 1. To even them out, X starts with
    columns of norm √d_t, where ``d_t = -½ ⟨C, ∂F/∂C⟩_t``: at the solution, ``∂F/∂C = -2 C S⁻¹AᵀAS⁻¹``, and the entries
    of S⁻¹AᵀAS⁻¹ in the band are d_t on the diagonal and 0 beside it.
    """
    from scipy.optimize import minimize

    if bands < n and workload.numerator is not None:
        start, bound = np.repeat(optimal_coefficients(workload, n, bands)[:, None], n, axis=1), 0.0
    else:
        start, bound = _unbanded(_matrix(workload, n), tolerance if bands == n else 1e-2)
        start = start[:bands]
    inside = np.add.outer(np.arange(bands), np.arange(n)) < n
    start *= inside / np.linalg.norm(start * inside, axis=0)
    error = squared_error(workload, n, bands)
    at_start, slope = error(start)
    if at_start < bound * (1 + 1e-4):
        return start
    multipliers = -(start * slope).sum(axis=0) / 2
    start *= np.sqrt(np.maximum(multipliers / multipliers.mean(), 1e-4))

    def objective(x: Array) -> tuple[float, Array]:
        norms = np.linalg.norm(x.reshape(bands, n), axis=0)
        c = x.reshape(bands, n) / norms
        squares, gradient = error(c)
        if not np.isfinite(squares):
            return 1e3, np.zeros_like(x)
        gradient -= c * (c * gradient).sum(axis=0)
        return float(np.log(squares / at_start)), (gradient / (norms * squares)).ravel()

    options = {"ftol": tolerance, "gtol": 0.0, "maxiter": 5000, "maxfun": 6000}
    with np.errstate(over="ignore", invalid="ignore"):
        found = minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    c = found.x.reshape(bands, n)
    c /= np.linalg.norm(c, axis=0)
    signs = np.sign(c[0])  # those of rows do not matter to S
    for j in range(bands):
        c[j, : n - j] *= signs[j:]
    return np.asarray(c)


def squared_error(workload: Workload, n: int, bands: int) -> Callable[[Array], tuple[float, Array]]:
    """The function that gives ``F = ‖A C⁻¹‖_F²`` and ``∂F/∂C`` for the diagonals of C.

    Optimizers are recursions, and so A⁻¹ is banded like C. Then ``K = C A⁻¹`` is banded too. In blocks as wide as the
    band, K is zero but for the diagonal K_j and, below it, K'_j, and x = K⁻¹ z is the recursion
    ``x_{j+1} = K_{j+1}⁻¹ (z_{j+1} - K'_j x_j)``. With ``h_j = (K_{j+1}⁻¹ K'_j)ᵀ``, its covariances U and the weights Λ
    with which they reach ``F = Σ_j tr(W U_j)``, W = I, are

        U_{j+1} = K_{j+1}⁻¹ K_{j+1}⁻ᵀ + h_jᵀ U_j h_j        Λ_j = W + h_j Λ_{j+1} h_jᵀ
        ∂F/∂K_j = -2 K_j⁻ᵀ Λ_j U_j                          ∂F/∂K'_j = 2 K_{j+1}⁻ᵀ Λ_{j+1} h_jᵀ U_j

    in O(n p²). Where A⁻¹ has no narrow band, the same holds for one block of all steps, K = C and W = AᵀA.
    """
    from scipy.linalg.lapack import dtrtri

    inverse = _inverse(workload, n)
    width = max(bands + len(inverse) - 2, NARROW)
    if 2 * width <= n:
        weight = np.eye(width)
    else:
        a = _matrix(workload, n)
        inverse, width, weight = np.ones((1, n)), n, a.T @ a
    blocks = -(-n // width)
    padding = blocks * width - n  # steps more, at which K is the identity
    reach = 2 * width

    def error(c: Array) -> tuple[float, Array]:
        columns = np.zeros((blocks * width, reach + 1))  # K[t+j, t] at t, j
        columns[n:, 0] = 1
        for i, row in enumerate(inverse):
            columns[: n - i, i : i + bands] += (c[:, i:] * row[: n - i]).T
        k = columns.reshape(blocks, -1)[:, : width * reach].reshape(
            blocks, width, reach
        )  # [K_jᵀ K'_jᵀ]
        r = np.array([dtrtri(block)[0] for block in k[:, :, :width]])  # K_j⁻ᵀ
        h = k[:-1, :, width:] @ r[1:]
        u, uh = r.transpose(0, 2, 1) @ r, np.empty_like(h)
        for j in range(blocks - 1):
            uh[j] = u[j] @ h[j]
            u[j + 1] += h[j].T @ uh[j]
        onward = np.repeat(weight[None], blocks, axis=0)  # Λ
        for j in reversed(range(blocks - 1)):
            onward[j] += h[j] @ onward[j + 1] @ h[j].T
        q = onward @ r.transpose(0, 2, 1)
        flat = np.zeros((blocks, width * (reach + 1)))
        by_block = flat[:, : width * reach].reshape(blocks, width, reach)
        by_block[:, :, :width] = -2 * (u @ q)
        by_block[:-1, :, width:] = 2 * (uh @ q[1:])
        by_column = flat.reshape(blocks * width, reach + 1)
        gradient = np.zeros_like(c)
        for i, row in enumerate(inverse):
            gradient[:, i:] += by_column[: n - i, i : i + bands].T * row[: n - i]
        return float(np.einsum("ik,jik->", weight, u)) - padding, gradient

    return error


def _matrix(workload: Workload, n: int) -> Array:
    """A; where a learning rate of 0 would leave the noise of a step without effect, and so without bound, a little."""
    a = workload.materialize(n).copy()
    sizes = np.abs(np.diag(a))
    idle = np.flatnonzero(sizes < 1e-6 * sizes.max())
    a[idle, idle] = 1e-3 * sizes.max()
    return a


def _inverse(workload: Workload, n: int) -> Array:
    """A⁻¹ by its diagonals, as far as they are not zero."""
    from scipy.linalg import solve_triangular

    if workload.matrix is None:
        numerator, denominator = workload.generating_function()
        diagonals = quotient(denominator, numerator, n)[:, None]
    else:
        diagonals = _diagonals(solve_triangular(_matrix(workload, n), np.eye(n), lower=True))
    sizes = np.abs(diagonals).max(axis=1)
    kept = 1 + np.flatnonzero(~(sizes <= 1e-12 * sizes[0]))[-1]
    return np.broadcast_to(diagonals[:kept], (kept, n))


def _unbanded(a: Array, tolerance: float) -> tuple[Array, float]:
    """The diagonals of C with all n bands and a lower bound of F, by the dual problem in but n variables d > 0:

        maximise ``2 tr R - Σ_t d_t``,  R = (D^½ AᵀA D^½)^½.

    Its gradient is ``S_tt - 1`` with ``S = D^-½ R D^-½``. So at the maximum S is the solution, and the maximum is F;
    short of it there is a bound, and S may be far off if A is nearly singular. The variables are log d in units that
    make the Hessian about 1.
    """
    from scipy.optimize import minimize

    m = a.T @ a
    m[np.diag_indices_from(m)] += 1e-12 * np.trace(m) / len(m)

    def root(d: Array) -> Array:
        scale = np.sqrt(d)
        values, vectors = np.linalg.eigh(scale[:, None] * m * scale)
        return np.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)

    start = np.diag(root(np.diag(root(np.ones(len(m))))))
    unit = np.sqrt(start / start.sum())

    def objective(x: Array) -> tuple[float, Array]:
        d = start * np.exp(x / unit)
        diagonal = np.diag(root(d))
        return float((d - 2 * diagonal).sum() / start.sum()), (d - diagonal) / (unit * start.sum())

    found = minimize(
        objective,
        np.zeros(len(m)),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": tolerance, "gtol": 0},
    )
    d = start * np.exp(found.x / unit)
    s = root(d) / np.sqrt(np.outer(d, d))
    s /= np.sqrt(np.outer(np.diag(s), np.diag(s)))
    return _diagonals(
        np.asarray(np.linalg.cholesky(s[::-1, ::-1]).T[::-1, ::-1], dtype=float)
    ), -float(found.fun) * start.sum()


def _diagonals(matrix: Array) -> Array:
    """``matrix[t+j, t]`` at j, t."""
    n = len(matrix)
    diagonals = np.zeros((n, n))
    for j in range(n):
        diagonals[j, : n - j] = np.diag(matrix, -j)
    return diagonals
