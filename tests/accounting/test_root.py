"""The root search: from above, to the tolerance, for smooth, infinite and jumping functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.accounting.root import Root, root_from_above

BOUNDS = (-5.0, 14.0)
TOLERANCE = 1e-6

Function = Callable[[float], float]

# Decreasing functions with root r, by name.
SHAPES: dict[str, Callable[[float, float], float]] = {
    "line": lambda x, r: 1.3 * (r - x),
    "steep": lambda x, r: 400 * (r - x),
    "flat": lambda x, r: 1e-3 * (r - x),
    "convex": lambda x, r: math.exp(r - x) - 1,
    "concave": lambda x, r: 1 - math.exp(x - r),
    "cubic": lambda x, r: (r - x) ** 3 + 1e-4 * (r - x),
    "jump": lambda x, r: 1.0 if x < r else -0.5,
    "infinite on both sides": lambda x, r: math.inf if x < r - 0.1 else -math.inf,
    "infinite below": lambda x, r: math.inf if x < r - 0.2 else r - x,
    "not a number below": lambda x, r: math.nan if x < r - 0.2 else r - x,
    "zero epsilon above": lambda x, r: -math.inf if x > r + 0.2 else r - x,
}
JUMPS = {"infinite on both sides": -0.1}  # where the sign changes, relative to r


class Counted:
    """A function that remembers its values."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.values: dict[float, float] = {}

    def __call__(self, x: float) -> float:
        self.values[x] = self.function(x)
        return self.values[x]


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    root=st.floats(-4.0, 13.0),
    start=st.floats(-9.0, 20.0),
    slope=st.one_of(st.none(), st.floats(-50.0, -0.01)),
)
def test_the_result_was_evaluated_and_lies_above_the_root(
    shape: str, root: float, start: float, slope: float | None
) -> None:
    function = Counted(lambda x: SHAPES[shape](x, root))
    found = root_from_above(function, start, TOLERANCE, bounds=BOUNDS, slope=slope)
    assert function.values[found.x] == found.value <= 0
    assert BOUNDS[0] <= min(function.values) and max(function.values) <= BOUNDS[1]
    assert found.x >= root + JUMPS.get(shape, 0.0) - 1e-12
    assert len(function.values) <= 100


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(root=st.floats(-4.0, 13.0), start=st.floats(-9.0, 20.0))
def test_nothing_is_wasted_if_no_slope_is_claimed(shape: str, root: float, start: float) -> None:
    found = root_from_above(lambda x: SHAPES[shape](x, root), start, TOLERANCE, bounds=BOUNDS)
    # The secant is that of the last two points, not the tangent.
    assert found.x <= root + JUMPS.get(shape, 0.0) + 3 * TOLERANCE


def test_a_good_start_with_its_slope_takes_one_evaluation() -> None:
    function = Counted(lambda x: 2.0 * (3.0 - x))
    found = root_from_above(function, 3.0 + TOLERANCE / 2, TOLERANCE, bounds=BOUNDS, slope=-2.0)
    assert len(function.values) == 1 and found.x == 3.0 + TOLERANCE / 2


def test_a_smooth_function_takes_few_evaluations() -> None:
    function = Counted(lambda x: SHAPES["convex"](x, 2.0))
    root_from_above(function, 1.8, 1e-5, bounds=BOUNDS)
    assert len(function.values) <= 5


def test_extrapolation_comes_closer() -> None:
    found = root_from_above(lambda x: SHAPES["convex"](x, 2.0), 1.8, 1e-2, bounds=BOUNDS)
    assert abs(found.extrapolated - 2.0) < (found.x - 2.0) / 10
    assert Root(1.0, -math.inf, -2.0).extrapolated == Root(1.0, -0.5, None).extrapolated == 1.0


def test_a_function_below_zero_everywhere_ends_at_the_lower_bound() -> None:
    assert root_from_above(lambda x: -1.0, 3.0, 1e-6, bounds=BOUNDS).x == BOUNDS[0]


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_a_function_above_zero_everywhere_has_no_root(value: float) -> None:
    with pytest.raises(ValueError, match="positive up to 14"):
        root_from_above(lambda x: value, 3.0, 1e-6, bounds=BOUNDS)
