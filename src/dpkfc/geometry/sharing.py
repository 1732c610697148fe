"""How the ranks of a job share a refresh, so that all of them have the same maps, bit by bit.

1. *Probes.* All ranks draw the same probes, from a public seed. Each runs the passes over its own
   chunks (`Probing.share_passes`).
2. *Moments.* Each layer has an owner (`owners`). What the probes contributed to the layer is added
   up there (`sum_at_owners`).
3. *Maps.* The owner alone computes eigenvectors and roots, and sends them to all (`build_once`).
4. *Check.* All ranks compare a checksum of their maps (`demand_same_maps`).

**Bytes** that a rank sends per refresh, with b bytes per number (4; 8 for models in float64). For a
factor of size d that n probe vectors contribute to:

* to the owner, once: ``b n d`` if n < d, otherwise ``b d²`` (times the groups of a convolution);
* from the owner to all: the root, ``b (d r + r)`` at rank r or ``b d²`` in full, and the spectrum
  in float64, ``8 d r`` or ``8 d²``. `KFC(post=...)` sends one more root.
* `Diagonal`, and `KFC(others="diagonal")` for parameters without factors: ``b`` per entry from the
  owner; `Diagonal` also ``b`` per entry to the owner.

The rest is small: counts, times and checksums, over the control group.

**Guarantee.** What is sent follows from probes and weights. No message depends on private records
beyond the weights, which private steps released.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpkfc.distributed import Ranks, buckets
from dpkfc.errors import PrivacyError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def owners(work: Mapping[Key, float], count: int) -> dict[Key, int]:
    """Divide tasks over ranks: the largest first, each to the rank with the least work so far.

    >>> owners({"a": 1.0, "b": 5.0, "c": 3.0}, 2)
    {'a': 1, 'b': 0, 'c': 1}
    """
    loads = [0.0] * count
    owner_of = {}
    for key in sorted(work, key=lambda key: -work[key]):  # stable: the same on all ranks
        owner_of[key] = loads.index(min(loads))
        loads[owner_of[key]] += work[key]
    return {key: owner_of[key] for key in work}


def sum_at_owners(
    ranks: Ranks, tensors: dict[Key, Tensor], owner_of: Mapping[Key, int]
) -> dict[Key, Tensor]:
    """The sums over the ranks of those tensors that this rank owns.

    All ranks give the same keys and shapes, in the same order. The tensors are used up.
    """
    if ranks.count == 1:
        return tensors
    sums: dict[Key, Tensor] = {}
    for owner in range(ranks.count):
        owned = {key: tensor for key, tensor in tensors.items() if owner_of[key] == owner}
        for keys in buckets(owned):
            flat = _flat([owned[key] for key in keys])
            dist.reduce(flat, dst=owner)
            if owner == ranks.rank:
                parts = flat.split([owned[key].numel() for key in keys])
                for key, part in zip(keys, parts, strict=True):
                    sums[key] = part.view(owned[key].shape)
            for key in keys:
                del owned[key], tensors[key]
    return sums


def build_once(
    ranks: Ranks, owner_of: Mapping[Key, int], build: Callable[[Key], T], device: torch.device
) -> dict[Key, T]:
    """``build(key)`` for every key, each on one rank; all ranks get all results.

    Args:
        ranks: of the job.
        owner_of: the rank that builds each.
        build: returns an object of any kind that can be pickled. Tensors in it are sent as they
            are, without a copy on the CPU, and are contiguous on all ranks.
        device: where this rank keeps the tensors.

    Raises:
        Exception: the error of the rank whose `build` failed, on all ranks.
    """
    if ranks.count == 1:
        return {key: build(key) for key in owner_of}
    own: dict[Key, T] = {}
    with ranks.together():
        own = {key: build(key) for key, owner in owner_of.items() if owner == ranks.rank}
    content, own_tensors = _take_apart(own)
    described = [(tensor.shape, tensor.dtype) for tensor in own_tensors]
    built: dict[Key, T] = {}
    for owner, (pickled, shapes) in enumerate(ranks.everyone((content, described))):
        tensors = own_tensors
        if owner != ranks.rank:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        _broadcast_(tensors, owner)
        built |= _PutTogether(pickled, tensors).load()
    return {key: built[key] for key in owner_of}


def demand_same_maps(ranks: Ranks, state: Any) -> None:
    """Refuse maps that differ between the ranks: per-sample gradients would be clipped in different
    spaces, and the weights of the ranks would drift apart.
    """
    if ranks.count > 1 and len(set(ranks.everyone(checksum(state)))) > 1:
        raise PrivacyError(
            "the ranks of this job have different maps after a refresh: a device or a connection "
            "returns wrong results. Start again from the last checkpoint"
        )


def checksum(state: Any) -> str:
    """A digest of numbers and tensors in nested dicts and lists.

    Of a tensor, the bit patterns are added up by row and by column, on its device: every single
    wrong bit changes it, and so does an exchange of two different entries.
    """
    digest = hashlib.sha256()
    for leaf in _leaves(state):
        if isinstance(leaf, Tensor):
            rows = leaf.detach().reshape(-1, leaf.shape[-1] if leaf.dim() else 1)
            bits = rows.contiguous().view(torch.int32)
            sums = torch.cat([bits.sum(dim, dtype=torch.int64) for dim in (0, 1)])
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(sums.cpu().numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for key, value in state.items() for leaf in (key, *_leaves(value))]
    if isinstance(state, list):
        return [leaf for value in state for leaf in _leaves(value)]
    return [state]


def _flat(tensors: list[Tensor]) -> Tensor:
    """One vector; of a single tensor, its own memory if possible."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _broadcast_(tensors: list[Tensor], owner: int) -> None:
    """Overwrite contiguous tensors with those of the owner."""
    by_kind = sorted(enumerate(tensors), key=lambda item: str(item[1].dtype))
    numbered = {number: tensor for number, tensor in by_kind if tensor.numel()}
    for numbers in buckets(numbered):
        together = [numbered[number] for number in numbers]
        flat = _flat(together)
        dist.broadcast(flat, src=owner)
        if len(together) > 1:
            parts = flat.split([tensor.numel() for tensor in together])
            for tensor, part in zip(together, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def _take_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """A pickle in which tensors are numbers, and the tensors."""
    file = io.BytesIO()
    pickler = _TakeApart(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


class _TakeApart(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach().contiguous())
        return len(self.tensors) - 1


class _PutTogether(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]
