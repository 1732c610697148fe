"""Parameters that FSDP2 (`fully_shard`) has divided over the ranks: which part this rank holds.

A sharded parameter is a DTensor. Its rows (the first dimension) are divided over the n ranks that
hold one copy of the model (all ranks, except with HSDP): `ceil(rows / n)` rows each, so that the
last pieces may be smaller or empty. Everything that is as large as the parameter is kept in such
pieces: sums of gradients, their noise, the buffers of correlated noise. During forward and backward
passes FSDP2 replaces the parameter by the gathered one; `engine` and `per_sample` keep the sharded
one as the parameter's identity.

All functions accept ordinary parameters too, of which every rank holds the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpkfc.distributed import Ranks


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which FSDP2 keeps after an evaluation: `parameters()` are sharded.

    All ranks may call this at any time between passes; nothing is sent.
    """
    for module in model.modules():
        # a module that fully_shard was called on; its class is not imported for other models
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of the module before fully_shard, which puts a subclass in its place."""
    kind = type(module)
    return kind.__bases__[1] if hasattr(module, "_get_fsdp_state") else kind


def is_sharded(p: Tensor) -> bool:
    """True for a DTensor. `problem_with` checks how it is divided."""
    return hasattr(p, "device_mesh")


def mesh_of(p: Tensor) -> Any:
    """The device mesh that a sharded parameter is divided over."""
    return p.device_mesh  # type: ignore[attr-defined]


def local(p: Tensor) -> Tensor:
    """What this rank holds of the parameter, or of its gradient."""
    return p.to_local() if is_sharded(p) else p  # type: ignore[attr-defined]


def own_rows(p: Tensor) -> tuple[int, int]:
    """The first of this rank's rows, and the row behind its last."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = p
    shape, offset = compute_local_shape_and_global_offset(
        placed.shape, placed.device_mesh, placed.placements
    )
    return (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)


def own_part(p: Tensor, full: Tensor) -> Tensor:
    """This rank's part of a tensor of the whole parameter's shape; a copy if it is a part."""
    if not is_sharded(p):
        return full
    start, stop = own_rows(p)
    return full[start:stop].clone()


def owned_ranges(params: Iterable[nn.Parameter]) -> list[range]:
    """Index ranges of the flat vector of all parameters that this rank holds, one per parameter.

    The noise of an entry depends on the key of the step and on the index of the entry in this
    vector. So it does not depend on the number of ranks.
    """
    ranges, offset = [], 0
    for p in params:
        start, stop = 0, p.numel()
        if is_sharded(p):
            row = p.numel() // max(1, p.shape[0])
            start, stop = (row * index for index in own_rows(p))
        ranges.append(range(offset + start, offset + stop))
        offset += p.numel()
    return ranges


