"""A printed epsilon is an upper bound of the number, and close to it."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.accounting.rounding import round_up

EPSILONS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@given(EPSILONS, st.integers(1, 17))
def test_what_is_printed_is_never_below_the_number(value: float, digits: int) -> None:
    assert float(round_up(value, digits)) >= value


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(1, 17))
def test_what_is_printed_is_at_most_one_unit_of_the_last_digit_above(
    value: float, digits: int
) -> None:
    exact = Decimal(repr(value))
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    assert Decimal(round_up(value, digits)) - exact < unit


@given(st.integers(0, 9999), st.integers(-8, 4))
def test_a_number_of_so_many_decimals_stays_as_it_is(number: int, exponent: int) -> None:
    value = float(Decimal(number).scaleb(exponent))
    assert float(round_up(value)) == value


@given(EPSILONS, EPSILONS)
def test_larger_numbers_are_not_printed_smaller(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert float(round_up(low)) <= float(round_up(high))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.0, "3"),
        (3, "3"),
        (0.0, "0"),
        (0.1, "0.1"),  # the binary number is a little above one tenth, and reads back as itself
        (2.46494, "2.465"),
        (2.4600001, "2.461"),
        (2.9999999, "3"),
        (0.00012345, "0.0001235"),
        (12345.0, "12350"),
        (999999.0, "1000000"),
        (1e-7, "1e-7"),
        (1.23451e300, "1.235e+300"),
        (math.inf, "inf"),
    ],
)
def test_how_it_looks(value: float, shown: str) -> None:
    assert round_up(value) == shown


def test_fewer_digits_round_further_up() -> None:
    assert [round_up(2.46494, digits) for digits in (1, 2, 3, 6)] == ["3", "2.5", "2.47", "2.46494"]


def test_what_is_no_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        round_up(math.nan)
    with pytest.raises(ValueError, match="digits=0"):
        round_up(1.0, 0)
