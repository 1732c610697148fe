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
from functools import lru_cache
from typing import Literal

from dpkfc.accounting.events import Mechanism

Accountant = Literal["pld", "rdp"]

# dp-accounting's default RDP orders have gaps above 63. The best order of a selection with a small
# epsilon may lie there.
MORE_ORDERS = (72, 80, 88, 96, 112, 144, 160, 192, 224, 320, 384, 448, 640, 768)

# Discretisation of the privacy loss, relative to epsilon. Any value gives an upper bound.
RESOLUTION = 1e-4

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


# Plan, ledger and report of a run compute the same epsilon.
@lru_cache(maxsize=1024)
def _bound(
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
    """The smallest noise multiplier, to 0.01 %, whose epsilon does not exceed the target.

    Epsilon falls as the noise grows. A root search on a cheap coarse grid finds the neighbourhood,
    and a search on a ten times finer grid the value.

    Args:
        mechanism: maps a noise multiplier to the mechanism.
        epsilon, delta: the target.
        accountant: as for `epsilon_spent`.

    Raises:
        ValueError: no noise multiplier below `LARGEST_NOISE` reaches the target.

    **Guarantee.** Every grid is pessimistic, and the epsilon at the returned multiplier is computed
    once more: it is at most the target.

    >>> noise = calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 1000), epsilon=2.0, delta=1e-5)
    >>> round(noise, 3)
    0.959
    """
    from scipy.optimize import brentq

    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(
            f"epsilon={epsilon}: must be positive and finite; for a non-private run pass "
            "noise_multiplier=0"
        )
    epsilon_spent([], delta, accountant)  # checks the arguments
    accountant = _applicable([mechanism(1.0)], accountant)
    fine = _resolution(epsilon)
    coarse = fine if accountant == "rdp" else 10 * fine  # RDP has no grid

    def excess(noise: float, resolution: float) -> float:
        return _bound((mechanism(noise),), delta, accountant, resolution) - epsilon

    def root(guess: float, factor: float, resolution: float) -> float:
        low = high = guess
        while excess(high, resolution) > 0:
            low, high = high, high * factor
            if high > LARGEST_NOISE:
                raise ValueError(
                    f"epsilon={epsilon} with delta={delta} is out of reach of any noise multiplier "
                    f"below {LARGEST_NOISE:g}: raise epsilon or delta, or take fewer steps; with "
                    "best_of, tune less, or add more noise to the score"
                )
        while excess(low, resolution) <= 0:
            low, high = low / factor, low
            if low < SMALLEST_NOISE:
                return low
        return float(brentq(lambda noise: excess(noise, resolution), low, high, rtol=1e-5))

    noise = root(root(1.0, 2.0, coarse), 1.01, fine)
    while excess(noise, fine) > 0:
        noise *= 1 + 1e-5
    return noise
