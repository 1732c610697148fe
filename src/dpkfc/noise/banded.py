"""The banded strategy matrix with the smallest error (Choquette-Choo et al., 2023).

The paper calls it the "approximately optimal factorization" (AOF):

    minimise ``F = tr(AᵀA S⁻¹) = ‖A C⁻¹‖_F²`` over ``S = CᵀC``
    subject to ``diag(S) = 1`` and ``S_ij = 0`` for |i-j| ≥ p.

The columns of C have norm 1, so its sensitivity is √k as long as p ≤ b. The problem is convex in S.
It is solved for C, lower triangular with p bands, whose columns are divided by their norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpkfc.noise.factorization import BandedStrategy, Factorization
from dpkfc.noise.sensitivity import MAX_DENSE_STEPS
from dpkfc.noise.series import Array, quotient
from dpkfc.noise.toeplitz import optimal_coefficients
from dpkfc.noise.workload import Workload

MIN_BLOCK = 32  # smallest width of the blocks in `squared_error`


@dataclass(frozen=True)
class Banded:
    """The banded matrix with columns of norm 1 and the smallest error, for any workload.

    The optimisation takes seconds for thousands of steps. The error is one or two percent below
    that of `BandedToeplitz`.

    Args:
        bands: the number p of bands. The noise keeps p-1 buffers.
        workload: A; by default that of the optimizer.

    >>> noise = Banded(bands=2).factorize(Workload.sgd(), n=3, separation=3)
    >>> np.linalg.norm(noise.materialize(3), axis=0).round(6).tolist()
    [1.0, 1.0, 1.0]
    """

    bands: int = 16
    workload: Workload | None = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C for n steps, in which a record returns after `separation` steps at the earliest."""
        if self.bands < 1:
            raise ValueError(f"bands={self.bands}: must be at least 1 (1 is independent noise)")
        if n > MAX_DENSE_STEPS:
            raise ValueError(
                f"Banded is for at most {MAX_DENSE_STEPS} steps; the run has {n}. Use "
                f"BandedToeplitz(bands={self.bands}), which takes any number of steps and has an "
                "error only one or two percent larger"
            )
        diagonals = optimal_diagonals(workload, n, min(self.bands, n))
        return BandedStrategy(f"approximately optimal, {len(diagonals)} bands", diagonals)


def optimal_diagonals(workload: Workload, n: int, bands: int, tolerance: float = 2e-7) -> Array:
    """The diagonals of C, ``C[t+j, t]`` at [j, t]. The error is within about 1e-4 of the optimum.

    L-BFGS on ``log F`` with ``C[:, t] = X[:, t] / ‖X[:, t]‖``, from the best Toeplitz matrix if
    there is one. Column t has the weight d_t, the multiplier of ``S_tt = 1``, in F. To balance the
    columns, X starts with columns of norm √d_t, where ``d_t = -½ ⟨C, ∂F/∂C⟩_t``: at the solution,
    ``∂F/∂C = -2 C S⁻¹AᵀAS⁻¹``, and within the band S⁻¹AᵀAS⁻¹ has d_t on the diagonal and 0
    elsewhere.
    """
    from scipy.optimize import minimize

    if bands < n and workload.numerator is not None:
        start = np.repeat(optimal_coefficients(workload, n, bands)[:, None], n, axis=1)
        lower_bound = 0.0
    else:
        start, lower_bound = _full_optimum(
            _invertible_matrix(workload, n), tolerance if bands == n else 1e-2
        )
        start = start[:bands]
    inside = np.add.outer(np.arange(bands), np.arange(n)) < n
    start *= inside / np.linalg.norm(start * inside, axis=0)
    error = squared_error(workload, n, bands)
    start_error, start_gradient = error(start)
    if start_error < lower_bound * (1 + 1e-4):
        return start
    multipliers = -(start * start_gradient).sum(axis=0) / 2
    start *= np.sqrt(np.maximum(multipliers / multipliers.mean(), 1e-4))

    def objective(x: Array) -> tuple[float, Array]:
        norms = np.linalg.norm(x.reshape(bands, n), axis=0)
        c = x.reshape(bands, n) / norms
        squares, gradient = error(c)
        if not np.isfinite(squares):
            return 1e3, np.zeros_like(x)
        gradient -= c * (c * gradient).sum(axis=0)
        return float(np.log(squares / start_error)), (gradient / (norms * squares)).ravel()

    options = {"ftol": tolerance, "gtol": 0.0, "maxiter": 5000, "maxfun": 6000}
    with np.errstate(over="ignore", invalid="ignore"):
        best = minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    c = best.x.reshape(bands, n)
    c /= np.linalg.norm(c, axis=0)
    # S does not change with the signs of the rows of C. Make the diagonal positive.
    signs = np.sign(c[0])
    for j in range(bands):
        c[j, : n - j] *= signs[j:]
    return np.asarray(c)


