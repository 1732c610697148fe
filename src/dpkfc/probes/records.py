"""Records: which part of one is the input, and do two data sets hold the same ones?

Records are compared by a digest of their inputs. Labels, shapes, names and data types do not count: a record that was
read from a file twice, cast, flattened, or given without its label is the same record.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

LABELS = ("label", "labels")
SECONDS = 10.0  # for reading data sets record by record, public and private ones together
NUMBERS = 2**22  # of a data set made of tensors, hashed at a time

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Columns:
    """A dict of tensors, record by record."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Of a batch or of a record: the last of two or more elements is the label; of a dict, `label` or `labels`."""
    if isinstance(batch, Mapping):
        found = [batch[name] for name in LABELS if name in batch]
        return {name: value for name, value in batch.items() if name not in LABELS}, found[
            0
        ] if found else None
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) == 1:
        return _plain(batch[0]), None
    return _plain(batch[0]) if len(batch) == 2 else tuple(batch[:-1]), batch[-1]


def _plain(inputs: Any) -> Any:
    """Inputs that came as one element of a record: a tensor, or themselves a dict or tuple."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return tuple(inputs) if isinstance(inputs, list) else inputs


@dataclass
class Digests:
    """Digests of the records of a data set, by their position in it."""

    at: dict[int, bytes] = field(default_factory=dict)
    complete: bool = True  # otherwise `at` holds a random sample


def digests(data: Any, deadline: float) -> Digests:
    """Tensors are hashed completely, other data sets record by record, in random order, until the deadline.

    `deadline` is a time of `time.monotonic()`. A record with nothing to compare in it (an object of an unknown class)
    counts as not read.
    """
    found = Digests()
    slow: list[tuple[Any, Rows, Rows]] = []
    for part, rows, places in parts(data):
        columns = _columns(part)
        if columns is None:
            slow.append((part, rows, places))
        else:
            found.at.update(zip(places.tolist(), _hashed(columns, rows), strict=True))
    with _same_randomness() as seed:
        for part, row, place in _in_random_order(slow):
            if time.monotonic() > deadline:
                found.complete = False
                break
            seed()
            if (digest := digest_of(part[row])) is None:
                found.complete = False
            else:
                found.at[place] = digest
    return found


def _in_random_order(several: list[tuple[Any, Rows, Rows]]) -> Iterator[tuple[Any, int, int]]:
    """Nobody can foresee which records are read before the time is over."""
    generator = np.random.default_rng(int.from_bytes(os.urandom(32), "big"))
    which = np.repeat(np.arange(len(several)), [len(rows) for _, rows, _ in several])
    rows, places = (np.concatenate([one[i] for one in several] or [which]) for i in (1, 2))
    for at in generator.permutation(len(which)):
        yield several[which[at]][0], int(rows[at]), int(places[at])


def parts(
    data: Any, rows: Rows | None = None, places: Rows | None = None
) -> Iterator[tuple[Any, Rows, Rows]]:
    """The data sets that one is made of; of each, which rows are used, and their positions in the whole."""
    rows = np.arange(len(data)) if rows is None else rows
    places = np.arange(len(rows)) if places is None else places
    if type(data) is Subset:
        yield from parts(data.dataset, np.asarray(data.indices, dtype=np.int64)[rows], places)
    elif type(data) is ConcatDataset:
        rows = np.where(rows < 0, rows + len(data), rows)
        begin = 0
        for part in data.datasets:
            end = begin + len(part)  # type: ignore[arg-type]
            here = (begin <= rows) & (rows < end)
            yield from parts(part, rows[here] - begin, places[here])
            begin = end
    else:
        yield data, rows, places


def digest_of(record: Any) -> bytes | None:
    """Of the largest input of a record, or of all that are as large. What is smaller (an index, a length, a weight)
    may differ from one copy of a data set to another. None if there is nothing to compare.

    >>> digest_of((torch.tensor([1.0, 2.0]), 7)) == digest_of({"x": np.array([1, 2]), "label": 3})
    True
    """
    leaves = list(_leaves(inputs_and_targets(record)[0]))
    largest = max((size for size, _ in leaves), default=0)
    content = b"".join(content for size, content in leaves if size == largest)
    return _digest(content) if largest else None


def _digest(content: Any) -> bytes:
    return hashlib.sha256(content).digest()[:16]  # processors have instructions for it


def _leaves(value: Any) -> Iterator[tuple[int, bytes]]:
    """Sizes and contents of what a record is made of; of a dict by name, in whatever order they come."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from _leaves(value[name])
    elif isinstance(value, str | bytes):
        yield len(value), value.encode() if isinstance(value, str) else value
    elif isinstance(value, Tensor):
        dense = value if value.layout is torch.strided else value.to_dense()
        yield value.numel(), b"".join(map(bytes, _contents(dense.reshape(1, -1))))
    elif isinstance(value, tuple | list) and not all(
        isinstance(item, int | float) for item in value
    ):
        for item in value:
            yield from _leaves(item)
    else:  # an array, an image, numbers
        array = np.asarray(value)
        if array.dtype.kind in "biuf":  # torch does not know all of them
            yield from _leaves(
                torch.from_numpy(array.astype(np.float64 if array.dtype.kind == "f" else np.int64))
            )


