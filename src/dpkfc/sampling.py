"""Poisson and cyclic Poisson batches, and the loader that hands them to a plain PyTorch loop.

Which records step t uses is a function of that step's key alone (and of the key of the groups, if there are several),
so workers may run ahead, and a resumed run continues where it stood, without a sampler state to lose.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from dpkfc.errors import PrivacyError
from dpkfc.noise.rng import next_key, sub_key, uniform_bits


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
            self._group = uniform_bits(key, records) % np.uint64(groups)  # uniform but for groups / 2⁶⁴

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
        yield Chunk(step, len(part), len(rows), first=start == 0, last=start + size >= len(rows)), part


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
        sampler = data.batch_sampler if data.batch_size is None else data.sampler
        if type(sampler) not in (SequentialSampler, RandomSampler) or getattr(sampler, "replacement", False):
            raise PrivacyError(
                f"the DataLoader draws with {type(sampler).__name__}: the accounting holds for Poisson sampling only, "
                "in which every record has the same chance at every step. Pass a DataLoader without a sampler of its "
                "own, or the data set"
            )
        dataset, batch_size = data.dataset, data.batch_size
        options = {name: getattr(data, name) for name in KEPT_OPTIONS}
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)):
        raise PrivacyError(
            f"{type(dataset).__name__} has no length and no index: Poisson sampling must be able to draw "
            "any record at any step. Use a map-style Dataset"
        )
    found: Dataset[Any] = dataset  # type: ignore[assignment]
    return found, options, batch_size


class Steps(Protocol):
    """What the loader tells the run, and asks of it."""

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

    def __len__(self) -> int:
        """Steps left (a step takes several iterations if batches are split, none if it drew no record)."""
        return self._steps - self._run.charged

    def __iter__(self) -> Iterator[Any]:
        if not len(self):
            warnings.warn(
                f"all {self._steps} planned steps have been taken: private.loader yields nothing more. One pass "
                "over it is the whole plan; for epochs, write `for epoch in private.epochs(): for batch in epoch:`",
                stacklevel=2,
            )
        yield from self.take(len(self))

    def take(self, steps: int) -> Iterator[Any]:
        """The batches of the next `steps` steps."""
        first, key = self._run._start()
        sampler = self._sampler()
        ahead: deque[Chunk] = deque()

        def indices() -> Iterator[list[int]]:
            chain = key
            for step in range(first, min(first + steps, self._steps)):
                for chunk, rows in split(step, sampler.draw(sub_key(chain, "sampling"), step), self._at_most):
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
            for batch in DataLoader(dataset, batch_sampler=_Batches(indices), generator=own, **options):
                self._skip_empty(ahead)
                self._run._begin(ahead.popleft(), batch)
                yield batch
            self._skip_empty(ahead)
        finally:
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
