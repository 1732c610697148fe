"""The few records on which model and loss are tried before any budget is spent."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from dpkfc.engine.check_collate import Collate, check_collate, is_random, shapes
from dpkfc.engine.loader import Source
from dpkfc.engine.rng_state import kept_generators
from dpkfc.probes.public import LABELS

ROWS = 4  # records in a trial batch
INSPECTED = 128  # records, to find some with different targets


@dataclass(frozen=True)
class Trial:
    """A batch to try model and loss on.

    Args:
        batch: as the collate function makes it.
        rows: its records.
        alone: for rows that are padded, the index of the row and a batch of copies of its record,
            which the collate function pads less.
    """

    batch: Any
    rows: int
    alone: dict[int, Any]


def trials_of(source: Source, has_loss: bool) -> tuple[list[Trial], bool]:
    """Two trials, and whether all was tried that a collate function can do wrong.

    Raises:
        PrivacyError: the collate function mixes records.
    """
    collate = source.options.get("collate_fn", default_collate)
    if not has_loss and collate is default_collate:
        return [], True
    with kept_generators():
        records = _records_with_different_targets(source)
        parts = [part for part in (records[:ROWS], records[ROWS:]) if len(part) > 1]
        batches = [collate(deepcopy(part)) for part in parts]
    if not parts:
        return [], True
    checked = check_collate(collate, records)
    random_padding = False
    trials = []
    for part, batch in zip(parts, batches, strict=True):
        alone = _alone(collate, part, batch)
        if alone and is_random(collate, part):
            # another shape, other random numbers: gradients cannot be compared
            alone, random_padding = {}, True
        trials.append(Trial(batch, len(part), alone))
    return trials, checked and not random_padding


def content_digest(source: Source) -> str:
    """A hash of a few records, to notice ranks that were given different data.

    Records that are read differently each time, as by random augmentation, are not compared.
    """

    def digest(seed: int) -> str:
        hashed = hashlib.sha256()
        with kept_generators(seed):
            for row in sorted({0, len(source) // 2, len(source) - 1}):
                for leaf in tree_leaves(source.dataset[row]):
                    is_tensor = isinstance(leaf, Tensor)
                    hashed.update(repr(leaf.tolist() if is_tensor else leaf).encode())
        return hashed.hexdigest()

    first, second = (digest(seed) for seed in (0, 1))
    return first if first == second else "random"


def _alone(collate: Collate, records: list[Any], batch: Any) -> dict[int, Any]:
    copies = {}
    with kept_generators(0):
        for row, record in enumerate(records):
            alone = collate([deepcopy(record) for _ in records])
            if shapes(alone) != shapes(batch):
                copies[row] = alone
    return copies


def _records_with_different_targets(source: Source) -> list[Any]:
    """A few records, with as many different targets as there are among some of the data set.

    A loss with class weights divides by the weights of the whole batch, which cannot be seen on
    records of one class.
    """
    rows = random.Random(0).sample(range(len(source)), min(INSPECTED, len(source)))
    first: dict[str, Any] = {}
    others = []
    for record in (source.dataset[row] for row in rows):
        if first.setdefault(_target(record), record) is not record:
            others.append(record)
    return [*first.values(), *others][: 2 * ROWS]


def _target(record: Any) -> str:
    """The last part of a tuple, or the label of a dict, as a string that equal ones share."""
    if isinstance(record, Mapping):
        return str([record.get(name) for name in LABELS])
    return str(record[-1]) if isinstance(record, tuple | list) else ""
