"""Records: which part of a record is the input, and whether two data sets share records.

Records are compared by a digest of their inputs. Labels, shapes, names and data types do not count:
a record that was read from a file twice, cast, flattened, or given without its label is the same
record.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

LABELS = ("label", "labels")
SECONDS = 10.0  # time to read public and private data sets record by record, in total
NUMBERS = 2**22  # numbers of a data set of tensors that are hashed at a time
MOST_READ = 2**20  # records that are read one by one, of larger data sets a random sample

Rows = np.ndarray[Any, np.dtype[np.int64]] | range  # a range where all records follow each other


class Columns:
    """A dict of tensors as a map-style dataset."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Split a batch or a record into inputs and label.

    The label is the last of two or more elements; in a dict it is `label` or `labels`.
    """
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name not in LABELS}
        labels = [batch[name] for name in LABELS if name in batch]
        return inputs, labels[0] if labels else None
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) == 1:
        return _plain(batch[0]), None
    return _plain(batch[0]) if len(batch) == 2 else tuple(batch[:-1]), batch[-1]


def _plain(inputs: Any) -> Any:
    """Inputs that are one element of a record: a tensor, or themselves a dict or tuple."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return tuple(inputs) if isinstance(inputs, list) else inputs


@dataclass
class Digests:
    """Digests of the records of a data set, by position.

    If `complete` is False, they are those of a random sample.
    """

    at: dict[int, bytes] = field(default_factory=dict)
    complete: bool = True


def digests(data: Any, deadline: float) -> Digests:
    """The digests of a data set.

    Tensors are hashed completely, other data sets record by record, in random order, until
    `deadline`, a time of `time.monotonic()`, and at most `MOST_READ` records. A record without
    comparable content (an object of an unknown class) counts as not read.
    """
    result = Digests()
    slow_parts: list[tuple[Any, Rows, Rows]] = []
    for part, rows, positions in parts(data):
        columns = _largest_columns(part)
        if columns is None:
            slow_parts.append((part, rows, positions))
        else:
            row_digests = _digests_of_rows(columns, rows)
            result.at.update(zip(_as_list(positions), row_digests, strict=True))
    if sum(len(rows) for _, rows, _ in slow_parts) > MOST_READ:
        result.complete = False
    with _same_randomness() as seed:
        for part, row, position in _in_random_order(slow_parts):
            if time.monotonic() > deadline:
                result.complete = False
                break
            seed()
            if (digest := digest_of(part[row])) is None:
                result.complete = False
            else:
                result.at[position] = digest
    return result


