"""The price of a choice: a run is repeated a random number of times, and only the best one is released.

Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy" (ICLR 2022, arXiv 2110.03620).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal

from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    import dp_accounting as dp
    import numpy as np

Runs = Literal["geometric", "poisson"]
SHAPES: dict[Runs, float] = {
    "geometric": 1.0,
    "poisson": math.inf,
}  # dp-accounting's names for the two


@dataclass(frozen=True)
class BestOf:
    """The whole run is repeated K times, and only the run with the highest score is released.

    K is drawn at random and stays a secret; its `mean` is public. The settings of each run are drawn independently of
    the data and of the other runs. With ε(λ) the Rényi divergence of order λ of one run with its score, that of the
    selection is at most

        geometric (theorem 2)  ε(λ) + log(mean) / (λ - 1) + 2 min_λ̂ [(1 - 1/λ̂) ε(λ̂) + log(mean) / λ̂]
        poisson (theorem 6)    ε(λ) + log(mean) / (λ - 1) + mean · δ̂,  δ̂ that of one run at ε̂ = log(1 + 1/(λ - 1))

    The geometric K is at least 1; the Poisson K varies less, but is 0 with probability exp(-mean): then nothing is
    released. Which one costs less depends on the run.

    `score_noise` is the standard deviation of the Gaussian noise added to a score that changes by at most 1 when a
    record is added or removed, such as the number of right answers on held-out private records. None says that the
    score is computed from public records only, so that it costs nothing.
    """

    mean: float
    runs: Runs = "geometric"
    score_noise: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.mean, Real) and 1 <= self.mean < math.inf):
            raise PrivacyError(
                f"mean={self.mean!r} of BestOf: the expected number of runs must be finite, at least 1"
            )
        if self.runs not in SHAPES:
            raise PrivacyError(
                f"runs={self.runs!r} of BestOf: choose one of {', '.join(map(repr, SHAPES))}"
            )
        if self.score_noise is not None and not (
            isinstance(self.score_noise, Real) and 0 < self.score_noise < math.inf
        ):
            raise PrivacyError(
                f"score_noise={self.score_noise!r} of BestOf: must be a positive, finite standard deviation, or None "
                "if the score is computed from public records only"
            )
        object.__setattr__(
            self, "mean", float(self.mean)
        )  # Python's own numbers, which files give back
        if self.score_noise is not None:
            object.__setattr__(self, "score_noise", float(self.score_noise))

    def draw(self, generator: np.random.Generator) -> int:
        """The number of runs: at least 1 if geometric; a Poisson one may be 0."""
        return int(
            generator.geometric(1 / self.mean)
            if self.runs == "geometric"
            else generator.poisson(self.mean)
        )

    def event(self, run: dp.DpEvent) -> dp.DpEvent:
        """The selection among repetitions of `run`, in dp-accounting's language."""
        import dp_accounting as dp
        from dp_accounting.dp_event import RepeatAndSelectDpEvent

        if self.score_noise is not None:
            run = dp.ComposedDpEvent([run, dp.GaussianDpEvent(self.score_noise)])
        return RepeatAndSelectDpEvent(run, self.mean, SHAPES[self.runs])

    def __str__(self) -> str:
        by = (
            "computed from public records only"
            if self.score_noise is None
            else f"with Gaussian noise of standard deviation {self.score_noise:g}, for a sensitivity of 1"
        )
        return (
            f"only the best of a random number of runs is released ({self.runs}, {self.mean:g} expected), by a score "
            f"{by}; their settings are drawn independently of the data and of each other"
        )
