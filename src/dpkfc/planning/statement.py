"""The privacy statement of a plan: what is protected, how, and what is not covered, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED
from dpkfc.noise.factorization import IDENTITY

if TYPE_CHECKING:
    from dpkfc.planning.plan import Plan

SAMPLING_NAMES = {
    "poisson": "Poisson",
    "cyclic-poisson": "cyclic Poisson",
    "min-separated": "groups in turn",
}
ACCOUNTANTS = {
    "pld": "privacy loss distribution (upper bound)",
    "rdp": "Rényi differential privacy (upper bound, looser than PLD)",
}


def statement(plan: Plan) -> list[tuple[str, str]]:
    """Names and values, in the order in which a reader needs them."""
    rows = [
        (
            "what is protected",
            f"one record: whether it is in the data set or not ({plan.neighbouring})",
        ),
        ("epsilon", _epsilon(plan)),
        ("delta", f"{plan.delta:.3g} (1/N = {1 / plan.records:.3g})"),
        ("accountant", ACCOUNTANTS[plan.accountant]),
        ("records", f"{plan.records} (this number is treated as public)"),
        ("sampling", _sampling(plan)),
        ("steps", _steps(plan)),
        ("geometry", plan.geometry),
        ("clipping", _clipping(plan)),
        ("noise", _noise(plan)),
    ]
    if plan.best_of is not None:
        rows.append(("selection", str(plan.best_of)))
    rows.append(("not covered", _not_covered(plan)))
    return rows + [(f"not checked: {what}", NOT_CHECKED[what]) for what in plan.unchecked]


def _epsilon(plan: Plan) -> str:
    text = f"{round_up(plan.epsilon())} after all {plan.steps} steps"
    if plan.best_of is not None:
        text += ", the selection included"
    if plan.target_epsilon is not None:
        text += f" (target {round_up(plan.target_epsilon, 6)})"
    if not plan.public_geometry:
        text += ": the geometry was built from the private records"
    return text


def _sampling(plan: Plan) -> str:
    expected = f"{plan.batch_size} expected"
    if plan.groups == 1:
        rate = f"{plan.sampling_rate:.4g}"
        return f"Poisson: each record joins a step with probability {rate}, {expected}"
    text = (
        f"{SAMPLING_NAMES[plan.sampling]}: {plan.groups} random groups take turns, a record joins "
        f"a step of its group with probability {plan.rate_in_turn:.4g}, {expected}"
    )
    return text + ("; the accounting does not use this" if plan.growth else "")


def _steps(plan: Plan) -> str:
    passes = plan.steps * plan.sampling_rate
    return f"{plan.steps} ({passes:.3g} expected passes over the data)"


def _clipping(plan: Plan) -> str:
    text = f"each record's mapped gradient to L2 norm {plan.clip:g}"
    if plan.clip_gamma is not None:
        text += f" by the factor {plan.clip:g} / (norm + {plan.clip_gamma:g})"
    return f"{text}, over all trainable parameters at once"


def _noise(plan: Plan) -> str:
    scale = f"{plan.noise_multiplier:.4g} x {plan.clip:g}"
    if plan.noise == IDENTITY.name:
        return f"{plan.noise}, standard deviation {scale} on the sum"
    sensitivity = f"{plan.noise_sensitivity:.4g} (its sensitivity)"
    return f"{plan.noise}, standard deviation {scale} x {sensitivity} before mixing"


def _not_covered(plan: Plan) -> str:
    hyperparameters = "hyperparameters" if plan.best_of is None else "other hyperparameters"
    text = (
        f"choices made by looking at the private data: {hyperparameters}, when to stop, data "
        "cleaning"
    )
    empty = plan.steps * (1 - plan.rate_in_turn) ** (plan.records / plan.groups)
    if empty <= plan.delta / 100:
        return text
    return text + (
        f"; how many batches are empty ({empty:.3g} of {plan.steps} batches are expected to be "
        "empty): code that runs once per batch besides optimizer.step(), such as averages and "
        "schedules, belongs in run.after_step"
    )
