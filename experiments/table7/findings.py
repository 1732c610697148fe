"""Findings from the trials of a search: importance and interaction of hyperparameters.

A search samples where it expects the best results, so its trials are no grid. Statements about one
or two hyperparameters are read from a kernel average over the trials, in decades where a
hyperparameter is searched on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean, stdev, variance
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import spearmanr

from experiments.clip_and_rate.experiment import level_set

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.importance import BaseImportanceEvaluator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterRange:
    """The range and scale on which a hyperparameter is searched."""

    low: float
    high: float
    log: bool = True
    integer: bool = False

    def to_unit(self, values: Array) -> Array:
        """Map values to [0, 1], from the low end to the high end.

        >>> ParameterRange(1, 100).to_unit(np.array([1.0, 10.0, 100.0])).tolist()
        [0.0, 0.5, 1.0]
        """
        if self.log:
            return np.asarray(np.log(values / self.low) / math.log(self.high / self.low))
        return np.asarray((values - self.low) / (self.high - self.low))


# Appendix I. α is the exponent of the amplitude of the probes, as in Algorithm 3.
SPACE = {
    "lr": ParameterRange(1e-3, 0.5),
    "clip": ParameterRange(0.1, 50.0),
    "damping": ParameterRange(1e-5, 0.1),
    "alpha": ParameterRange(0.0, 2.0, log=False),
    "steps": ParameterRange(1, 100, integer=True),
}
METHODS = {"DP-SGD": ("lr", "clip"), "DP-KFC": tuple(SPACE)}
KFC_ONLY = ("damping", "alpha", "steps")  # the hyperparameters that only DP-KFC has
# Importances that the paper states, by correlation.
CLAIMED = {"lr": 0.50, "clip": 0.28, "steps": 0.21}
GOOD = 0.9  # a good trial has at least this share of the best accuracy
NEAR = 2.0  # the factor by which lr, or lr · clip, may differ from that of the best trial
WITHIN = 0.02  # trials within this distance of the best accuracy count as equally good
WIDTH = 0.2  # of the kernel, in decades
DIAGONAL = -0.75  # ridges with a slope below it are called diagonal
RECTANGLE = -0.25  # ridges with a slope above it are called rectangular
ANGLES = np.radians(np.arange(-45, 86))
RESAMPLES = 100
HOLDS = "holds"
IN_PART = "holds in part"
UNRESOLVED = "not resolved"
FAILS = "does not hold"


@dataclass(frozen=True)
class Sweep:
    """All trials of one method on one data set, and the test accuracies of the best of them."""

    values: Mapping[str, Array]  # by hyperparameter
    accuracy: Array  # on held-out training records
    tests: tuple[float, ...] = ()  # one per seed

    @property
    def best(self) -> dict[str, float]:
        """The hyperparameters of the trial with the best accuracy."""
        number = int(self.accuracy.argmax())
        return {name: float(values[number]) for name, values in self.values.items()}

    @property
    def equally_good(self) -> float:
        """The share of trials within two points of the best."""
        return float((self.accuracy >= self.accuracy.max() - WITHIN).mean())

    @property
    def step(self) -> Array:
        """log10(lr · clip): the length of a step if all gradients are clipped."""
        return np.asarray(np.log10(self.values["lr"] * self.values["clip"]))

    @property
    def residual(self) -> Array:
        """The accuracy minus its prediction from lr · clip, the kernel mean of the other trials."""
        counts = np.ones((1, len(self.accuracy)))
        predicted = _leave_one_out(self.step, self.accuracy, counts)[0]
        return np.asarray(self.accuracy - predicted)


@dataclass(frozen=True)
class Slope:
    """d log lr / d log clip along which accuracy changes least: -1 is a diagonal, 0 a rectangle.

    `low` and `high` are the 5 % and 95 % quantiles over resampled trials.
    """

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the slope is that of a rectangle; not resolved if a diagonal is possible too."""
        if self.low < DIAGONAL and self.high > RECTANGLE:
            return UNRESOLVED
        return FAILS if self.value < DIAGONAL else HOLDS if self.value > RECTANGLE else IN_PART

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def smooth(at: Array, places: Array, values: Array, width: float) -> Array:
    """Average `values` at `places` [n, d] with a Gaussian kernel around each of `at` [m, d]."""
    squared = ((at[:, None] - places[None]) ** 2).sum(-1)
    return np.asarray(softmax(-squared / (2 * width**2), axis=1) @ values)


def _leave_one_out(places: Array, values: Array, counts: Array) -> Array:
    """Return, at each place, the kernel mean of all values but its own.

    There is one row per row of `counts`, the multiplicities of the values.
    """
    kernel = np.exp(-((places[:, None] - places) ** 2) / (2 * WIDTH**2)) + 1e-30
    np.fill_diagonal(kernel, 0)
    return np.asarray((counts * values) @ kernel / (counts @ kernel))