def _contents(values: Tensor) -> Iterator[Any]:
    """The bytes of each row: the same for the same values, whatever type they have.

    All are rounded to float32; what that loses of large whole numbers comes behind. Zero has no sign.
    """
    values = torch.view_as_real(values).flatten(1) if values.is_complex() else values
    values = values.detach().cpu()
    numbers = values.float().add(0.0).contiguous()
    if values.is_floating_point() or values.element_size() <= 2:
        yield from numbers.numpy()
        return
    rest = values.long() - numbers.double().long()
    for row, lost, is_lost in zip(numbers.numpy(), rest.numpy(), rest.any(1).tolist(), strict=True):
        yield row.tobytes() + lost.tobytes() if is_lost else row


def _columns(data: Any) -> list[Tensor] | None:
    """The largest inputs of a data set that is made of tensors."""
    if type(data) not in (Columns, TensorDataset):
        return None
    inputs = inputs_and_targets(data.tensors)[0]
    if isinstance(inputs, Mapping):
        tensors = [inputs[name] for name in sorted(inputs, key=str)]
    else:
        tensors = list(inputs) if isinstance(inputs, tuple) else [inputs]
    largest = max((tensor[0].numel() for tensor in tensors if len(tensor)), default=0)
    return [
        tensor for tensor in tensors if len(tensor) and tensor[0].numel() == largest > 0
    ] or None


def _hashed(columns: list[Tensor], rows: Rows) -> Iterator[bytes]:
    step = max(1, NUMBERS // sum(column[0].numel() for column in columns))
    for begin in range(0, len(rows), step):
        index = torch.from_numpy(rows[begin : begin + step])
        chosen = [
            _contents(column[index.to(column.device)].reshape(len(index), -1)) for column in columns
        ]
        if len(chosen) == 1:
            yield from map(_digest, chosen[0])
        else:
            yield from (_digest(b"".join(map(bytes, row))) for row in zip(*chosen, strict=True))


@contextmanager
def _same_randomness() -> Iterator[Any]:
    """A function that sets all global generators to one state, so that a random transform does the same to the same
    record. In the end they are as before.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.default_generator.manual_seed(0)

    try:
        yield seed
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


@dataclass(frozen=True)
class Overlap:
    """What was found of one data set in another."""

    places: tuple[int, ...]  # positions of records that are in the other as well
    compared: int  # records of the one
    evident: bool  # no coincidence


def overlap(one: Digests, other: Digests) -> Overlap:
    """Which records of `one` are in `other`.

    In a table of a few short columns, equal records need not be the same ones. So a match is evidence only if its
    content occurs once in `other`; but if more than half of all records match, they are taken to be the same.
    """
    often = Counter(other.at.values())
    places = sorted(place for place, digest in one.at.items() if digest in often)
    unique = any(often[one.at[place]] == 1 for place in places)
    return Overlap(tuple(places), len(one.at), unique or 2 * len(places) > len(one.at))


def shared(one: Any, other: Any) -> Overlap:
    """Records of `one` that are rows of a data set which is a part of `other` too: the same ones, unread."""
    whose: dict[int, Rows] = {}
    for part, rows, _ in parts(other):
        whose[id(part)] = np.union1d(whose.get(id(part), rows), rows)
    places = [
        place
        for part, rows, its_places in parts(one)
        if id(part) in whose
        for place in its_places[np.isin(rows, whose[id(part)])].tolist()
    ]
    return Overlap(tuple(sorted(places)), len(one), bool(places))
