"""What the trials of a search tell: which parameters matter, how clip and learning rate depend on each other.

A search samples where it hopes for the best, so that trials are no grid. What is said of one or two parameters is read
from a kernel average over the trials, in decades of parameters that are searched in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean, stdev, variance
from typing import TYPE_CHECKING

import numpy as np
from experiments.clip_and_rate.experiment import level_set
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import spearmanr

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.importance import BaseImportanceEvaluator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Range:
    """Where a parameter is searched."""

    low: float
    high: float
    log: bool = True
    whole: bool = False

    def place(self, values: Array) -> Array:
        """From 0 at the low end to 1 at the high one.

        >>> Range(1, 100).place(np.array([1.0, 10.0, 100.0])).tolist()
        [0.0, 0.5, 1.0]
        """
        if self.log:
            return np.asarray(np.log(values / self.low) / math.log(self.high / self.low))
        return np.asarray((values - self.low) / (self.high - self.low))


SPACE = {  # Appendix I. α is the exponent of the amplitude of the probes, as in Algorithm 3
    "lr": Range(1e-3, 0.5),
    "clip": Range(0.1, 50.0),
    "damping": Range(1e-5, 0.1),
    "alpha": Range(0.0, 2.0, log=False),
    "steps": Range(1, 100, whole=True),
}
METHODS = {"DP-SGD": ("lr", "clip"), "DP-KFC": tuple(SPACE)}
OWN = ("damping", "alpha", "steps")  # the parameters that only DP-KFC has
CLAIMED = {
    "lr": 0.50,
    "clip": 0.28,
    "steps": 0.21,
}  # importances that the paper states, by correlation
GOOD, NEAR = (
    0.9,
    2.0,
)  # of the best accuracy; the factor by which lr, or lr · clip, may differ from the best
WITHIN = 0.02  # of the best accuracy: as good
WIDTH = 0.2  # of the kernel, in decades
DIAGONAL, RECTANGLE = -0.75, -0.25  # slopes below and above which they are called so
ANGLES = np.radians(np.arange(-45, 86))
RESAMPLES = 100
HOLDS, IN_PART, UNRESOLVED, FAILS = "holds", "holds in part", "not resolved", "does not hold"


@dataclass(frozen=True)
class Sweep:
    """All trials of one method on one data set, and the test accuracies of the best of them."""

    values: Mapping[str, Array]  # by parameter
    accuracy: Array  # on held-out training records
    tests: tuple[float, ...] = ()  # one a seed

    @property
    def best(self) -> dict[str, float]:
        """The parameters of the trial with the best accuracy."""
        place = int(self.accuracy.argmax())
        return {name: float(values[place]) for name, values in self.values.items()}

    @property
    def as_good(self) -> float:
        """The share of trials within two points of the best."""
        return float((self.accuracy >= self.accuracy.max() - WITHIN).mean())

    @property
    def step(self) -> Array:
        """log10(lr · clip): how far a step goes, if all gradients are clipped."""
        return np.asarray(np.log10(self.values["lr"] * self.values["clip"]))

    @property
    def residual(self) -> Array:
        """The accuracy less what lr · clip explains of it: the kernel mean of the other trials."""
        others = _others(self.step, self.accuracy, np.ones((1, len(self.accuracy))))[0]
        return np.asarray(self.accuracy - others)


@dataclass(frozen=True)
class Slope:
    """d log lr / d log clip along which accuracy changes least: -1 is a diagonal, 0 a rectangle."""

    value: float
    low: float  # 5 and 95 % of resampled trials
    high: float

    @property
    def verdict(self) -> str:
        """Whether it is that of a rectangle; if the trials allow a diagonal as well, there is no telling."""
        if self.low < DIAGONAL and self.high > RECTANGLE:
            return UNRESOLVED
        return FAILS if self.value < DIAGONAL else HOLDS if self.value > RECTANGLE else IN_PART

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def smooth(at: Array, places: Array, values: Array, width: float) -> Array:
    """The mean of `values` at `places` [n, d], weighted by a Gaussian kernel around each of `at` [m, d]."""
    squared = ((at[:, None] - places[None]) ** 2).sum(-1)
    return np.asarray(softmax(-squared / (2 * width**2), axis=1) @ values)


def _others(places: Array, values: Array, counts: Array) -> Array:
    """At each place, the kernel mean of all values but its own: a row for each row of how often the values count."""
    kernel = np.exp(-((places[:, None] - places) ** 2) / (2 * WIDTH**2)) + 1e-30
    np.fill_diagonal(kernel, 0)
    return np.asarray((counts * values) @ kernel / (counts @ kernel))


def ridge(sweep: Sweep) -> Slope:
    """The direction of the (clip, lr) plane across which accuracy is best foretold by the other trials.

    Of all angles θ, the one for which the kernel mean of the other trials along ``cos θ log lr + sin θ log clip`` has
    the least squared error; lines on which that sum is constant have the slope -tan θ.
    """
    lr, clip = (np.log10(sweep.values[name]) for name in ("lr", "clip"))
    count = len(lr)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    counts = np.vstack([np.ones(count), drawn]) + 1e-9

    def errors(angle: float) -> Array:
        foretold = _others(math.cos(angle) * lr + math.sin(angle) * clip, sweep.accuracy, counts)
        return np.asarray((counts * (sweep.accuracy - foretold) ** 2).sum(1))

    least = np.stack([errors(angle) for angle in ANGLES]).argmin(0)
    slopes = -np.tan(ANGLES[least])
    low, high = np.quantile(slopes[1:], [0.05, 0.95])
    return Slope(float(slopes[0]), float(low), float(high))


def band(sweep: Sweep) -> float:
    """Decades of lr · clip over which the kernel mean of the accuracy is above 90 % of its best."""
    grid = np.linspace(sweep.step.min(), sweep.step.max(), 200)
    curve = smooth(grid[:, None], sweep.step[:, None], sweep.accuracy, WIDTH)
    return level_set((10**grid).tolist(), curve, GOOD * float(curve.max()))[0]


def clip_decades(sweep: Sweep, product: bool) -> float:
    """Decades between the clips of trials above 90 % of the best accuracy, at about the best lr (or lr · clip)."""
    along = sweep.step if product else np.log10(sweep.values["lr"])
    near = np.abs(along - along[int(sweep.accuracy.argmax())]) <= math.log10(NEAR)
    clips = sweep.values["clip"][near & (sweep.accuracy > GOOD * sweep.accuracy.max())]
    return float(np.log10(clips.max() / clips.min()))


@dataclass(frozen=True)
class Importance:
    """How much a parameter matters."""

    correlation: float  # of ranks, with the accuracy; its sign says whether more is better
    adjusted: float  # the same with what lr · clip leaves unexplained
    variance: float  # share of the variance of a forest's main effects (fANOVA), or of PED-ANOVA


def importances(sweep: Sweep) -> dict[str, Importance]:
    shares = _shares(sweep)

    def of(name: str) -> Importance:
        plain, adjusted = (
            float(spearmanr(sweep.values[name], target).statistic)
            for target in (sweep.accuracy, sweep.residual)
        )
        return Importance(plain, adjusted, shares[name])

    return {name: of(name) for name in sweep.values}


def evaluator_name() -> str:
    """fANOVA needs scikit-learn."""
    return "fANOVA" if find_spec("sklearn") else "PED-ANOVA"


def _shares(sweep: Sweep) -> dict[str, float]:
    """Optuna's importances, of parameters on the scale on which they are searched; they sum to 1."""
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
    places = {
        name: np.clip(SPACE[name].place(values), 0, 1) for name, values in sweep.values.items()
    }
    trials = [
        ({name: float(place[number]) for name, place in places.items()}, float(accuracy))
        for number, accuracy in enumerate(sweep.accuracy)
    ]
    study = study_of(trials, {name: FloatDistribution(0, 1) for name in places})
    found = get_param_importances(study, evaluator=evaluator)
    return {name: float(found.get(name, 0.0)) for name in sweep.values}


