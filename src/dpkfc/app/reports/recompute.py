"""The epsilon of a finished run, recomputed from its plan and the steps that were taken.

The number in result.json can be edited, or be left from another version. Readers are shown the
epsilon of the mechanism instead: plan.json defines a step, and the number of steps is the largest
that any file of the folder, or the ledger, knows of.

**Guarantee.** The epsilon and the delta are a bound for every run that is consistent with all the
files. Where files disagree, the larger epsilon, the smaller delta and the larger number of steps
count, and a remark says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.ledger import LedgerRun, read
from dpkfc.accounting.rounding import round_up
from dpkfc.errors import PrivacyError
from dpkfc.planning.plan import Plan

TOLERANCE = 1e-6  # relative: another version of the accountant may differ by this much
CHANGED = "the file was changed or is wrong"


@dataclass(frozen=True)
class Spent:
    """The cost of a run, and remarks about files that disagree."""

    epsilon: float
    delta: float
    steps: int  # covered by epsilon, including lost ones
    remarks: tuple[str, ...] = ()


def recompute(
    folder: Path, result: Mapping[str, Any], config: Mapping[str, Any], plan: Plan
) -> Spent:
    """The epsilon of the run in `folder`, with the content of its JSON files."""
    remarks: list[str] = []
    charged = _in_ledger(result, config, remarks)
    steps = _steps(folder, result, plan, charged, remarks)
    delta = _delta(result, plan, charged, remarks)
    try:
        epsilon = plan.epsilon(steps) if delta == plan.delta else plan.epsilon(steps, delta)
    except (PrivacyError, ValueError) as problem:
        raise ValueError(
            f"{folder}/plan.json does not fit the {steps} steps that were taken ({problem}): it "
            "was changed or is wrong; restore it"
        ) from problem
    if charged is not None and charged.mechanism != plan.mechanism:
        remarks.append(f"plan.json and the ledger disagree about this run: {CHANGED}.")
        steps_in_plan = min(steps, charged.mechanism.steps)
        epsilon = max(
            epsilon, epsilon_spent([charged.mechanism.after(steps_in_plan)], delta, plan.accountant)
        )
    return Spent(_larger(result.get("epsilon"), epsilon, remarks), delta, steps, tuple(remarks))


def _larger(stated: Any, epsilon: float, remarks: list[str]) -> float:
    """The larger of the epsilon in result.json and the computed one."""
    computed = f"the plan and the steps taken give {round_up(epsilon)}"
    if not _is_number(stated):
        remarks.append(f"result.json has no epsilon, {computed}: {CHANGED}.")
        return epsilon
    if stated < epsilon * (1 - TOLERANCE):
        remarks.append(f"result.json says epsilon = {stated}, but {computed}: {CHANGED}.")
    elif stated > epsilon * (1 + TOLERANCE):
        remarks.append(
            f"result.json says epsilon = {stated}, but {computed}: one of the files was changed or "
            "is wrong. The larger epsilon is shown."
        )
    return max(epsilon, float(stated))


def _steps(
    folder: Path,
    result: Mapping[str, Any],
    plan: Plan,
    charged: LedgerRun | None,
    remarks: list[str],
) -> int:
    stated = result.get("steps")
    lost = result.get("lost_steps", 0)
    if _is_count(stated) and _is_count(lost):
        total = stated + lost
    else:
        remarks.append(f"result.json has no valid number of steps: {CHANGED}.")
        total = plan.steps
    known = max(
        _steps_of_weights(folder / "model.safetensors", plan, remarks),
        _steps_of_metrics(folder / "metrics.jsonl"),
        0 if charged is None else charged.charged,
    )
    if known > total:
        remarks.append(f"result.json says {total} steps, but {known} were taken: {CHANGED}.")
    taken = max(known, total)
    if taken > plan.steps:
        remarks.append(f"plan.json plans {plan.steps} steps, but {taken} were taken: {CHANGED}.")
    return taken


def _steps_of_weights(file: Path, plan: Plan, remarks: list[str]) -> int:
    if not file.exists():
        return 0
    try:
        with safe_open(str(file), "pt") as weights:
            return int((weights.metadata() or {}).get("steps", plan.steps))
    except (SafetensorError, OSError, ValueError):
        remarks.append(
            f"{file.name} cannot be read: it is damaged, and all planned steps are counted."
        )
        return plan.steps


def _steps_of_metrics(file: Path) -> int:
    steps = 0
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            steps = max(steps, int(json.loads(line)["step"]))
        except (ValueError, TypeError, KeyError):  # a line that was cut off
            continue
    return steps


def _delta(
    result: Mapping[str, Any], plan: Plan, charged: LedgerRun | None, remarks: list[str]
) -> float:
    others = [result.get("delta"), None if charged is None else charged.delta]
    known = [plan.delta, *(float(delta) for delta in others if _is_number(delta) and 0 < delta < 1)]
    if max(known) > min(known):
        remarks.append(
            f"The files disagree about delta ({', '.join(f'{delta:g}' for delta in known)}): one "
            "of them was changed or is wrong. The smallest counts."
        )
    return min(known)


def _in_ledger(
    result: Mapping[str, Any], config: Mapping[str, Any], remarks: list[str]
) -> LedgerRun | None:
    """The run in the ledger of config.json, if there is one."""
    settings = config.get("settings", {})
    path, run_id = settings.get("ledger"), result.get("run")
    if not path or not run_id or not Path(path).is_file():
        return None
    try:
        runs = read(path)
    except (PrivacyError, ValueError) as problem:
        remarks.append(f"The ledger was not consulted: {problem}.")
        return None
    for run in runs:
        if (run.dataset, run.run_id) == (settings.get("dataset"), run_id):
            return run
    remarks.append(
        f"The ledger {path} does not know this run: restore the ledger, or add the run's epsilon "
        "to what the ledger shows."
    )
    return None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
