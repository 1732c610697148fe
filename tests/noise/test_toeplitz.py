"""The recipes: their definitions, and published and measured errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.noise.factorization import (
    IDENTITY,
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.noise.sensitivity import Participation
from dpkfc.noise.toeplitz import (
    BandedSquareRoot,
    BandedToeplitz,
    BufferedToeplitz,
    InverseSquareRoot,
    LambdaCGD,
    OutputPerturbation,
)
from dpkfc.noise.workload import Workload


def decayed(alpha: float, beta: float) -> Workload:
    """The workload 1 / ((1 - αz)(1 - βz)) of the BSR paper."""
    return Workload.sgd(beta, 1 - alpha, coupled=False)


def cost(form: Factorization, workload: Workload, n: int, b: int) -> float:
    """E = sens(C) ‖A C⁻¹‖_F / √n, if a record takes part in every b-th step."""
    return form.sensitivity(n, Participation.every(b, n)).value * form.error(workload, n)


def toeplitz(c: list[float] | np.ndarray, n: int) -> np.ndarray:
    return sum((x * np.eye(n, k=-j) for j, x in enumerate(c) if j < n), np.zeros((n, n)))


WORKLOADS = {
    "sums": Workload.sgd(),
    "momentum": Workload.sgd(0.9),
    "Nesterov": Workload.sgd(0.9, 0.01, nesterov=True),
    "complex roots": Workload.sgd(0.9, 0.3, lr=0.5),
    "decoupled": decayed(0.999, 0.9),
    "given": Workload.toeplitz(np.random.default_rng(0).uniform(0.1, 1, size=60).tolist()),
}
workloads = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())


# Golden values


@pytest.mark.parametrize(
    ("recipe", "of", "golden"),
    [
        (BandedSquareRoot(4), "c", [1, 0.9495, 0.90277537, 0.85951173]),
        (InverseSquareRoot(4), "d", [1, -0.9495, -0.00122512, -0.00116326]),
    ],
)
def test_golden_coefficients(recipe: Any, of: str, golden: list[float]) -> None:
    form = recipe.factorize(decayed(0.999, 0.9), 100, 100)
    np.testing.assert_allclose(getattr(form, of), golden, rtol=0, atol=1e-8)


STEPS = (100, 200, 500, 1000, 2000)


@pytest.mark.parametrize(
    ("alpha", "beta", "name", "golden"),
    [
        (1, 0, "BSR", (2.371, 3.645, 6.949, 12.103, 22.190)),
        (1, 0, "identity", (7.106, 14.177, 35.391, 70.746, 141.457)),
        (1, 0, "A", (10.000, 22.361, 74.162, 196.214, 535.724)),
        (1, 0.9, "BSR", (13.905, 22.896, 47.976, 88.724, 169.675)),
        (1, 0.9, "identity", (61.807, 132.274, 344.275, 697.787, 1404.874)),
        (1, 0.9, "A", (92.878, 213.196, 724.660, 1937.850)),
        (0.999, 0, "BSR", (2.327, 3.532, 6.375, 10.040, 15.429)),
        (0.999, 0, "identity", (6.879, 13.296, 30.366, 53.317, 86.909)),
        (0.999, 0, "A", (9.525, 20.491, 61.091, 137.383, 282.867)),
        (0.999, 0.9, "BSR", (13.498, 21.799, 42.536, 69.957, 110.300)),
        (0.999, 0.9, "identity", (59.826, 124.011, 295.157, 525.136, 861.154)),
        (0.999, 0.9, "A", (88.625, 195.813, 598.458, 1360.153)),
    ],
)
def test_golden_errors_of_repeated_participation(
    alpha: float, beta: float, name: str, golden: tuple[float, ...]
) -> None:
    """b = 100, and BSR with 100 bands."""
    workload = decayed(alpha, beta)
    for n, want in zip(STEPS, golden, strict=False):
        recipe: Any = {"BSR": BandedSquareRoot(100), "A": OutputPerturbation()}.get(name)
        form = recipe.factorize(workload, n, 100) if recipe else IDENTITY
        assert cost(form, workload, n, 100) == pytest.approx(want, abs=6e-4)


@pytest.mark.parametrize(
    ("alpha", "beta", "golden"),
    [
        (1, 0, (2.371, 2.590, 2.882, 3.102, 3.323)),
        (1, 0.9, (13.905, 16.281, 19.320, 21.576, 23.812)),
        (0.999, 0, (2.327, 2.505, 2.690, 2.777, 2.822)),
        (0.999, 0.9, (13.498, 15.461, 17.437, 18.351, 18.819)),
    ],
)
def test_golden_errors_of_a_single_pass(
    alpha: float, beta: float, golden: tuple[float, ...]
) -> None:
    """The whole square root, p = n."""
    workload = decayed(alpha, beta)
    for n, want in zip(STEPS, golden, strict=True):
        form = BandedSquareRoot(n).factorize(workload, n, n)
        assert cost(form, workload, n, n) == pytest.approx(want, abs=6e-4)


@pytest.mark.parametrize(
    ("recipe", "beta", "golden", "digit"),
    [
        *[(BandedSquareRoot(p), 0, e, 1) for p, e in ((2, 105), (4, 79), (16, 45), (100, 22))],
        *[(BandedSquareRoot(p), 0.9, e, 1) for p, e in ((2, 994), (4, 704), (16, 360), (100, 170))],
        *[(InverseSquareRoot(p), 0, e, 1) for p, e in ((2, 82), (4, 57), (16, 31), (100, 22))],
        *[
            (InverseSquareRoot(p), 0.9, e, 1)
            for p, e in ((2, 231), (4, 225), (16, 199), (100, 177))
        ],
        (LambdaCGD(), 0, 26.1, 0.1),
        (LambdaCGD(), 0.9, 171.8, 0.1),
        (BufferedToeplitz(1), 0, 21.75, 0.01),
        (BandedToeplitz(100, normalise=False), 0, 20.2067, 0.0001),
    ],
    ids=str,
)
def test_golden_errors_with_little_memory(
    recipe: Any, beta: float, golden: float, digit: float
) -> None:
    """n = 2000, b = 100, to the precision at which they are stated."""
    workload = decayed(1, beta)
    form = recipe.factorize(workload, 2000, 100)
    assert cost(form, workload, 2000, 100) == pytest.approx(golden, abs=0.51 * digit)


# What the recipes promise


@workloads
@pytest.mark.parametrize("bands", [1, 2, 7, 60])
def test_square_roots_are_square_roots(workload: Workload, bands: int) -> None:
    """As far as their bands reach, C² = A, and (C⁻¹)² = A⁻¹."""
    n = 60
    a = workload.materialize(n)
    root = BandedSquareRoot(bands).factorize(workload, n, n)
    inverse = InverseSquareRoot(bands).factorize(workload, n, n)
    assert isinstance(root, ToeplitzStrategy) and isinstance(inverse, InverseToeplitzStrategy)
    assert len(root.c) == len(inverse.d) == root.bands == bands
    for got, want in ((root.c, a), (inverse.d, np.linalg.inv(a))):
        square = np.convolve(got, got)[:bands]
        np.testing.assert_allclose(
            square, want[:bands, 0], rtol=0, atol=1e-12 * np.abs(want[:bands]).max()
        )


def objective(c: np.ndarray, a: np.ndarray) -> float:
    """log ‖c‖² ‖A C⁻¹‖_F², with dense matrices."""
    b = np.linalg.solve(toeplitz(c, len(a)).T, a.T)
    return float(np.log(np.square(b).sum() * (c @ c)))


@workloads
@pytest.mark.parametrize("bands", [2, 8, 30])
def test_the_optimum_is_one(workload: Workload, bands: int) -> None:
    """The gradient vanishes, by differences of the dense objective, and BSR is not better."""
    n, h = 60, 1e-5
    a = workload.materialize(n)

    def steepest(c: np.ndarray) -> float:
        slopes = [
            (objective(c + h * e, a) - objective(c - h * e, a)) / (2 * h) for e in np.eye(bands)
        ]
        return float(np.abs(slopes).max())

    # type: ignore[attr-defined]
    c = np.array(BandedToeplitz(bands, normalise=False).factorize(workload, n, n).c)
    # type: ignore[attr-defined]
    root = np.array(BandedSquareRoot(bands).factorize(workload, n, n).c)
    assert objective(c, a) < objective(root, a)
    assert steepest(c) < 1e-4 and steepest(c) < 0.1 * steepest(root)


@given(
    st.floats(0, 0.99), st.floats(0, 0.5), st.integers(2, 200), st.integers(2, 20), st.booleans()
)
@settings(max_examples=20, deadline=None)
def test_the_optimum_is_never_worse_than_the_root(
    momentum: float, decay: float, n: int, bands: int, nesterov: bool
) -> None:
    workload = Workload.sgd(momentum, decay, nesterov=nesterov)
    root = BandedSquareRoot(bands).factorize(workload, n, n)
    optimum = BandedToeplitz(bands, normalise=False).factorize(workload, n, n)
    normalised = BandedToeplitz(bands).factorize(workload, n, n)
    assert cost(optimum, workload, n, n) <= cost(root, workload, n, n) * (1 + 1e-9)
    assert cost(normalised, workload, n, n) <= cost(optimum, workload, n, n) * (1 + 1e-9)


@pytest.mark.parametrize(
    "workload", [WORKLOADS["sums"], WORKLOADS["momentum"]], ids=["sums", "momentum"]
)
@pytest.mark.parametrize("b", [10, 40, 120])
def test_lambda_is_the_best_of_a_grid(workload: Workload, b: int) -> None:
    n = 120
    form = LambdaCGD().factorize(workload, n, b)
    assert isinstance(form, InverseToeplitzStrategy) and form.d[0] == 1 and len(form.d) == 2
    grid = [
        cost(InverseToeplitzStrategy("", (1.0, -x)), workload, n, b)
        for x in 1 - np.geomspace(1, 1e-5, 200)
    ]
    assert cost(form, workload, n, b) <= min(grid) * (1 + 1e-6)
    given = LambdaCGD(0.25).factorize(workload, n, b)
    assert np.allclose(given.materialize(4)[:, 0], [1, 0.25, 0.25**2, 0.25**3])


@pytest.mark.parametrize(
    "workload", [WORKLOADS["sums"], WORKLOADS["momentum"]], ids=["sums", "momentum"]
)
@pytest.mark.parametrize("b", [10, 120])
def test_buffered_is_the_best_of_a_grid(workload: Workload, b: int) -> None:
    """One buffer against a grid of ω and λ, and two against one. The sensitivity is exact."""
    n = 120
    one, two = (BufferedToeplitz(m).factorize(workload, n, b) for m in (1, 2))
    grid = min(
        cost(BufferedStrategy("", (weight,), (pole,)), workload, n, b)
        for pole in 1 - np.geomspace(0.9, 1e-4, 25)
        for weight in np.linspace(0.02, 0.98, 25)
    )
    assert cost(one, workload, n, b) <= grid * (1 + 1e-6)
    assert cost(two, workload, n, b) <= cost(one, workload, n, b) * (1 + 1e-6)
    for form, buffers in ((one, 1), (two, 2)):
        c = form.materialize(n)[:, 0]
        assert form.buffers == buffers and (np.diff(c) <= 0).all() and c[-1] >= 0
        assert form.sensitivity(n, Participation.every(b, n)).exact


@workloads
def test_output_perturbation_is_the_workload_itself(workload: Workload) -> None:
    n = 60
    form = OutputPerturbation().factorize(workload, n, n)
    a = workload.materialize(n)
    np.testing.assert_allclose(form.materialize(n), a, rtol=0, atol=1e-12 * np.abs(a).max())
    assert form.error(workload, n) == pytest.approx(1.0, rel=1e-9)


# Arguments


@pytest.mark.parametrize(
    "recipe",
    [
        BandedSquareRoot(1),
        BandedToeplitz(1),
        BandedToeplitz(1, normalise=False),
        InverseSquareRoot(1),
        LambdaCGD(0.0),
    ],
    ids=str,
)
@workloads
def test_one_band_is_independent_noise(recipe: Any, workload: Workload) -> None:
    c = recipe.factorize(workload, 20, 20).materialize(20)
    np.testing.assert_allclose(c, c[0, 0] * np.eye(20), rtol=1e-12, atol=1e-15)
    assert c[0, 0] > 0


@pytest.mark.parametrize("recipe", [BandedSquareRoot, BandedToeplitz, InverseSquareRoot])
def test_more_bands_than_steps_are_as_many_as_steps(recipe: Any) -> None:
    workload = WORKLOADS["momentum"]
    few, many = recipe(6).factorize(workload, 6, 6), recipe(100).factorize(workload, 6, 6)
    np.testing.assert_array_equal(many.materialize(6), few.materialize(6))
    assert many.name == few.name and "6 bands" in few.name


@pytest.mark.parametrize("recipe", [BandedSquareRoot, BandedToeplitz, InverseSquareRoot])
@pytest.mark.parametrize("bands", [0, -3])
def test_bad_bands(recipe: Any, bands: int) -> None:
    with pytest.raises(ValueError, match=f"bands={bands}: must be at least 1"):
        recipe(bands).factorize(WORKLOADS["sums"], 10, 10)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_bad_decay(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay=.*must lie in \[0, 1\)"):
        LambdaCGD(decay).factorize(WORKLOADS["sums"], 10, 10)


def test_bad_buffers() -> None:
    with pytest.raises(ValueError, match="buffers=0: must be at least 1"):
        BufferedToeplitz(0).factorize(WORKLOADS["sums"], 10, 10)


@pytest.mark.parametrize(
    "recipe", [BandedSquareRoot(), BandedToeplitz(), InverseSquareRoot(), OutputPerturbation()]
)
def test_a_workload_without_a_generating_function_is_refused(recipe: Any) -> None:
    with pytest.raises(ValueError, match=r"not Toeplitz.*Banded\(bands="):
        recipe.factorize(Workload.linear(np.eye(10)), 10, 10)


@pytest.mark.parametrize("recipe", [LambdaCGD(), BufferedToeplitz(1)])
def test_the_others_take_any_matrix(recipe: Any) -> None:
    """For a workload with a schedule, or given as a matrix, the error uses the matrix."""
    sums = recipe.factorize(WORKLOADS["sums"], 30, 30).materialize(30)
    np.testing.assert_allclose(
        recipe.factorize(Workload.linear(np.tril(np.ones((30, 30)))), 30, 30).materialize(30),
        sums,
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "recipe",
    [
        BandedSquareRoot(4),
        BandedToeplitz(4),
        InverseSquareRoot(4),
        LambdaCGD(),
        BufferedToeplitz(1),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_very_short_runs(recipe: Any, n: int) -> None:
    """C is finite and invertible, and the error that of the dense matrices."""
    workload = WORKLOADS["momentum"]
    form = recipe.factorize(workload, n, 100)
    dense = form.materialize(n)
    want = np.linalg.norm(workload.materialize(n) @ np.linalg.inv(dense)) / n**0.5
    assert form.error(workload, n) == pytest.approx(want, rel=1e-10)
    assert form.sensitivity(n, Participation.once(n)).value == pytest.approx(
        np.linalg.norm(dense, axis=0).max()
    )
