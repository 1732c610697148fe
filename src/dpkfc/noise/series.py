"""Power series: the generating functions of lower-triangular Toeplitz matrices.

A series c_0, c_1, ... represents the matrix with entry c_{i-j} at row i, column j. Products of
matrices are products of series, so roots and inverses of matrices are roots and inverses of series.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.polynomial import polynomial
from numpy.typing import NDArray

Array = NDArray[np.float64]
CHUNK = 8192  # coefficients that `filtered` computes at a time
NEGLIGIBLE = 1e-200


def quotient(
    numerator: Sequence[float] | Array, denominator: Sequence[float] | Array, n: int
) -> Array:
    """The first `n` coefficients of ``numerator(z) / denominator(z)``.

    >>> quotient([1.0], [1.0, -0.5], 4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """
    from scipy.signal import lfilter

    impulse = np.zeros(n)
    impulse[0] = 1
    return np.asarray(lfilter(numerator, denominator, impulse))


def filtered(
    numerator: Sequence[float] | Array, denominator: Sequence[float] | Array, x: Array
) -> Array:
    """The first len(x) coefficients of ``x(z) numerator(z) / denominator(z)``.

    A decaying result ends in denormal numbers, on which arithmetic is a hundred times slower. So
    the result is computed in chunks, and the rest is zero once it is negligible.
    """
    from scipy.signal import lfilter

    result = np.zeros_like(x)
    last = int(np.flatnonzero(np.abs(x) > NEGLIGIBLE).max(initial=-1))
    state = np.zeros(max(len(numerator), len(denominator)) - 1)
    for start in range(0, len(x), CHUNK):
        if start > last and np.abs(state).max(initial=0.0) <= NEGLIGIBLE:
            break
        chunk = x[start : start + CHUNK]
        chunk = np.where(np.abs(chunk) > NEGLIGIBLE, chunk, 0)
        result[start : start + CHUNK], state = lfilter(numerator, denominator, chunk, zi=state)
    return result


def power(
    numerator: Sequence[float], denominator: Sequence[float], exponent: float, n: int
) -> Array:
    """The first `n` coefficients of ``F = (P/Q)^s``, in time O(n) for P, Q of fixed degree.

    F solves the differential equation ``P Q F' = s (P'Q - PQ') F``. With R = PQ and
    S = s (P'Q - PQ'), its coefficients satisfy

        R_0 k f_k = Σ_{i≥0} S_i f_{k-1-i} - Σ_{i≥1} R_i (k-i) f_{k-i}.

    For SGD with momentum β and decay α, P = 1 and Q = (1-αz)(1-βz), the square root s = 1/2 gives
    ``k c_k = (α+β)(k-½) c_{k-1} - αβ (k-1) c_{k-2}``.

    >>> power([1.0], np.convolve([1, -0.999], [1, -0.9]), 0.5, 4).round(8).tolist()
    [1.0, 0.9495, 0.90277538, 0.85951173]
    """
    p = np.trim_zeros(np.asarray(numerator, float), "b")
    q = np.trim_zeros(np.asarray(denominator, float), "b")
    r = np.convolve(p, q)
    s = exponent * polynomial.polysub(
        np.convolve(_derivative(p), q), np.convolve(p, _derivative(q))
    )
    r_tail = r[1:]
    s = np.atleast_1d(s)
    f = np.zeros(n)
    f[0] = (p[0] / q[0]) ** exponent
    kf = np.zeros(n)  # k f_k
    for k in range(1, n):
        i = min(k, len(s))
        j = min(k, len(r_tail))
        total = s[:i] @ f[k - i : k][::-1] - r_tail[:j] @ kf[k - j : k][::-1]
        kf[k] = total / r[0]
        f[k] = kf[k] / k
    return f


def _derivative(p: Array) -> Array:
    return np.asarray(polynomial.polyder(p)) if len(p) > 1 else np.zeros(1)


def lower_toeplitz(coefficients: Array, n: int) -> Array:
    """The n x n lower-triangular Toeplitz matrix of a series, which is zero beyond its end.

    >>> lower_toeplitz(np.array([1.0, 0.5]), 3)
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    """
    from scipy.linalg import toeplitz

    column = np.zeros(n)
    column[: min(n, len(coefficients))] = coefficients[:n]
    return np.asarray(toeplitz(column, np.zeros(n)))
