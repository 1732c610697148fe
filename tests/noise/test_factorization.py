"""Every form of C against dense linear algebra and brute force."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch

from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import (
    IDENTITY,
    BandedStrategy,
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.noise.sensitivity import Participation
from dpkfc.noise.workload import Workload

N = 12  # steps of the run
SHORTER = [1, 3, 7, N]
RNG = np.random.default_rng(0)


def toeplitz(c: list[float] | np.ndarray) -> np.ndarray:
    return sum((x * np.eye(N, k=-j) for j, x in enumerate(c) if j < N), np.zeros((N, N)))


def normalised(c: list[float]) -> np.ndarray:
    dense = toeplitz(c)
    return np.asarray(dense / np.linalg.norm(dense, axis=0) * np.linalg.norm(c))


def buffered(weights: list[float], poles: list[float]) -> np.ndarray:
    c = [1.0] + [
        sum(w * p ** (k - 1) for w, p in zip(weights, poles, strict=True)) for k in range(1, N)
    ]
    return toeplitz(c)


FALLING, RISING, SIGNED, LONG = (
    [1.0, 0.8, 0.5, 0.3],
    [0.5, 1.0, 0.7],
    [2.0, -1.0, 0.5, 0.2],
    [0.9**k for k in range(N)],
)
DIAGONALS = np.vstack([RNG.uniform(0.5, 2, size=N), RNG.normal(size=(3, N))])
SHORT_D, LONG_D = [1.0, -0.5, -0.2], [1.0, -0.4, -0.1, 0.2, -0.05, -0.02]
FORMS: dict[str, tuple[Factorization, np.ndarray]] = {
    "identity": (IDENTITY, np.eye(N)),
    "one band": (ToeplitzStrategy("", (2.0,)), 2 * np.eye(N)),
    "Toeplitz": (ToeplitzStrategy("", tuple(FALLING)), toeplitz(FALLING)),
    "Toeplitz, rising": (ToeplitzStrategy("", tuple(RISING)), toeplitz(RISING)),
    "Toeplitz, signed": (ToeplitzStrategy("", tuple(SIGNED)), toeplitz(SIGNED)),
    "Toeplitz, full": (ToeplitzStrategy("", tuple(LONG)), toeplitz(LONG)),
    "normalised": (ToeplitzStrategy("", tuple(FALLING), N), normalised(FALLING)),
    "normalised, signed": (ToeplitzStrategy("", tuple(SIGNED), N), normalised(SIGNED)),
    "normalised, full": (ToeplitzStrategy("", tuple(LONG), N), normalised(LONG)),
    "inverse": (InverseToeplitzStrategy("", tuple(SHORT_D)), np.linalg.inv(toeplitz(SHORT_D))),
    "inverse, long": (InverseToeplitzStrategy("", tuple(LONG_D)), np.linalg.inv(toeplitz(LONG_D))),
    "inverse, scaled": (
        InverseToeplitzStrategy("", (0.5, -0.3)),
        np.linalg.inv(toeplitz([0.5, -0.3])),
    ),
    "buffered, 1": (BufferedStrategy("", (0.4,), (0.9,)), buffered([0.4], [0.9])),
    "buffered, 3": (
        BufferedStrategy("", (0.4, 0.2, 0.1), (0.9, 0.5, 0.99)),
        buffered([0.4, 0.2, 0.1], [0.9, 0.5, 0.99]),
    ),
    "buffered, signed": (
        BufferedStrategy("", (0.2, -0.4), (0.9, 0.5)),
        buffered([0.2, -0.4], [0.9, 0.5]),
    ),
    "matrix": (
        BandedStrategy("", DIAGONALS),
        sum((np.diag(DIAGONALS[j, : N - j], -j) for j in range(4)), np.zeros((N, N))),
    ),
    "matrix, positive": (
        BandedStrategy("", np.abs(DIAGONALS)),
        sum((np.diag(np.abs(DIAGONALS)[j, : N - j], -j) for j in range(4)), np.zeros((N, N))),
    ),
}
WORKLOADS = {
    "plain": Workload.sgd(),
    "momentum": Workload.sgd(0.9),
    "Nesterov and decay": Workload.sgd(0.9, 0.1, lr=0.5, nesterov=True),
    "schedule": Workload.sgd(0.9, 0.1, lr_schedule=lambda t: 1 / (1 + t)),
    "coefficients": Workload.toeplitz(RNG.uniform(0.1, 1, size=N).tolist()),
    "matrix": Workload.linear(np.tril(RNG.normal(size=(N, N)))),
}
forms = pytest.mark.parametrize(("form", "dense"), FORMS.values(), ids=FORMS.keys())
steps = pytest.mark.parametrize("n", SHORTER)


@forms
@steps
def test_c_is_the_matrix_that_is_meant(form: Factorization, dense: np.ndarray, n: int) -> None:
    """For fewer steps than planned, C is its leading block."""
    c = form.materialize(n)
    np.testing.assert_allclose(c, dense[:n, :n], rtol=1e-12, atol=1e-13)
    assert form.bands is None or not np.tril(dense, -form.bands).any()


@forms
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_error(form: Factorization, dense: np.ndarray, workload: Workload) -> None:
    for n in SHORTER:
        b = workload.materialize(n) @ np.linalg.inv(dense[:n, :n])
        assert form.error(workload, n) == pytest.approx(np.linalg.norm(b) / n**0.5, rel=1e-10)


@forms
@steps
def test_column_norm(form: Factorization, dense: np.ndarray, n: int) -> None:
    assert form.column_norm(n) == pytest.approx(
        np.linalg.norm(dense[:n, :n], axis=0).max(), rel=1e-10
    )


def patterns(n: int, b: int, k: int) -> list[tuple[int, ...]]:
    """All sets of at most k of n steps that are at least b apart."""
    sets = (pattern for size in range(1, min(k, n) + 1) for pattern in combinations(range(n), size))
    return [
        pattern
        for pattern in sets
        if all(later - earlier >= b for earlier, later in pairwise(pattern))
    ]


def brute_force(c: np.ndarray, b: int, k: int) -> tuple[float, float]:
    """A lower bound (signs ±1) and an upper bound (Σ|G|) over all patterns."""
    gram, attained, bound = c.T @ c, 0.0, 0.0
    for pattern in patterns(len(c), b, k):
        signs = np.array(list(product([1.0], *[[1.0, -1.0]] * (len(pattern) - 1))))
        block = gram[np.ix_(pattern, pattern)]
        attained = max(attained, np.einsum("si,ij,sj->s", signs, block, signs).max())
        bound = max(bound, np.abs(block).sum())
    return attained**0.5, bound**0.5


@forms
@pytest.mark.parametrize("n", [1, 3, 7, 8])
def test_sensitivity(form: Factorization, dense: np.ndarray, n: int) -> None:
    """Never below brute force, and equal to it if marked exact."""
    for b, k in [(1, 8), (2, 4), (3, 2), (4, 9), (5, 2), (20, 1), (20, 3)]:
        attained, bound = brute_force(dense[:n, :n], b, k)
        found = form.sensitivity(n, Participation(b, k))
        assert found.value >= bound * (1 - 1e-10), (b, k)
        if found.exact:
            assert found.value <= attained * (1 + 1e-10), (b, k)


@forms
@pytest.mark.parametrize(("b", "k"), [(4, 3), (5, 2), (12, 1)])
def test_sensitivity_of_the_whole_run(
    form: Factorization, dense: np.ndarray, b: int, k: int
) -> None:
    """It is exact for bands that do not overlap, and for non-negative, non-increasing c."""
    attained, bound = brute_force(dense, b, k)
    found = form.sensitivity(N, Participation(b, k))
    falling = (
        np.allclose(dense[1:, 1:], dense[:-1, :-1])
        and (np.diff(dense[:, 0]) <= 0).all()
        and (dense >= 0).all()
    )
    apart = form.bands is not None and form.bands <= b
    assert found.exact or not (falling or apart)
    assert found.value >= bound * (1 - 1e-10)
    if found.exact:
        assert found.value == pytest.approx(attained, rel=1e-10)


@pytest.mark.parametrize(
    "name", ["Toeplitz, rising", "Toeplitz, signed", "inverse, long", "buffered, signed"]
)
@pytest.mark.parametrize(("b", "k"), [(1, 8), (1, 2), (2, 3), (3, 2)])
def test_the_tighter_of_two_bounds_counts(name: str, b: int, k: int) -> None:
    """The bounds by the non-increasing envelope of |c| and by the rows of |CᵀC|."""
    n, (form, dense) = 8, FORMS[name]
    c = np.abs(dense[:n, 0])
    envelope = toeplitz([c[j:].max() for j in range(n)])[:n, :n]
    gram, sets = np.abs(dense[:n, :n].T @ dense[:n, :n]), patterns(n, b, k)
    rows = np.array(
        [max(gram[s, list(pattern)].sum() for pattern in sets if s in pattern) for s in range(n)]
    )
    one_by_one = max(rows[list(pattern)].sum() for pattern in sets) ** 0.5
    found = form.sensitivity(n, Participation(b, k))
    assert found.value <= min(brute_force(envelope, b, k)[0], one_by_one) * (1 + 1e-10)


@pytest.mark.parametrize("name", ["normalised", "normalised, signed"])
def test_normalising_costs_no_sensitivity_and_lowers_the_error(name: str) -> None:
    form, dense = FORMS[name]
    plain = ToeplitzStrategy("", form.c)  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.linalg.norm(dense, axis=0), np.linalg.norm(plain.c), rtol=1e-12)
    assert form.sensitivity(N, Participation(4, 3)).value == pytest.approx(
        3**0.5 * np.linalg.norm(plain.c)
    )
    assert form.error(WORKLOADS["plain"], N) < plain.error(WORKLOADS["plain"], N)


@pytest.mark.parametrize("name", ["normalised", "normalised, full", "matrix"])
def test_more_steps_than_planned_are_refused(name: str) -> None:
    form = FORMS[name][0]
    assert form.steps == N
    workload = Workload.sgd(0.9)
    for ask in (
        lambda: form.error(workload, N + 1),
        lambda: form.sensitivity(N + 1, Participation(4, 2)),
        lambda: form.materialize(N + 1),
    ):
        with pytest.raises(PrivacyError, match=f"computed for {N} steps, not for {N + 1}"):
            ask()


@pytest.mark.parametrize("name", [name for name, (form, _) in FORMS.items() if form.steps is None])
def test_other_forms_have_no_end(name: str) -> None:
    """C of more steps begins with the C of fewer."""
    form, dense = FORMS[name]
    c = form.materialize(3 * N)
    np.testing.assert_allclose(c[:N, :N], dense, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(c[N:, N:], c[: 2 * N, : 2 * N], rtol=1e-12, atol=1e-13)
    assert form.error(WORKLOADS["momentum"], 3 * N) > 0


@forms
@steps
def test_non_negative_means_no_negative_entry(
    form: Factorization, dense: np.ndarray, n: int
) -> None:
    assert not form.non_negative(n) or dense[:n, :n].min() >= 0
    if n == N:
        assert form.non_negative(n) == (dense.min() >= 0)


@forms
def test_buffers_are_what_the_stream_keeps(form: Factorization, dense: np.ndarray) -> None:
    state = form.stream([range(10)], torch.device("cpu")).state_dict()
    past = state.get("past")
    assert form.buffers == (0 if past is None else past.numel() / 10)
