"""The loader that yields Poisson batches to a plain PyTorch loop, and tells the run about each."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

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

from dpkfc.distributed import ALONE, Ranks
from dpkfc.errors import PrivacyError
from dpkfc.random import next_key, sub_key
from dpkfc.sampling import CyclicPoisson

# an expected number of empty batches below this is treated as none
NEGLIGIBLE = 1e-12
# of the user's own DataLoader
KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)


@dataclass(frozen=True)
class Chunk:
    """A physical part of the logical batch of one step, for this rank."""

    step: int
    rows: int  # samples that count
    share: int  # samples of the logical batch that are this rank's
    drawn: int  # samples of the logical batch over all ranks
    first: bool
    last: bool

    @property
    def placeholder(self) -> bool:
        """This rank has no sample left, but others have: it gets one that does not count."""
        return self.drawn > 0 and self.rows == 0


def split(
    step: int, rows: list[int], at_most: int | None, ranks: Ranks = ALONE
) -> Iterator[tuple[Chunk, list[int]]]:
    """This rank's share of the logical batch in physical chunks.

    The sample at place k of the batch goes to rank k mod `ranks.count`. All ranks get the same
    number of chunks, because a loop may communicate at every batch: a rank with fewer samples gets
    a placeholder, a sample of the batch whose gradient is dropped. An empty batch is one chunk
    without records, on every rank.

    >>> [rows for _, rows in split(0, [3, 5, 8], 1, Ranks(rank=1, count=2))]
    [[5], [3]]
    >>> [chunk.rows for chunk, _ in split(0, [3, 5, 8], 1, Ranks(rank=1, count=2))]
    [1, 0]
    """
    share = rows[ranks.rank :: ranks.count]
    largest = -(-len(rows) // ranks.count)
    size = at_most or max(1, largest)
    for start in range(0, max(1, largest), size):
        part = share[start : start + size]
        chunk = Chunk(
            step, len(part), len(share), len(rows), first=start == 0, last=start + size >= largest
        )
        yield chunk, part or rows[:1]


@dataclass(frozen=True)
class Source:
    """A data set, and how its records are read."""

    dataset: Dataset[Any]
    options: dict[str, Any]  # of a DataLoader
    batch_size: int | None  # of the user's own DataLoader, over all ranks

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def read_source(data: Any) -> Source:
    """The data set of `data`, a map-style data set or a DataLoader whose sampler is replaced.

    Raises:
        PrivacyError: a sampler of the user's own: the accounting would not hold for it.
        TypeError: the data set has no length or no index.
    """
    dataset: Any = data
    options: dict[str, Any] = {}
    batch_size = None
    if isinstance(data, DataLoader):
        sampler: Any = data.batch_sampler if data.batch_size is None else data.sampler
        batch_size = data.batch_size
        # as a DataLoader makes it, and one that accelerate has prepared
        sampler, batches = _batches_per_step(data, sampler)
        if type(sampler) is BatchSampler:
            sampler, batch_size = sampler.sampler, sampler.batch_size * batches
        if not _draws_uniformly(sampler):
            raise PrivacyError(
                f"the DataLoader draws with {type(sampler).__name__}: the accounting holds for "
                "Poisson sampling only, in which every record has the same probability at every "
                "step. Pass a DataLoader without a sampler of its own, or the data set"
            )
        dataset = data.dataset
        options = {name: getattr(data, name) for name in KEPT_OPTIONS}
    has_index = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if isinstance(dataset, IterableDataset) or not has_index:
        raise TypeError(
            f"{type(dataset).__name__} has no length or no index: Poisson sampling must be able to "
            "draw any record at any step. Use a map-style Dataset"
        )
    return Source(dataset, options, batch_size)


def _batches_per_step(data: DataLoader[Any], sampler: Any) -> tuple[Any, int]:
    """The user's own sampler, and how many of its batches all ranks together take in one step.

    A DataLoader that accelerate has prepared for several ranks gives each a batch of its own,
    unless it was told to split batches.
    """
    if _of_accelerate(sampler, "BatchSamplerShard"):
        return sampler.batch_sampler, 1 if sampler.split_batches else sampler.num_processes
    loader: Any = data
    if _of_accelerate(loader, "DataLoaderDispatcher") and not loader.split_batches:
        return sampler, loader.state.num_processes
    return sampler, 1


def _of_accelerate(thing: Any, name: str) -> bool:
    return type(thing).__module__.startswith("accelerate.") and type(thing).__name__ == name


def _draws_uniformly(sampler: Any) -> bool:
    """True for the samplers that torch and accelerate give a DataLoader by default."""
    known = type(sampler) in (SequentialSampler, RandomSampler) or _of_accelerate(
        sampler, "SeedableRandomSampler"
    )
    return known and not getattr(sampler, "replacement", False)


class LoaderEvents(Protocol):
    """What the loader tells the run, and asks of it."""

    _key: bytes

    @property
    def charged(self) -> int: ...

    def _start_iteration(self) -> tuple[int, bytes]: ...

    def _begin_batch(self, chunk: Chunk, batch: Any) -> None: ...

    def _seed_generators(self, key: bytes) -> None: ...

    def _take_empty_step(self, chunk: Chunk) -> None: ...

    def _end_iteration(self) -> None: ...


class PrivateLoader:
    """Yields the batches of all planned steps that are left, as the collate function makes them."""

    def __init__(
        self,
        source: Source,
        sampler: Callable[[], CyclicPoisson],
        steps: int,
        max_physical_batch_size: int | None,
        run: LoaderEvents,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.dataset, self._options = source.dataset, source.options
        self._sampler, self._steps = sampler, steps
        self._at_most, self._run = max_physical_batch_size, run
        # of the iteration under way: its first step, key, and number of steps
        self._iteration: tuple[int, bytes, int] | None = None
        # the same of the last count, and the batches
        self._counted: tuple[int, bytes, int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        """Only for names that do not exist, such as those that `skip_first_batches` reads."""
        if name in ("sampler", "batch_sampler"):
            raise AttributeError(
                f"run.loader has no {name}: the run draws its batches. It begins at the next step "
                "of the run, also after a resume: do not skip or resample its batches"
            )
        raise AttributeError(f"run.loader has no attribute '{name}'")

    def __len__(self) -> int:
        """How many batches iterating yields; during an iteration, how many that one yields in all.

        A step yields several if it draws more than `max_physical_batch_size` records, and none if
        it draws no record.
        """
        charged, key = self._run.charged, self._run._key
        return self._count(*(self._iteration or (charged, key, self._steps - charged)))

    def _count(self, first: int, key: bytes, steps: int) -> int:
        if self._counted is None or self._counted[:3] != (first, key, steps):
            sampler = self._sampler()
            empty = steps * math.exp(-sampler.expected_batch_size)
            if self._at_most is None and empty < NEGLIGIBLE:
                count = steps
            else:
                count, chain = 0, key
                for step in range(first, first + steps):
                    drawn = len(sampler.draw(sub_key(chain, "sampling"), step))
                    share = -(-drawn // self._ranks.count)  # the largest of all ranks
                    count += -(-share // (self._at_most or max(1, share)))
                    chain = next_key(chain)
            self._counted = first, key, steps, count
        return self._counted[3]

    def __iter__(self) -> Iterator[Any]:
        if self._run.charged == self._steps:
            warnings.warn(
                f"all {self._steps} planned steps have been taken: run.loader yields nothing more. "
                "One pass over it is the whole plan; for epochs, write "
                "`for epoch in run.epochs(): for batch in epoch:`",
                stacklevel=2,
            )
        yield from self.take(self._steps - self._run.charged)

    def take(self, steps: int) -> Iterator[Any]:
        """The batches of the next `steps` steps; steps without records are taken on the way."""
        with self._iterating(steps) as drawn:
            for chunk, batch in drawn:
                if chunk.drawn:
                    self._run._begin_batch(chunk, batch)
                    yield batch
                else:
                    self._run._take_empty_step(chunk)

    def by_step(self, steps: int) -> Iterator[Iterator[Any]]:
        """One iterator over physical batches for each of the next `steps` steps.

        For loops that count steps themselves, as trainers of frameworks do: a step without records
        is an empty iterator. Exhaust each iterator, then call optimizer.step() once.
        """
        with self._iterating(steps) as drawn:
            for _, parts in groupby(drawn, key=lambda part: part[0].step):
                yield self._physical_batches(parts)

    def _physical_batches(self, parts: Iterator[tuple[Chunk, Any]]) -> Iterator[Any]:
        for chunk, batch in parts:
            self._run._begin_batch(chunk, batch)
            if chunk.drawn:
                yield batch

    @contextmanager
    def _iterating(self, steps: int) -> Iterator[Iterator[tuple[Chunk, Any]]]:
        """The chunks of the next `steps` steps with their batches; None for an empty batch."""
        first, key = self._run._start_iteration()
        steps = min(steps, self._steps - first)
        self._iteration = iteration = first, key, steps
        try:
            yield self._draw(first, key, steps)
        finally:
            # unless another iteration was begun since
            if self._iteration is iteration:
                self._iteration = None
                self._run._end_iteration()

    def _draw(self, first: int, key: bytes, steps: int) -> Iterator[tuple[Chunk, Any]]:
        sampler = self._sampler()
        drawn: deque[Chunk] = deque()  # workers may run ahead

        def indices() -> Iterator[list[int]]:
            chain = key
            for step in range(first, first + steps):
                rows = sampler.draw(sub_key(chain, "sampling"), step)
                if not self._options.get("num_workers"):
                    self._run._seed_generators(chain)  # records are read in this process
                for chunk, part in split(step, rows, self._at_most, self._ranks):
                    drawn.append(chunk)
                    if part:
                        yield part
                chain = next_key(chain)

        dataset, options = self.dataset, self._options
        if type(dataset) is TensorDataset and "collate_fn" not in options:
            dataset, options = _WholeBatches(dataset), {**options, "collate_fn": _unchanged}
        elif not _reads_records_apart(dataset):
            dataset = _OneByOne(dataset)
        # for the seeds of workers, so that the global generator is not used
        generator = torch.Generator()
        worker_key = sub_key(key, f"workers of rank {self._ranks.rank}")
        generator.manual_seed(int.from_bytes(worker_key[:7], "big"))
        loader = DataLoader(
            dataset, batch_sampler=_Batches(indices), generator=generator, **options
        )
        for batch in loader:
            while not drawn[0].drawn:
                yield drawn.popleft(), None
            yield drawn.popleft(), batch
        while drawn:
            yield drawn.popleft(), None


class _Batches:
    """A batch sampler from a generator function."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices()


class _WholeBatches(Dataset[Any]):
    """Tensors indexed once per batch, not once per record."""

    def __init__(self, data: TensorDataset) -> None:
        self.tensors = data.tensors

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        index = torch.tensor(rows)
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self.tensors]


def _reads_records_apart(dataset: Any) -> bool:
    """False if a data set may read several records at once in a way of its own.

    A transform of a Hugging Face data set (`with_transform`) gets all records of a batch, and might
    mix them.
    """
    if not hasattr(dataset, "__getitems__"):
        return True
    of_hugging_face = type(dataset).__module__.startswith("datasets.")
    return of_hugging_face and getattr(dataset, "_format_type", "custom") != "custom"


class _OneByOne(Dataset[Any]):
    """Every record read on its own, as the trial of the loss has read it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, row: int) -> Any:
        return self._dataset[row]


def _unchanged(batch: Any) -> Any:
    return batch
