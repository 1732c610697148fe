"""Copies and rows of a collated batch: nested tensors, mappings, lists, tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def map_parts(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every tensor, and to every flat list of values, of the batch."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {name: map_parts(function, part) for name, part in batch.items()}
        return mapped if type(batch) is dict else _same_class(batch, mapped)
    if _is_flat_list(batch):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(map_parts(function, part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_parts(function, part) for part in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {each.name: getattr(batch, each.name) for each in fields(batch) if each.init}
        return replace(batch, **{name: map_parts(function, part) for name, part in parts.items()})
    return batch


def _is_flat_list(batch: Any) -> bool:
    values = str | bytes | int | float
    is_list = isinstance(batch, list | tuple) and bool(batch)
    return is_list and all(isinstance(part, values) for part in batch)


def _same_class(batch: Mapping[str, Any], mapped: dict[str, Any]) -> Any:
    """Of the class of `batch` if it can be made from a dict, as transformers' BatchEncoding can."""
    try:
        return type(batch)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def parts_of(batch: Any) -> list[Any]:
    """The tensors and lists of the batch, in order."""
    parts: list[Any] = []
    map_parts(lambda part: parts.append(part) or part, batch)  # type: ignore[func-returns-value]
    return parts


def copied(batch: Any) -> Any:
    """A copy with its own tensors, so that changes in place do not reach the batch."""
    return map_parts(
        lambda part: part.detach().clone() if isinstance(part, Tensor) else part, batch
    )


def has_rows(part: Any, rows: int) -> bool:
    """True if the part has one entry per record of a batch of `rows`."""
    if isinstance(part, Tensor):
        return part.dim() > 0 and part.shape[0] == rows
    return len(part) == rows


def pick(batch: Any, rows: int, chosen: list[int]) -> Any:
    """The rows `chosen` of a batch of `rows` records; parts without such rows stay as they are.

    >>> pick({"x": torch.arange(3), "scale": torch.ones(1)}, 3, [2, 2])
    {'x': tensor([2, 2]), 'scale': tensor([1.])}
    """

    def rows_of(part: Any) -> Any:
        if not has_rows(part, rows):
            return part
        if isinstance(part, Tensor):
            return part[torch.tensor(chosen, device=part.device)]
        return type(part)(part[row] for row in chosen)

    return map_parts(rows_of, batch)


def all_equal(batch: Any, rows: int) -> bool:
    """True if all records of the batch are equal: then exchanging them shows nothing."""
    for part in parts_of(batch):
        if has_rows(part, rows):
            if isinstance(part, Tensor):
                equal = torch.equal(part, part[:1].expand_as(part))
            else:
                equal = all(value == part[0] for value in part)
            if not equal:
                return False
    return True
