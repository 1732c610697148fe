"""Copies and rows of a collated batch: nested tensors, mappings, lists, tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def each_part(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with every tensor, and every list of values that are no tensors, replaced by ``function(part)``."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        changed = {name: each_part(function, part) for name, part in batch.items()}
        return changed if type(batch) is dict else _like(batch, changed)
    if (
        isinstance(batch, list | tuple)
        and batch
        and all(isinstance(part, str | bytes | int | float) for part in batch)
    ):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(each_part(function, part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_part(function, part) for part in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {each.name: getattr(batch, each.name) for each in fields(batch) if each.init}
        return replace(batch, **{name: each_part(function, part) for name, part in parts.items()})
    return batch


def _like(batch: Mapping[str, Any], changed: dict[str, Any]) -> Any:
    """Of the same class if it can be made from a dict, as a BatchEncoding of transformers can."""
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def parts_of(batch: Any) -> list[Any]:
    """Its tensors and lists, in order."""
    found: list[Any] = []
    each_part(lambda part: found.append(part) or part, batch)  # type: ignore[func-returns-value]
    return found


def copied(batch: Any) -> Any:
    """With its own tensors, so that changes in place do not reach the batch."""
    return each_part(
        lambda part: part.detach().clone() if isinstance(part, Tensor) else part, batch
    )


def has_rows(part: Any, rows: int) -> bool:
    """Does it hold one entry per record of a batch of `rows`?"""
    return (
        (part.dim() > 0 and part.shape[0] == rows)
        if isinstance(part, Tensor)
        else len(part) == rows
    )


def pick(batch: Any, rows: int, chosen: list[int]) -> Any:
    """The rows `chosen` of a batch of `rows` records; what has no such rows is left as it is.

    >>> pick({"x": torch.arange(3), "scale": torch.ones(1)}, 3, [2, 2])
    {'x': tensor([2, 2]), 'scale': tensor([1.])}
    """

    def some(part: Any) -> Any:
        if not has_rows(part, rows):
            return part
        if isinstance(part, Tensor):
            return part[torch.tensor(chosen, device=part.device)]
        return type(part)(part[row] for row in chosen)

    return each_part(some, batch)


def all_equal(batch: Any, rows: int) -> bool:
    """Are all records of the batch the same? Then nothing can be seen by exchanging them."""
    for part in parts_of(batch):
        if has_rows(part, rows):
            if isinstance(part, Tensor):
                equal = torch.equal(part, part[:1].expand_as(part))
            else:
                equal = all(value == part[0] for value in part)
            if not equal:
                return False
    return True
