"""`Probe`: a source of model inputs that is independent of the private records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Called as model(x), model(*x) or model(**x).
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Probes:
    """A batch of probes. The leading dimension of every tensor is the batch.

    Args:
        inputs: the inputs of the model.
        targets: public targets. Without them the probe loss draws random ones.
        active: [batch, positions], True where a token is not padding.

    >>> import torch
    >>> len(Probes({"input_ids": torch.zeros(4, 7, dtype=torch.long)}))
    4
    """

    inputs: Inputs
    targets: Tensor | None = None
    active: Tensor | None = None

    def __len__(self) -> int:
        return len(tensors(self.inputs)[0])


class Probe(Protocol):
    """A source of probes. All of it is public knowledge unless `public` is False."""

    @property
    def name(self) -> str: ...

    @property
    def public(self) -> bool:
        """False if it reads the private records. The run then reports epsilon = inf."""

    @property
    def count(self) -> int:
        """The default number of probes per refresh."""

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` probes on the CPU. All randomness comes from `generator`."""


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The output of the model, for inputs in any form."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def split(probes: Probes, size: int) -> Iterator[Probes]:
    """The probes in chunks of at most `size`."""
    for start in range(0, len(probes), size):
        yield _map_batch(probes, lambda tensor, rows=slice(start, start + size): tensor[rows])  # type: ignore[misc]


def to(probes: Probes, device: torch.device | str, dtype: torch.dtype) -> Probes:
    """The probes on `device`, with floating-point inputs as `dtype`.

    Ids, masks and targets keep their type.
    """
    moved = _map_batch(probes, lambda tensor: tensor.to(device))
    inputs = _map_inputs(moved.inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)
    return replace(moved, inputs=inputs)


def digest(probes: Probes) -> str:
    """A hash of all tensors, by which ranks compare what they drew."""
    content = hashlib.sha256()
    for tensor in (*tensors(probes.inputs), probes.targets, probes.active):
        if tensor is not None:
            content.update(repr((tensor.shape, tensor.dtype)).encode())
            content.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def token_ids(inputs: Inputs) -> Tensor | None:
    """The token ids among the inputs; None if there are none.

    They are `input_ids`, or else the first input, if it holds 32- or 64-bit integers.
    """
    if isinstance(inputs, dict) and "input_ids" in inputs:
        first = inputs["input_ids"]
    else:
        first = tensors(inputs)[0]
    return first if first.dtype in (torch.int32, torch.int64) else None


def tensors(inputs: Inputs) -> list[Tensor]:
    """The input tensors as a list."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def _map_inputs(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def _map_batch(probes: Probes, function: Callable[[Tensor], Tensor]) -> Probes:
    targets, active = (
        tensor if tensor is None else function(tensor) for tensor in (probes.targets, probes.active)
    )
    return Probes(_map_inputs(probes.inputs, function), targets, active)
