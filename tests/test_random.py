"""The keyed generator: standard normal, independent, addressed by offset, with one-way keys."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpkfc import normals as normals_module
from dpkfc import random as rng
from dpkfc.normals import LANE, PAIRS, TAIL
from dpkfc.random import add_normal_, first_key, next_key, sub_key, uniform_bits

KEY = first_key(0)


def normals(count: int, key: bytes = KEY) -> torch.Tensor:
    out = torch.zeros(count)
    add_normal_([out], key, 1.0)
    return out


def test_the_stream_is_standard_normal() -> None:
    z = normals(2_000_000)
    assert stats.kstest(z[:200_000].numpy(), "norm").pvalue > 1e-4
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt(math.prod(range(2 * power - 1, 0, -2)) / len(z))  # of the mean of z^p
        assert abs(float((z.double() ** power).mean()) - moment) < 5 * spread, power
    tail = float((z.abs() > 4).float().mean())
    assert abs(tail / (2 * stats.norm.sf(4)) - 1) < 0.35


def test_halves_of_a_lane_are_uncorrelated_also_in_size() -> None:
    """Both halves come from the same radii: cosine and sine."""
    z = normals(LANE * 3).view(3, LANE)
    first, second = z[:, :PAIRS].flatten(), z[:, PAIRS:].flatten()
    for a, b in ((first, second), (first**2, second**2), (first.abs(), second.abs())):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(len(first))


def words_of(key: bytes, offset: int, count: int, nonce: int = 0) -> torch.Tensor:
    """32-bit words of the key stream, by another route than the code's: one block at a time."""
    stream = b"".join(
        Cipher(algorithms.ChaCha20(key, struct.pack("<QQ", block, nonce)), mode=None)
        .encryptor()
        .update(bytes(64))
        for block in range(offset // 16, (offset + count) // 16)
    )
    return torch.frombuffer(bytearray(stream), dtype=torch.uint32).long().double()


@pytest.mark.parametrize(
    "tail", [TAIL, 2**30], ids=["tail as it is", "a quarter of all counts as tail"]
)
def test_it_is_box_and_muller_over_chacha20(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An independent reading of the same bits, in float64."""
    monkeypatch.setattr(normals_module, "TAIL", tail)
    for module in (rng, normals_module):  # read one by one, and slowly: shorter lanes
        monkeypatch.setattr(module, "PAIRS", 1024)
        monkeypatch.setattr(module, "LANE", 2048)
    lane, half = 2, 1024
    u, angle = words_of(KEY, lane * 2 * half, 2 * half).view(2, half)
    fraction = words_of(KEY, lane * half, half, nonce=1)
    u = torch.where(u < tail, u + (fraction + 0.5) / 2**32, u + 0.5) / 2**32
    radius = (-2 * u.log()).sqrt()
    want = torch.cat(
        [radius * (2 * math.pi * angle / 2**32).cos(), radius * (2 * math.pi * angle / 2**32).sin()]
    )
    got = normals(2 * half * 4)[lane * 2 * half : (lane + 1) * 2 * half]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=4e-4)  # u is rounded to float32


def test_the_tail_goes_on_where_32_bits_end() -> None:
    """At the smallest 32-bit radius, 6.7 standard deviations, the fraction extends the tail."""
    u = torch.full((2000,), 0.5)
    normals_module._refine_tail_(u, KEY, 0)
    radius = (-2 * (u * 2.0**-32).log()).sqrt()
    assert radius.min() > math.sqrt(-2 * math.log(2**-32)) and radius.max() > 7.5
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4


@given(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 3 * LANE)), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_any_split_into_tensors_reads_the_same_stream(sizes: list[int]) -> None:
    pieces = [torch.zeros(size) for size in sizes]
    add_normal_(pieces, KEY, 2.0)
    torch.testing.assert_close(torch.cat(pieces), 2.0 * normals(sum(sizes)), rtol=0, atol=0)


@pytest.mark.parametrize(
    "count", [1, 5, PAIRS - 1, PAIRS, PAIRS + 3, LANE, LANE + 1, 2 * LANE + PAIRS + 7]
)
def test_a_longer_stream_begins_with_the_shorter(count: int) -> None:
    assert torch.equal(normals(count), normals(4 * LANE)[:count])


def test_noise_is_added_not_written() -> None:
    x = torch.full((10, 3), 5.0, dtype=torch.float64)
    add_normal_([x], KEY, 0.0)
    assert (x == 5).all()


def test_keys_form_a_one_way_chain_and_purposes_are_apart() -> None:
    assert next_key(KEY) == hashlib.sha256(b"dpkfc next" + KEY).digest() != KEY
    keys = {
        KEY,
        next_key(KEY),
        sub_key(KEY, "noise"),
        sub_key(KEY, "sampling"),
        sub_key(next_key(KEY), "noise"),
    }
    assert len(keys) == 5 and all(len(key) == 32 for key in keys)
    assert first_key(1) == first_key(1) != first_key(2)
    assert first_key(None) != first_key(None), "without a seed, keys come from the operating system"


def test_uniform_bits_are_uniform() -> None:
    bits = uniform_bits(KEY, 100_000)
    assert stats.kstest(bits / 2.0**64, "uniform").pvalue > 1e-4
