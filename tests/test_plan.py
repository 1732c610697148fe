"""The plan: wishes checked before anything is spent, noise calibrated, a statement a person can read."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting import pld

import dpkfc

GOOD: dict[str, Any] = {"records": 1000, "batch_size": 50, "clip": 1.0, "delta": 1e-5, "epsilon": 2.0, "epochs": 3}


def test_the_plan_keeps_its_target_and_agrees_with_dp_accounting() -> None:
    plan = dpkfc.Plan.make(**GOOD)
    assert plan.steps == 60 and plan.sampling_rate == 0.05
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4)
    accountant.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(plan.noise_multiplier)), 60)
    assert plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert accountant.supports(plan.event) and plan.neighbouring == "add or remove one record"
    assert plan.epsilon(0) == 0 and plan.epsilon(30) < plan.epsilon(60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 0}, "0 records"),
        ({"batch_size": 1001}, "exceeds the 1000 records"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": "1"}, "clip='1'"),
        ({"clip": float("inf")}, "clip=inf"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"delta": None}, "delta is missing"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"epsilon": None}, "exactly one of epsilon"),
        ({"noise_multiplier": 1.0}, "exactly one of epsilon"),
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"epsilon": float("inf")}, "epsilon=inf"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"steps": 5}, "exactly one of epochs and steps"),
        ({"epochs": None}, "exactly one of epochs and steps"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": None, "steps": 0}, "steps=0"),
        ({"accountant": "gdp"}, "'pld' \\(tight\\) or 'rdp'"),
        ({"epsilon": 1e-9, "delta": 1e-12}, "out of reach"),
    ],
)
def test_impossible_wishes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(dpkfc.PrivacyError, match=message):
        dpkfc.Plan.make(**{**GOOD, **change})


def test_a_delta_above_one_in_n_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="above 1/N"):
        dpkfc.Plan.make(**{**GOOD, "delta": 2e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpkfc.Plan.make(**GOOD)


def test_rdp_on_request_needs_more_noise() -> None:
    tight, loose = dpkfc.Plan.make(**GOOD), dpkfc.Plan.make(**GOOD, accountant="rdp")
    assert loose.noise_multiplier > tight.noise_multiplier
    assert loose.epsilon() <= 2.0 and "Rényi" in str(loose)


def test_the_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        dpkfc.Plan.make(**GOOD).clip = 2.0  # type: ignore[misc]


def test_the_statement_says_what_a_data_protection_officer_asks() -> None:
    text = str(dpkfc.Plan.make(**GOOD))
    for word in (
        "what is protected",
        "add or remove one",
        "epsilon",
        "target 2",
        "1e-05",
        "Poisson",
        "60",
        "not covered",
    ):
        assert word in text
