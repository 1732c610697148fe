"""Poisson and cyclic Poisson batches, and the loader that hands them to a plain PyTorch loop.

Which records step t uses is a function of that step's key alone (and of the key of the groups, if there are several),
so workers may run ahead, and a resumed run continues where it stood, without a sampler state to lose.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from dpkfc.errors import PrivacyError
from dpkfc.random import next_key, sub_key, uniform_bits

NEVER = 1e-12  # a probability that is not reckoned with


def poisson_sample(key: bytes, records: int, rate: float) -> list[int]:
    """Each record independently with probability `rate` (rounded down to a multiple of 2⁻⁶⁴)."""
    if rate >= 1:
        return list(range(records))
    return np.flatnonzero(uniform_bits(key, records) < np.uint64(int(rate * 2**64))).tolist()


class CyclicPoisson:
    """`groups` groups take turns: step t draws each record of group t mod `groups` with probability `rate`.

    Every record belongs to one group, drawn for it independently and uniformly; so adding or removing a record
    changes nothing for the others (groups of equal size would). One group is Poisson sampling; a rate of 1 hands out
    whole groups in turn. A record takes part at most once in `groups` steps: the batches are b-min-separated.

    **Amplification with banded noise.** Let C have at most b = `groups` bands, and take what adding record r
    does to the released stream ``C x + z``. Fix the group of r; it can join steps t = j, j+b, j+2b, .... Let the coin
    say that it joins step t, with the vector v, ‖v‖ ≤ clip, a function of what was released before t. Row i of C x
    moves by ``C[i, t] v``, which is zero but for the rows t ≤ i < t+b; those rows contain no other
    participation of r, and all else in them is a function of earlier rows. So given the past, rows t to t+b-1 are, up
    to a known shift, ``N(0, s²)`` without the record and a mixture ``(1-q) N(0, s²) + q N(C[:, t] vᵀ, s²)`` with it: a
    Poisson-subsampled Gaussian with sensitivity ``‖C[:, t]‖ ‖v‖`` and one coin. Such blocks compose adaptively,
    ⌈n/b⌉ of them at most, whichever group r was in; a mixture over groups is no worse than the worst group.
    """

    def __init__(self, key: bytes, records: int, groups: int, rate: float) -> None:
        self.records, self.groups, self.rate = records, groups, rate
        if groups > 1:
            self._group = uniform_bits(key, records) % np.uint64(
                groups
            )  # uniform but for groups / 2⁶⁴

    @property
    def expected(self) -> float:
        """Records in a batch."""
        return self.records * self.rate / self.groups

    def draw(self, key: bytes, step: int) -> list[int]:
        """The records of one step."""
        if self.groups == 1:
            return poisson_sample(key, self.records, self.rate)
        members = np.flatnonzero(self._group == step % self.groups)
        return [int(row) for row in members[poisson_sample(key, len(members), self.rate)]]


@dataclass(frozen=True)
class Chunk:
    """A physical part of the logical batch of one step."""

    step: int
    rows: int
    of: int  # samples in the whole logical batch
    first: bool
    last: bool


def split(step: int, rows: list[int], at_most: int | None) -> Iterator[tuple[Chunk, list[int]]]:
    """The logical batch in physical chunks; an empty batch is one chunk without records."""
    size = at_most or max(1, len(rows))
    for start in range(0, max(1, len(rows)), size):
        part = rows[start : start + size]
        yield (
            Chunk(step, len(part), len(rows), first=start == 0, last=start + size >= len(rows)),
            part,
        )


KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)


def read_dataset(data: Any) -> tuple[Dataset[Any], dict[str, Any], int | None]:
    """The data set behind `data`, the loader options to keep, and a loader's batch size."""
    dataset: Any = data
    options: dict[str, Any] = {}
    batch_size = None
    if isinstance(data, DataLoader):
        sampler: Any = data.batch_sampler if data.batch_size is None else data.sampler
        batch_size = data.batch_size
        if (
            type(sampler) is BatchSampler
        ):  # as a DataLoader makes it, and one that accelerate has prepared
            sampler, batch_size = sampler.sampler, sampler.batch_size
        if not _shuffles(sampler):
            raise PrivacyError(
                f"the DataLoader draws with {type(sampler).__name__}: the accounting holds for Poisson sampling only, "
                "in which every record has the same chance at every step. Pass a DataLoader without a sampler of its "
                "own, or the data set"
            )
        dataset = data.dataset
        options = {name: getattr(data, name) for name in KEPT_OPTIONS}
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    ):
        raise PrivacyError(
            f"{type(dataset).__name__} has no length and no index: Poisson sampling must be able to draw "
            "any record at any step. Use a map-style Dataset"
        )
    found: Dataset[Any] = dataset  # type: ignore[assignment]
    return found, options, batch_size


