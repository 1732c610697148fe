"""A nested state as files: a JSON tree, and its tensors in safetensors; nothing is unpickled.

One process writes one file of tensors. The ranks of a job write one file each, through
torch.distributed.checkpoint: of a sharded tensor each rank writes its own part, and what all ranks
have alike is written once. Any number of ranks can read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpkfc.distributed import Ranks
from dpkfc.sharding import fsdp_placements, is_sharded

TENSORS = "tensors.safetensors"  # of one process
SHARD = "shard-"  # files of ranks begin with this


def is_tensor_file(name: str) -> bool:
    """True for the names of the files that `write_tensors` writes."""
    return name == TENSORS or (name.startswith(SHARD) and name.endswith(".safetensors"))


def write_tensors(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Write the tensors into the folder. All ranks must call this with the same names."""
    if ranks.count == 1:
        save_file(tensors, folder / TENSORS)
        return
    if not tensors:
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(tensors, storage_writer=writer, process_group=ranks.control)


def read_tensors(folder: Path, tree: Any, ranks: Ranks, mesh: Any) -> dict[str, Tensor]:
    """The tensors that the tree names. All ranks must call this.

    Args:
        folder: that `write_tensors` was given.
        tree: what `pack` has returned.
        ranks: of this job.
        mesh: the device mesh of sharded parameters, or None. With a mesh, tensors that were sharded
            when they were written are divided over it. All others, and all tensors of a checkpoint
            of one process, are read whole: see `sharding.divided_like_parameters`.
    """
    if (folder / TENSORS).exists():
        return load_file(folder / TENSORS)
    tensors = {leaf["tensor"]: _empty(leaf, mesh) for leaf in _leaves(tree)}
    if not tensors:
        return {}
    if not any(is_tensor_file(place.name) for place in folder.iterdir()):
        raise ValueError(
            f"it has no tensors: expected '{TENSORS}' or files '{SHARD}*.safetensors'. Copy the "
            "whole folder, to where all ranks can read it"
        )
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    alone = ranks.count == 1
    with warnings.catch_warnings():
        # torch warns if there is no process group, as in one process
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            load(tensors, storage_reader=reader, process_group=ranks.control, no_dist=alone)
        except CheckpointException as problem:
            raise ValueError(f"its tensors cannot be read: {problem}") from problem
    return tensors


def _empty(leaf: dict[str, Any], mesh: Any) -> Tensor:
    dtype = getattr(torch, leaf["dtype"])
    if leaf["sharded_dim"] is None or mesh is None:
        return torch.empty(leaf["shape"], dtype=dtype)
    from torch.distributed.tensor import empty

    placements = fsdp_placements(mesh, leaf["sharded_dim"])
    return empty(*leaf["shape"], dtype=dtype, device_mesh=mesh, placements=placements)


def _leaves(tree: Any) -> Iterator[dict[str, Any]]:
    if "tensor" in tree:
        yield tree
    elif "dict" in tree:
        for _, item in tree["dict"]:
            yield from _leaves(item)
    else:
        for item in tree.get("list", tree.get("tuple", ())):
            yield from _leaves(item)


def pack(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """A JSON tree with every tensor replaced by its name; dictionaries keep their key types.

    Args:
        value: numbers, strings, tensors, and lists, tuples and dictionaries of them.
        tensors: receives the tensors by name.
        place: the name of this value, and the prefix of the names of those inside it.
    """
    if isinstance(value, Tensor):
        sharded = is_sharded(value)
        tensors[place] = value.detach() if sharded else value.detach().clone().contiguous()
        return {
            "tensor": place,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "sharded_dim": _sharded_dim(value) if sharded else None,
        }
    if isinstance(value, dict):
        return {
            "dict": [[key, pack(item, tensors, f"{place}/{key}")] for key, item in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(item, tensors, f"{place}/{k}") for k, item in enumerate(value)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(
        f"cannot write {type(value).__name__} at '{place}' to a checkpoint: states must be made of "
        "tensors, numbers, strings, lists and dictionaries"
    )


def _sharded_dim(value: Any) -> int | None:
    return next((each.dim for each in value.placements if each.is_shard()), None)


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack` was given."""
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [unpack(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content
