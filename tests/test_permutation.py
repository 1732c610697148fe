"""Permutations of 2^k numbers: one-to-one, uniform, and a function of the key alone."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpkfc import permutation as module
from dpkfc.permutation import Permutation, permutation
from dpkfc.random import sub_key

KEY = b"k" * 32


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feistel networks for all sizes, so that all of their numbers can be looked at."""
    monkeypatch.setattr(module, "SHUFFLED", 1)


@pytest.mark.parametrize("bits", range(12))
def test_a_shuffle_is_one_to_one(bits: int) -> None:
    everything = Permutation(KEY, bits)(np.arange(2**bits))
    assert everything.dtype == np.int64
    assert sorted(everything.tolist()) == list(range(2**bits))


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("bits", range(2, 15))
def test_a_network_is_one_to_one(bits: int) -> None:
    everything = Permutation(KEY, bits)(np.arange(2**bits))
    assert everything.dtype == np.int64
    assert sorted(everything.tolist()) == list(range(2**bits))


@pytest.mark.parametrize("bits", [20, 21, 31, 41])
def test_large_ones_are_one_to_one_where_one_looks(bits: int) -> None:
    """Numbers beside each other, and numbers that differ in one bit."""
    numbers = np.unique(
        np.concatenate([np.arange(2000), 2**bits - 1 - np.arange(2000), 2 ** np.arange(bits)])
    )
    images = Permutation(KEY, bits)(numbers)
    assert len(np.unique(images)) == len(numbers)
    assert images.min() >= 0 and images.max() < 2**bits


def test_all_orders_of_four_numbers_are_equally_likely() -> None:
    """The shuffle is uniform: 24 orders, 12,000 keys."""
    orders = Counter(
        tuple(Permutation(sub_key(KEY, str(n)), 2)(np.arange(4)).tolist()) for n in range(12_000)
    )
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > 1e-4


def test_equal_random_integers_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order would depend on the sorting algorithm."""
    drawn: list[int] = []
    streams = [np.array([3, 1, 3, 2], "<u8"), np.array([2, 9, 4, 1], "<u8")]

    def stream(key: bytes, count: int) -> np.ndarray:
        drawn.append(count)
        return streams[len(drawn) - 1]

    monkeypatch.setattr(module, "uniform_bits", stream)
    assert Permutation(KEY, 2)(np.arange(4)).tolist() == [3, 0, 2, 1]
    assert drawn == [4, 4]


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("bits", [8, 9, 12])
def test_a_network_maps_pairs_uniformly(bits: int) -> None:
    """Where 0 and 1 go, and how far apart, over many keys: the three uniform, up to ties."""
    images = np.array(
        [Permutation(sub_key(KEY, f"{bits} {n}"), bits)(np.array([0, 1])) for n in range(8000)]
    )
    for values in (images[:, 0], images[:, 1], (images[:, 1] - images[:, 0]) % 2**bits - 1):
        cells = np.bincount(values * 16 // 2**bits, minlength=16)
        assert stats.chisquare(cells).pvalue > 1e-4
    both = np.bincount((images[:, 0] % 4) * 4 + images[:, 1] % 4, minlength=16)
    distinct = np.array([[2**bits / 4 - (a == b) for b in range(4)] for a in range(4)]).ravel()
    assert stats.chisquare(both, distinct / distinct.sum() * len(images)).pvalue > 1e-4


@pytest.mark.parametrize("divisor", [3, 64, 1000])
def test_a_large_network_spreads_a_run_of_numbers(divisor: int) -> None:
    """Neighbouring slots and every b-th slot hold records from everywhere."""
    images = Permutation(KEY, 31)(7 + divisor * np.arange(100_000))
    for values in (images // 2**25, images % 64):
        assert stats.chisquare(np.bincount(values, minlength=64)).pvalue > 1e-4
    steps = np.diff(images) % 2**31 // 2**25
    assert stats.chisquare(np.bincount(steps, minlength=64)).pvalue > 1e-4


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.sampled_from([3, 10, 23, 31]))
def test_any_part_of_it_can_be_asked_for(key: bytes, bits: int) -> None:
    numbers = np.arange(0, 2**bits, max(1, 2**bits // 50))
    whole = Permutation(key, bits)(numbers)
    pieces = [permutation(key, bits)(part) for part in (numbers[:3], numbers[3:])]
    assert (np.concatenate(pieces) == whole).all()


def test_other_keys_permute_differently() -> None:
    for bits in (10, 25):
        numbers = np.arange(1000)
        one, other = (Permutation(key, bits)(numbers) for key in (KEY, b"l" * 32))
        assert (one == other).sum() < 20


def hash_stream(key: bytes, count: int) -> np.ndarray:
    """A stream that does not depend on the library's cipher: SHA-256 of a counter."""
    blocks = (hashlib.sha256(key + n.to_bytes(8, "big")).digest() for n in range(-(-count // 4)))
    return np.frombuffer(b"".join(blocks), "<u8")[:count]


def test_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded values; a change of these numbers is a change of recorded runs."""
    monkeypatch.setattr(module, "uniform_bits", hash_stream)
    shuffled = [1, 11, 0, 12, 6, 3, 7, 13, 5, 10, 2, 15, 14, 4, 8, 9]
    assert Permutation(KEY, 4)(np.arange(16)).tolist() == shuffled
    assert Permutation(KEY, 21)(np.array([0, 1, 2, 2**21 - 1])).tolist() == [
        1095571,
        240601,
        1169672,
        1679656,
    ]
