"""Records as readers return them, and a split that moves no record because of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpkfc.app.suggestions import did_you_mean
from dpkfc.probes.probe import Probe

Kind = Literal["images", "tabular", "text"]
SHOWN = 8  # names in an error message


@dataclass(frozen=True)
class Records:
    """Inputs [N, ...], class numbers [N], and a digest of each record as it is in the file."""

    x: Tensor
    y: Tensor
    digests: list[bytes]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ParsedSource:
    """The content of a source. `test` is None if the source has no test part of its own."""

    kind: Kind
    names: tuple[str, ...]  # of the classes
    train: Records
    test: Records | None
    probe: Probe  # resembles the inputs, from declared facts alone
    remarks: tuple[str, ...] = ()  # what is treated as public


def content_digest(*parts: bytes) -> bytes:
    """A digest of a record's content."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def split(records: Records, share: float) -> tuple[Records, Records]:
    """Split into training and test records, with about `share` of the records in the test.

    **Guarantee.** The part of a record depends only on its own content. Under a split by position,
    removing one record would shift all later ones, and many would change their part: the training
    sets of neighbouring data sets would differ in more than one record. The k-th copy of equal
    records has a hash of its own, so one copy more or less moves none of the others.
    """
    copies: Counter[bytes] = Counter()
    in_test = []
    for digest in records.digests:
        hashed = blake2b(
            digest + copies[digest].to_bytes(8, "big"), digest_size=8, person=b"dpkfc split"
        ).digest()
        copies[digest] += 1
        in_test.append(int.from_bytes(hashed, "big") < share * 2**64)
    rows = np.array(in_test, dtype=bool)
    return _take(records, np.flatnonzero(~rows)), _take(records, np.flatnonzero(rows))


def concatenate(parts: Iterable[Records | None]) -> Records:
    """All records of the parts that are not None."""
    present = [part for part in parts if part is not None]
    return Records(
        torch.cat([part.x for part in present]),
        torch.cat([part.y for part in present]),
        [digest for part in present for digest in part.digests],
    )


def on_device(data: TensorDataset, device: torch.device | str) -> TensorDataset:
    """The data with its tensors on the device."""
    return TensorDataset(*(tensor.to(device) for tensor in data.tensors))


def _take(records: Records, rows: np.ndarray) -> Records:
    index = torch.from_numpy(rows)
    return Records(records.x[index], records.y[index], [records.digests[row] for row in rows])


def class_numbers(labels: Sequence[str], names: Sequence[str], where: Sequence[str]) -> Tensor:
    """The number of each label's class. `where` locates each record, for error messages."""
    number = {name: position for position, name in enumerate(names)}
    for label, place in zip(labels, where, strict=True):
        if label not in number:
            raise ValueError(
                f"{place}: the class {label!r} is not one of {preview(names)}"
                f"{did_you_mean(label, names)}: correct the record, or declare the class"
            )
    return torch.tensor([number[label] for label in labels], dtype=torch.long)


def check_distinct(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of classes or categories; raises ValueError if one is listed twice."""
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"{where}: {twice!r} is listed twice: list each value once")
    return tuple(names)


def preview(names: Sequence[str]) -> str:
    """The first names of a list, for error messages."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + rest
