"""From mechanisms to epsilon, and from a target epsilon to the smallest noise that keeps it.

Both accountants are dp-accounting's and both give *upper bounds*: PLD (privacy loss distributions,
pessimistic discretisation; tight) and RDP (Renyi; loose, for comparison with older papers). CLT-GDP is
an approximation, not a bound, and is not offered.

The best of several runs (`Mechanism.best_of`) can be analysed by RDP only. What such a mechanism is composed with is
then analysed by RDP too, whichever accountant was asked for: still an upper bound, a looser one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

from dpkfc.accounting.events import Mechanism
from dpkfc.errors import PrivacyError

Accountant = Literal["pld", "rdp"]
# dp-accounting's default RDP orders have gaps above 63, where a selection with a small epsilon has its best order.
MORE_ORDERS = (72, 80, 88, 96, 112, 144, 160, 192, 224, 320, 384, 448, 640, 768)
FINE = (
    1e-4  # discretisation of the privacy loss, relative to epsilon; any value gives an upper bound
)
SMALLEST_NOISE, LARGEST_NOISE = 1e-2, 1e6


def epsilon_spent(
    mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant = "pld"
) -> float:
    """The epsilon of running all `mechanisms` on the same records, at `delta` (add-or-remove-one).

    If any of them is a selection, RDP analyses all of them.
    """
    if accountant not in ("pld", "rdp"):
        raise PrivacyError(f"accountant={accountant!r}: choose 'pld' (tight) or 'rdp'")
    if not 0 < delta < 1:
        raise PrivacyError(
            f"delta={delta}: must lie strictly between 0 and 1; below 1/N is customary"
        )
    ran = tuple(mechanism for mechanism in mechanisms if mechanism.steps)
    if not ran:
        return 0.0
    if any(mechanism.noise_multiplier == 0 or not mechanism.public_geometry for mechanism in ran):
        return math.inf
    accountant = _able(ran, accountant)
    rough = _bound(ran, delta, accountant, 10 * FINE)
    return (
        rough
        if accountant == "rdp"
        else min(rough, _bound(ran, delta, accountant, _resolution(rough / 2)))
    )


def _able(mechanisms: Sequence[Mechanism], accountant: Accountant) -> Accountant:
    """The accountant that was asked for, unless there is a selection, which RDP alone can analyse."""
    return "rdp" if any(mechanism.best_of is not None for mechanism in mechanisms) else accountant


def _resolution(epsilon: float) -> float:
    return FINE * min(max(epsilon, 0.1), 10.0)


@lru_cache(
    maxsize=1024
)  # a run asks for the same epsilon in its statement, its ledger and its report
def _bound(
    mechanisms: tuple[Mechanism, ...], delta: float, accountant: Accountant, resolution: float
) -> float:
    import dp_accounting as dp
    from dp_accounting import pld, rdp

    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    selects = any(mechanism.best_of is not None for mechanism in mechanisms)
    analysis: dp.PrivacyAccountant = (
        pld.PLDAccountant(relation, value_discretization_interval=resolution)
        if accountant == "pld"
        else rdp.RdpAccountant(selection_orders() if selects else None, relation)
    )
    with _quietly():
        for mechanism in mechanisms:
            analysis.compose(mechanism.event())
        return float(analysis.get_epsilon(delta))


def selection_orders() -> list[float]:
    """The RDP orders at which the best of several runs is analysed."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return [*DEFAULT_RDP_ORDERS, *MORE_ORDERS]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a line for each order of RDP whose series does not converge: leaving it out only loosens the bound."""
    logger = logging.getLogger("absl")  # of dp-accounting

    def is_news(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def calibrate_noise(
    mechanism: Callable[[float], Mechanism],
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """The smallest noise multiplier (to 0.01%) whose epsilon does not exceed the target.

    epsilon falls as the noise grows, so a root search on a cheap coarse grid finds the neighbourhood and
    a search on a ten times finer grid the value. Every grid is pessimistic, and the last word is an
    evaluation at the returned value: it is at most the target.
    """
    from scipy.optimize import brentq

    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise PrivacyError(
            f"epsilon={epsilon}: must be positive and finite; for a non-private run pass noise_multiplier=0"
        )
    epsilon_spent([], delta, accountant)  # the arguments are sound
    accountant = _able([mechanism(1.0)], accountant)
    fine = _resolution(epsilon)
    coarse = fine if accountant == "rdp" else 10 * fine  # RDP has no grid

    def excess(noise: float, resolution: float) -> float:
        return _bound((mechanism(noise),), delta, accountant, resolution) - epsilon

    def root(guess: float, factor: float, resolution: float) -> float:
        low = high = guess
        while excess(high, resolution) > 0:
            low, high = high, high * factor
            if high > LARGEST_NOISE:
                raise PrivacyError(
                    f"epsilon={epsilon} with delta={delta} is out of reach of any noise multiplier below "
                    f"{LARGEST_NOISE:g}: raise epsilon or delta, or take fewer steps; with best_of, tune less, or add "
                    "more noise to the score"
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
