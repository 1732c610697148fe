"""Check that the collate function makes each row from one record, and no batch statistic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpkfc.engine.batch import has_rows
from dpkfc.engine.rng_state import kept_generators
from dpkfc.errors import PrivacyError

Collate = Callable[[list[Any]], Any]


def check_collate(collate: Collate, records: list[Any]) -> bool:
    """Refuse a collate function that mixes records, as mixup does.

    With another record in the last place, at most one row may change.

    Returns:
        False if this could not be tried: the function draws random numbers that no seed reaches, or
        fails on a batch with two copies of a record.
    """
    changed = [*records[:-1], records[0]]
    try:
        whole, again, other = (
            tree_leaves(_seeded(collate, given)) for given in (records, records, changed)
        )
        _check_no_statistic(collate, records)
    except PrivacyError:
        raise
    except Exception:
        return False
    for x, y, z in zip(whole, again, other, strict=False):
        comparable = isinstance(x, Tensor) and has_rows(x, len(records)) and x.shape == z.shape
        if not (comparable and torch.equal(x, y)):
            continue  # padded to the longest record, or randomness that no seed reaches
        # as sets: the function may sort the records
        if (_row_counts(x) - _row_counts(z)).total() > 1:
            raise PrivacyError(
                "collate_fn mixes the records of a batch (as mixup does): a record would be "
                "clipped in several rows, and count several times. Make every row from one record"
            )
    return all(_equal(x, y) for x, y in zip(whole, again, strict=True))


def is_random(collate: Collate, records: list[Any]) -> bool:
    """True if the function draws random numbers, as for masked language models."""
    batches = [tree_leaves(_seeded(collate, records, seed)) for seed in (0, 1)]
    return not all(_equal(x, y) for x, y in zip(*batches, strict=True))


def shapes(batch: Any) -> list[Any]:
    """The shapes of all tensors in the batch."""
    return [getattr(x, "shape", None) for x in tree_leaves(_as_dict(batch))]


def _check_no_statistic(collate: Collate, records: list[Any]) -> None:
    """What has no entry per record must not change if all records are copies of one."""
    rows = len(records)
    batches = (records, records, *([record] * rows for record in records))
    whole, again, *alone = (_seeded(collate, given) for given in batches)
    for batch in alone:
        if shapes(batch) != shapes(whole):
            continue  # padded to the longest record: not comparable
        parts = (_parts_without_rows(part, rows) for part in (whole, again, batch))
        for x, y, z in zip(*parts, strict=True):
            if _equal(x, y) and not _equal(x, z):
                raise PrivacyError(
                    "collate_fn computes something from all records of a batch (a mean, a count, "
                    "weights): one record would influence all others through it. Let it return "
                    "only what belongs to single records"
                )


def _parts_without_rows(batch: Any, rows: int) -> list[Any]:
    """The tensors, numbers and lists of numbers in the batch without one entry per record."""
    if isinstance(batch, int | float):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif isinstance(batch, Tensor) or _is_flat(batch):
        return [] if has_rows(batch, rows) else [batch]
    if isinstance(batch, list | tuple):
        return [found for part in batch for found in _parts_without_rows(part, rows)]
    return []


def _is_flat(value: Any) -> bool:
    nested = (Tensor, Mapping, list, tuple)
    return isinstance(value, list | tuple) and not any(isinstance(v, nested) for v in value)


def _equal(x: Any, y: Any) -> bool:
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return torch.equal(x, y) if both else bool(x == y)


def _row_counts(x: Tensor) -> Counter[str]:
    return Counter(str(row.tolist()) for row in x)


def _seeded(collate: Collate, records: list[Any], seed: int = 0) -> Any:
    """With the same random numbers each time, on copies: the function may change its records."""
    with kept_generators(seed):
        return _as_dict(collate([deepcopy(record) for record in records]))


def _as_dict(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch
