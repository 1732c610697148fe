"""The root of a decreasing function that is expensive to evaluate, approached from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# A step is at most this long: in log σ, a factor of 2.
LONGEST_STEP = math.log(2)

# Until there are two points, the slope of log ε over log σ that a step assumes.
USUAL_SLOPE = -1.5

# After so many evaluations the secant is not trusted any more: steps are long until the root is
# enclosed, and then every other step bisects.
PATIENCE = 6


@dataclass(frozen=True)
class Root:
    """A point at or slightly above the root."""

    x: float
    value: float  # of the function at x
    slope: float | None  # of the function near x; None if only one point was evaluated

    @property
    def extrapolated(self) -> float:
        """Where the tangent at x is 0: closer to the root, on either side of it."""
        if self.slope is None or not math.isfinite(self.value):
            return self.x
        return self.x - self.value / self.slope


def root_from_above(
    function: Callable[[float], float],
    start: float,
    tolerance: float,
    *,
    bounds: tuple[float, float],
    slope: float | None = None,
) -> Root:
    """The smallest x, to `tolerance`, at which a decreasing function is 0 or less.

    It takes secant steps, which are kept within the points known to lie on either side of the root,
    and bisects where they fail: where the function is infinite, or not smooth. A good start and
    slope save evaluations; they do not affect what is guaranteed.

    Args:
        function: decreasing. It may be infinite, of either sign.
        start: where to begin.
        tolerance: how far above the root the result may lie, as far as the slope can tell.
        bounds: the search does not leave them.
        slope: of the function, if known. It decides how small a value is close enough to 0.

    Returns:
        x, with the slope near it. If the function is 0 or less on all of `bounds`, the lower bound.

    Raises:
        ValueError: the function is positive on all of `bounds`.

    **Guarantee.** The function was evaluated at the x that is returned, and was 0 or less there.

    >>> root = root_from_above(lambda x: 2 - x, start=0.0, tolerance=1e-6, bounds=(-9.0, 9.0))
    >>> 2 <= root.x <= 2 + 1e-6
    True
    """
    least, largest = bounds
    low, high = -math.inf, math.inf  # the root lies in (low, high]
    x = min(max(start, least), largest)
    before: tuple[float, float] | None = None
    evaluations = 0
    value_at_high = -math.inf
    while True:
        value = function(x)
        evaluations += 1
        if before is not None and math.isfinite(value - before[1]) and x != before[0]:
            secant = (value - before[1]) / (x - before[0])
            slope = secant if secant < 0 else slope
        if value <= 0:
            high, value_at_high = x, value
            is_close = slope is not None and value >= slope * tolerance
            if is_close or x <= least:
                return Root(high, value_at_high, slope)
        elif x >= largest:
            raise ValueError(f"the function is positive up to {largest:g}")
        else:  # also for a value that is not a number
            low = x
        if high - low <= tolerance:
            return Root(high, value_at_high, slope)
        before = (x, value)
        step = -value / (slope or USUAL_SLOPE) + tolerance / 2
        is_late = evaluations >= PATIENCE
        is_enclosed = math.isfinite(high - low)
        if not abs(step) <= LONGEST_STEP or (is_late and not is_enclosed):
            step = LONGEST_STEP if math.isinf(high) else -LONGEST_STEP
        x = min(max(x + step, least), largest)
        if is_enclosed and (not low < x < high or (is_late and evaluations % 2 == 0)):
            x = (low + high) / 2
