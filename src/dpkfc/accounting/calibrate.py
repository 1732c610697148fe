"""From mechanisms to epsilon, and from a target epsilon to the smallest noise that keeps it.

Both accountants are dp-accounting's and both give *upper bounds*: PLD (privacy loss distributions,
pessimistic discretisation; tight) and RDP (Renyi; loose, for comparison with older papers). CLT-GDP is
an approximation, not a bound, and is not offered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import dp_accounting as dp
from dp_accounting import pld, rdp
from scipy.optimize import brentq

from dpkfc.accounting.events import Mechanism
from dpkfc.errors import PrivacyError

Accountant = Literal["pld", "rdp"]
FINE = 1e-4  # discretisation of the privacy loss, relative to epsilon; any value gives an upper bound
SMALLEST_NOISE, LARGEST_NOISE = 1e-2, 1e6


def epsilon_spent(mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant = "pld") -> float:
    """The epsilon of running all `mechanisms` on the same records, at `delta` (add-or-remove-one)."""
    if accountant not in ("pld", "rdp"):
        raise PrivacyError(f"accountant={accountant!r}: choose 'pld' (tight) or 'rdp'")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta={delta}: must lie strictly between 0 and 1; below 1/N is customary")
    ran = [mechanism for mechanism in mechanisms if mechanism.steps]
    if any(mechanism.noise_multiplier == 0 or not mechanism.public_geometry for mechanism in ran):
        return math.inf
    rough = _bound(ran, delta, accountant, 10 * FINE)
    return min(rough, _bound(ran, delta, accountant, _resolution(rough / 2)))


def _resolution(epsilon: float) -> float:
    return FINE * min(max(epsilon, 0.1), 10.0)


def _bound(mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant, resolution: float) -> float:
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    analysis: dp.PrivacyAccountant = (
        pld.PLDAccountant(relation, value_discretization_interval=resolution)
        if accountant == "pld"
        else rdp.RdpAccountant(neighboring_relation=relation)
    )
    for mechanism in mechanisms:
        analysis.compose(mechanism.event())
    return float(analysis.get_epsilon(delta))


def calibrate_noise(
    mechanism: Callable[[float], Mechanism], epsilon: float, delta: float, accountant: Accountant = "pld"
) -> float:
    """The smallest noise multiplier (to 0.01%) whose epsilon does not exceed the target.

    epsilon falls as the noise grows, so a root search on a cheap coarse grid finds the neighbourhood and
    a search on a ten times finer grid the value. Every grid is pessimistic, and the last word is an
    evaluation at the returned value: it is at most the target.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise PrivacyError(
            f"epsilon={epsilon}: must be positive and finite; for a non-private run pass noise_multiplier=0"
        )
    fine = _resolution(epsilon)
    epsilon_spent([], delta, accountant)  # the arguments are sound

    @cache
    def excess(noise: float, resolution: float) -> float:
        return _bound([mechanism(noise)], delta, accountant, resolution) - epsilon

    def root(guess: float, factor: float, resolution: float) -> float:
        low = high = guess
        while excess(high, resolution) > 0:
            low, high = high, high * factor
            if high > LARGEST_NOISE:
                raise PrivacyError(
                    f"epsilon={epsilon} with delta={delta} is out of reach of any noise multiplier below "
                    f"{LARGEST_NOISE:g}: raise epsilon or delta, or take fewer steps"
                )
        while excess(low, resolution) <= 0:
            low, high = low / factor, low
            if low < SMALLEST_NOISE:
                return low
        return float(brentq(lambda noise: excess(noise, resolution), low, high, rtol=1e-5))

    noise = root(root(1.0, 2.0, 10 * fine), 1.01, fine)
    while excess(noise, fine) > 0:
        noise *= 1 + 1e-5
    return noise
