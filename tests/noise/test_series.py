"""Series against the dense matrices they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import binom

from dpkfc.noise.series import lower_toeplitz, power, quotient

ROOTS = st.floats(0, 1)


def dense(coefficients: list[float] | np.ndarray, n: int) -> np.ndarray:
    """The Toeplitz matrix, diagonal by diagonal."""
    return sum((c * np.eye(n, k=-j) for j, c in enumerate(coefficients) if j < n), np.zeros((n, n)))


def check_power(numerator: list[float], denominator: list[float], exponent: float, n: int) -> None:
    """F² or F is the dense P/Q or its inverse, and the root is the one with a positive diagonal."""
    f = power(numerator, denominator, exponent, n)
    p, q = dense(numerator, n), dense(denominator, n)
    want = np.linalg.solve(q, p) if exponent > 0 else np.linalg.solve(p, q)
    got = dense(f, n) if abs(exponent) == 1 else dense(f, n) @ dense(f, n)
    assert f.shape == (n,) and f[0] > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, -1.0])
@given(ROOTS, ROOTS, st.sampled_from([0.0, 0.3, 0.5]), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_powers_of_sgd_workloads(
    exponent: float, alpha: float, beta: float, zero: float, n: int
) -> None:
    """Real roots α, β, with the numerator of degree 1 that Nesterov's momentum has."""
    check_power([1.0, -zero], np.convolve([1, -alpha], [1, -beta]).tolist(), exponent, n)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, -1.0])
@given(st.floats(0.1, 1), st.floats(0, np.pi), st.floats(0.2, 5))
@settings(max_examples=25, deadline=None)
def test_powers_with_complex_roots_and_any_scale(
    exponent: float, size: float, angle: float, scale: float
) -> None:
    check_power([scale, -0.4 * scale], [1.0, -2 * size * np.cos(angle), size**2], exponent, 30)


@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_trailing_zeros_of_the_polynomials_do_not_matter(exponent: float) -> None:
    want = power([1.0, -0.2], [1.0, -0.9], exponent, 12)
    assert (power([1.0, -0.2, 0.0], [1.0, -0.9, 0.0, 0.0], exponent, 12) == want).all()
    check_power([1.0, -0.2, 0.0], [1.0, -0.9, 0.0, 0.0], exponent, 12)


@given(ROOTS, ROOTS)
@settings(max_examples=25, deadline=None)
def test_the_square_root_has_its_closed_form(alpha: float, beta: float) -> None:
    """c_k = Σ_j α^{k-j} r_{k-j} r_j β^j with r_j = |binom(-1/2, j)|."""
    n = 30
    r = np.abs(binom(-0.5, np.arange(n)))
    want = [
        sum(alpha ** (k - j) * r[k - j] * r[j] * beta**j for j in range(k + 1)) for k in range(n)
    ]
    c = power([1.0], np.convolve([1, -alpha], [1, -beta]).tolist(), 0.5, n)
    np.testing.assert_allclose(c, want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("exponent", "golden"),
    [(0.5, [1, 0.9495, 0.90277537, 0.85951173]), (-0.5, [1, -0.9495, -0.00122512, -0.00116326])],
)
def test_golden_coefficients(exponent: float, golden: list[float]) -> None:
    """At α = .999, β = .9."""
    np.testing.assert_allclose(
        power([1.0], np.convolve([1, -0.999], [1, -0.9]).tolist(), exponent, 4),
        golden,
        rtol=0,
        atol=1e-8,
    )


COEFFICIENTS = st.lists(st.floats(-1, 1), min_size=0, max_size=6)


@given(COEFFICIENTS, COEFFICIENTS, st.floats(0.5, 2), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_quotients_are_those_of_the_matrices(
    p: list[float], q: list[float], lead: float, n: int
) -> None:
    """Also where the polynomials are longer than the result."""
    p, q = [1.0, *p], [lead, *q]
    want = np.linalg.solve(dense(q, n), dense(p, n)[:, 0])
    np.testing.assert_allclose(
        quotient(p, q, n), want, rtol=0, atol=1e-12 * (1 + np.abs(want).max())
    )


@pytest.mark.parametrize("length", [1, 3, 5, 8])
def test_lower_toeplitz_places_every_coefficient(length: int) -> None:
    n, c = 5, np.arange(1.0, length + 1)
    matrix = lower_toeplitz(c, n)
    assert matrix.shape == (n, n)
    for i in range(n):
        for j in range(n):
            assert matrix[i, j] == (c[i - j] if 0 <= i - j < length else 0)