def sum_over_ranks(full: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """This rank's parts of the sums over all ranks, for sharded parameters of one mesh and dtype.

    All of them are sent in one reduce-scatter, because many small ones would each wait for all
    ranks. With HSDP, an all-reduce over the copies of the model follows.
    """
    mesh = mesh_of(next(iter(full)))
    *replicate_dims, shard_dim = range(mesh.ndim)
    count = mesh.size(shard_dim)
    # [ranks, numbers of a rank]; the last ranks' rows are padded, as FSDP2 divides them
    together = torch.cat([_rows_by_rank(x, count) for x in full.values()], dim=1)
    sums = together.new_empty(together.shape[1])
    dist.reduce_scatter_tensor(sums, together.flatten(), group=mesh.get_group(shard_dim))
    for dim in replicate_dims:
        dist.all_reduce(sums, group=mesh.get_group(dim))
    parts = {}
    for p, part in zip(full, sums.split(_sizes_by_rank(full.values(), count)), strict=True):
        start, stop = own_rows(p)
        shape = (stop - start, *p.shape[1:])
        # a copy: a view would keep the whole bucket
        parts[p] = part[: math.prod(shape)].view(shape).clone()
    return parts


def _rows_by_rank(x: Tensor, count: int) -> Tensor:
    """[rows, ...] as [count, numbers of the rows of each rank], padded with zeros."""
    rows = x.reshape(len(x), -1)
    missing = -len(rows) % count
    return nn.functional.pad(rows, (0, 0, 0, missing)).view(count, -1)


def _sizes_by_rank(tensors: Iterable[Tensor], count: int) -> list[int]:
    return [-(-len(x) // count) * (x.numel() // len(x)) for x in tensors]


def tensors_to_copy(model: nn.Module) -> list[Tensor]:
    """What is copied from the first rank: buffers, and parameters that are not sharded."""
    whole = [p for p in model.parameters() if not is_sharded(p)]
    return [*whole, *(b for b in model.buffers() if not is_sharded(b))]


def zeros_of(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for what this rank holds of the parameter."""
    return torch.zeros_like(local(p.detach()), dtype=dtype)


def like_parameter(p: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a tensor that an optimizer can use as the parameter's gradient."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    placed: Any = p
    return DTensor.from_local(
        part,
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )


def fsdp_placements(mesh: Any, dim: int) -> list[Any]:
    """Shard dimension `dim` over the last mesh dimension; replicate over the others (HSDP)."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]


def divided_like_parameters(
    tensors: Mapping[str, Any], params: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Tensors by name, with whole tensors of sharded parameters replaced by this rank's part."""

    def divided(name: str, value: Any) -> Any:
        p = params.get(name)
        if p is None or not is_sharded(p) or not isinstance(value, Tensor) or is_sharded(value):
            return value
        return like_parameter(p, own_part(p, value)) if value.shape == p.shape else value

    return {name: divided(name, value) for name, value in tensors.items()}


def buffers_by_parameter(past: Tensor, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Buffers of the flat vector of all parameters, [K, own size], as one [K, ...] per parameter.

    Those of a sharded parameter are sharded like it.
    """
    sizes = [local(p).numel() for p in params.values()]
    buffers = {}
    for (name, p), part in zip(params.items(), past.split(sizes, dim=1), strict=True):
        own = part.reshape(len(past), *local(p).shape)
        if is_sharded(p):
            from torch.distributed.tensor import DTensor

            mesh = mesh_of(p)
            shape = torch.Size((len(past), *p.shape))
            stride = torch.empty(shape, device="meta").stride()
            placements = fsdp_placements(mesh, 1)
            own = DTensor.from_local(
                own, mesh, placements, run_check=False, shape=shape, stride=stride
            )
        buffers[name] = own
    return buffers


def flat_buffers(buffers: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]) -> Tensor:
    """The inverse of `buffers_by_parameter`; whole buffers are cut to this rank's part."""
    parts = []
    for name, p in params.items():
        own = local(buffers[name])
        if is_sharded(p) and not is_sharded(buffers[name]):
            start, stop = own_rows(p)
            own = own[:, start:stop]
        parts.append(own.reshape(len(own), -1))
    return torch.cat(parts, dim=1)


def problem_with(p: nn.Parameter, ranks: Ranks) -> str | None:
    """Why a sharded parameter cannot be trained privately; None if it can."""
    if not is_sharded(p):
        return None
    placed: Any = p
    if placed.device_mesh.size() != ranks.count:
        return (
            f"is divided over {placed.device_mesh.size()} ranks of a job of {ranks.count}: other "
            "ranks would hold another part of the model, as with tensor parallelism. Use "
            "fully_shard over all ranks"
        )
    for placement in placed.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            return (
                f"has the placement {placement}: noise is drawn for consecutive rows. Use "
                "fully_shard without shard_placement_fn"
            )
    if local(p).device.type != placed.device_mesh.device_type:
        return (
            "is kept on the CPU and computed elsewhere (CPUOffloadPolicy): its sums and noise "
            "would be computed on the wrong device. Use fully_shard without offload_policy"
        )
    return None


def all_or_none(params: Mapping[str, nn.Parameter]) -> str | None:
    """Why the trainable parameters cannot be trained together: some are sharded, others not."""
    whole = [name for name, p in params.items() if p.requires_grad and not is_sharded(p)]
    sharded = [name for name, p in params.items() if p.requires_grad and is_sharded(p)]
    if whole and sharded:
        return (
            f"'{sharded[0]}' is sharded and '{whole[0]}' is not: call fully_shard on the model "
            "itself after its parts, so that it takes all that is left, without ignored_params"
        )
    return None