def study_of(
    trials: Iterable[tuple[dict[str, float], float]],
    scales: dict[str, BaseDistribution],
    storage: str | None = None,
    name: str | None = None,
) -> Study:
    """An Optuna study that holds trials made before, as parameters and scores."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study: Study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
        for params, score in trials:
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=scales, value=score)
            )
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


@dataclass(frozen=True)
class Difference:
    """Of two means, with its standard error."""

    value: float
    error: float

    @property
    def verdict(self) -> str:
        """Whether it is above 0."""
        if not math.isfinite(self.error) or abs(self.value) <= 2 * self.error:
            return UNRESOLVED
        return HOLDS if self.value > 0 else FAILS

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "no such trials"
        return f"{100 * self.value:+.2f}" + (
            f" ± {100 * self.error:.2f}" if math.isfinite(self.error) else ""
        )


def difference(ones: Sequence[float] | Array, others: Sequence[float] | Array) -> Difference:
    """The mean of some numbers less that of others. With fewer than two of either there is no telling."""
    if not (len(ones) and len(others)):
        return Difference(math.nan, math.nan)
    error = math.nan
    if len(ones) > 1 and len(others) > 1:
        error = math.sqrt(sum(variance(map(float, some)) / len(some) for some in (ones, others)))
    return Difference(fmean(ones) - fmean(others), error)


def pink_over_white(sweep: Sweep, adjusted: bool) -> Difference:
    """Accuracy with α > 1 less that with α < .5; adjusted for lr · clip, which the search chose for both."""
    alpha, accuracy = sweep.values["alpha"], sweep.residual if adjusted else sweep.accuracy
    return difference(accuracy[alpha > 1], accuracy[alpha < 0.5])


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, and what was found."""

    text: str
    paper: str
    measured: str
    verdict: str


