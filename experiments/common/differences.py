"""Differences between two arms of a study, paired by seed, with an interval and a verdict.

A difference is material if its 95% interval lies wholly beyond ±0.5 points. Two arms are the same
if it lies wholly within. Otherwise this many seeds do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from experiments.common.study import Row, Study, choose, finals

MARGIN = 0.5  # points that matter
# Maps a recorded result, and the weights that were chosen ("last" or "average"), to a number.
Measure = Callable[[Mapping[str, Any], str], float]


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two arms within each seed, in points: its mean and 95% interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f}, {self.seeds} seeds)"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> PairedDifference | None:
    """Return ``d̄ ± t_{.975, n-1} s_d / √n`` over the common seeds; None for fewer than two.

    >>> print(paired({1: 0.91, 2: 0.93, 3: 0.95}, {1: 0.90, 2: 0.91, 3: 0.92}))
    +2.00 (-0.48 to +4.48, 3 seeds)
    """
    gaps = [100 * (own[seed] - other[seed]) for seed in own if seed in other]
    if len(gaps) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    return PairedDifference(fmean(gaps), fmean(gaps) - half, fmean(gaps) + half, len(gaps))


def verdict(difference: PairedDifference) -> str:
    """Say whether the difference is material (see the module)."""
    if difference.low > MARGIN:
        return "materially better"
    if difference.high < -MARGIN:
        return "materially worse"
    return "the same" if difference.low >= -MARGIN and difference.high <= MARGIN else "not decided"


def final_accuracy(result: Mapping[str, Any], weights: str) -> float:
    """Return the accuracy at the end of the run."""
    return float(result[weights])


def mean_accuracy(result: Mapping[str, Any], weights: str) -> float:
    """Return the mean accuracy over the course of the run, a measure of convergence speed."""
    return fmean(result["course"])


def by_seed(
    study: Study, rows: Sequence[Row], task: str, arm: str, measure: Measure = final_accuracy
) -> dict[int, float]:
    """Measure the final runs of an arm, by seed; empty if it was not run."""
    try:
        weights = choose(study, rows, task, arm)[1]
    except ValueError:
        return {}
    results = {row["key"]: row["result"] for row in rows}
    runs = [final for final in finals(study, rows, task, [arm]) if final.key in results]
    return {run.seed: measure(results[run.key], weights) for run in runs}


def differences_to(
    study: Study,
    rows: Sequence[Row],
    reference: str,
    arms: Iterable[str],
    measure: Measure = final_accuracy,
) -> dict[tuple[str, str], PairedDifference]:
    """Return the differences of arms to a reference arm, by task and arm.

    Pairs of arms with fewer than two common seeds are left out.
    """
    differences = {}
    for task in study.tasks:
        reference_runs = by_seed(study, rows, task, reference, measure)
        for arm in arms:
            difference = paired(by_seed(study, rows, task, arm, measure), reference_runs)
            if arm != reference and difference is not None:
                differences[task, arm] = difference
    return differences