def ridge(sweep: Sweep) -> Slope:
    """Find the direction in the (clip, lr) plane along which accuracy changes least.

    Among all angles θ it is the one for which the leave-one-out kernel mean along
    ``cos θ log lr + sin θ log clip`` predicts accuracy with the least squared error; lines on
    which that sum is constant have the slope -tan θ.
    """
    lr, clip = (np.log10(sweep.values[name]) for name in ("lr", "clip"))
    count = len(lr)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    counts = np.vstack([np.ones(count), drawn]) + 1e-9

    def errors(angle: float) -> Array:
        along = math.cos(angle) * lr + math.sin(angle) * clip
        predicted = _leave_one_out(along, sweep.accuracy, counts)
        return np.asarray((counts * (sweep.accuracy - predicted) ** 2).sum(1))

    least = np.stack([errors(angle) for angle in ANGLES]).argmin(0)
    slopes = -np.tan(ANGLES[least])
    low, high = np.quantile(slopes[1:], [0.05, 0.95])
    return Slope(float(slopes[0]), float(low), float(high))


def band(sweep: Sweep) -> float:
    """Return the decades of lr · clip over which mean accuracy is above 90 % of its best."""
    grid = np.linspace(sweep.step.min(), sweep.step.max(), 200)
    curve = smooth(grid[:, None], sweep.step[:, None], sweep.accuracy, WIDTH)
    return level_set((10**grid).tolist(), curve, GOOD * float(curve.max()))[0]


def clip_decades(sweep: Sweep, product: bool) -> float:
    """Return the decades between the clips of good trials near the best lr (or lr · clip)."""
    along = sweep.step if product else np.log10(sweep.values["lr"])
    near = np.abs(along - along[int(sweep.accuracy.argmax())]) <= math.log10(NEAR)
    clips = sweep.values["clip"][near & (sweep.accuracy > GOOD * sweep.accuracy.max())]
    return float(np.log10(clips.max() / clips.min()))


@dataclass(frozen=True)
class Importance:
    """The importance of a hyperparameter, by three measures.

    Args:
        correlation: The rank correlation with accuracy; positive if larger values are better.
        adjusted: The rank correlation with what lr · clip leaves unexplained.
        variance: The share of the variance of a forest's main effects (fANOVA), or of PED-ANOVA.
    """

    correlation: float
    adjusted: float
    variance: float


def importances(sweep: Sweep) -> dict[str, Importance]:
    """Return the importance of every hyperparameter."""
    shares = _variance_shares(sweep)

    def importance(name: str) -> Importance:
        plain, adjusted = (
            float(spearmanr(sweep.values[name], target).statistic)
            for target in (sweep.accuracy, sweep.residual)
        )
        return Importance(plain, adjusted, shares[name])

    return {name: importance(name) for name in sweep.values}


def evaluator_name() -> str:
    """Return the measure of variance in use: fANOVA needs scikit-learn."""
    return "fANOVA" if find_spec("sklearn") else "PED-ANOVA"


def _variance_shares(sweep: Sweep) -> dict[str, float]:
    """Return Optuna's importances, which sum to 1, on the scales of the search."""
    from optuna.distributions import FloatDistribution
    from optuna.importance import (
        FanovaImportanceEvaluator,
        PedAnovaImportanceEvaluator,
        get_param_importances,
    )

    by_forest = evaluator_name() == "fANOVA"
    evaluator: BaseImportanceEvaluator = (
        FanovaImportanceEvaluator(seed=0) if by_forest else PedAnovaImportanceEvaluator()
    )
    units = {
        name: np.clip(SPACE[name].to_unit(values), 0, 1) for name, values in sweep.values.items()
    }
    trials = [
        ({name: float(unit[number]) for name, unit in units.items()}, float(accuracy))
        for number, accuracy in enumerate(sweep.accuracy)
    ]
    study = study_of(trials, {name: FloatDistribution(0, 1) for name in units})
    shares = get_param_importances(study, evaluator=evaluator)
    return {name: float(shares.get(name, 0.0)) for name in sweep.values}