def claims(sgd: Sweep, kfc: Sweep) -> list[Claim]:
    """The claims of Appendix I on one data set."""
    gain = difference(kfc.tests, sgd.tests)
    slopes, bands = [ridge(sweep) for sweep in (sgd, kfc)], [band(sweep) for sweep in (sgd, kfc)]
    fixed, along = (
        [clip_decades(sweep, product) for sweep in (sgd, kfc)] for product in (False, True)
    )
    found, raw, pink = importances(kfc), pink_over_white(kfc, False), pink_over_white(kfc, True)
    chance = 2 / math.sqrt(len(kfc.accuracy))
    common, own = (
        {name: abs(found[name].correlation) for name in found if (name in OWN) == is_own}
        for is_own in (False, True)
    )

    def negligible(name: str, called: str) -> Claim:
        of = found[name]
        text = f"{called} hardly matters: no rank correlation beyond chance ({chance:.2f}) at equal lr · clip"
        said = f"{CLAIMED[name]:.2f}" if name in CLAIMED else "minimal impact"
        return Claim(
            text, said, f"{of.adjusted:+.2f}", HOLDS if abs(of.adjusted) < chance else FAILS
        )

    return [
        Claim(
            "DP-KFC is better than DP-SGD (test, points)", "+2.8 to +8.6", str(gain), gain.verdict
        ),
        Claim(
            "DP-KFC frees the learning rate from the clip: slope of its ridge, DP-SGD's beside it",
            "rectangle (0), diagonal (-1)",
            f"{slopes[1]}, {slopes[0]}",
            slopes[1].verdict,
        ),
        Claim(
            "at one learning rate DP-KFC keeps 90 % of its best over two decades of clip; DP-SGD's decades beside it",
            "2 decades",
            f"{fixed[1]:.2f}, {fixed[0]:.2f}",
            HOLDS if fixed[1] >= 2 else FAILS,
        ),
        Claim(
            "at one lr · clip it does so over an order of magnitude of clip",
            "1 decade",
            f"{along[1]:.2f}, {along[0]:.2f}",
            HOLDS if along[1] >= 1 else FAILS,
        ),
        Claim(
            "DP-KFC's band of lr · clip is wider than DP-SGD's, by a quarter at least (decades above 90 % of the best)",
            "substantially wider",
            f"{bands[1]:.2f}, {bands[0]:.2f}",
            HOLDS if bands[1] >= 1.25 * bands[0] else FAILS,
        ),
        Claim(
            "more trials of DP-KFC are within two points of its best than of DP-SGD",
            "broad plateau",
            f"{100 * kfc.as_good:.0f} %, {100 * sgd.as_good:.0f} %",
            HOLDS if kfc.as_good > sgd.as_good else FAILS,
        ),
        Claim(
            "lr and clip matter more than damping, α and steps: least of the first, most of the others, by rank "
            "correlation",
            "0.28, 0.21",
            f"{min(common.values()):.2f}, {max(own.values()):.2f}",
            HOLDS if min(common.values()) > max(own.values()) else FAILS,
        ),
        negligible("damping", "damping"),
        negligible("steps", "the number of steps"),
        Claim(
            "the best α is that of pink to brown noise",
            "1.0 to 2.0",
            f"{kfc.best['alpha']:.2f}",
            HOLDS if 1 <= kfc.best["alpha"] <= 2 else FAILS,
        ),
        Claim(
            "α > 1 is better than α < .5 (points, as the trials fell)",
            "+3 to +5",
            str(raw),
            raw.verdict,
        ),
        Claim("so it is at equal lr · clip", "+3 to +5", str(pink), pink.verdict),
    ]


def spread(tests: Sequence[float]) -> float:
    """The standard deviation over the seeds; 0 for one."""
    return stdev(tests) if len(tests) > 1 else 0.0
