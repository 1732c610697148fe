"""The plan: arguments are checked, the noise is calibrated, and the statement can be read."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting import pld

import dpkfc

GOOD: dict[str, Any] = {
    "records": 1000,
    "batch_size": 50,
    "clip": 1.0,
    "delta": 1e-5,
    "epsilon": 2.0,
    "epochs": 3,
}


def test_the_plan_keeps_its_target_and_agrees_with_dp_accounting() -> None:
    plan = dpkfc.Plan.make(**GOOD)
    assert plan.steps == 60 and plan.sampling_rate == 0.05
    accountant = pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    accountant.compose(
        dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(plan.noise_multiplier)), 60
    )
    assert plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert accountant.supports(plan.event) and plan.neighbouring == "add or remove one record"
    assert plan.epsilon(0) == 0 and plan.epsilon(30) < plan.epsilon(60)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"records": 0}, ValueError, "0 records"),
        ({"batch_size": 1001}, ValueError, "exceeds the 1000 records"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"clip": 0.0}, ValueError, "clip=0.0"),
        ({"clip": "1"}, TypeError, "clip='1'"),
        ({"clip": float("inf")}, ValueError, "clip=inf"),
        ({"clip": float("nan")}, ValueError, "clip=nan"),
        ({"delta": None}, ValueError, "delta is missing"),
        ({"delta": 0.0}, ValueError, "delta=0.0"),
        ({"delta": 1.0}, ValueError, "delta=1.0"),
        ({"epsilon": None}, ValueError, "exactly one of epsilon"),
        ({"noise_multiplier": 1.0}, ValueError, "exactly one of epsilon"),
        ({"steps": 5}, ValueError, "exactly one of epochs and steps"),
        ({"epochs": None}, ValueError, "exactly one of epochs and steps"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"epochs": None, "steps": 0}, ValueError, "steps=0"),
        ({"epochs": None, "steps": 1.5}, TypeError, "steps=1.5"),
        ({"sampling": "poison"}, ValueError, "Did you mean 'poisson'"),
    ],
)
def test_wrong_arguments_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dpkfc.Plan.make(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"epsilon": float("inf")}, "epsilon=inf"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"accountant": "gdp"}, "'pld' \\(tight\\) or 'rdp'"),
        ({"accountant": "gdp", "best_of": dpkfc.tuning.BestOf(4)}, "'pld' \\(tight\\) or 'rdp'"),
        ({"best_of": 4}, "must be a dpkfc.tuning.BestOf"),
        ({"best_of": dpkfc.tuning.BestOf(4, score_noise=0.1)}, "out of reach"),
        ({"epsilon": 1e-9, "delta": 1e-12}, "out of reach"),
    ],
)
def test_what_the_accountant_cannot_analyse_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
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


@pytest.mark.parametrize(
    "best_of", [dpkfc.tuning.BestOf(4), dpkfc.tuning.BestOf(4, "poisson", 30.0)], ids=repr
)
def test_a_plan_for_the_best_of_several_runs_is_calibrated_for_the_whole(
    best_of: dpkfc.tuning.BestOf,
) -> None:
    plan, single = (
        dpkfc.Plan.make(**GOOD, best_of=best_of),
        dpkfc.Plan.make(**GOOD, accountant="rdp"),
    )
    assert plan.accountant == "rdp" and plan.noise_multiplier > single.noise_multiplier
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(plan.event)
    assert 0.999 * 2.0 < plan.epsilon() <= min(2.0, accountant.get_epsilon(1e-5))
    assert plan.epsilon(0) == 0 < plan.epsilon(1) < plan.epsilon(60)
    text = " ".join(str(plan).replace("│", " ").split())
    for words in (
        "selection",
        "the selection included",
        f"{best_of.runs}, 4 expected",
        "other hyperparameters",
    ):
        assert words in text
    assert ("standard deviation 30, for" in text) == (best_of.runs == "poisson")
    assert ("public records only" in text) == (best_of.runs == "geometric")
    assert "selection" not in str(single)


def test_a_plan_survives_json() -> None:
    plans = [
        dpkfc.Plan.make(**GOOD, accountant="rdp", best_of=best_of)
        for best_of in (None, dpkfc.tuning.BestOf(4))
    ]
    written = [json.loads(json.dumps(plan.to_json())) for plan in plans]
    assert written == [plan.to_json() for plan in plans] and written[0] != written[1]
    assert written[1]["best_of"] == {"mean": 4.0, "runs": "geometric", "score_noise": None}


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


@pytest.mark.parametrize("best_of", [None, dpkfc.tuning.BestOf(mean=3, score_noise=5.0)])
@pytest.mark.parametrize("growth", [(), (0.5, 1.0)])
def test_a_plan_can_be_read_again(
    best_of: dpkfc.tuning.BestOf | None, growth: tuple[float, ...]
) -> None:
    plan = dataclasses.replace(
        dpkfc.Plan.make(
            records=100, batch_size=10, steps=15, clip=1.0, noise_multiplier=1.0, delta=1e-4
        ),
        best_of=best_of,
        growth=growth,
        groups=10 if growth else 1,
    )
    assert dpkfc.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_an_estimated_plan_has_about_the_noise_and_claims_no_target() -> None:
    plan = dpkfc.Plan.make(**GOOD)
    estimated = plan.estimated(2.0)
    assert estimated.target_epsilon is None
    assert estimated.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=2e-3)
    assert estimated.calibrated(2.0) == plan == plan.calibrated(2.0)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_plan_is_not_calibrated_for_an_impossible_target(epsilon: float) -> None:
    plan = dpkfc.Plan.make(**{**GOOD, "epsilon": None, "noise_multiplier": 1.0})
    for calibrate in (plan.calibrated, plan.estimated):
        with pytest.raises(ValueError, match="epsilon"):
            calibrate(epsilon)


def test_a_geometry_from_private_records_does_not_change_the_noise() -> None:
    plan = dpkfc.Plan.make(**GOOD, public_geometry=False)
    assert plan.noise_multiplier == dpkfc.Plan.make(**GOOD).noise_multiplier
    assert plan.epsilon() == float("inf")
