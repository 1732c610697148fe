"""Sensitivities against brute force over every pattern of participation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpkfc.noise.sensitivity import (
    Participation,
    banded_sensitivity,
    gram_sensitivity,
    heaviest_pattern,
    toeplitz_sensitivity,
)

CLOSE = 1e-9  # relative


def patterns(n: int, b: int, k: int) -> Iterator[list[int]]:
    """All sets of at most k of n steps that are at least b apart."""
    for size in range(1, min(k, n) + 1):
        for steps in combinations(range(n), size):
            if all(later - earlier >= b for earlier, later in pairwise(steps)):
                yield list(steps)


def attained(c: np.ndarray, b: int, k: int) -> float:
    """The largest effect of contributions ±v of one vector v: a lower bound, exact if CᵀC ≥ 0."""
    best = 0.0
    for steps in patterns(len(c), b, k):
        signs = np.array(list(product([1.0], *[[1.0, -1.0]] * (len(steps) - 1))))
        best = max(best, np.square(signs @ c[:, steps].T).sum(axis=1).max())
    return float(best**0.5)


def bound(c: np.ndarray, b: int, k: int) -> float:
    """max_π Σ_{s,t∈π} |G_st|: an upper bound for vectors of norm 1."""
    gram = np.abs(c.T @ c)
    return float(max(gram[np.ix_(steps, steps)].sum() for steps in patterns(len(c), b, k)) ** 0.5)


def random_vectors(c: np.ndarray, b: int, k: int, rng: np.random.Generator) -> float:
    """The largest effect of some random unit vectors."""
    best = 0.0
    for steps in patterns(len(c), b, k):
        v = rng.normal(size=(len(steps), 3))
        best = max(
            best,
            float(np.linalg.norm(c[:, steps] @ (v / np.linalg.norm(v, axis=1, keepdims=True)))),
        )
    return best


def lower_toeplitz(c: np.ndarray) -> np.ndarray:
    return sum((x * np.eye(len(c), k=-j) for j, x in enumerate(c)), np.zeros((len(c), len(c))))


def random_banded(n: int, bands: int, seed: int, low: float = -1.0) -> np.ndarray:
    matrix = np.random.default_rng(seed).uniform(low, 1, size=(n, n))
    return np.asarray(np.tril(matrix) - np.tril(matrix, -bands))


GRID = [(n, b, k) for n in (1, 2, 5, 8) for b in (1, 2, 3, 5, 8, 12) for k in (1, 2, 9)]
SEPARATIONS, TIMES, SEEDS = st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32 - 1)
FEW = settings(max_examples=60, deadline=None)
# Squares of numbers below 1e-154 underflow, and no bound holds to a relative error then.
SIGNED = st.floats(-1, 1).map(lambda c: c if abs(c) > 1e-150 else 0.0)


# Toeplitz


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), SEPARATIONS, TIMES)
@FEW
def test_toeplitz_is_exact_if_c_does_not_increase(c: list[float], b: int, k: int) -> None:
    falling = np.sort(c)[::-1]
    found = toeplitz_sensitivity(falling, Participation(b, k))
    assert found.exact
    assert found.value == pytest.approx(
        attained(lower_toeplitz(falling), b, k), rel=CLOSE, abs=1e-150
    )


@pytest.mark.parametrize(("n", "b", "k"), GRID)
@pytest.mark.parametrize(
    "c", [[1.0] * 8, [1.0] + [0.0] * 7, 0.7 ** np.arange(8)], ids=["flat", "impulse", "geometric"]
)
def test_toeplitz_is_exact_on_a_grid(c: list[float], n: int, b: int, k: int) -> None:
    found = toeplitz_sensitivity(np.array(c[:n]), Participation(b, k))
    assert found.exact and found.value == pytest.approx(
        attained(lower_toeplitz(np.array(c[:n])), b, k), rel=CLOSE
    )


@given(st.lists(SIGNED, min_size=1, max_size=9), SEPARATIONS, TIMES, SEEDS)
@example([1.0, 0.0, 1.0], 1, 2, 0)  # the earliest pattern is not the worst
@FEW
def test_toeplitz_bounds_any_c(c: list[float], b: int, k: int, seed: int) -> None:
    coefficients = np.array(c)
    dense = lower_toeplitz(coefficients)
    found = toeplitz_sensitivity(coefficients, Participation(b, k))
    assert found.value >= bound(dense, b, k) * (1 - CLOSE)
    assert found.value >= random_vectors(dense, b, k, np.random.default_rng(seed)) * (1 - CLOSE)
    if found.exact:
        assert found.value <= attained(dense, b, k) * (1 + CLOSE)


@pytest.mark.parametrize("c", [[1.0, -0.5], [0.5, 1.0], [1.0, 0.0, 0.5], [-1.0, -0.5]])
def test_toeplitz_does_not_claim_what_it_does_not_know(c: list[float]) -> None:
    assert not toeplitz_sensitivity(np.array(c), Participation(1, 3)).exact


# Banded


@given(st.integers(1, 9), SEPARATIONS, TIMES, SEEDS, st.data())
@FEW
def test_columns_are_exact_if_bands_do_not_overlap(
    n: int, b: int, k: int, seed: int, data: st.DataObject
) -> None:
    bands = data.draw(st.integers(1, b))
    c = random_banded(n, bands, seed)
    found = banded_sensitivity(np.linalg.norm(c, axis=0), bands, Participation(b, k))
    assert found is not None and found.exact
    assert found.value == pytest.approx(attained(c, b, k), rel=CLOSE)
    assert found.value == pytest.approx(bound(c, b, k), rel=CLOSE)


@pytest.mark.parametrize(("n", "b", "k"), GRID)
def test_columns_are_exact_on_a_grid(n: int, b: int, k: int) -> None:
    for seed, bands in enumerate({1, b}):
        c = random_banded(n, bands, seed)
        found = banded_sensitivity(np.linalg.norm(c, axis=0), bands, Participation(b, k))
        assert found is not None and found.value == pytest.approx(attained(c, b, k), rel=CLOSE)


def test_columns_know_nothing_of_overlapping_bands() -> None:
    norms = np.array([3.0, 5.0, 4.0])
    assert banded_sensitivity(norms, 3, Participation(2, 2)) is None
    alone = banded_sensitivity(norms, 3, Participation(2, 1))
    assert alone is not None and alone.exact and alone.value == 5


# Any matrix


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    SEPARATIONS,
    TIMES,
    SEEDS,
    st.sampled_from([-1.0, -0.2, 0.0]),
)
@FEW
def test_gram_bounds_any_matrix(n: int, bands: int, b: int, k: int, seed: int, low: float) -> None:
    c = random_banded(n, bands, seed, low)
    found = gram_sensitivity(c, Participation(b, k))
    assert found.value >= bound(c, b, k) * (1 - CLOSE)
    assert found.value >= attained(c, b, k) * (1 - CLOSE)
    assert found.value >= random_vectors(c, b, k, np.random.default_rng(seed)) * (1 - CLOSE)
    if found.exact:
        assert found.value <= attained(c, b, k) * (1 + CLOSE)


@pytest.mark.parametrize(("n", "b", "k"), GRID)
def test_gram_bounds_on_a_grid(n: int, b: int, k: int) -> None:
    for seed, low in enumerate((-1.0, 0.0)):
        c = random_banded(n, n, seed, low)
        found = gram_sensitivity(c, Participation(b, k))
        assert found.value >= bound(c, b, k) * (1 - CLOSE)
        assert not found.exact or found.value <= attained(c, b, k) * (1 + CLOSE)


@pytest.mark.parametrize(("b", "k"), [(1, 8), (2, 4), (3, 3), (8, 1)])
def test_gram_is_exact_where_the_earliest_pattern_is_worst(b: int, k: int) -> None:
    c = lower_toeplitz(0.7 ** np.arange(8))
    found = gram_sensitivity(c, Participation(b, k))
    assert found.exact and found.value == pytest.approx(attained(c, b, k), rel=CLOSE)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_gram_bounds_matrices_of_any_size(scale: float) -> None:
    """Small entries are not lost next to the large number that marks a step."""
    c = scale * random_banded(7, 7, 0)
    for b, k in ((1, 7), (2, 3), (3, 2)):
        assert gram_sensitivity(c, Participation(b, k)).value >= bound(c, b, k) * (1 - CLOSE)


# Patterns


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), SEPARATIONS, TIMES)
@FEW
def test_heaviest_pattern(weights: list[float], b: int, k: int) -> None:
    w = np.array(weights)
    want = max(w[steps].sum() for steps in patterns(len(w), b, k))
    assert heaviest_pattern(w, Participation(b, k)) == pytest.approx(want, rel=CLOSE)


@pytest.mark.parametrize(("n", "b", "k"), GRID)
def test_heaviest_pattern_on_a_grid(n: int, b: int, k: int) -> None:
    for w in (
        np.arange(1.0, n + 1),
        np.arange(n, 0.0, -1),
        np.random.default_rng(n).permutation(n) + 1.0,
    ):
        want = max(w[steps].sum() for steps in patterns(n, b, k))
        assert heaviest_pattern(w, Participation(b, k)) == pytest.approx(want, rel=CLOSE)


@given(st.integers(2, 9), SEPARATIONS, TIMES, SEEDS, st.booleans(), st.data())
@FEW
def test_restarting_never_raises_the_sensitivity(
    n: int, b: int, k: int, seed: int, positive: bool, data: st.DataObject
) -> None:
    """For C ≥ 0, or p ≤ b. A restart at r sets the rows from r on of earlier columns to zero."""
    c = random_banded(n, n, seed, low=0.0) if positive else random_banded(n, min(b, n), seed)
    restarted = c.copy()
    for r in data.draw(st.lists(st.integers(1, n - 1), min_size=1, max_size=3)):
        restarted[r:, :r] = 0
    assert bound(restarted, b, k) <= attained(c, b, k) * (1 + CLOSE)


@pytest.mark.parametrize(("n", "b", "k"), GRID)
def test_participation(n: int, b: int, k: int) -> None:
    """`every` and `within` count the participations that fit."""
    most = max(len(steps) for steps in patterns(n, b, n))
    assert Participation.every(b, n) == Participation(b, most)
    assert Participation(b, k).within(n) == Participation(b, min(k, most))
    assert list(patterns(n, Participation.once(n).separation, Participation.once(n).times)) == [
        [t] for t in range(n)
    ]


@pytest.mark.parametrize(("separation", "times"), [(0, 1), (1, 0), (-1, 2)])
def test_bad_participation(separation: int, times: int) -> None:
    with pytest.raises(
        ValueError, match=f"separation={separation}, times={times}.*must be at least 1"
    ):
        Participation(separation, times)
