"""The values that a setting may take in a tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna import Trial


@dataclass(frozen=True)
class Interval:
    """One number, or an interval from which numbers are drawn log-uniformly.

    >>> str(Interval.parse("rho", "0.5,8")), str(Interval.parse("clip", "1"))
    ('0.5,8', '1')
    """

    low: float
    high: float

    @staticmethod
    def parse(option: str, text: str) -> Interval:
        """Read NUMBER or LOW,HIGH."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if (
            len(numbers) not in (1, 2)
            or not all(0 < number < math.inf for number in numbers)
            or sorted(set(numbers)) != numbers
        ):
            raise ValueError(
                f"--{option} {text}: give a positive number, or two as LOW,HIGH with LOW below HIGH"
            )
        return Interval(numbers[0], numbers[-1])

    @property
    def is_tuned(self) -> bool:
        """Whether there is something to choose."""
        return self.low < self.high

    def __str__(self) -> str:
        return f"{self.low:g},{self.high:g}" if self.is_tuned else f"{self.low:g}"

    def draw(self, name: str, trial: Trial) -> float:
        return float(trial.suggest_float(name, self.low, self.high, log=True))
