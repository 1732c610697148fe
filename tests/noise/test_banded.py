"""AOF: the published errors, and optimality proved independently of the optimiser."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import solve_triangular

from dpkfc.noise.banded import Banded, optimal_diagonals, squared_error
from dpkfc.noise.factorization import BandedStrategy
from dpkfc.noise.sensitivity import MAX_DENSE_STEPS, Participation
from dpkfc.noise.series import Array
from dpkfc.noise.toeplitz import BandedToeplitz
from dpkfc.noise.workload import Workload


def sgd(alpha: float, beta: float) -> Workload:
    return Workload.sgd(beta, 1 - alpha, coupled=False)


def random_workload(n: int) -> Workload:
    return Workload.linear(np.tril(np.random.default_rng(0).uniform(size=(n, n))) + np.eye(n))


GOLDEN = {  # E at n = 100 and 200, b = p = 100
    (1.0, 0.0): (2.236, 3.517),
    (1.0, 0.9): (12.958, 22.115),
    (0.999, 0.0): (2.204, 3.422),
    (0.999, 0.9): (12.632, 21.102),
}
WORKLOADS = {
    "prefix sums": Workload.sgd(),
    "momentum": Workload.sgd(0.9),
    "coupled decay": Workload.sgd(0.9, 0.1, lr=0.1),
    "Nesterov": Workload.sgd(0.9, nesterov=True),
    "cosine": Workload.sgd(0.9, lr_schedule=lambda t: 0.5 * (1 + np.cos(np.pi * t / 90))),
    "roots": Workload.toeplitz((1 / np.sqrt(np.arange(1, 91))).tolist()),
    "unstable inverse": Workload.toeplitz([1.0, 1.5, *[0.1] * 88]),
    "any matrix": random_workload(90),
}


def banded(workload: Workload, n: int, bands: int) -> BandedStrategy:
    form = Banded(bands).factorize(workload, n, bands)
    assert isinstance(form, BandedStrategy)
    return form


def duality(a: Array, c: Array, bands: int) -> tuple[float, float]:
    """``tr(M S⁻¹)``, M = AᵀA, and a lower bound of its minimum.

    Any W ⪰ 0 that is zero off the diagonal within the band gives a bound:
    ``tr(M S⁻¹) + tr(W S) ≥ 2 tr (M^½ W M^½)^½`` for every S, and tr(W S) = tr W for every feasible
    S. At the optimum W = S⁻¹ M S⁻¹ makes the bound tight.
    """
    n, m, inverse = len(a), a.T @ a, np.linalg.inv(c.T @ c)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    w = np.where((apart > 0) & (apart < bands), 0, inverse @ m @ inverse)
    w += np.eye(n) * max(0, -np.linalg.eigvalsh(w)[0])
    root = np.sqrt(np.maximum(np.linalg.eigvalsh(a @ w @ a.T), 0)).sum()
    return float(np.trace(m @ inverse)), float(root**2 / np.trace(w))  # at the best scale of W


@pytest.mark.parametrize(("setting", "n"), [(setting, n) for setting in GOLDEN for n in (100, 200)])
def test_published_errors(setting: tuple[float, float], n: int) -> None:
    workload, participation = sgd(*setting), Participation.every(100, n)
    form = banded(workload, n, 100)
    sensitivity = form.sensitivity(n, participation)
    assert sensitivity.exact
    assert sensitivity.value == pytest.approx(participation.times**0.5)
    assert sensitivity.value * form.error(workload, n) == pytest.approx(
        GOLDEN[setting][n // 200], rel=1e-3
    )


def test_published_error_with_all_bands() -> None:
    workload = Workload.sgd()
    assert banded(workload, 200, 200).error(workload, 200) == pytest.approx(2.448, rel=3e-4)


@pytest.mark.parametrize("bands", [1, 2, 7, 89, 90, 200])
@pytest.mark.parametrize("name", WORKLOADS)
def test_columns_have_norm_one_and_p_bands(name: str, bands: int) -> None:
    n = 90
    form = banded(WORKLOADS[name], n, bands)
    c = form.materialize(n)
    assert form.bands == min(bands, n)
    assert form.diagonals.shape == (form.bands, n)
    assert not np.tril(c, -bands).any()
    assert (np.diag(c) > 0).all()
    np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1, rtol=1e-12)


@pytest.mark.parametrize("bands", [4, 16])
@pytest.mark.parametrize(
    "name", [name for name, workload in WORKLOADS.items() if workload.numerator]
)
def test_better_than_the_best_toeplitz_matrix(name: str, bands: int) -> None:
    workload, n = WORKLOADS[name], 90
    toeplitz = BandedToeplitz(bands).factorize(workload, n, bands)
    assert banded(workload, n, bands).error(workload, n) < toeplitz.column_norm(n) * toeplitz.error(
        workload, n
    )


@pytest.mark.parametrize("bands", [3, 16, 40, 90])
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_matrix_is_better(name: str, bands: int) -> None:
    """The duality gap is small, also at the default tolerance."""
    n, workload = 90, WORKLOADS[name]
    best = BandedStrategy("", optimal_diagonals(workload, n, bands, tolerance=1e-12))
    reached, bound = duality(workload.materialize(n), best.materialize(n), bands)
    assert bound < reached * (1 + 1e-6)
    assert reached == pytest.approx(bound, rel=1e-3)
    assert banded(workload, n, bands).error(workload, n) == pytest.approx(
        best.error(workload, n), rel=2e-4
    )


@pytest.mark.parametrize("setting", GOLDEN)
def test_multipliers_are_on_the_diagonal_only(setting: tuple[float, float]) -> None:
    """In the band, S⁻¹ AᵀA S⁻¹ is diagonal at the optimum, and far from it at the start."""
    n, bands, workload = 150, 30, sgd(*setting)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))

    def beside(c: Array) -> float:
        e = workload.materialize(n) @ np.linalg.inv(c.T @ c)
        v = e.T @ e
        return float(np.linalg.norm(v[(apart > 0) & (apart < bands)]) / np.linalg.norm(np.diag(v)))

    start = BandedToeplitz(bands).factorize(workload, n, bands).materialize(n)
    assert beside(banded(workload, n, bands).materialize(n)) < min(
        0.02, 0.1 * beside(start / np.linalg.norm(start[:, 0]))
    )


@pytest.mark.parametrize("bands", [1, 5, 50])
@pytest.mark.parametrize("name", WORKLOADS)
def test_error_and_gradient_equal_the_dense_formula(name: str, bands: int) -> None:
    """``F = ‖B‖²`` and ``∂F/∂C = -2 Bᵀ B C⁻ᵀ`` with B = A C⁻¹."""
    n, rng = 90, np.random.default_rng(bands)
    diagonals = rng.uniform(-1, 1, (bands, n)) * 0.5 ** np.arange(bands)[:, None]
    diagonals[0] = rng.uniform(1, 2, n)
    diagonals *= np.add.outer(np.arange(bands), np.arange(n)) < n
    c = BandedStrategy("", diagonals).materialize(n)
    b = solve_triangular(c, WORKLOADS[name].materialize(n).T, lower=True, trans="T").T
    slopes = -2 * b.T @ b @ np.linalg.inv(c).T
    squares, gradient = squared_error(WORKLOADS[name], n, bands)(diagonals)
    assert squares == pytest.approx(np.square(b).sum(), rel=1e-9)
    for j in range(bands):
        np.testing.assert_allclose(
            gradient[j, : n - j], np.diag(slopes, -j), rtol=1e-6, atol=1e-8 * abs(slopes).max()
        )
        assert not gradient[j, n - j :].any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("idle", [{0}, {7, 8, 30}, set(range(60, 70)), {69}])
def test_steps_without_a_learning_rate(momentum: float, idle: set[int]) -> None:
    """Their noise may have no effect at all, but it stays bounded."""
    workload, n = Workload.sgd(momentum, lr_schedule=lambda t: float(t not in idle)), 70
    for bands in (8, n):
        form = banded(workload, n, bands)
        toeplitz = BandedToeplitz(bands).factorize(workload, n, bands)
        assert form.error(workload, n) < toeplitz.column_norm(n) * toeplitz.error(workload, n)
        assert np.linalg.norm(np.linalg.inv(form.materialize(n)), axis=1).max() < 1e4


def test_any_matrix_gains_from_more_bands() -> None:
    workload, n = random_workload(60), 60
    errors = [banded(workload, n, bands).error(workload, n) for bands in (1, 4, 16, 60)]
    assert errors[0] == pytest.approx(np.linalg.norm(workload.materialize(n)) / n**0.5)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.98 * errors[0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="bands=0"):
        Banded(0).factorize(Workload.sgd(), 10, 10)
    with pytest.raises(ValueError, match=r"BandedToeplitz\(bands=16\)"):
        Banded().factorize(Workload.sgd(), MAX_DENSE_STEPS + 1, 100)
    for workload in (random_workload(9), Workload.toeplitz([1.0] * 9)):
        with pytest.raises(ValueError, match="given for 9 steps; the run has 10"):
            Banded(4).factorize(workload, 10, 10)
