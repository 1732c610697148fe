"""Rounding to a grid: the nearest multiple of a power of two that depends on the plan alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpkfc.noise.grid import FRACTION, MOST_STEPS, round_to_grid_, spacing
from dpkfc.random import add_normal_, first_key


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


@pytest.mark.parametrize("shift", [0.0, 0.1234567, 5.4321])
def test_the_probability_of_each_cell_is_that_of_the_gaussian(shift: float) -> None:
    """Chi-squared over the cells within two standard deviations, for sums on and off the grid."""
    grid, draws = spacing(1.0), 2_000_000
    values = torch.full((draws,), shift)
    add_normal_([values], first_key(11), 1.0)
    round_to_grid_([values], grid)
    cells = torch.arange(math.ceil((shift - 2) / grid), math.floor((shift + 2) / grid))
    counts = torch.bincount((values / grid).round().long() - int(cells[0]) + 10**6)[
        10**6 : 10**6 + len(cells)
    ]
    edges = (torch.cat([cells - 0.5, cells[-1:] + 0.5]).double() * grid - shift).numpy()
    expected = (stats.norm.cdf(edges[1:]) - stats.norm.cdf(edges[:-1])) * draws
    statistic = float((((counts.double().numpy() - expected) ** 2) / expected).sum())
    assert stats.chi2.sf(statistic, len(cells)) > 1e-4
