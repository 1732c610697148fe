"""What every reader of private data returns, and how it is split, so that no record has a say in the others' places."""

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

from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probe

Kind = Literal["images", "tabular", "text"]


@dataclass(frozen=True)
class Records:
    """Inputs [N, ...], class numbers [N], and a digest of each record as it stood in the file."""

    x: Tensor
    y: Tensor
    marks: list[bytes]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Read:
    """A source as it was read. `test` is None if the source has no test part of its own."""

    kind: Kind
    names: tuple[str, ...]  # of the classes
    train: Records
    test: Records | None
    probe: Probe  # what inputs look like, from what was declared alone
    remarks: tuple[str, ...] = ()  # what was taken as public


def mark(*parts: bytes) -> bytes:
    """A digest of a record's content."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def split(records: Records, share: float) -> tuple[Records, Records]:
    """Training and test records. Which a record belongs to depends on its own content, and on nothing else.

    Splitting by position would not do: to remove one record would move all later ones by a place, many of them from
    one part to the other, and the training sets of two neighbours would differ in more than one record. Of equal
    records the k-th copy has a place of its own, so that one copy more or less moves none of the others.
    """
    seen: Counter[bytes] = Counter()
    chosen = []
    for content in records.marks:
        place = blake2b(
            content + seen[content].to_bytes(8, "big"), digest_size=8, person=b"dpkfc split"
        ).digest()
        seen[content] += 1
        chosen.append(int.from_bytes(place, "big") < share * 2**64)
    rows = np.array(chosen, dtype=bool)
    return _take(records, np.flatnonzero(~rows)), _take(records, np.flatnonzero(rows))


def joined(parts: Iterable[Records | None]) -> Records:
    found = [part for part in parts if part is not None]
    return Records(
        torch.cat([part.x for part in found]),
        torch.cat([part.y for part in found]),
        [content for part in found for content in part.marks],
    )


def on_device(data: TensorDataset, device: torch.device | str) -> TensorDataset:
    return TensorDataset(*(tensor.to(device) for tensor in data.tensors))


def _take(records: Records, rows: np.ndarray) -> Records:
    index = torch.from_numpy(rows)
    return Records(records.x[index], records.y[index], [records.marks[row] for row in rows])


def numbered(labels: Sequence[str], names: Sequence[str], where: Sequence[str]) -> Tensor:
    """The numbers of the classes; `where` says for each record what an error should point at."""
    number = {name: place for place, name in enumerate(names)}
    for label, place in zip(labels, where, strict=True):
        if label not in number:
            raise PrivacyError(
                f"{place}: the class {label!r} is not one of {some(names)}: correct the record, or declare the class"
            )
    return torch.tensor([number[label] for label in labels], dtype=torch.long)


def distinct(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of classes or categories, each once; a model needs two classes at least."""
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise PrivacyError(f"{where}: {twice!r} is listed twice: list each value once")
    return tuple(names)


def some(names: Sequence[str]) -> str:
    """A list for an error message."""
    return ", ".join(map(repr, names[:8])) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )
