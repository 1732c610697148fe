"""Agreement with JAX-Privacy, where it has the same mechanism."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
from jax.extend import backend
from jax_privacy.matrix_factorization import (
    banded,
    buffered_toeplitz,
    sensitivity,
    streaming_matrix,
    toeplitz,
)

from dpkfc.noise.factorization import (
    BandedStrategy,
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.noise.sensitivity import (
    Participation,
    banded_sensitivity,
    gram_sensitivity,
    heaviest_pattern,
    toeplitz_sensitivity,
)
from dpkfc.noise.toeplitz import (
    BandedSquareRoot,
    BandedToeplitz,
    BufferedToeplitz,
    InverseSquareRoot,
)
from dpkfc.noise.workload import Workload
from dpkfc.random import add_normal_, first_key

N = 60
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """JAX releases its threads at the end, because other tests fork."""
    yield
    backend.clear_backends()


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """In JAX, and for these tests only."""
    with jax.enable_x64(True):
        yield


def falling(n: int, seed: int) -> np.ndarray:
    """Coefficients ≥ 0 that do not increase, the only ones JAX-Privacy takes."""
    return np.asarray(np.sort(np.random.default_rng(seed).uniform(size=n))[::-1])


# Workloads and errors


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("scheduled", [False, True])
def test_workloads(momentum: float, scheduled: bool) -> None:
    rates = 1 / (1 + np.arange(N)) if scheduled else None
    theirs = streaming_matrix.momentum_sgd_matrix(
        momentum, None if rates is None else jax.numpy.array(rates)
    )
    ours = Workload.sgd(momentum, lr_schedule=None if rates is None else rates.tolist())
    np.testing.assert_allclose(ours.materialize(N), theirs.materialize(N), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "workload", [Workload.sgd(), Workload.sgd(0.9, 0.01)], ids=["sums", "momentum and decay"]
)
@pytest.mark.parametrize("bands", [8, N])
def test_errors_of_toeplitz_matrices(workload: Workload, bands: int) -> None:
    """Theirs is squared, and for each step."""
    c, a = falling(bands, bands), jax.numpy.array(workload.coefficients(N))
    theirs = toeplitz.per_query_error(strategy_coef=jax.numpy.array(c), n=N, workload_coef=a)
    assert ToeplitzStrategy("", tuple(c)).error(workload, N) == pytest.approx(
        float(theirs.mean()) ** 0.5, rel=1e-10
    )
    d = np.concatenate([[1.0], -falling(bands, bands) / bands])
    padded = jax.numpy.array(np.pad(d, (0, max(0, N - len(d))))[:N])
    theirs = toeplitz.per_query_error(noising_coef=padded, n=N, workload_coef=a)
    assert InverseToeplitzStrategy("", tuple(d)).error(workload, N) == pytest.approx(
        float(theirs.mean()) ** 0.5, rel=1e-10
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_errors_of_column_normalised_matrices(momentum: float) -> None:
    """Theirs has columns of norm 1, ours of norm ‖c‖."""
    c = falling(8, 0)
    ours, theirs = (
        ToeplitzStrategy("", tuple(c), N),
        banded.ColumnNormalizedBanded.from_banded_toeplitz(N, jax.numpy.array(c)),
    )
    np.testing.assert_allclose(
        ours.materialize(N) / np.linalg.norm(c), theirs.materialize(), rtol=1e-10, atol=1e-14
    )
    error = banded.per_query_error(theirs, A=streaming_matrix.momentum_sgd_matrix(momentum))
    want = float(error.mean()) ** 0.5 / np.linalg.norm(c)
    assert ours.error(Workload.sgd(momentum), N) == pytest.approx(want, rel=1e-10)


def test_square_roots_of_prefix_sums() -> None:
    root = BandedSquareRoot(N).factorize(Workload.sgd(), N, N)
    inverse = InverseSquareRoot(N).factorize(Workload.sgd(), N, N)
    # type: ignore[attr-defined]
    np.testing.assert_allclose(root.c, toeplitz.optimal_max_error_strategy_coefs(N), rtol=1e-12)
    # type: ignore[attr-defined]
    np.testing.assert_allclose(inverse.d, toeplitz.optimal_max_error_noising_coefs(N), rtol=1e-10)


def test_the_optimal_banded_toeplitz_matrix() -> None:
    """Computed there by another optimizer, through automatic differentiation."""
    theirs = toeplitz.optimize_banded_toeplitz(N, 8, max_optimizer_steps=100)
    form = BandedToeplitz(8, normalise=False).factorize(Workload.sgd(), N, 8)
    ours = np.array(form.c)  # type: ignore[attr-defined]
    assert form.column_norm(N) * form.error(Workload.sgd(), N) == pytest.approx(
        float(toeplitz.loss(theirs, N)) ** 0.5, rel=1e-7
    )
    np.testing.assert_allclose(ours / np.linalg.norm(ours), theirs, rtol=0, atol=1e-4)


# Sensitivities


@pytest.mark.parametrize(("b", "k"), [(1, 2), (3, 4), (12, 1)])
def test_sensitivities(b: int, k: int) -> None:
    """Of a Toeplitz matrix, of a banded one, of any, and the heaviest pattern under all of them."""
    n = 12
    rng, who = np.random.default_rng(b), Participation(b, k)
    c, weights = falling(n, n * b), rng.uniform(size=n)
    full = np.tril(rng.normal(size=(n, n)))
    narrow = full - np.tril(full, -b)

    theirs = float(toeplitz.minsep_sensitivity_squared(jax.numpy.array(c), b, k)) ** 0.5
    assert toeplitz_sensitivity(c, who).value == pytest.approx(theirs, rel=1e-12)

    columns = banded_sensitivity(np.linalg.norm(narrow, axis=0), b, who)
    theirs = sensitivity.get_sensitivity_banded(jax.numpy.array(narrow), b, k)
    assert columns is not None and columns.value == pytest.approx(theirs, rel=1e-12)

    theirs = float(sensitivity.max_participation_for_linear_fn(jax.numpy.array(weights), b, k))
    assert heaviest_pattern(weights, who) == pytest.approx(theirs, rel=1e-12)

    for matrix in (
        full,
        narrow,
    ):  # ours keeps every row's own step in its pattern, so it may be tighter
        theirs = sensitivity.get_min_sep_sensitivity_upper_bound(jax.numpy.array(matrix), b, k)
        assert gram_sensitivity(matrix, who).value <= theirs * (1 + 1e-12)
    assert gram_sensitivity(narrow, who).value == pytest.approx(columns.value, rel=1e-12)


# Buffered linear Toeplitz matrices


BLT = {"one": ([0.4], [0.9]), "three": ([0.1, 0.2, 0.3], [0.999, 0.9, 0.3])}


@pytest.mark.parametrize(("weights", "poles"), BLT.values(), ids=BLT.keys())
@pytest.mark.parametrize(("b", "k"), [(N, 1), (20, 3)])
def test_buffered_matrices(weights: list[float], poles: list[float], b: int, k: int) -> None:
    theirs = buffered_toeplitz.BufferedToeplitz.build(buf_decay=poles, output_scale=weights)
    ours = BufferedStrategy("", tuple(weights), tuple(poles))
    loss = buffered_toeplitz.LossFn.build_min_sep(
        n=N, error="mean", min_sep=b, max_participations=k
    )
    np.testing.assert_allclose(ours.coefficients(N), theirs.toeplitz_coefs(N), rtol=1e-11)
    found = ours.sensitivity(N, Participation(b, k))
    assert found.exact and found.value == pytest.approx(
        float(loss.sensitivity_squared(theirs)) ** 0.5, rel=1e-11
    )
    assert ours.error(Workload.sgd(), N) == pytest.approx(
        float(loss.error_for_inv(theirs.inverse())) ** 0.5, rel=1e-9
    )
    assert ours.column_norm(N) == pytest.approx(
        float(buffered_toeplitz.sensitivity_squared(theirs, N)) ** 0.5, rel=1e-11
    )


@pytest.mark.parametrize(
    ("n", "b", "buffers", "reached"),
    [
        (500, 50, 1, 11.583000627518),
        (500, 50, 2, 11.498182967996),
        (2000, 100, 1, 21.745613343220),
        (2000, 100, 2, 21.374016052180),
        (2000, 2000, 2, 3.318282123853),
        (2000, 2000, 3, 3.273663393018),
    ],
)
def test_the_optimal_buffered_matrix(n: int, b: int, buffers: int, reached: float) -> None:
    """The mean error that `buffered_toeplitz.optimize` reaches in half a minute."""
    form = BufferedToeplitz(buffers).factorize(Workload.sgd(), n, b)
    cost = form.sensitivity(n, Participation.every(b, n)).value * form.error(Workload.sgd(), n)
    assert cost == pytest.approx(reached, rel=1e-6)


def test_the_optimal_buffered_matrix_has_no_slope() -> None:
    """By automatic differentiation of their error and sensitivity."""
    n, b = 500, 50
    form = BufferedToeplitz(2).factorize(Workload.sgd(), n, b)

    def loss(x: jax.Array) -> jax.Array:
        blt = buffered_toeplitz.BufferedToeplitz(
            output_scale=jax.numpy.exp(x[0]), buf_decay=1 - jax.numpy.exp(x[1])
        )
        c = blt.toeplitz_coefs(n)
        error = toeplitz.per_query_error(strategy_coef=c, n=n, skip_checks=True).mean()
        return (
            jax.numpy.log(error * toeplitz.minsep_sensitivity_squared(c, b, n=n, skip_checks=True))
            / 2
        )

    assert isinstance(form, BufferedStrategy)
    x = jax.numpy.log(jax.numpy.array([form.weights, 1 - np.array(form.poles)]))
    value, slopes = jax.jit(jax.value_and_grad(loss))(x)
    cost = form.sensitivity(n, Participation.every(b, n)).value * form.error(Workload.sgd(), n)
    assert cost == pytest.approx(float(jax.numpy.exp(value)), rel=1e-10)
    np.testing.assert_allclose(slopes, 0, atol=1e-4)


# Streams


def normals(size: int) -> np.ndarray:
    rows = [torch.zeros(size) for _ in range(N)]
    for step, row in enumerate(rows):
        add_normal_([row], first_key(step), 1.0)
    return np.array([row.double().numpy() for row in rows])


C = falling(8, 1)
STREAMS: dict[str, Factorization] = {
    "Toeplitz": ToeplitzStrategy("", tuple(C / np.linalg.norm(C))),
    "normalised": ToeplitzStrategy("", tuple(C / np.linalg.norm(C)), N),
    "buffered": BufferedStrategy("", (0.3, 0.2), (0.99, 0.5)),
    "matrix": BandedStrategy("", np.ones((4, N)) / 2),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    """Their streaming multiplication by C⁻¹, of the same z."""
    size, form = 50, STREAMS[name]
    if isinstance(form, ToeplitzStrategy):
        theirs = toeplitz.inverse_as_streaming_matrix(
            jax.numpy.array(form.c), column_normalize_for_n=form.steps
        )
    elif isinstance(form, BufferedStrategy):
        blt = buffered_toeplitz.BufferedToeplitz.build(
            buf_decay=form.poles, output_scale=form.weights
        )
        theirs = blt.inverse_as_streaming_matrix()
    else:
        theirs = banded.ColumnNormalizedBanded(
            params=jax.numpy.ones((N, 4))
        ).inverse_as_streaming_matrix()
    want = np.asarray(theirs @ jax.numpy.array(normals(size)))
    stream = form.stream([range(size)], torch.device("cpu"))
    for step in range(N):
        got = torch.zeros(size, dtype=torch.float64)
        stream.add_([got], first_key(step), 1.0, step)
        np.testing.assert_allclose(got.numpy(), want[step], rtol=0, atol=4e-6 * np.abs(want).max())
