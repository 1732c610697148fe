"""From mechanisms to epsilon, and from a target epsilon to the smallest noise that keeps it.

Both accountants are dp-accounting's, and both give *upper bounds*: PLD (privacy loss distributions
with pessimistic discretisation; tight) and RDP (Rényi; loose, for comparison with older papers).
CLT-GDP is an approximation, not a bound, and is not offered.

The best of several runs (`Mechanism.best_of`) can be analysed by RDP only. All mechanisms that are
composed with it are then analysed by RDP too, whichever accountant was chosen: still an upper
bound, but a looser one.

dp-accounting takes as long to import as torch, so it is imported by the functions that use it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.root import Root, root_from_above

Accountant = Literal["pld", "rdp"]

# dp-accounting's default RDP orders have gaps above 63. The best order of a selection with a small
# epsilon may lie there.
MORE_ORDERS = (72, 80, 88, 96, 112, 144, 160, 192, 224, 320, 384, 448, 640, 768)

# Discretisation of the privacy loss, relative to epsilon. Any value gives an upper bound.
RESOLUTION = 1e-4

# Spacing of the grid on which noise is estimated, relative to the grid on which it is calibrated.
COARSE = 20

# The usual slope of log ε over log μ, for μ of Gaussian differential privacy.
FASTER_THAN_MU = 1.2

# How far above the smallest noise multiplier the calibrated one may lie, relative to it.
TOLERANCE = 1e-5

SMALLEST_NOISE = 1e-2
LARGEST_NOISE = 1e6


def epsilon_spent(
    mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant = "pld"
) -> float:
    """The epsilon of all `mechanisms` on the same records.

    Args:
        mechanisms: what was released.
        delta: the δ of (ε, δ)-differential privacy.
        accountant: "pld" or "rdp". A selection among the mechanisms is always analysed by RDP.

    **Guarantee.** An upper bound, under adding or removing one record. Gradients may depend on
    everything released before.

    >>> round(epsilon_spent([Mechanism(0.01, 1.0, steps=1000)], delta=1e-5), 2)
    1.83
    """
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant={accountant!r}: choose 'pld' (tight) or 'rdp'")
    if not 0 < delta < 1:
        raise ValueError(
            f"delta={delta}: must lie strictly between 0 and 1; below 1/N is customary"
        )
    started = tuple(mechanism for mechanism in mechanisms if mechanism.steps)
    if not started:
        return 0.0
    if any(
        mechanism.noise_multiplier == 0 or not mechanism.public_geometry for mechanism in started
    ):
        return math.inf
    accountant = _applicable(started, accountant)
    coarse = _bound(started, delta, accountant, 10 * RESOLUTION)
    if accountant == "rdp":
        return coarse
    return min(coarse, _bound(started, delta, accountant, _resolution(coarse / 2)))


def _applicable(mechanisms: Sequence[Mechanism], accountant: Accountant) -> Accountant:
    """`accountant`, or RDP if there is a selection, which no other accountant can analyse."""
    return "rdp" if any(mechanism.best_of is not None for mechanism in mechanisms) else accountant


def _resolution(epsilon: float) -> float:
    return RESOLUTION * min(max(epsilon, 0.1), 10.0)


def _bound(
    mechanisms: tuple[Mechanism, ...], delta: float, accountant: Accountant, resolution: float
) -> float:
    reduced = tuple(mechanism.reduced() for mechanism in mechanisms)
    return _bound_of_reduced(reduced, delta, accountant, resolution)


# Plan, ledger and report of a run compute the same epsilon.
@lru_cache(maxsize=1024)
def _bound_of_reduced(
    mechanisms: tuple[Mechanism, ...], delta: float, accountant: Accountant, resolution: float
) -> float:
    import dp_accounting as dp
    from dp_accounting import pld, rdp

    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    analysis: dp.PrivacyAccountant
    if accountant == "pld":
        analysis = pld.PLDAccountant(relation, value_discretization_interval=resolution)
    else:
        selects = any(mechanism.best_of is not None for mechanism in mechanisms)
        analysis = rdp.RdpAccountant(selection_orders() if selects else None, relation)
    with _without_order_warnings():
        for mechanism in mechanisms:
            analysis.compose(mechanism.event())
        return float(analysis.get_epsilon(delta))


def selection_orders() -> list[float]:
    """The RDP orders at which the best of several runs is analysed."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return [*DEFAULT_RDP_ORDERS, *MORE_ORDERS]


