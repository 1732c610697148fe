"""Rounding to a grid: the nearest multiple of a power of two that depends on the plan alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dpkfc import chacha, normals
from dpkfc.noise.grid import FRACTION, MOST_STEPS, round_to_grid_, spacing
from dpkfc.random import add_normal_, first_key


@pytest.mark.parametrize("pair", [0, 2**30, 2**31, 2**32 - 2**8])
def test_neighbouring_angles_are_as_close_as_the_proof_says(pair: int) -> None:
    """2⁻²¹ at most, on every device: the angle is one product of the rounded word."""
    words = torch.arange(pair, pair + 2**8)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    angles = normals._as_float(signed) * (6.283185307179586 * 2.0**-32)
    assert float(angles.double().diff().max()) <= 2.0**-21
    assert float(angles.max()) <= 2 * math.pi + 1e-6


@settings(deadline=None)
@given(noise=st.floats(1e-12, 1e12), steps=st.integers(1, 10**7))
def test_the_spacing_is_the_largest_power_of_two_below_the_fraction(
    noise: float, steps: int
) -> None:
    grid = spacing(noise, steps)
    limit = noise * FRACTION / math.sqrt(min(steps, MOST_STEPS))
    assert math.frexp(grid)[0] == 0.5
    assert grid <= limit * (1 + 1e-15) and 2 * grid > limit * (1 - 1e-15)


def test_without_noise_there_is_no_grid() -> None:
    x = torch.randn(5)
    before = x.clone()
    round_to_grid_([x], spacing(0.0))
    assert torch.equal(x, before)


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    exponent=st.integers(-20, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_value_goes_to_the_nearest_multiple(
    values: list[float], exponent: int, dtype: torch.dtype
) -> None:
    grid = 2.0**exponent
    x = torch.tensor(values, dtype=dtype)
    round_to_grid_([x], grid)
    for value, rounded in zip(values, x.tolist(), strict=True):
        multiple = Fraction(rounded) / Fraction(grid)
        assert multiple.denominator == 1
        assert abs(Fraction(rounded) - Fraction(value)) <= Fraction(grid) / 2


def on_cpu(count: int) -> Tensor:
    values = torch.zeros(count)
    add_normal_([values], first_key(11), 1.0)
    return values


def as_on_a_device(count: int) -> Tensor:
    """The tensor operations of other devices, run on the CPU."""
    key = chacha.key_words(first_key(11), torch.device("cpu"))
    return normals.box_muller(key, torch.arange(count // 32)).flatten()


@pytest.mark.parametrize("draw", [on_cpu, as_on_a_device])
@pytest.mark.parametrize("shift", [0.0, 0.1234567, 5.4321])
def test_the_probability_of_each_cell_is_that_of_the_gaussian(
    draw: Callable[[int], Tensor], shift: float
) -> None:
    """Chi-squared over the cells within two standard deviations, for sums on and off the grid."""
    grid, draws = spacing(1.0), 2_000_000
    values = torch.full((draws,), shift) + draw(draws)
    round_to_grid_([values], grid)
    cells = torch.arange(math.ceil((shift - 2) / grid), math.floor((shift + 2) / grid))
    counts = torch.bincount((values / grid).round().long() - int(cells[0]) + 10**6)[
        10**6 : 10**6 + len(cells)
    ]
    edges = (torch.cat([cells - 0.5, cells[-1:] + 0.5]).double() * grid - shift).numpy()
    expected = (stats.norm.cdf(edges[1:]) - stats.norm.cdf(edges[:-1])) * draws
    statistic = float((((counts.double().numpy() - expected) ** 2) / expected).sum())
    assert stats.chi2.sf(statistic, len(cells)) > 1e-4
