"""Power series, the generating functions of lower-triangular Toeplitz matrices.

A sequence c_0, c_1, ... stands for the matrix with c_{i-j} at row i, column j. Products of matrices are
products of series, so roots and inverses of matrices are those of series.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.polynomial import polynomial
from numpy.typing import NDArray

Array = NDArray[np.float64]
PIECE = 8192


def quotient(
    numerator: Sequence[float] | Array, denominator: Sequence[float] | Array, n: int
) -> Array:
    """The first `n` coefficients of ``numerator(z) / denominator(z)``."""
    from scipy.signal import lfilter

    impulse = np.zeros(n)
    impulse[0] = 1
    return np.asarray(lfilter(numerator, denominator, impulse))


def filtered(
    numerator: Sequence[float] | Array, denominator: Sequence[float] | Array, x: Array
) -> Array:
    """The first len(x) coefficients of ``x(z) numerator(z) / denominator(z)``.

    In pieces, so that it can stop where a decaying answer has come to nothing: arithmetic on the denormal numbers
    that it would go on with is a hundred times slower.
    """
    from scipy.signal import lfilter

    out, nothing = np.zeros_like(x), 1e-200
    last = int(np.flatnonzero(np.abs(x) > nothing).max(initial=-1))
    state = np.zeros(max(len(numerator), len(denominator)) - 1)
    for start in range(0, len(x), PIECE):
        piece = slice(start, start + PIECE)
        if start > last and np.abs(state).max(initial=0.0) <= nothing:
            break
        out[piece], state = lfilter(
            numerator, denominator, np.where(np.abs(x[piece]) > nothing, x[piece], 0), zi=state
        )
    return out


def power(
    numerator: Sequence[float], denominator: Sequence[float], exponent: float, n: int
) -> Array:
    """The first `n` coefficients of ``F = (P/Q)^s``, in linear time for polynomials P, Q of fixed degree.

    F solves the differential equation ``P Q F' = s (P'Q - PQ') F``, and so, with R = PQ and S = s (P'Q - PQ'),

        R_0 k f_k = Σ_{i≥0} S_i f_{k-1-i} - Σ_{i≥1} R_i (k-i) f_{k-i}.

    For SGD with momentum β and decay α, P = 1 and Q = (1-αz)(1-βz), the square root s = 1/2 gives
    ``k c_k = (α+β)(k-½) c_{k-1} - αβ (k-1) c_{k-2}``.

    >>> power([1.0], np.convolve([1, -0.999], [1, -0.9]), 0.5, 4).round(8).tolist()
    [1.0, 0.9495, 0.90277538, 0.85951173]
    """
    p, q = (
        np.trim_zeros(np.asarray(numerator, float), "b"),
        np.trim_zeros(np.asarray(denominator, float), "b"),
    )
    r = np.convolve(p, q)
    s = exponent * polynomial.polysub(
        np.convolve(_derivative(p), q), np.convolve(p, _derivative(q))
    )
    before, after = r[1:], np.atleast_1d(s)
    f = np.zeros(n)
    f[0] = (p[0] / q[0]) ** exponent
    weighted = np.zeros(n)  # k f_k
    for k in range(1, n):
        a, b = min(k, len(after)), min(k, len(before))
        total = after[:a] @ f[k - a : k][::-1] - before[:b] @ weighted[k - b : k][::-1]
        weighted[k] = total / r[0]
        f[k] = weighted[k] / k
    return f


def _derivative(p: Array) -> Array:
    return np.asarray(polynomial.polyder(p)) if len(p) > 1 else np.zeros(1)


def lower_toeplitz(coefficients: Array, n: int) -> Array:
    """The n x n lower-triangular Toeplitz matrix of a series (zero beyond its end)."""
    from scipy.linalg import toeplitz

    column = np.zeros(n)
    column[: min(n, len(coefficients))] = coefficients[:n]
    return np.asarray(toeplitz(column, np.zeros(n)))