def squared_error(workload: Workload, n: int, bands: int) -> Callable[[Array], tuple[float, Array]]:
    """The function that maps the diagonals of C to ``F = ‖A C⁻¹‖_F²`` and ``∂F/∂C``.

    Optimizers are recursions, so A⁻¹ is banded like C, and so is ``K = C A⁻¹``. In blocks as wide
    as the band, K is zero except for the diagonal blocks K_j and the blocks K'_j below them, and
    x = K⁻¹ z is the recursion ``x_{j+1} = K_{j+1}⁻¹ (z_{j+1} - K'_j x_j)``. With
    ``h_j = (K_{j+1}⁻¹ K'_j)ᵀ``, the covariances U_j of x_j and the weights Λ_j with which they
    enter ``F = Σ_j tr(W U_j)``, W = I, are

        U_{j+1} = K_{j+1}⁻¹ K_{j+1}⁻ᵀ + h_jᵀ U_j h_j        Λ_j = W + h_j Λ_{j+1} h_jᵀ
        ∂F/∂K_j = -2 K_j⁻ᵀ Λ_j U_j                          ∂F/∂K'_j = 2 K_{j+1}⁻ᵀ Λ_{j+1} h_jᵀ U_j

    in O(n p²). Where A⁻¹ has no narrow band, the same holds for one block of all steps, with K = C
    and W = AᵀA.
    """
    from scipy.linalg.lapack import dtrtri

    inverse = _inverse_diagonals(workload, n)
    width = max(bands + len(inverse) - 2, MIN_BLOCK)
    if 2 * width <= n:
        weight = np.eye(width)
    else:
        a = _invertible_matrix(workload, n)
        inverse = np.ones((1, n))
        width = n
        weight = a.T @ a
    blocks = -(-n // width)
    padding = blocks * width - n  # added steps, at which K is the identity
    reach = 2 * width

    def error(c: Array) -> tuple[float, Array]:
        columns = np.zeros((blocks * width, reach + 1))  # K[t+j, t] at [t, j]
        columns[n:, 0] = 1
        for i, row in enumerate(inverse):
            columns[: n - i, i : i + bands] += (c[:, i:] * row[: n - i]).T
        # k[j] is [K_jᵀ K'_jᵀ], r[j] is K_j⁻ᵀ.
        k = columns.reshape(blocks, -1)[:, : width * reach].reshape(blocks, width, reach)
        r = np.array([dtrtri(block)[0] for block in k[:, :, :width]])
        h = k[:-1, :, width:] @ r[1:]
        u = r.transpose(0, 2, 1) @ r
        uh = np.empty_like(h)
        for j in range(blocks - 1):
            uh[j] = u[j] @ h[j]
            u[j + 1] += h[j].T @ uh[j]
        lambdas = np.repeat(weight[None], blocks, axis=0)
        for j in reversed(range(blocks - 1)):
            lambdas[j] += h[j] @ lambdas[j + 1] @ h[j].T
        q = lambdas @ r.transpose(0, 2, 1)
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


def _invertible_matrix(workload: Workload, n: int) -> Array:
    """A, with a small number in place of a (nearly) zero diagonal entry.

    With a learning rate of 0 the noise of a step would have no effect, and so no bound.
    """
    a = workload.materialize(n).copy()
    sizes = np.abs(np.diag(a))
    idle = np.flatnonzero(sizes < 1e-6 * sizes.max())
    a[idle, idle] = 1e-3 * sizes.max()
    return a


def _inverse_diagonals(workload: Workload, n: int) -> Array:
    """The diagonals of A⁻¹ up to the last that is not zero."""
    from scipy.linalg import solve_triangular

    if workload.matrix is None:
        numerator, denominator = workload.generating_function()
        diagonals = quotient(denominator, numerator, n)[:, None]
    else:
        a = _invertible_matrix(workload, n)
        diagonals = _diagonals(solve_triangular(a, np.eye(n), lower=True))
    sizes = np.abs(diagonals).max(axis=1)
    kept = 1 + np.flatnonzero(~(sizes <= 1e-12 * sizes[0]))[-1]
    return np.broadcast_to(diagonals[:kept], (kept, n))


def _full_optimum(a: Array, tolerance: float) -> tuple[Array, float]:
    """The diagonals of the best C with all n bands, and a lower bound of F.

    It solves the dual problem, which has only n variables d > 0:

        maximise ``2 tr R - Σ_t d_t``,  R = (D^½ AᵀA D^½)^½.

    The gradient is ``S_tt - 1`` with ``S = D^-½ R D^-½``. So at the maximum S is the solution and
    the maximum is F. Before it, the value is a lower bound, and S may be far off if A is nearly
    singular. The variables are log d, in units in which the Hessian is about 1.
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

    options = {"ftol": tolerance, "gtol": 0}
    best = minimize(objective, np.zeros(len(m)), jac=True, method="L-BFGS-B", options=options)
    d = start * np.exp(best.x / unit)
    s = root(d) / np.sqrt(np.outer(d, d))
    s /= np.sqrt(np.outer(np.diag(s), np.diag(s)))
    c = np.asarray(np.linalg.cholesky(s[::-1, ::-1]).T[::-1, ::-1], dtype=float)
    return _diagonals(c), -float(best.fun) * start.sum()


def _diagonals(matrix: Array) -> Array:
    """``matrix[t+j, t]`` at [j, t]."""
    n = len(matrix)
    diagonals = np.zeros((n, n))
    for j in range(n):
        diagonals[j, : n - j] = np.diag(matrix, -j)
    return diagonals
