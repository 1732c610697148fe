"""Checkpoints of a run: save them, load them, never replace anything else.

A checkpoint holds the model, the optimizer, the state of the private run, the global generators
(dropout, augmentation), and any further object with a `state_dict`. It is written beside its final
place and renamed, so that a kill leaves the old one or the new one. It holds the keys of future
noise: keep it secret, and readable by its owner only.

Under torch.distributed all ranks call `save` and `load` together, on a folder that all of them
see. A checkpoint can be continued by any number of ranks, sharded or not.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dpkfc.engine import guards, lineage, resume
from dpkfc.engine.rng_state import get_generators, set_generators
from dpkfc.engine.state_files import is_tensor_file, pack, read_tensors, unpack, write_tensors
from dpkfc.errors import PrivacyError
from dpkfc.sharding import divided_like_parameters, is_sharded, mesh_of

if TYPE_CHECKING:
    from dpkfc.engine.run import PrivateRun
    from dpkfc.planning.plan import Plan

FORMAT = 6
STATE = "state.json"  # beside the files of tensors


def save(path: str | os.PathLike[str], run: PrivateRun, others: dict[str, Any]) -> None:
    """Write the directory `path`, replacing an earlier checkpoint there, and nothing else."""
    whole = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "generators": run._ranks.everyone(get_generators()),
        "others": {name: thing.state_dict() for name, thing in others.items()},
    }
    _write(path, run, whole)


def save_run(path: str | os.PathLike[str], run: PrivateRun) -> None:
    """Like `save`, without model, optimizer and generators, which a framework saves itself.

    All ranks call it, and the first writes.
    """
    _write(path, run, {})


def _write(path: str | os.PathLike[str], run: PrivateRun, parts: dict[str, Any]) -> None:
    if run.batch_open:
        raise PrivacyError("cannot save in the middle of a batch: save after optimizer.step()")
    ranks = run._ranks
    state = {"private": run.state_dict(), **parts}
    state["private"]["not_private"] = ranks.total(state["private"]["not_private"])
    tensors: dict[str, Tensor] = {}
    tree = pack(state, tensors, "")
    path = Path(path).absolute()
    fresh, checkpoint_id = ranks.on_first(lambda: _prepare(path))
    try:
        write_tensors(fresh, tensors, ranks)
        document = {"format": FORMAT, "id": checkpoint_id, "state": tree}
        ranks.on_first(lambda: _finish(fresh, path, document))
    finally:
        if ranks.first:
            _remove(fresh)
    run._checkpoints.append((path, checkpoint_id))


def _prepare(path: Path) -> tuple[Path, str]:
    """A folder beside the final place, and the id of the checkpoint."""
    for place in (path, _old(path)):
        _check_replaceable(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0700
    return Path(fresh), secrets.token_hex(8)


def _finish(fresh: Path, path: Path, document: dict[str, Any]) -> None:
    """All tensors are written: write the rest, and put the folder in its place."""
    (fresh / STATE).write_text(json.dumps(document))
    _swap(fresh, path)


def load(path: str | os.PathLike[str], run: PrivateRun, others: dict[str, Any]) -> None:
    """Read the directory `path` into the run, its model and its optimizer.

    All is checked before anything changes.
    """
    names = ("model", "optimizer", "generators", "others")
    folder, checkpoint_id, run_state, parts = _read(path, names, run)
    model, optimizer, generators, other_states = parts
    unknown = set(others) ^ set(other_states)
    if unknown:
        raise ValueError(
            f"checkpoint and call disagree about: {', '.join(sorted(unknown))}. Pass the same "
            "keyword arguments to save and load"
        )
    plan = resume.check_state(run, run_state)
    _check_model(run.model, model)
    _check_optimizer(run.optimizer, optimizer)
    model = divided_like_parameters(model, dict(run.model.named_parameters(remove_duplicate=False)))
    optimizer = _optimizer_state_divided(run.optimizer, optimizer)
    # first: if what follows fails, the steps behind these weights are counted
    _continue(run, folder, checkpoint_id, run_state, plan)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    for name, thing in others.items():
        thing.load_state_dict(other_states[name])
    set_generators(generators[run._ranks.rank % len(generators)])


def load_run(path: str | os.PathLike[str], run: PrivateRun) -> None:
    """Read what `save_run` wrote.

    The framework has loaded model and optimizer. Weights of another step are refused.
    """
    folder, checkpoint_id, run_state, _ = _read(path, (), run)
    plan = resume.check_state(run, run_state)
    guards.same_weights(run._weights_digest(), run_state["weights"], run_state["step"])
    _continue(run, folder, checkpoint_id, run_state, plan)


def run_id_of(path: str | os.PathLike[str]) -> str:
    """The id of the run that the checkpoint belongs to."""
    document, _ = _read_document(path)
    return str(_part(document["state"], "private", "run")["value"])


def _part(tree: Any, *names: str) -> Any:
    """A part of the tree that `pack` has returned."""
    for name in names:
        tree = dict(tree["dict"])[name]
    return tree


def _read_document(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """The JSON document of the checkpoint, and its folder."""
    path = Path(path).absolute()
    if not (path / STATE).exists():
        path = _old(path)  # killed between the two renames of `_swap`
    try:
        document = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"'{path}' is not a readable checkpoint: {problem}") from problem
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        given = document.get("format") if isinstance(document, dict) else None
        raise ValueError(f"'{path}' has checkpoint format {given}; this version reads {FORMAT}")
    return document, path


def _read(
    path: str | os.PathLike[str], names: tuple[str, ...], run: PrivateRun
) -> tuple[Path, str, dict[str, Any], list[Any]]:
    """The folder, the id of the checkpoint, the state of the run, and the named parts."""
    document, path = _read_document(path)
    mesh = next((mesh_of(p) for p in run.model.parameters() if is_sharded(p)), None)
    try:
        tensors = read_tensors(path, document["state"], run._ranks, mesh)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"'{path}' is not a readable checkpoint: {problem!r}") from problem
    try:
        state, checkpoint_id = unpack(document["state"], tensors), str(document["id"])
        return path, checkpoint_id, state["private"], [state[name] for name in names]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(
            f"'{path}' is not a readable checkpoint: {problem!r} is missing or damaged"
        ) from problem


def _continue(
    run: PrivateRun, folder: Path, checkpoint_id: str, state: dict[str, Any], plan: Plan
) -> None:
    # asked once: the first rank leaves its mark there when it begins to iterate
    marker = lineage.marker(folder, checkpoint_id)
    continued_before = run._ranks.on_first(marker.exists)
    resume.continue_run(run, state, plan, fresh=continued_before)
    run._checkpoints = [] if continued_before else [(folder, checkpoint_id)]
    if continued_before and run.charged == state["step"] + state["lost_steps"]:
        warnings.warn(lineage.continued_before(folder), stacklevel=4)


def claim(folder: Path, checkpoint_id: str) -> bool | None:
    """Record that the checkpoint with this id in this folder is continued: see `lineage.claim`."""

    def exists() -> bool:
        try:
            return bool(json.loads((folder / STATE).read_text())["id"] == checkpoint_id)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    return lineage.claim(folder, checkpoint_id, exists)


def _check_model(model: nn.Module, state: Any) -> None:
    own = model.state_dict()
    problems = {
        "missing": [name for name in own if name not in state],
        "unknown": [name for name in state if name not in own],
        "of another shape": [
            name for name in own if name in state and state[name].shape != own[name].shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{what} {', '.join(names[:8])}" for what, names in problems.items() if names
        )
        raise ValueError(
            f"the checkpoint belongs to another model: {listed}. Build the model as it was. "
            "Nothing was changed"
        )


def _check_optimizer(optimizer: Optimizer, state: Any) -> None:
    # an optimizer around another one (DiSK) keeps the other's state under this name
    groups = state if "param_groups" in state else state.get("optimizer", state)
    given = [len(group["params"]) for group in groups["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if given != own:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {given} parameters, this one of "
            f"{own}: build it as it was. Nothing was changed"
        )


def _optimizer_state_divided(optimizer: Optimizer, state: Any) -> Any:
    """The state with what is as large as a sharded parameter divided like it."""
    if "param_groups" not in state:
        return state
    params = [p for group in optimizer.param_groups for p in group["params"]]
    divided = {
        index: divided_like_parameters(entries, dict.fromkeys(entries, params[index]))
        for index, entries in state["state"].items()
    }
    return {**state, "state": divided}


def discard(path: Path) -> None:
    """Remove the checkpoint, which is secret, and what a kill may have left of earlier ones."""
    for place in (path, _old(path), *path.parent.glob(f".{path.name}.*")):
        if place.is_dir() and any(place.iterdir()) and not _foreign(place):
            _remove(place)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _foreign(folder: Path) -> list[str]:
    """Files in the folder that neither `save` nor a run continued from it has written."""
    return sorted(
        place.name
        for place in folder.iterdir()
        if place.name != STATE and not is_tensor_file(place.name) and not _is_marker(place)
    )


def _is_marker(place: Path) -> bool:
    return place.name.startswith("continued.") and place.is_file() and place.stat().st_size == 0


def _check_replaceable(path: Path) -> None:
    """Only a checkpoint, and an empty folder, may be replaced."""
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir():
        raise ValueError(
            f"'{path}' exists and is no checkpoint: it was left as it is. Choose another path"
        )
    foreign = _foreign(path)
    if foreign:
        raise ValueError(
            f"'{path}' holds files that are no part of a checkpoint ({', '.join(foreign[:5])}): it "
            "was left as it is. Choose another path to save to, or move them away"
        )


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for place in folder.iterdir():
        if place.name == STATE or is_tensor_file(place.name) or _is_marker(place):
            place.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _swap(fresh: Path, path: Path) -> None:
    if path.exists():
        old = _old(path)
        _remove(old)
        os.replace(path, old)
        os.replace(fresh, path)
        _remove(old)
    else:
        os.replace(fresh, path)