def _in_random_order(dataset_parts: list[tuple[Any, Rows, Rows]]) -> Iterator[tuple[Any, int, int]]:
    """All records of the parts, or `MOST_READ` of them. Nobody can predict which are read first."""
    generator = np.random.default_rng(int.from_bytes(os.urandom(32), "big"))
    ends = np.cumsum([len(rows) for _, rows, _ in dataset_parts], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    chosen = generator.choice(total, min(total, MOST_READ), replace=False) if total else ()
    for at in chosen:
        which = int(np.searchsorted(ends, at, side="right"))
        part, rows, positions = dataset_parts[which]
        within = int(at - ends[which]) + len(rows)
        yield part, int(rows[within]), int(positions[within])


def parts(
    data: Any, rows: Rows | None = None, positions: Rows | None = None
) -> Iterator[tuple[Any, Rows, Rows]]:
    """The data sets of which `data` is composed by `Subset` and `ConcatDataset`.

    Yields each with the rows that are used of it, and their positions in the whole. No array has an
    entry per record unless a `Subset` has one.
    """
    rows = range(len(data)) if rows is None else rows
    positions = range(len(rows)) if positions is None else positions
    if type(data) is Subset:
        indices = np.asarray(data.indices, dtype=np.int64)
        chosen = indices[rows.start : rows.stop] if isinstance(rows, range) else indices[rows]
        yield from parts(data.dataset, chosen, positions)
    elif type(data) is ConcatDataset:
        begin = 0
        for part in data.datasets:
            end = begin + len(part)  # type: ignore[arg-type]
            if isinstance(rows, range):
                first, last = max(rows.start, begin), max(rows.start, begin, min(rows.stop, end))
                here = slice(first - rows.start, last - rows.start)
                yield from parts(part, range(first - begin, last - begin), positions[here])
            else:
                absolute = np.where(rows < 0, rows + len(data), rows)
                mask = (begin <= absolute) & (absolute < end)
                yield from parts(part, absolute[mask] - begin, np.asarray(positions)[mask])
            begin = end
    else:
        yield data, rows, positions


def _as_list(rows: Rows) -> list[int]:
    return list(rows) if isinstance(rows, range) else rows.tolist()


def digest_of(record: Any) -> bytes | None:
    """The digest of the largest input of a record, or of all inputs of that size.

    Smaller inputs (an index, a length, a weight) may differ between copies of a data set. None if
    there is nothing to compare.

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
    """Sizes and contents of the parts of a record; those of a dict in the order of their names."""
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
        if array.dtype.kind in "biuf":
            # torch does not have all of numpy's types.
            dtype = np.float64 if array.dtype.kind == "f" else np.int64
            yield from _leaves(torch.from_numpy(array.astype(dtype)))


def _contents(values: Tensor) -> Iterator[Any]:
    """The bytes of each row: the same for the same values of any data type.

    All numbers are rounded to float32. The rounding errors of large whole numbers are appended.
    Zero has no sign.
    """
    values = torch.view_as_real(values).flatten(1) if values.is_complex() else values
    values = values.detach().cpu()
    numbers = values.float().add(0.0).contiguous()
    if values.is_floating_point() or values.element_size() <= 2:
        yield from numbers.numpy()
        return
    errors = values.long() - numbers.double().long()
    for row, row_errors, is_inexact in zip(
        numbers.numpy(), errors.numpy(), errors.any(1).tolist(), strict=True
    ):
        yield row.tobytes() + row_errors.tobytes() if is_inexact else row


def _largest_columns(data: Any) -> list[Tensor] | None:
    """The largest inputs of a data set of tensors; None for other data sets."""
    if type(data) not in (Columns, TensorDataset):
        return None
    inputs = inputs_and_targets(data.tensors)[0]
    if isinstance(inputs, Mapping):
        tensors = [inputs[name] for name in sorted(inputs, key=str)]
    else:
        tensors = list(inputs) if isinstance(inputs, tuple) else [inputs]
    tensors = [tensor for tensor in tensors if len(tensor)]
    largest = max((tensor[0].numel() for tensor in tensors), default=0)
    return [tensor for tensor in tensors if tensor[0].numel() == largest > 0] or None


def _digests_of_rows(columns: list[Tensor], rows: Rows) -> Iterator[bytes]:
    step = max(1, NUMBERS // sum(column[0].numel() for column in columns))
    for begin in range(0, len(rows), step):
        index = torch.from_numpy(np.asarray(rows[begin : begin + step], dtype=np.int64))
        contents = [
            _contents(column[index.to(column.device)].reshape(len(index), -1)) for column in columns
        ]
        if len(contents) == 1:
            yield from map(_digest, contents[0])
        else:
            yield from (_digest(b"".join(map(bytes, row))) for row in zip(*contents, strict=True))


@contextmanager
def _same_randomness() -> Iterator[Callable[[], None]]:
    """A function that resets all global generators; they are restored at the end.

    So a random transform does the same to the same record.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state()

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.default_generator.manual_seed(0)

    try:
        yield seed
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)


@dataclass(frozen=True)
class Overlap:
    """Records of one data set that are in another one too.

    Args:
        positions: their positions in the first data set.
        compared: the number of records of the first data set that were compared.
        evident: whether this is no coincidence.
    """

    positions: tuple[int, ...]
    compared: int
    evident: bool


def overlap(first: Digests, second: Digests) -> Overlap:
    """The records of `first` that are in `second`.

    In a table of a few short columns, equal records need not be the same ones. So a match is
    evidence only if its content occurs once in `second`. If more than half of all records match,
    they count as the same.
    """
    occurrences = Counter(second.at.values())
    positions = sorted(at for at, digest in first.at.items() if digest in occurrences)
    has_unique_match = any(occurrences[first.at[position]] == 1 for position in positions)
    is_evident = has_unique_match or 2 * len(positions) > len(first.at)
    return Overlap(tuple(positions), len(first.at), is_evident)


def shared_rows(first: Any, second: Any) -> Overlap:
    """Records of `first` that are rows of a data set which is a part of `second` too.

    They are the same records; none is read.
    """
    used_rows: dict[int, list[Rows]] = {}
    for part, rows, _ in parts(second):
        used_rows.setdefault(id(part), []).append(rows)
    positions = {
        position
        for part, rows, part_positions in parts(first)
        for used in used_rows.get(id(part), ())
        for position in _at(part_positions, _shared(rows, used))
    }
    return Overlap(tuple(sorted(positions)), len(first), bool(positions))


def _shared(rows: Rows, used: Rows) -> Rows:
    """Where in `rows` the rows are that are in `used`."""
    if isinstance(rows, range) and isinstance(used, range):
        first = max(rows.start, used.start)
        last = max(first, min(rows.stop, used.stop))
        return range(first - rows.start, last - rows.start)
    if isinstance(rows, range):
        used = np.asarray(used)
        inside = (rows.start <= used) & (used < rows.stop)
        return np.unique(used[inside]) - rows.start
    if isinstance(used, range):
        return np.flatnonzero((used.start <= rows) & (rows < used.stop))
    return np.flatnonzero(np.isin(rows, used))


def _at(positions: Rows, where: Rows) -> list[int]:
    if isinstance(where, range):
        return _as_list(positions[where.start : where.stop])
    chosen: Rows = where + positions.start if isinstance(positions, range) else positions[where]
    return _as_list(chosen)
