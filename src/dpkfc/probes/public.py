"""Probes from records: public, private for research, and different sources for A and G."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from dpkfc.errors import PrivacyError
from dpkfc.probes import records
from dpkfc.probes.arguments import check_integer
from dpkfc.probes.probe import Probe, Probes
from dpkfc.probes.records import LABELS as LABELS
from dpkfc.probes.records import (
    Columns,
    Overlap,
    digests,
    inputs_and_targets,
    overlap,
    shared_rows,
)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class PublicData:
    """Public DP-KFC: probes from records that are independent of the private ones.

    A refresh draws distinct records, unless there are fewer than it needs.

    Args:
        dataset: a map-style dataset, a tensor of inputs, or a tuple or dict of tensors. In a record
            that is a tuple of two or more elements, the last one is the label and the others are
            the model's inputs. In a dict, the label is `label` or `labels`.
        labels: use the labels. Otherwise the probe loss draws uniform ones.
        collate: makes a batch from a list of records; torch's default_collate by default.
        count: probes per refresh.

    **Guarantee.** The user declares that the records are public. `make_private` compares them with
    the private ones (`check_apart`), but this finds exact copies only.

    >>> import torch
    >>> public = PublicData((torch.randn(100, 8), torch.arange(100)))
    >>> public.draw(32, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([32, 8])
    """

    dataset: Any
    _: KW_ONLY
    labels: bool = False
    collate: Collate | None = None
    count: int = 256

    name = "public data"
    public = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", _map_style("PublicData", self.dataset))
        check_integer("PublicData: count", self.count, 1)

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` random records."""
        return _draw("PublicData", self.dataset, self.labels, self.collate, count, generator)


@dataclass(frozen=True, eq=False)
class Oracle:
    """Probes from the *private* records, for research only: the run reports epsilon = inf.

    The arguments are those of `PublicData`.

    >>> import torch, warnings
    >>> with warnings.catch_warnings(record=True):
    ...     oracle = Oracle(torch.randn(100, 8))
    >>> oracle.public
    False
    """

    dataset: Any
    _: KW_ONLY
    labels: bool = False
    collate: Collate | None = None
    count: int = 256

    name = "ORACLE (private records, not private)"
    public = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", _map_style("Oracle", self.dataset))
        check_integer("Oracle: count", self.count, 1)
        warnings.warn(
            "Oracle builds the geometry from the PRIVATE records: nothing about this run is "
            "differentially private and it will report epsilon = inf. It is for research only; use "
            "PinkNoise, Tokens, Tabular or PublicData",
            UserWarning,
            stacklevel=3,
        )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` random records."""
        return _draw("Oracle", self.dataset, self.labels, self.collate, count, generator)


@dataclass(frozen=True, eq=False)
class Hybrid:
    """The activation factors A from one source, the gradient factors G from another.

    >>> import torch
    >>> from dpkfc.probes.pink import PinkNoise
    >>> public = PublicData(torch.randn(100, 1, 8, 8))
    >>> hybrid = Hybrid(A=public, G=PinkNoise((1, 8, 8), count=512))
    >>> hybrid.name, hybrid.public, hybrid.count
    ('A from public data, G from pink noise', True, 512)
    """

    A: Probe
    G: Probe

    def __post_init__(self) -> None:
        for factor, source in self.sources.items():
            if isinstance(source, Hybrid) or not hasattr(source, "draw"):
                raise TypeError(
                    f"Hybrid: {factor}={type(source).__name__}: give a single source, such as "
                    "PinkNoise or PublicData"
                )

    @property
    def sources(self) -> dict[str, Probe]:
        """The source of each factor."""
        return {"A": self.A, "G": self.G}

    @property
    def name(self) -> str:
        return f"A from {self.A.name}, G from {self.G.name}"

    @property
    def public(self) -> bool:
        return self.A.public and self.G.public

    @property
    def count(self) -> int:
        return max(self.A.count, self.G.count)

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """Raises TypeError: a hybrid has two sources."""
        raise TypeError(
            "Hybrid has no probes of its own: draw from hybrid.A and hybrid.G, each for its own "
            "factor"
        )


def check_apart(source: Any, private: Any) -> bool:
    """Check that no public data contain private records.

    Args:
        source: a geometry, or a probe. Every `PublicData` within is compared. `Oracle` is not: it
            is declared private.
        private: the private data set.

    Returns:
        Whether all records were compared. Data sets of tensors always are. Others are read for
        `records.SECONDS`; after that time, random samples of both were compared.

    Raises:
        PrivacyError: public data contain private records.

    **Guarantee.** None. Equal inputs are found, whatever their type, shape, order and labels.
    Records that were scaled, cropped or transformed at random in another way are not found: the
    user remains responsible for public data being public.
    """
    public = list({id(data): data for data in _public_data(source)}.values())
    if not public:
        return True
    for data in public:
        _refuse_overlap(shared_rows(data.dataset, private))
    begin = time.monotonic()
    public_digests = [digests(data.dataset, begin + records.SECONDS / 2) for data in public]
    private_digests = digests(private, begin + records.SECONDS)
    for data_digests in public_digests:
        _refuse_overlap(overlap(data_digests, private_digests))
    return private_digests.complete and all(part.complete for part in public_digests)


def _public_data(source: Any) -> Iterator[PublicData]:
    """Every PublicData in a geometry, or in a probe composed of others."""
    if isinstance(source, PublicData):
        yield source
    for name in ("probe", "source", "A", "G"):
        if (inner := getattr(source, name, None)) is not None:
            yield from _public_data(inner)


def _refuse_overlap(overlap: Overlap) -> None:
    if overlap.evident:
        raise PrivacyError(
            f"PublicData holds private records: {len(overlap.positions)} of {overlap.compared} "
            "public records that were compared equal private ones, such as the one at position "
            f"{overlap.positions[0]}. The geometry would be computed from them, and epsilon would "
            "not hold. Remove them from PublicData, or use noise instead: PinkNoise, Tokens, "
            "Tabular"
        )


def _map_style(argument: str, data: Any) -> Any:
    """`data` as a map-style dataset."""
    if isinstance(data, Tensor):
        data = (data,)
    tensors = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(data, tuple | Mapping):
        if not tensors or not all(isinstance(part, Tensor) and part.dim() for part in tensors):
            raise TypeError(
                f"{argument}: dataset: a tuple or dict must hold tensors, records along the first "
                "dimension"
            )
        if len({len(part) for part in tensors}) > 1:
            raise ValueError(
                f"{argument}: dataset: the tensors have {[len(part) for part in tensors]} records: "
                "not equal"
            )
        data = Columns(dict(data)) if isinstance(data, Mapping) else TensorDataset(*tensors)
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__getitem__") and isinstance(data, Sized)
    ):
        raise TypeError(
            f"{argument}: dataset={type(data).__name__} has no length and no index: pass a "
            "map-style Dataset or tensors"
        )
    if not len(data):
        raise ValueError(f"{argument}: dataset is empty: pass at least one record")
    return data


def _draw(
    argument: str,
    dataset: Any,
    labels: bool,
    collate: Collate | None,
    count: int,
    generator: torch.Generator,
) -> Probes:
    """Distinct records as long as there are enough of them.

    Random transforms are seeded from `generator`; the global generator is restored.
    """
    check_integer(f"{argument}.draw: count", count, 1)
    size = len(dataset)
    if size >= count:
        rows = torch.randperm(size, generator=generator)[:count]
    else:
        rows = torch.randint(size, (count,), generator=generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        chosen = [dataset[row] for row in rows.tolist()]
        try:
            batch = (collate or default_collate)(chosen)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{argument}: the records do not make a batch ({str(error).splitlines()[0]}): pass "
                "collate=, a function from a list of records to a batch of tensors"
            ) from error
    inputs, targets = inputs_and_targets(batch)
    for name, tensor in _named(inputs):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{argument}: input {name!r} of a batch is {type(tensor).__name__}, not a tensor: "
                "drop it from the records, or pass collate="
            )
    if labels and not isinstance(targets, Tensor):
        raise ValueError(
            f"{argument}: labels=True, but the records carry no label tensor: give (input, label) "
            "tuples or dicts with 'label' or 'labels', or pass labels=False"
        )
    return Probes(inputs, targets if labels else None)


def _named(inputs: Any) -> list[tuple[str, Any]]:
    """The inputs with their names or positions."""
    if isinstance(inputs, dict):
        return list(inputs.items())
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return [(str(position), part) for position, part in enumerate(parts)]
