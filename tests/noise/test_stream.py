"""Streams against the dense C⁻¹ z."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import (
    IDENTITY,
    BandedStrategy,
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.noise.stream import RegeneratedStream, RingBufferStream, Stream, _combination
from dpkfc.normals import LANE
from dpkfc.random import add_normal_, first_key

N = 12
CPU = torch.device("cpu")
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one number": [(1,)],
    "less than a lane": [(3, 4), (5,), (2, 3, 2), ()],
    "a lane": [(LANE,)],
    "more than a lane": [(LANE // 2, 1), (LANE + 3,), (7, 11)],
}


def toeplitz(c: list[float], n: int) -> np.ndarray:
    return sum((x * np.eye(n, k=-j) for j, x in enumerate(c) if j < n), np.zeros((n, n)))


def all_forms(n: int) -> dict[str, tuple[Factorization, np.ndarray]]:
    """For a run of n steps, each with its C."""
    c, signed, d = [1.0, 0.8, 0.5, 0.3], [2.0, -1.0, 0.5], [1.0, -0.5, -0.2]
    long_d = [0.8, -0.4, -0.1, 0.2, -0.05, -0.02]
    normalised = toeplitz(c, n) / np.linalg.norm(toeplitz(c, n), axis=0) * np.linalg.norm(c)
    buffered = toeplitz([1.0] + [0.4 * 0.99**k + 0.2 * 0.5**k for k in range(n)], n)
    rng = np.random.default_rng(0)
    diagonals = np.vstack([rng.uniform(1, 2, size=n), rng.uniform(-0.3, 0.45, size=(2, n))])
    matrix = sum((np.diag(diagonals[j, : n - j], -j) for j in range(3)), np.zeros((n, n)))
    return {
        "identity": (IDENTITY, np.eye(n)),
        "one band": (ToeplitzStrategy("", (2.0,)), 2 * np.eye(n)),
        "Toeplitz": (ToeplitzStrategy("", tuple(c)), toeplitz(c, n)),
        "Toeplitz, signed": (ToeplitzStrategy("", tuple(signed)), toeplitz(signed, n)),
        "normalised": (ToeplitzStrategy("", tuple(c), n), normalised),
        "inverse, regenerated": (
            InverseToeplitzStrategy("", tuple(d)),
            np.linalg.inv(toeplitz(d, n)),
        ),
        "inverse, one band": (InverseToeplitzStrategy("", (0.5,)), 2 * np.eye(n)),
        "inverse, in a ring": (
            InverseToeplitzStrategy("", tuple(long_d)),
            np.linalg.inv(toeplitz(long_d, n)),
        ),
        "buffered": (BufferedStrategy("", (0.4, 0.2), (0.99, 0.5)), buffered),
        "matrix": (BandedStrategy("", diagonals), matrix),
    }


FORMS = all_forms(N)
forms = pytest.mark.parametrize(("form", "dense"), FORMS.values(), ids=FORMS.keys())
WITH_BUFFERS = [name for name, (form, _) in FORMS.items() if form.buffers]


def whole(form: Factorization, size: int) -> Stream:
    """The stream of one process, which owns all positions."""
    return form.stream([range(size)], CPU)


def key(step: int) -> bytes:
    return first_key(1000 + step)


def normals(size: int, steps: list[int]) -> np.ndarray:
    """z, one row per step."""
    rows = [torch.zeros(size) for _ in steps]
    for row, step in zip(rows, steps, strict=True):
        add_normal_([row], key(step), 1.0)
    return np.array([row.double().numpy() for row in rows])


def draw(stream: Stream, size: int, steps: list[int]) -> np.ndarray:
    """w, one row per step, in float64 sums that preserve every bit."""
    rows = []
    for step in steps:
        row = torch.zeros(size, dtype=torch.float64)
        stream.add_([row], key(step), 1.0, step)
        rows.append(row.numpy())
    return np.array(rows)


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """To the rounding of float32 buffers."""
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6 * np.abs(want).max())


@forms
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_stream_is_the_inverse_times_z(
    form: Factorization, dense: np.ndarray, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """It is added to the sums, in tensors of any shape."""
    size, scale = sum(math.prod(shape) for shape in shapes), 2.5
    n = N if size < 100 else 5
    block = dense[:n, :n]
    want = np.linalg.inv(block) @ normals(size, list(range(n)))
    stream = whole(form, size)
    for step in range(n):
        sums = [torch.full(shape, float(i), dtype=dtype) for i, shape in enumerate(shapes)]
        stream.add_(sums, key(step), scale, step)
        added = [(tensor.double() - i).flatten() for i, tensor in enumerate(sums)]
        assert [tensor.dtype for tensor in sums] == [dtype] * len(shapes)
        np.testing.assert_allclose(
            torch.cat(added).numpy(), scale * want[step], rtol=0, atol=4e-6 * scale
        )


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_rounding_errors_do_not_accumulate(name: str) -> None:
    """C w is as close to z after many steps as after few."""
    n, size = 300, 32
    form, dense = all_forms(n)[name]
    steps = list(range(n))
    off = dense @ draw(whole(form, size), size, steps) - normals(size, steps)
    assert np.abs(off).max() < 4e-6
    assert off[-100:].std() < 2 * off[50:150].std() + 1e-9


@forms
def test_the_covariance_is_that_of_the_mechanism(form: Factorization, dense: np.ndarray) -> None:
    """E[w wᵀ] = (CᵀC)⁻¹, estimated over independent coordinates to 5 standard deviations."""
    size = 60_000
    w = draw(whole(form, size), size, list(range(N)))
    want = np.linalg.inv(dense.T @ dense)
    spread = np.sqrt((np.outer(np.diag(want), np.diag(want)) + want**2) / size)
    assert (np.abs(w @ w.T / size - want) < 5 * spread).all()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint would be."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@forms
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_a_stream_continues_from_its_state_to_the_bit(
    form: Factorization, dense: np.ndarray, at: int
) -> None:
    size = 50
    expected = draw(whole(form, size), size, list(range(N)))
    first = whole(form, size)
    draw(first, size, list(range(at)))
    state = copied(first.state_dict())
    draw(first, size, list(range(at, N)))  # what the old object goes on to do is of no consequence
    second = whole(form, size)
    second.load_state_dict(state)
    assert np.array_equal(draw(second, size, list(range(at, N))), expected[at:])


@forms
def test_a_repeated_step_is_refused(form: Factorization, dense: np.ndarray) -> None:
    """Also after loading, without adding anything, and without harm to what follows."""
    size = 20
    expected = draw(whole(form, size), size, list(range(N)))
    stream, other = whole(form, size), whole(form, size)
    draw(stream, size, [0, 1, 2])
    other.load_state_dict(copied(stream.state_dict()))
    for each in (stream, other):
        for step in (2, 0):
            sums = [torch.zeros(size)]
            with pytest.raises(PrivacyError, match=f"noise of step {step} was requested again"):
                each.add_(sums, key(step), 1.0, step)
            assert not sums[0].any()
        assert np.array_equal(draw(each, size, list(range(3, N))), expected[3:])


@forms
@pytest.mark.parametrize(("before", "at"), [(3, 4), (3, 9), (1, 2), (0, 5)])
def test_a_skipped_step_restarts_the_stream(
    form: Factorization, dense: np.ndarray, before: int, at: int
) -> None:
    """The noise is C⁻¹ z for the block-diagonal part of C."""
    size, steps = 40, list(range(before)) + list(range(at, N))
    block = dense[np.ix_(steps, steps)].copy()
    block[before:, :before] = 0
    got = draw(whole(form, size), size, steps)
    assert_close(got, np.linalg.inv(block) @ normals(size, steps))


@forms
def test_restart_forgets_the_past(form: Factorization, dense: np.ndarray) -> None:
    size, at = 40, 5
    stream = whole(form, size)
    block = dense.copy()
    block[at:, :at] = 0
    first = draw(stream, size, list(range(at)))
    stream.restart()
    got = np.vstack([first, draw(stream, size, list(range(at, N)))])
    assert_close(got, np.linalg.inv(block) @ normals(size, list(range(N))))
    with pytest.raises(PrivacyError, match="requested again"):
        stream.add_([torch.zeros(size)], key(0), 1.0, 0)


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_a_state_of_another_shape_is_refused(name: str) -> None:
    stream = whole(FORMS[name][0], 10)
    state = stream.state_dict()
    wrong: list[Tensor] = [
        torch.zeros(len(state["past"]), 11),
        torch.zeros(len(state["past"]) + 1, 10),
    ]
    for past in wrong:
        with pytest.raises(
            PrivacyError, match=rf"buffers of shape \({len(past)}, {past.shape[1]}\), the run needs"
        ):
            stream.load_state_dict({**state, "past": past})


@pytest.mark.parametrize("d", [[1.0, -0.9], [0.5, -0.4, 0.2], [1.0, -0.5, -0.2, -0.1]])
def test_regeneration_equals_the_ring_buffer(d: list[float]) -> None:
    size, steps = LANE + 9, list(range(6))
    lags = np.array(d[1:])
    ring = RingBufferStream(
        [range(size)], CPU, len(lags), lambda t: (d[0], lags), lambda t: 1.0, keeps="inputs"
    )
    regenerated = whole(InverseToeplitzStrategy("", tuple(d)), size)
    assert isinstance(regenerated, RegeneratedStream)
    want = toeplitz(d, 6) @ normals(size, steps)
    for stream in (ring, regenerated):
        assert_close(draw(stream, size, steps), want)


def test_only_the_keys_that_are_needed_are_kept() -> None:
    """Three coefficients need the keys of two steps: older noise cannot be recomputed."""
    stream = whole(InverseToeplitzStrategy("", (1.0, -0.5, -0.2)), 10)
    draw(stream, 10, list(range(5)))
    assert stream.state_dict()["keys"] == [key(4).hex(), key(3).hex()]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [9, 11])
def test_sums_of_another_size_are_refused_before_anything_is_added(name: str, size: int) -> None:
    """Too many numbers would leave some without noise."""
    stream, sums = whole(FORMS[name][0], 10), [torch.zeros(size)]
    with pytest.raises(PrivacyError, match=f"for 10 numbers, not for {size}"):
        stream.add_(sums, key(0), 1.0, 0)
    assert not sums[0].any()


def test_a_state_of_keys_for_another_size_is_refused() -> None:
    form = FORMS["inverse, regenerated"][0]
    with pytest.raises(PrivacyError, match="noise for 10 numbers, the run needs 20"):
        whole(form, 20).load_state_dict(whole(form, 10).state_dict())


@pytest.mark.parametrize("name", ["normalised", "matrix"])
def test_steps_beyond_what_the_matrix_was_made_for_are_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match=f"computed for {N} steps"):
        draw(whole(FORMS[name][0], 3), 3, [*range(N), N])


def divided(size: int, owners: int) -> list[list[range]]:
    """Positions dealt to owners in uneven stretches; the last owner has none."""
    if owners == 1:
        return [[range(size)]]
    cuts = [0, 1, 1, 8, 39, size // 3, size // 2 + 1, size - 2, size]
    owned: list[list[range]] = [[] for _ in range(owners)]
    for i, (start, stop) in enumerate(pairwise(cuts)):
        owned[i % max(owners - 1, 2)].append(range(start, stop))
    return owned


@forms
@pytest.mark.parametrize("owners", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1001, 2 * LANE + 77])
def test_the_noise_of_a_position_does_not_depend_on_its_owner(
    form: Factorization, dense: np.ndarray, owners: int, size: int
) -> None:
    """To the bit, for every owner and over several steps, with a scale that is no power of two."""
    steps, scale = (list(range(N)) if size < LANE else [0, 1, 2, 3]), 0.3
    alone, shared = whole(form, size), divided(size, owners)
    assert sorted(k for owned in shared for r in owned for k in r) == list(range(size))
    streams = [form.stream(owned, CPU) for owned in shared]
    for step in steps:
        want = torch.linspace(-1, 1, size)
        got = want.clone()
        alone.add_([want], key(step), scale, step)
        for owned, stream in zip(shared, streams, strict=True):
            # each stretch is a parameter of its own, as it is where the parameters are sharded
            sums = [got[positions.start : positions.stop].clone() for positions in owned]
            stream.add_(sums, key(step), scale, step)
            for positions, tensor in zip(owned, sums, strict=True):
                got[positions.start : positions.stop] = tensor
        assert torch.equal(got, want), step


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["identity", "Toeplitz", "inverse, in a ring", "buffered", "matrix"]),
    data=st.data(),
)
def test_any_stretch_has_the_noise_of_the_whole(name: str, data: st.DataObject) -> None:
    """The rounding of correlated noise does not depend on where a stretch begins and ends."""
    size = 3000
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    form = FORMS[name][0]
    alone, own = whole(form, size), form.stream([range(start, stop)], CPU)
    for step in range(6):
        want, got = torch.zeros(size), torch.zeros(stop - start)
        alone.add_([want], key(step), 0.7, step)
        own.add_([got], key(step), 0.7, step)
        assert torch.equal(got, want[start:stop])


@pytest.mark.parametrize("bands", [2, 3, 5, 9, 17, 32])
def test_the_sum_over_buffers_rounds_alike_at_every_position(bands: int) -> None:
    """BLAS may treat the end of a vector differently: cuts of all lengths and alignments."""
    generator = torch.Generator().manual_seed(bands)
    z = torch.randn(4099, generator=generator)
    past = torch.randn(bands - 1, 4099, generator=generator)
    weights = torch.randn(bands - 1, generator=generator).tolist()
    want = _combination(0.9, z, weights, past)
    for length in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 255, 1000, 4001):
        for start in (0, 1, 2, 3, 5, 8, 13, 16, 31, 64, 98):
            part = slice(start, start + length)
            assert torch.equal(_combination(0.9, z[part], weights, past[:, part]), want[part])


def test_positions_that_overlap_are_refused() -> None:
    """Two entries of one process would have the same noise: their difference has none."""
    with pytest.raises(PrivacyError, match="overlap"):
        IDENTITY.stream([range(10), range(20, 30), range(5, 7)], CPU)
    for odd in (range(0, 10, 2), range(-3, 4)):
        with pytest.raises(ValueError, match="consecutive"):
            IDENTITY.stream([odd], CPU)


def test_adjacent_ranges_are_one() -> None:
    """So a model of many small parameters is computed in whole lanes."""
    ranges = [range(5), range(5, 5), range(5, 9), range(11, 12), range(3, 3)]
    state = FORMS["Toeplitz"][0].stream(ranges, CPU).state_dict()
    assert state["ranges"] == [[0, 9], [11, 12]]


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_a_state_of_other_positions_is_refused(name: str) -> None:
    """Of the same size: the past of other positions would be subtracted."""
    form = FORMS[name][0]
    first, second = form.stream([range(10)], CPU), form.stream([range(10, 20)], CPU)
    draw(first, 10, [0, 1])
    with pytest.raises(
        PrivacyError, match=r"positions \[\[0, 10\]\].*needs those of \[\[10, 20\]\]"
    ):
        second.load_state_dict(copied(first.state_dict()))
    without = copied(first.state_dict())
    del without["ranges"]
    with pytest.raises(PrivacyError, match="positions None"):
        first.check_state(without)
