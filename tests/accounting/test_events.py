"""Correlated mechanisms: their fields, and their epsilon against closed forms."""

from __future__ import annotations

import json
import math

import dp_accounting as dp
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpkfc.accounting.calibrate import calibrate_noise, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.selection import BestOf

GROWING = (0.5, 0.8, 1.0)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Balle & Wang (2018): ``δ = Φ(-εσ + 1/2σ) - e^ε Φ(-εσ - 1/2σ)``."""

    def excess(epsilon: float) -> float:
        tail = norm.logcdf(-epsilon * sigma - 0.5 / sigma) + epsilon
        return float(norm.cdf(-epsilon * sigma + 0.5 / sigma) - math.exp(tail) - delta)

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 3.7306), (2, 1.9938), (4, 1.0812), (8, 0.6002)])
def test_one_gaussian_release_has_the_known_noise(epsilon: float, sigma: float) -> None:
    """The golden multipliers without amplification, at delta 1e-5; never below the exact value."""
    found = calibrate_noise(lambda s: Mechanism(1.0, s, 30, True, 10, GROWING), epsilon, 1e-5)
    assert found == pytest.approx(sigma, rel=2e-4)
    assert gaussian_epsilon(found, 1e-5) <= epsilon


@pytest.mark.parametrize(
    ("steps", "factor"), [(1, 0.5), (10, 0.5), (11, 0.8), (20, 0.8), (21, 1.0), (30, 1.0)]
)
def test_a_run_that_stops_early_has_the_sensitivity_of_its_rounds(
    steps: int, factor: float
) -> None:
    stopped = Mechanism(1.0, 2.0, 30, True, 10, GROWING).after(steps)
    exact = gaussian_epsilon(2.0 / factor, 1e-5)
    assert exact <= epsilon_spent([stopped], 1e-5) <= exact * (1 + 1e-3)


def test_growth_that_falls_is_not_believed() -> None:
    """An upper bound of the sensitivity may be larger for fewer rounds; the maximum counts."""
    odd = Mechanism(1.0, 2.0, 20, True, 10, (1.0, 0.7, 1.0))
    assert odd.event() == dp.GaussianDpEvent(2.0)


@pytest.mark.parametrize("cycle", [1, 4, 7])
def test_a_cycle_counts_as_one_subsampled_gaussian(cycle: int) -> None:
    ran = Mechanism(0.1, 1.2, 30, True, cycle)
    gaussian = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.2))
    assert ran.event() == dp.SelfComposedDpEvent(gaussian, math.ceil(30 / cycle))
    assert ran.after(0).event() == dp.NoOpDpEvent()


def test_whole_groups_in_turn_are_gaussians_that_add_up() -> None:
    exact = gaussian_epsilon(3.0 / math.sqrt(4), 1e-5)
    assert exact <= epsilon_spent([Mechanism(1.0, 3.0, 40, True, 10)], 1e-5) <= exact * (1 + 1e-3)


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(0.1, 1.2, 30),
        Mechanism(0.1, 1.2, 30, False, 4),
        Mechanism(1.0, 2.0, 30, True, 10, GROWING),
    ],
)
def test_files_keep_a_mechanism_as_it_is(mechanism: Mechanism) -> None:
    written = json.loads(json.dumps(mechanism.to_json()))
    assert Mechanism.from_json(written) == mechanism
    plain = mechanism.cycle == 1
    assert ("cycle" not in written) == plain, (
        "older versions must not take a correlated mechanism for a plain one"
    )
    assert (written["mechanism"] == "poisson-gaussian") == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sampling_rate": 0.5, "cycle": 10, "growth": GROWING},
            "no accountant with amplification by sampling",
        ),
        ({"cycle": 0}, "cycle=0"),
        ({"sampling_rate": 1.0, "cycle": 10, "growth": (0.5, 1.0)}, "3 rounds"),
        ({"sampling_rate": 1.0, "cycle": 10, "growth": (0.5, 0.8, 0.9)}, "the last 1"),
        ({"sampling_rate": 1.0, "cycle": 10, "growth": (0.5, 1.5, 1.0)}, "the last 1"),
        ({"sampling_rate": 1.0, "cycle": 10, "growth": (0.0, 0.5, 1.0)}, "above 0"),
    ],
)
def test_what_cannot_be_accounted_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        # type: ignore[arg-type]
        Mechanism(**({"sampling_rate": 0.1, "noise_multiplier": 1.0, "steps": 30} | fields))


@pytest.mark.parametrize(
    ("mechanism", "reduced"),
    [
        (Mechanism(0.1, 1.2, 30, cycle=7), Mechanism(0.1, 1.2, 5)),
        (Mechanism(1.0, 3.0, 18, cycle=2), Mechanism(1.0, 1.0, 1)),
        (Mechanism(1.0, 2.0, 20, True, 10, GROWING), Mechanism(1.0, 2.5, 1)),
        (Mechanism(1.0, 2.0, 30, False, 10, GROWING), Mechanism(1.0, 2.0, 1, False)),
        (Mechanism(1.0, 2.0, 0, True, 10, GROWING), Mechanism(1.0, 2.0, 0)),
        (Mechanism(1.0, 2.0, 0), Mechanism(1.0, 2.0, 0)),
        (Mechanism(0.1, 2.0, 9, best_of=BestOf(3)), Mechanism(0.1, 2.0, 9, best_of=BestOf(3))),
    ],
)
def test_the_reduced_mechanism_has_the_same_event(mechanism: Mechanism, reduced: Mechanism) -> None:
    """Epsilons are cached by it: runs that share it must cost the same."""
    assert mechanism.reduced() == reduced == reduced.reduced()
    assert mechanism.event() == reduced.event()


@pytest.mark.parametrize(
    "other",
    [
        Mechanism(0.1, 1.2, 31),
        Mechanism(0.1, 1.3, 30),
        Mechanism(0.2, 1.2, 30),
        Mechanism(0.1, 1.2, 30, cycle=2),
        Mechanism(0.1, 1.2, 30, public_geometry=False),
        Mechanism(0.1, 1.2, 30, best_of=BestOf(2)),
    ],
)
def test_mechanisms_with_other_events_are_not_reduced_to_the_same(other: Mechanism) -> None:
    assert other.reduced() != Mechanism(0.1, 1.2, 30).reduced()
