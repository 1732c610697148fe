"""What a probe is: a source of model inputs that owes nothing to the private records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Inputs = (
    Tensor | tuple[Tensor, ...] | dict[str, Tensor]
)  # called as model(x), model(*x), model(**x)


@dataclass(frozen=True)
class Probes:
    """A batch of probes; every tensor has the probes along its leading dimension.

    >>> import torch
    >>> len(Probes({"input_ids": torch.zeros(4, 7, dtype=torch.long)}))
    4
    """

    inputs: Inputs
    targets: Tensor | None = None  # public ones; without them the probe loss draws its own
    active: Tensor | None = None  # [batch, positions], True where a token is not padding

    def __len__(self) -> int:
        return len(tensors(self.inputs)[0])


class Probe(Protocol):
    """A source of probes. All of it is public knowledge unless `public` is False."""

    @property
    def name(self) -> str: ...

    @property
    def public(self) -> bool:
        """False if it reads the private records: the run then reports epsilon = inf."""

    @property
    def count(self) -> int:
        """How many probes a refresh draws by default."""

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` probes on the CPU, random by `generator` alone."""


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output, however it takes its inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def split(probes: Probes, size: int) -> Iterator[Probes]:
    """The probes in chunks of at most `size`."""
    for start in range(0, len(probes), size):
        yield _each(probes, lambda tensor, rows=slice(start, start + size): tensor[rows])  # type: ignore[misc]


def to(probes: Probes, device: torch.device | str, dtype: torch.dtype) -> Probes:
    """The probes on `device`, floating-point inputs as `dtype`; ids, masks and targets keep their type."""
    moved = _each(probes, lambda tensor: tensor.to(device))
    return replace(
        moved, inputs=_map(moved.inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)
    )


def token_ids(inputs: Inputs) -> Tensor | None:
    """The token ids among the inputs: `input_ids`, or else the first input, if it holds 32- or 64-bit integers."""
    first = (
        inputs["input_ids"]
        if isinstance(inputs, dict) and "input_ids" in inputs
        else tensors(inputs)[0]
    )
    return first if first.dtype in (torch.int32, torch.int64) else None


def tensors(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def _map(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def _each(probes: Probes, function: Callable[[Tensor], Tensor]) -> Probes:
    targets, active = (
        tensor if tensor is None else function(tensor) for tensor in (probes.targets, probes.active)
    )
    return Probes(_map(probes.inputs, function), targets, active)
