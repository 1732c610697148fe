"""Validation of arguments.

Every function takes the name of the argument for the message, returns the valid value, and raises
`TypeError` for a wrong type and `ValueError` for a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_integer(argument: str, value: object, least: int) -> int:
    """`value`, a whole number of at least `least`.

    >>> check_integer("count", 3, least=1)
    3
    """
    message = f"{argument}={value!r}: give a whole number, {least} or more"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return value


def check_number(
    argument: str, value: float, least: float = -math.inf, above: float = -math.inf
) -> float:
    """`value`, a finite number of at least `least` and greater than `above`."""
    if above > -math.inf:
        bound = f" greater than {above:g}"
    elif least > -math.inf:
        bound = f" of at least {least:g}"
    else:
        bound = ""
    message = f"{argument}={value!r}: give a finite number{bound}"
    if not isinstance(value, int | float):
        raise TypeError(message)
    if not (math.isfinite(value) and value >= least and value > above):
        raise ValueError(message)
    return value


def check_fraction(argument: str, value: float) -> float:
    """`value`, a number in [0, 1]."""
    message = f"{argument}={value!r}: give a number from 0 to 1"
    if not isinstance(value, int | float):
        raise TypeError(message)
    if not 0 <= value <= 1:
        raise ValueError(message)
    return value


def check_distinct_ids(argument: str, values: Sequence[int], size: int) -> tuple[int, ...]:
    """`values` as a tuple of distinct whole numbers in [0, size)."""
    ids = tuple(int(value) for value in values)
    outside = [value for value in ids if not 0 <= value < size]
    if outside or len(set(ids)) < len(ids):
        problem = f"holds {outside[0]}" if outside else "names an id twice"
        raise ValueError(f"{argument} {problem}: give different whole numbers from 0 to {size - 1}")
    return ids
