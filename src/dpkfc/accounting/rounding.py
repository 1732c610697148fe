"""How an epsilon is printed: rounded up, so that the printed number is still an upper bound."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context

MAX_PLAIN_DIGITS = 7  # numbers with more digits or zeros are written with an exponent


def round_up(value: float, digits: int = 4) -> str:
    """`value` as text with at most `digits` significant digits, rounded up.

    A number with so few digits stays as it is. Trailing zeros are not printed.

    **Guarantee.** ``float(round_up(value)) >= value``. Rounding is done in decimal numbers:
    ``math.ceil(1000 * value) / 1000`` can be wrong by one in the last digit, in either direction.

    >>> round_up(2.46494), round_up(2.46494, 2), round_up(3.0), round_up(float("inf"))
    ('2.465', '2.5', '3', 'inf')
    """
    if digits < 1:
        raise ValueError(f"digits={digits}: must be at least 1")
    number = float(value)
    if math.isnan(number):
        raise ValueError("the value to print is not a number (nan)")
    if math.isinf(number):
        return str(number)
    context = Context(prec=digits, rounding=ROUND_CEILING)
    # repr() is the shortest text that reads back as the same float, so 0.1 stays 0.1.
    rounded = context.create_decimal(repr(number)).normalize(context)
    if rounded.is_zero() or -MAX_PLAIN_DIGITS < rounded.adjusted() < MAX_PLAIN_DIGITS:
        return f"{rounded:f}"
    return f"{rounded:e}"
