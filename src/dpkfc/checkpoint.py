"""Checkpoints: tensors in safetensors, everything else in JSON; nothing is ever unpickled.

A checkpoint holds the model, the optimizer, the state of the private run, the global generators (dropout,
augmentation), and any further object with a `state_dict`. It is written beside its final place and
renamed, so that a kill leaves the old one or the new one. It holds the keys of future noise: keep it
secret, and readable by its owner only.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.generators import get_generators, set_generators

if TYPE_CHECKING:
    from dpkfc.run import Private

FORMAT = 3


def save(path: str | os.PathLike[str], private: Private, others: dict[str, Any]) -> None:
    """Write the directory `path`, replacing an earlier checkpoint there."""
    if private.batch_open:
        raise PrivacyError("cannot save in the middle of a batch: save after optimizer.step()")
    state = {
        "model": private.model.state_dict(),
        "optimizer": private.optimizer.state_dict(),
        "private": private.state_dict(),
        "generators": get_generators(),
        "others": {name: thing.state_dict() for name, thing in others.items()},
    }
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors, "")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))  # mode 0700
    try:
        save_file(tensors, fresh / "tensors.safetensors")
        (fresh / "state.json").write_text(json.dumps({"format": FORMAT, "state": tree}))
        _swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load(path: str | os.PathLike[str], private: Private, others: dict[str, Any]) -> None:
    """Read the directory `path` into the run, its model and its optimizer."""
    path = Path(path)
    if not (path / "state.json").exists():
        path = path.with_name(path.name + ".old")  # killed between the two renames of `_swap`
    try:
        document = json.loads((path / "state.json").read_text())
        tensors = load_file(path / "tensors.safetensors")
    except (OSError, ValueError) as problem:
        raise PrivacyError(f"'{path}' is not a readable checkpoint: {problem}") from problem
    if document.get("format") != FORMAT:
        raise PrivacyError(f"'{path}' has checkpoint format {document.get('format')}; this version reads {FORMAT}")
    state = _unpack(document["state"], tensors)
    unknown = set(others) ^ set(state["others"])
    if unknown:
        raise PrivacyError(
            f"checkpoint and call disagree about: {', '.join(sorted(unknown))}. Pass the same keyword "
            "arguments to save and load"
        )
    private.load_state_dict(state["private"])  # first: if the rest does not fit, the steps of its weights are counted
    private.model.load_state_dict(state["model"])
    private.optimizer.load_state_dict(state["optimizer"])
    for name, thing in others.items():
        thing.load_state_dict(state["others"][name])
    set_generators(state["generators"])


def discard(path: Path) -> None:
    """Remove the checkpoint, which is a secret, and all that a kill may have left of others in its place."""
    for place in (path, path.with_name(path.name + ".old"), *path.parent.glob(f".{path.name}.*")):
        shutil.rmtree(place, ignore_errors=True)


def _swap(fresh: Path, path: Path) -> None:
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(fresh, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(fresh, path)


def _pack(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """A JSON tree with every tensor replaced by its name; dictionaries keep their key types."""
    if isinstance(value, Tensor):
        tensors[place] = value.detach().clone().contiguous()
        return {"tensor": place}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, tensors, f"{place}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, tensors, f"{place}/{k}") for k, item in enumerate(value)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise PrivacyError(
        f"cannot write {type(value).__name__} at '{place}' to a checkpoint: states must be made of tensors, "
        "numbers, strings, lists and dictionaries"
    )


def _unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_unpack(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content
