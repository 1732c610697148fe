"""Normals from the key stream: both implementations, any stretch, the law and its tails."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dpkfc import chacha, normals
from dpkfc import random as rng
from dpkfc.errors import PrivacyError
from dpkfc.normals import LANE, PAIRS
from dpkfc.random import first_key, normal_lanes

KEY = first_key(0)
CPU = torch.device("cpu")
Draw = Callable[[int, int], Tensor]


def on_cpu(start: int, stop: int) -> Tensor:
    pieces = [piece.clone() for piece in normal_lanes(KEY, start, stop, CPU)]
    return torch.cat([torch.zeros(0), *pieces])


def as_on_a_device(start: int, stop: int) -> Tensor:
    """The tensor operations of a device, run on the CPU."""
    words = chacha.key_words(KEY, CPU)
    pieces = rng._pieces(start, stop, rng.LANES_AT_ONCE)
    return torch.cat(
        [torch.zeros(0), *(normals.device_normals(words, first, last) for first, last in pieces)]
    )


both = pytest.mark.parametrize("draw", [on_cpu, as_on_a_device])


@pytest.fixture
def short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of 64 normals, so that a few hundred numbers contain every kind of cut."""
    for module in (rng, normals):
        monkeypatch.setattr(module, "PAIRS", 32)
        monkeypatch.setattr(module, "LANE", 64)
    monkeypatch.setattr(rng, "LANES_AT_ONCE", 3)


# the fixture changes constants only, alike for all examples
EXAMPLES = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@both
@EXAMPLES
@given(data=st.data())
def test_any_stretch_is_part_of_the_same_stream(
    short_lanes: None, draw: Draw, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 500))
    stop = data.draw(st.integers(start, 500))
    cut = data.draw(st.integers(start, stop))
    pieces = [draw(0, start), draw(start, cut), draw(cut, stop)]
    assert torch.equal(torch.cat(pieces), draw(0, stop))


@both
@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 1),
        (5, 6),
        (PAIRS - 3, PAIRS + 3),
        (PAIRS + 17, LANE - 1),
        (100, LANE - 100),
        (LANE - 9, LANE + PAIRS + 9),
        (7, 2 * LANE + 7),
    ],
)
def test_stretches_of_real_lanes(draw: Draw, start: int, stop: int) -> None:
    assert torch.equal(draw(start, stop), draw(0, 3 * LANE)[start:stop])


def test_pieces_follow_each_other_and_waste_little() -> None:
    """A piece in both halves of a lane has pairs in common; whole lanes come several at a time."""
    for start, stop in ((0, 10 * LANE), (3, LANE + 5), (PAIRS - 1, PAIRS + 1), (5, 5)):
        pieces = list(rng._pieces(start, stop, 4))
        assert [first for first, _ in pieces] == [start, *(last for _, last in pieces[:-1])][
            : len(pieces)
        ]
        assert (pieces[-1][1] if pieces else start) == stop
    assert list(rng._pieces(0, 10 * LANE, 4)) == [
        (0, 4 * LANE),
        (4 * LANE, 8 * LANE),
        (8 * LANE, 10 * LANE),
    ]
    assert list(rng._pieces(PAIRS - 1, PAIRS + 1, 4)) == [(PAIRS - 1, PAIRS), (PAIRS, PAIRS + 1)]
    assert list(rng._pieces(1, PAIRS + 2, 4)) == [(1, PAIRS + 2)]


def test_both_implementations_agree() -> None:
    """The same bits; float32 functions of them differ in the last places at most."""
    start, stop = LANE - 1000, 2 * LANE + 1000
    want, got = on_cpu(start, stop), as_on_a_device(start, stop)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("tail", [2**12, 2**30, 2**31 - 1])
