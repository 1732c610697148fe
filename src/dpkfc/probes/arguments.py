"""What a probe refuses to be made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpkfc.errors import PrivacyError


def whole(where: str, value: object, least: int) -> int:
    """`value` as a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PrivacyError(f"{where}={value!r}: give a whole number, {least} or more")
    return value


def real(where: str, value: float, least: float = -math.inf, above: float = -math.inf) -> float:
    """`value` if it is finite, at least `least` and greater than `above`."""
    if not (
        isinstance(value, int | float) and math.isfinite(value) and value >= least and value > above
    ):
        bound = (
            f" greater than {above:g}"
            if above > -math.inf
            else f" of at least {least:g}" * (least > -math.inf)
        )
        raise PrivacyError(f"{where}={value!r}: give a finite number{bound}")
    return value


def share(where: str, value: float) -> float:
    """`value` if it lies in [0, 1]."""
    if not (isinstance(value, int | float) and 0 <= value <= 1):
        raise PrivacyError(f"{where}={value!r}: give a number from 0 to 1")
    return value


def distinct_ids(where: str, values: Sequence[int], size: int) -> tuple[int, ...]:
    """`values` as a tuple of different whole numbers in [0, size)."""
    found = tuple(int(value) for value in values)
    outside = [value for value in found if not 0 <= value < size]
    if outside or len(set(found)) < len(found):
        wrong = f"holds {outside[0]}" if outside else "names an id twice"
        raise PrivacyError(f"{where} {wrong}: give different whole numbers from 0 to {size - 1}")
    return found