def _shuffles(sampler: Any) -> bool:
    """Does it give every record the same chance? Those of torch, and accelerate's, that a DataLoader has by default."""
    kind = type(sampler)
    of_accelerate = (
        kind.__module__.startswith("accelerate.") and kind.__name__ == "SeedableRandomSampler"
    )
    return (kind in (SequentialSampler, RandomSampler) or of_accelerate) and not getattr(
        sampler, "replacement", False
    )


class Steps(Protocol):
    """What the loader tells the run, and asks of it."""

    _key: bytes

    @property
    def charged(self) -> int: ...

    def _start(self) -> tuple[int, bytes]: ...

    def _begin(self, chunk: Chunk, batch: Any) -> None: ...

    def _empty_step(self, chunk: Chunk) -> None: ...

    def end_iteration(self) -> None: ...


class PrivateLoader:
    """Iterating yields the batches of all planned steps that are left, as the collate function makes them."""

    def __init__(
        self,
        dataset: Dataset[Any],
        options: dict[str, Any],
        sampler: Callable[[], CyclicPoisson],
        steps: int,
        at_most: int | None,
        run: Steps,
    ) -> None:
        self.dataset, self._options, self._sampler = dataset, options, sampler
        self._steps, self._at_most, self._run = steps, at_most, run
        self._counted: tuple[int, bytes, int, int] | None = (
            None  # first step, key, steps, and batches in them
        )
        self._under_way: tuple[int, bytes, int] | None = (
            None  # the iteration: its first step, key, and steps
        )

    def __len__(self) -> int:
        """How many batches iterating yields; during an iteration, how many that one yields in all.

        A step yields several if it draws more than `max_physical_batch_size` records, and none if it draws no record.
        """
        charged, key = self._run.charged, self._run._key
        return self._count(*(self._under_way or (charged, key, self._steps - charged)))

    def _count(self, first: int, key: bytes, steps: int) -> int:
        if self._counted is None or self._counted[:3] != (first, key, steps):
            sampler = self._sampler()
            if self._at_most is None and steps * math.exp(-sampler.expected) < NEVER:
                count = steps
            else:
                count, chain = 0, key
                for step in range(first, first + steps):
                    drawn = len(sampler.draw(sub_key(chain, "sampling"), step))
                    count += -(-drawn // (self._at_most or max(1, drawn)))
                    chain = next_key(chain)
            self._counted = first, key, steps, count
        return self._counted[3]

    def __iter__(self) -> Iterator[Any]:
        if self._run.charged == self._steps:
            warnings.warn(
                f"all {self._steps} planned steps have been taken: private.loader yields nothing more. One pass "
                "over it is the whole plan; for epochs, write `for epoch in private.epochs(): for batch in epoch:`",
                stacklevel=2,
            )
        yield from self.take(self._steps - self._run.charged)

    def take(self, steps: int) -> Iterator[Any]:
        """The batches of the next `steps` steps."""
        first, key = self._run._start()
        steps = min(steps, self._steps - first)
        sampler = self._sampler()
        self._under_way = under_way = first, key, steps
        ahead: deque[Chunk] = deque()

        def indices() -> Iterator[list[int]]:
            chain = key
            for step in range(first, first + steps):
                for chunk, rows in split(
                    step, sampler.draw(sub_key(chain, "sampling"), step), self._at_most
                ):
                    ahead.append(chunk)
                    if rows:
                        yield rows
                chain = next_key(chain)

        dataset, options = self.dataset, self._options
        if type(dataset) is TensorDataset and "collate_fn" not in options:
            dataset, options = _WholeBatches(dataset), {**options, "collate_fn": _as_it_is}
        own = torch.Generator()  # for the workers' seeds; the global generator stays put
        own.manual_seed(int.from_bytes(sub_key(key, "workers")[:7], "big"))
        try:
            for batch in DataLoader(
                dataset, batch_sampler=_Batches(indices), generator=own, **options
            ):
                self._skip_empty(ahead)
                self._run._begin(ahead.popleft(), batch)
                yield batch
            self._skip_empty(ahead)
        finally:
            if self._under_way is under_way:  # and not one that was begun since
                self._under_way = None
                self._run.end_iteration()

    def _skip_empty(self, ahead: deque[Chunk]) -> None:
        while ahead and not ahead[0].of:
            self._run._empty_step(ahead.popleft())


class _Batches:
    """A batch sampler made of a generator function."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices()


class _WholeBatches(Dataset[Any]):
    """Tensors indexed once a batch, not once a record."""

    def __init__(self, data: TensorDataset) -> None:
        self.tensors = data.tensors

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        index = torch.tensor(rows)
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self.tensors]


def _as_it_is(batch: Any) -> Any:
    return batch