def test_both_implementations_agree_in_the_tail(
    tail: int, short_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The further bits are those of the same pair. Up to half of all numbers are taken as tail."""
    monkeypatch.setattr(normals, "TAIL", tail)
    # radii near 0 amplify rounding: r² = -2 log u, and u is rounded to 24 bits
    torch.testing.assert_close(as_on_a_device(3, 2000), on_cpu(3, 2000), rtol=1e-4, atol=4e-4)


@pytest.mark.parametrize("block", [2**28 - 1, 2**28, 2**40 - 5])
def test_far_positions(block: int) -> None:
    """Where the counter needs more than 32 bits: positions of a trillion parameters."""
    start = 16 * block
    want, got = on_cpu(start, start + 100), as_on_a_device(start, start + 100)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=4e-6)
    assert not torch.equal(want, on_cpu(start % 2**32, start % 2**32 + 100)) or start < 2**32


@both
def test_the_law_is_standard_normal(draw: Draw) -> None:
    z = draw(0, 4 * LANE)
    assert stats.kstest(z.double().numpy(), "norm").pvalue > 1e-4
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt(math.prod(range(2 * power - 1, 0, -2)) / len(z))  # of the mean of z^p
        assert abs(float((z.double() ** power).mean()) - moment) < 5 * spread, power
    for size in (3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(size) * len(z)
        assert abs(int((z.abs() > size).sum()) - expected) < 5 * math.sqrt(expected) + 1


@pytest.mark.parametrize("draw", [on_cpu, as_on_a_device])
def test_no_number_occurs_twice(draw: Draw) -> None:
    """A repeated block would repeat 16 radii: of a million pairs hardly two have the same."""
    z = draw(0, 4 * LANE).view(4, 2, PAIRS)
    squared_radii = z.double().square().sum(dim=1).flatten()
    # 2^19 values of 24 bits: a few hundred coincidences in float32, no runs of them
    rows = squared_radii.float().view(-1, 16)
    assert len(torch.unique(rows, dim=0)) == len(rows)


def words_at(monkeypatch: pytest.MonkeyPatch, radius: int, tail: int, angle: int) -> Tensor:
    """The normals of `box_muller` if the cipher gave these words."""
    answers = iter([radius, angle, tail])

    def fixed(key: Tensor, counter: Tensor, nonce: int = 0) -> list[Tensor]:
        word = next(answers)
        signed = word - 2**32 if word >= 2**31 else word
        return [torch.full(counter.shape, signed, dtype=torch.int32)] * 16

    monkeypatch.setattr(chacha, "blocks", fixed)
    return normals.box_muller(chacha.key_words(KEY, CPU), torch.arange(1))[0]


@pytest.mark.parametrize(
    ("radius", "tail", "want"),
    [
        (0, 0, math.sqrt(-2 * math.log(2**-65))),  # 9.5 standard deviations: the end of the tail
        (0, 2**32 - 1, math.sqrt(-2 * math.log(2**-32))),
        (4095, 2**31, math.sqrt(-2 * math.log(4095.5 * 2**-32))),
        (4096, 0, math.sqrt(-2 * math.log(4096.5 * 2**-32))),  # no longer in the tail
        (2**31, 0, math.sqrt(2 * math.log(2))),
        (2**32 - 1, 0, 0.0),  # u rounds to 1
    ],
)
def test_the_ends_of_the_range(
    radius: int, tail: int, want: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No infinity and no NaN for any word, and the tail reaches 9.5 standard deviations."""
    for angle, factor in ((0, 1.0), (2**31, -1.0)):
        got = float(words_at(monkeypatch, radius, tail, angle)[0])
        assert got == pytest.approx(want * factor, rel=1e-6, abs=1e-6)


@given(word=st.integers(0, 2**32 - 1))
def test_words_are_rounded_to_the_nearest_float(word: int) -> None:
    signed = word - 2**32 if word >= 2**31 else word
    got = normals._as_float(torch.tensor([signed], dtype=torch.int32))
    assert torch.equal(got, torch.tensor([word], dtype=torch.uint32).float())


GOLDEN = {
    0: [0.529599, -0.8876221, 0.1749497, 0.827135],
    PAIRS: [-1.067324, -0.3437066, -0.7786672, -0.1377913],
    LANE: [2.041438, -0.7869439, 3.015481, -0.6362252],
}


@both
def test_the_stream_is_the_recorded_one(draw: Draw) -> None:
    """A change of the stream would change every recorded run."""
    for start, want in GOLDEN.items():
        assert draw(start, start + 4).tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_it_compiles_to_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two rounds instead of twenty, which compile in seconds; `benchmarks.device` has all."""
    from torch._inductor import metrics

    monkeypatch.setattr(chacha, "DOUBLE_ROUNDS", 1)
    torch.compiler.reset()
    metrics.reset()
    key, block = chacha.key_words(KEY, CPU), torch.arange(100)
    got = normals.compiled()(key, block)
    kernels = metrics.generated_kernel_count
    torch.testing.assert_close(got, normals.box_muller(key, block), rtol=1e-5, atol=4e-6)
    assert kernels == 1


def test_a_device_with_wrong_kernels_is_noticed() -> None:
    normals.check_against_cpu(normals.box_muller, CPU)
    for wrong in (
        lambda key, block: normals.box_muller(key, block + 1),
        lambda key, block: normals.box_muller(key, block) * 1.01,
        lambda key, block: normals.box_muller(key, block) * float("nan"),
        lambda key, block: normals.box_muller(key, block).roll(1, 0),
    ):
        with pytest.raises(PrivacyError, match="differs by"):
            normals.check_against_cpu(wrong, CPU)


def test_without_a_compiler_the_noise_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(key: Tensor, block: Tensor) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(normals, "compiled", lambda: fails)
    with pytest.warns(UserWarning, match="no compiler.*separate kernels"):
        assert normals._compiled_on.__wrapped__("cpu") is normals.box_muller
