"""Continue a run from its state, so that no noise is used twice and no step is forgotten.

**Guarantee.** If this process or the ledger knows of steps after the state (the process died after
its last checkpoint, or goes back to it), their results may have been seen: they stay charged, and
fresh entropy is mixed into the key. The same holds where it cannot be known whether the state was
continued before: it comes from another process, without a ledger and without a seed. (A checkpoint
folder can tell: see `engine.lineage`.) Otherwise the run continues bit for bit.

A run that has taken steps can only go back or forward within itself: with the state of another run
it would take over that run's count of steps and forget its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.unchecked import NOT_CHECKED
from dpkfc.engine import guards, lineage
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.planning.plan import Plan
from dpkfc.random import is_key
from dpkfc.sharding import buffers_by_parameter, flat_buffers

if TYPE_CHECKING:
    from dpkfc.engine.run import PrivateRun

# what the state of a stream says of the positions that this rank owns
POSITIONS = ("ranges", "size")


def state_of(run: PrivateRun) -> dict[str, Any]:
    """The state of a run as numbers, strings and tensors. Holds secret keys."""
    return {
        "plan": run.plan.to_json(),
        "step": run.steps,
        "lost_steps": run._lost_steps,
        "key": run._key.hex(),
        "groups": run._group_key.hex(),
        "run": run.run_id,
        "weights": run._weights_digest(),
        "salt": run._salt.hex(),
        "not_private": vars(run.not_private).copy(),
        "geometry": run.geometry.state_dict(),
        "noise": _noise_state(run),
    }


def load_state(run: PrivateRun, state: dict[str, Any]) -> None:
    """Continue with a state that does not come from a checkpoint folder."""
    plan = check_state(run, state)
    unknown = lineage.steps_here(state["run"]) is None and run._ledger is None
    seeded = "seed" in state["plan"].get("unchecked", ())
    continue_run(run, state, plan, fresh=unknown and not seeded)


def continue_run(run: PrivateRun, state: dict[str, Any], plan: Plan, fresh: bool) -> None:
    """Take over a state that `check_state` has accepted with this plan.

    With `fresh`, mix fresh entropy into the key.
    """
    run_id, step, lost = state["run"], state["step"], state["lost_steps"]
    own = run.charged if run_id == run.run_id else 0
    charged = max(lineage.steps_here(run_id) or 0, own)
    if run._ledger is not None:
        charged = max(charged, open_in_ledger(run, run._ledger, run_id, plan))
    if charged > step + lost:
        noise = run.factorization
        non_negative = noise.non_negative(run.plan.steps)
        guards.noise_may_restart(noise.bands, run.plan.groups, non_negative, noise.name)
        lost, fresh = charged - step, True
    _load_geometry(run.geometry, state["geometry"])
    # after lost steps the stream restarts at the next step
    run._noise.load_state_dict(_own_noise_state(run, state["noise"]))
    run.plan = plan
    run.steps, run._lost_steps, run.run_id = step, lost, run_id
    key = bytes.fromhex(state["key"])
    run._key = run._ranks.on_first(lambda: lineage.fresh_key(key)) if fresh else key
    run._group_key = bytes.fromhex(state["groups"])
    run._salt, run._pid = bytes.fromhex(state["salt"]), os.getpid()
    lineage.own(run_id, run._handle_id, run.charged)
    run._expected_weights, run._checkpoints = state["weights"], []
    run._check_due = run._check_due or bool(run._secret_steps)
    # the counts of all ranks together, continued by the first
    counts = state["not_private"] if run._ranks.first else {}
    run._counts = type(run._counts)(type(run.not_private)(**counts))
    run._drop_batch()


def check_state(run: PrivateRun, state: dict[str, Any]) -> Plan:
    """The plan to continue with; refuses a state that cannot be continued, changing nothing."""
    _check_values(state, run.plan.steps)
    plan = run.plan
    if run._clip_from_probes:  # chosen at the first weights of the run that is continued
        plan = replace(plan, clip=state["plan"]["clip"])
    # what was not checked stays unchecked
    unchecked = set(plan.unchecked) | set(state["plan"].get("unchecked", ()))
    plan = replace(plan, unchecked=tuple(what for what in NOT_CHECKED if what in unchecked))
    own = {k: v for k, v in plan.to_json().items() if k != "unchecked"}
    given = {k: v for k, v in state["plan"].items() if k != "unchecked"}
    if given != own:
        changed = [k for k, v in own.items() if given.get(k) != v]
        raise PrivacyError(
            f"the checkpoint belongs to another plan: {', '.join(changed)} differ. Make the run "
            "private with the same settings to resume it"
        )
    if run.charged and state["run"] != run.run_id:
        raise PrivacyError(
            f"the checkpoint belongs to another run, and this one has taken {run.charged} steps, "
            "which it would forget. Call detach() and make_private again, and load the checkpoint "
            "into that run"
        )
    run._noise.check_state(_own_noise_state(run, state["noise"]))
    return plan


def _noise_state(run: PrivateRun) -> dict[str, Any]:
    """The state of the stream in a form that any number of ranks can continue.

    Buffers are divided by parameters, and the positions that this rank owns are left out.
    """
    state = {k: v for k, v in run._noise.state_dict().items() if k not in POSITIONS}
    state["size"] = sum(p.numel() for p in run._trainable().values())
    if "past" in state:
        state["past"] = buffers_by_parameter(state["past"], run._trainable())
    return state


def _own_noise_state(run: PrivateRun, state: dict[str, Any]) -> dict[str, Any]:
    """The state for the positions that this rank owns."""
    own, trainable = run._noise.state_dict(), run._trainable()
    size = sum(p.numel() for p in trainable.values())
    if set(own) - {"next"} and state.get("size") != size:
        raise PrivacyError(
            f"the checkpoint has noise for {state.get('size')} numbers, the run needs {size}: load "
            "it into the model that it was saved from"
        )
    state = {**state, **{name: own[name] for name in POSITIONS if name in own}}
    if "past" not in own:
        return state
    past = state.get("past")
    shapes = {name: (len(own["past"]), *p.shape) for name, p in trainable.items()}
    given = {}
    if isinstance(past, dict) and all(isinstance(each, Tensor) for each in past.values()):
        given = {name: tuple(each.shape) for name, each in past.items()}
    if not isinstance(past, dict) or given != shapes:
        raise PrivacyError(
            "the checkpoint has noise buffers of other shapes than the run needs: the set of "
            "trainable parameters or the noise has changed, or the checkpoint is damaged"
        )
    return {**state, "past": flat_buffers(past, trainable)}


def _check_values(state: Any, steps: int) -> None:
    """Refuse numbers or keys that no run can have written."""
    valid: dict[str, Callable[[Any], bool]] = {
        "plan": lambda value: isinstance(value, dict),
        "step": lambda value: type(value) is int and 0 <= value <= steps,
        "lost_steps": lambda value: type(value) is int and 0 <= value <= steps,
        "key": is_key,
        "groups": is_key,
        "run": lambda value: isinstance(value, str) and bool(value),
        "weights": is_key,
        "salt": lambda value: value == "" or is_key(value),
        "not_private": lambda value: (
            isinstance(value, dict)
            and set(value) == {"samples", "clipped", "non_finite"}
            and all(type(count) is int and count >= 0 for count in value.values())
        ),
        "geometry": lambda value: isinstance(value, dict),
        "noise": lambda value: isinstance(value, dict),
    }
    if not isinstance(state, dict):
        raise PrivacyError(
            f"the state of a run is a dict, not {type(state).__name__}: it is damaged"
        )
    bad = [name for name, ok in valid.items() if name not in state or not ok(state[name])]
    if not bad and state["step"] + state["lost_steps"] > steps:
        bad = ["step + lost_steps"]
    if not bad and state["noise"].get("next", 0) > state["step"] + state["lost_steps"]:
        bad = ["noise: next"]
    if bad:
        raise PrivacyError(
            f"the state of the run cannot be right: {', '.join(bad)} missing, of another kind or "
            "out of range. It is damaged or was changed: restore it from a backup. Nothing was "
            "changed here"
        )


def open_in_ledger(run: PrivateRun, ledger: Ledger, run_id: str, plan: Plan) -> int:
    """Enter the run in the ledger; returns the steps that it already holds."""
    mechanism, delta = plan.mechanism, plan.delta
    charged = run._ranks.on_first(
        lambda: ledger.open_run(run_id, mechanism, delta=delta, unchecked=plan.unchecked)
    )
    run._ledger_open = True
    return charged


def _load_geometry(geometry: Geometry, state: dict[str, Any]) -> None:
    """All of it or nothing."""
    before = geometry.state_dict()
    try:
        geometry.load_state_dict(state)
    except BaseException:
        geometry.load_state_dict(before)
        raise