@contextmanager
def _without_order_warnings() -> Iterator[None]:
    """Suppress one log line per RDP order whose series does not converge.

    Such an order is left out, which only loosens the bound.
    """
    logger = logging.getLogger("absl")  # dp-accounting's logger

    def is_other(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def calibrate_noise(
    mechanism: Callable[[float], Mechanism],
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """The smallest noise multiplier, to 0.001 %, whose epsilon does not exceed the target.

    Epsilon falls as the noise grows. Coarse grids estimate the noise (`estimate_noise`), and a
    search on a fine grid, which mostly ends after one or two evaluations, finds the value.

    Args:
        mechanism: maps a noise multiplier to the mechanism.
        epsilon, delta: the target.
        accountant: as for `epsilon_spent`.

    Raises:
        ValueError: no noise multiplier below `LARGEST_NOISE` reaches the target.

    **Guarantee.** The epsilon at the returned multiplier was computed on the fine grid, which is
    pessimistic, and is at most the target. The estimate has no part in this.

    >>> noise = calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 1000), epsilon=2.0, delta=1e-5)
    >>> round(noise, 3)
    0.959
    """
    search = _Search.of(mechanism, epsilon, delta, accountant)
    estimate = search.estimate(tolerance=3e-4)
    start = estimate.extrapolated + TOLERANCE / 2
    return math.exp(search.root(search.on_fine_grid, start, TOLERANCE, estimate.slope).x)


def estimate_noise(
    mechanism: Callable[[float], Mechanism],
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """The value of `calibrate_noise` to about 0.1 %, above or below, in a fifth of the time.

    It is for comparisons. What is released needs the noise of `calibrate_noise`.
    """
    search = _Search.of(mechanism, epsilon, delta, accountant)
    return math.exp(search.estimate(tolerance=1e-2).extrapolated)


@dataclass(frozen=True)
class _Search:
    """The search for the noise at which a mechanism spends epsilon.

    The variable is log σ, in which log ε is nearly linear.
    """

    mechanism: Callable[[float], Mechanism]
    epsilon: float
    delta: float
    accountant: Accountant

    @staticmethod
    def of(
        mechanism: Callable[[float], Mechanism],
        epsilon: float,
        delta: float,
        accountant: Accountant,
    ) -> _Search:
        if not (epsilon > 0 and math.isfinite(epsilon)):
            raise ValueError(
                f"epsilon={epsilon}: must be positive and finite; for a non-private run pass "
                "noise_multiplier=0"
            )
        epsilon_spent([], delta, accountant)  # checks the arguments
        return _Search(mechanism, epsilon, delta, _applicable([mechanism(1.0)], accountant))

    def estimate(self, tolerance: float) -> Root:
        """The root on an infinitely fine grid, extrapolated from two coarse ones."""
        guess, slope = self.guess()
        if self.accountant == "rdp":  # has no grid
            return self.root(self.on_fine_grid, guess, TOLERANCE)
        coarse = self.root(self.on_coarse_grid, guess, 2e-3, slope)
        return self.root(self.without_grid, coarse.x, tolerance, coarse.slope)

    def guess(self) -> tuple[float, float]:
        """The root and the slope in the limit of many steps, where privacy is Gaussian.

        With sampling rate q, T steps are like one Gaussian mechanism with noise 1/μ,
        ``μ = q √(T (exp(1/σ²) - 1))`` (Dong et al., "Gaussian differential privacy", 2022).
        """
        import dp_accounting as dp

        mu = 1 / dp.get_sigma_gaussian(self.epsilon, self.delta)
        run = self.mechanism(1.0).reduced()
        if run.sampling_rate == 1 or run.sampling_rate * run.steps == 0:
            return -math.log(run.noise_multiplier * mu), -FASTER_THAN_MU
        ratio = mu / run.sampling_rate
        odds = ratio * ratio / run.steps  # exp(1/σ²) - 1
        inverse_variance = min(math.log1p(odds), 1 / SMALLEST_NOISE**2)
        slope_of_mu = -inverse_variance * (1 + 1 / odds)
        return -math.log(inverse_variance) / 2, FASTER_THAN_MU * slope_of_mu

    def root(
        self,
        spent: Callable[[float], float],
        start: float,
        tolerance: float,
        slope: float | None = None,
    ) -> Root:
        """The smallest log σ, to `tolerance`, at which `spent` is at most the target.

        Args:
            spent: maps log σ to epsilon.
            start: an estimate of the root.
            tolerance: in log σ.
            slope: an estimate of the slope of log ε.
        """

        def excess(x: float) -> float:
            epsilon = spent(x)
            return math.log(epsilon / self.epsilon) if epsilon > 0 else -math.inf

        bounds = (math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE))
        try:
            return root_from_above(excess, start, tolerance, bounds=bounds, slope=slope)
        except ValueError:
            raise ValueError(
                f"epsilon={self.epsilon} with delta={self.delta} is out of reach of any noise "
                f"multiplier below {LARGEST_NOISE:g}: raise epsilon or delta, or take fewer steps; "
                "with best_of, tune less, or add more noise to the score"
            ) from None

    def on_fine_grid(self, x: float) -> float:
        return self._spent(x, _resolution(self.epsilon))

    def on_coarse_grid(self, x: float) -> float:
        return self._spent(x, COARSE * _resolution(self.epsilon))

    def without_grid(self, x: float) -> float:
        """Not a bound. The error of epsilon is about proportional to the squared resolution."""
        coarse = self.on_coarse_grid(x)
        return coarse - (coarse - self._spent(x, COARSE / 2 * _resolution(self.epsilon))) * 4 / 3

    def _spent(self, x: float, resolution: float) -> float:
        return _bound((self.mechanism(math.exp(x)),), self.delta, self.accountant, resolution)
