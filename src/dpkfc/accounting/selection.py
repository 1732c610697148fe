"""The privacy cost of selecting the best of several runs.

Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy" (ICLR 2022,
arXiv 2110.03620).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import dp_accounting as dp
    import numpy as np

Runs = Literal["geometric", "poisson"]
# The shape parameters of dp-accounting's RepeatAndSelectDpEvent.
SHAPES: dict[Runs, float] = {"geometric": 1.0, "poisson": math.inf}


@dataclass(frozen=True)
class BestOf:
    """The whole run is repeated K times, and only the run with the highest score is released.

    K is drawn at random and stays secret; its mean is public. The settings of each run are drawn
    independently of the data and of the other runs.

    Args:
        mean: the expected number of runs.
        runs: the distribution of K. A geometric K is at least 1. A Poisson K varies less, but is 0
            with probability exp(-mean): then nothing is released. Which one costs less depends on
            the run.
        score_noise: the standard deviation of the Gaussian noise added to a score of sensitivity 1
            under adding or removing a record, such as the number of correct answers on held-out
            private records. None if the score is computed from public records only, so that it
            costs nothing.

    **Guarantee.** Let ε(λ) be the Rényi divergence of order λ of one run with its score. That of
    the selection is at most

        geometric (theorem 2)  ε(λ) + log(mean) / (λ-1) + 2 min_λ̂ [(1 - 1/λ̂) ε(λ̂) + log(mean) / λ̂]
        poisson (theorem 6)    ε(λ) + log(mean) / (λ-1) + mean · δ̂

    where δ̂ is that of one run at ε̂ = log(1 + 1/(λ-1)).

    >>> BestOf(mean=10, score_noise=20.0)
    BestOf(mean=10.0, runs='geometric', score_noise=20.0)
    """

    mean: float
    runs: Runs = "geometric"
    score_noise: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.mean, Real) and 1 <= self.mean < math.inf):
            raise ValueError(
                f"mean={self.mean!r} of BestOf: the expected number of runs must be finite, at "
                "least 1"
            )
        if self.runs not in SHAPES:
            raise ValueError(
                f"runs={self.runs!r} of BestOf: choose one of {', '.join(map(repr, SHAPES))}"
            )
        if self.score_noise is not None and not (
            isinstance(self.score_noise, Real) and 0 < self.score_noise < math.inf
        ):
            raise ValueError(
                f"score_noise={self.score_noise!r} of BestOf: must be a positive, finite standard "
                "deviation, or None if the score is computed from public records only"
            )
        # Python's own numbers, which JSON files preserve.
        object.__setattr__(self, "mean", float(self.mean))
        if self.score_noise is not None:
            object.__setattr__(self, "score_noise", float(self.score_noise))

    def draw(self, generator: np.random.Generator) -> int:
        """Draw the number of runs K."""
        if self.runs == "geometric":
            return int(generator.geometric(1 / self.mean))
        return int(generator.poisson(self.mean))

    def event(self, run: dp.DpEvent) -> dp.DpEvent:
        """The selection among repetitions of `run`, as a dp-accounting event."""
        import dp_accounting as dp
        from dp_accounting.dp_event import RepeatAndSelectDpEvent

        if self.score_noise is not None:
            run = dp.ComposedDpEvent([run, dp.GaussianDpEvent(self.score_noise)])
        return RepeatAndSelectDpEvent(run, self.mean, SHAPES[self.runs])

    def __str__(self) -> str:
        if self.score_noise is None:
            score = "computed from public records only"
        else:
            score = (
                f"with Gaussian noise of standard deviation {self.score_noise:g}, for a "
                "sensitivity of 1"
            )
        return (
            f"only the best of a random number of runs is released ({self.runs}, {self.mean:g} "
            f"expected), by a score {score}; their settings are drawn independently of the data "
            "and of each other"
        )