def study_of(
    trials: Iterable[tuple[dict[str, float], float]],
    space: dict[str, BaseDistribution],
    storage: str | None = None,
    name: str | None = None,
) -> Study:
    """Create an Optuna study from completed trials, given as parameters and scores."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study: Study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
        for params, score in trials:
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=space, value=score)
            )
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


@dataclass(frozen=True)
class MeanDifference:
    """The difference of two means, with its standard error."""

    value: float
    error: float

    @property
    def verdict(self) -> str:
        """Whether the difference is above 0, beyond two standard errors."""
        if not math.isfinite(self.error) or abs(self.value) <= 2 * self.error:
            return UNRESOLVED
        return HOLDS if self.value > 0 else FAILS

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "no such trials"
        return f"{100 * self.value:+.2f}" + (
            f" ± {100 * self.error:.2f}" if math.isfinite(self.error) else ""
        )


def mean_difference(
    first: Sequence[float] | Array, second: Sequence[float] | Array
) -> MeanDifference:
    """Return the mean of `first` minus that of `second`.

    The standard error is not a number if either has fewer than two values.
    """
    if not (len(first) and len(second)):
        return MeanDifference(math.nan, math.nan)
    error = math.nan
    if len(first) > 1 and len(second) > 1:
        squares = (variance(map(float, sample)) / len(sample) for sample in (first, second))
        error = math.sqrt(sum(squares))
    return MeanDifference(fmean(first) - fmean(second), error)


def pink_over_white(sweep: Sweep, adjusted: bool) -> MeanDifference:
    """Return the accuracy with α > 1 minus that with α < .5, adjusted for lr · clip or not."""
    alpha = sweep.values["alpha"]
    accuracy = sweep.residual if adjusted else sweep.accuracy
    return mean_difference(accuracy[alpha > 1], accuracy[alpha < 0.5])


@dataclass(frozen=True)
class SearchClaim:
    """A statement of the paper about the search, the measured values, and the verdict."""

    text: str
    paper: str
    measured: str
    verdict: str


def claims(sgd: Sweep, kfc: Sweep) -> list[SearchClaim]:
    """Check the claims of Appendix I on one data set."""
    gain = mean_difference(kfc.tests, sgd.tests)
    slope_sgd, slope_kfc = ridge(sgd), ridge(kfc)
    band_sgd, band_kfc = band(sgd), band(kfc)
    fixed_lr_sgd, fixed_lr_kfc = (clip_decades(sweep, product=False) for sweep in (sgd, kfc))
    fixed_step_sgd, fixed_step_kfc = (clip_decades(sweep, product=True) for sweep in (sgd, kfc))
    importance = importances(kfc)
    pink = pink_over_white(kfc, adjusted=False)
    pink_adjusted = pink_over_white(kfc, adjusted=True)
    chance = 2 / math.sqrt(len(kfc.accuracy))
    correlations = {name: abs(value.correlation) for name, value in importance.items()}
    least_common = min(value for name, value in correlations.items() if name not in KFC_ONLY)
    most_own = max(value for name, value in correlations.items() if name in KFC_ONLY)

    def negligible(name: str, label: str) -> SearchClaim:
        adjusted = importance[name].adjusted
        return SearchClaim(
            f"{label} hardly matters: no rank correlation beyond chance ({chance:.2f}) at equal "
            "lr · clip",
            f"{CLAIMED[name]:.2f}" if name in CLAIMED else "minimal impact",
            f"{adjusted:+.2f}",
            HOLDS if abs(adjusted) < chance else FAILS,
        )

    return [
        SearchClaim(
            "DP-KFC is better than DP-SGD (test, points)", "+2.8 to +8.6", str(gain), gain.verdict
        ),
        SearchClaim(
            "DP-KFC frees the learning rate from the clip: slope of its ridge, DP-SGD's beside it",
            "rectangle (0), diagonal (-1)",
            f"{slope_kfc}, {slope_sgd}",
            slope_kfc.verdict,
        ),
        SearchClaim(
            "at one learning rate DP-KFC keeps 90 % of its best over two decades of clip; DP-SGD's "
            "decades beside it",
            "2 decades",
            f"{fixed_lr_kfc:.2f}, {fixed_lr_sgd:.2f}",
            HOLDS if fixed_lr_kfc >= 2 else FAILS,
        ),
        SearchClaim(
            "at one lr · clip it does so over an order of magnitude of clip",
            "1 decade",
            f"{fixed_step_kfc:.2f}, {fixed_step_sgd:.2f}",
            HOLDS if fixed_step_kfc >= 1 else FAILS,
        ),
        SearchClaim(
            "DP-KFC's band of lr · clip is wider than DP-SGD's, by a quarter at least (decades "
            "above 90 % of the best)",
            "substantially wider",
            f"{band_kfc:.2f}, {band_sgd:.2f}",
            HOLDS if band_kfc >= 1.25 * band_sgd else FAILS,
        ),
        SearchClaim(
            "more trials of DP-KFC are within two points of its best than of DP-SGD",
            "broad plateau",
            f"{100 * kfc.equally_good:.0f} %, {100 * sgd.equally_good:.0f} %",
            HOLDS if kfc.equally_good > sgd.equally_good else FAILS,
        ),
        SearchClaim(
            "lr and clip matter more than damping, α and steps: least of the first, most of the "
            "others, by rank correlation",
            "0.28, 0.21",
            f"{least_common:.2f}, {most_own:.2f}",
            HOLDS if least_common > most_own else FAILS,
        ),
        negligible("damping", "damping"),
        negligible("steps", "the number of steps"),
        SearchClaim(
            "the best α is that of pink to brown noise",
            "1.0 to 2.0",
            f"{kfc.best['alpha']:.2f}",
            HOLDS if 1 <= kfc.best["alpha"] <= 2 else FAILS,
        ),
        SearchClaim(
            "α > 1 is better than α < .5 (points, as the trials fell)",
            "+3 to +5",
            str(pink),
            pink.verdict,
        ),
        SearchClaim(
            "so it is at equal lr · clip", "+3 to +5", str(pink_adjusted), pink_adjusted.verdict
        ),
    ]


def spread(tests: Sequence[float]) -> float:
    """Return the standard deviation over the seeds; 0 for one seed."""
    return stdev(tests) if len(tests) > 1 else 0.0
