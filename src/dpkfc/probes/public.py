"""Probes from records: public ones, the private ones for research, and different sources for A and G."""

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
from dpkfc.probes.arguments import whole
from dpkfc.probes.probe import Probe, Probes
from dpkfc.probes.records import LABELS as LABELS
from dpkfc.probes.records import Columns, Overlap, digests, inputs_and_targets, overlap, shared

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class PublicData:
    """Public DP-KFC: records that the user vouches are independent of the private ones.

    `dataset` is a map-style dataset, a tensor of inputs, or a tuple or dict of tensors. Of a record that is a tuple,
    the last of two or more elements is the label and the others are the model's inputs; of a dict, `label` or
    `labels`. Labels are used only if labels=True, otherwise the probe loss draws uniform ones.
    A refresh draws different records, unless there are fewer than it asks for.

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
        object.__setattr__(self, "dataset", _records("PublicData", self.dataset))
        whole("PublicData: count", self.count, 1)

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        return _draw("PublicData", self.dataset, self.labels, self.collate, count, generator)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The geometry of the *private* records, for research only: the run reports epsilon = inf. See `PublicData`.

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
        object.__setattr__(self, "dataset", _records("Oracle", self.dataset))
        whole("Oracle: count", self.count, 1)
        warnings.warn(
            "Oracle builds the geometry from the PRIVATE records: nothing about this run is differentially private "
            "and it will report epsilon = inf. It is for research only; use PinkNoise, Tokens, Tabular or PublicData",
            UserWarning,
            stacklevel=3,
        )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        return _draw("Oracle", self.dataset, self.labels, self.collate, count, generator)


@dataclass(frozen=True, eq=False)
class Hybrid:
    """The activation factors A from one source, the gradient factors G from another.

    >>> import torch
    >>> from dpkfc.probes.pink import PinkNoise
    >>> hybrid = Hybrid(A=PublicData(torch.randn(100, 1, 8, 8)), G=PinkNoise((1, 8, 8), count=512))
    >>> hybrid.name, hybrid.public, hybrid.count
    ('A from public data, G from pink noise', True, 512)
    """

    A: Probe
    G: Probe

    def __post_init__(self) -> None:
        for factor, source in self.sources.items():
            if isinstance(source, Hybrid) or not hasattr(source, "draw"):
                raise PrivacyError(
                    f"Hybrid: {factor}={type(source).__name__}: give a single source, such as PinkNoise or PublicData"
                )

    @property
    def sources(self) -> dict[str, Probe]:
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
        raise PrivacyError(
            "Hybrid has no probes of its own: draw from hybrid.A and hybrid.G, each for its own factor"
        )


def check_apart(source: Any, private: Any) -> bool:
    """Refuse public data that holds private records.

    Args:
        source: a geometry, or a probe; every `PublicData` within is compared. `Oracle` is not: it says what it is.
        private: the private data set.

    Returns:
        Were all records compared? Data sets of tensors always are. Others are read within `records.SECONDS`; if that is
        not enough, random samples of both were compared.

    Guarantee: none. Equal inputs are found, whatever their type, shape, order and labels. Records that were scaled,
    cropped, or transformed at random in another way are not: that public data is public remains the user's word.
    """
    public = list({id(data): data for data in _public(source)}.values())
    if not public:
        return True
    for data in public:
        _refuse(shared(data.dataset, private))
    begin = time.monotonic()
    found = [digests(data.dataset, begin + records.SECONDS / 2) for data in public]
    theirs = digests(private, begin + records.SECONDS)
    for ours in found:
        _refuse(overlap(ours, theirs))
    return theirs.complete and all(ours.complete for ours in found)


def _public(source: Any) -> Iterator[PublicData]:
    """Every PublicData of a geometry, or of a probe made from others."""
    if isinstance(source, PublicData):
        yield source
    for name in ("probe", "source", "A", "G"):
        if (inner := getattr(source, name, None)) is not None:
            yield from _public(inner)


def _refuse(found: Overlap) -> None:
    if found.evident:
        raise PrivacyError(
            f"PublicData holds private records: {len(found.places)} of {found.compared} public records that were "
            f"compared equal private ones, such as the one at position {found.places[0]}. The geometry would be "
            "computed from them, and epsilon would not hold. Remove them from PublicData, or use noise instead: "
            "PinkNoise, Tokens, Tabular"
        )


def _records(where: str, data: Any) -> Any:
    """`data` as a map-style dataset."""
    if isinstance(data, Tensor):
        data = (data,)
    tensors = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(data, tuple | Mapping):
        if not tensors or not all(isinstance(part, Tensor) and part.dim() for part in tensors):
            raise PrivacyError(
                f"{where}: dataset: a tuple or dict must hold tensors, records along the first dimension"
            )
        if len({len(part) for part in tensors}) > 1:
            raise PrivacyError(
                f"{where}: dataset: the tensors have {[len(part) for part in tensors]} records: not equal"
            )
        data = Columns(dict(data)) if isinstance(data, Mapping) else TensorDataset(*tensors)
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__getitem__") and isinstance(data, Sized)
    ):
        raise PrivacyError(
            f"{where}: dataset={type(data).__name__} has no length and no index: pass a map-style Dataset or tensors"
        )
    if not len(data):
        raise PrivacyError(f"{where}: dataset is empty: pass at least one record")
    return data


def _draw(
    where: str,
    dataset: Any,
    labels: bool,
    collate: Collate | None,
    count: int,
    generator: torch.Generator,
) -> Probes:
    """Different records as long as there are enough; random transforms are seeded from `generator`, not globally."""
    whole(f"{where}.draw: count", count, 1)
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
            raise PrivacyError(
                f"{where}: the records do not make a batch ({str(error).splitlines()[0]}): pass collate=, "
                "a function from a list of records to a batch of tensors"
            ) from error
    inputs, targets = inputs_and_targets(batch)
    for name, tensor in _named(inputs):
        if not isinstance(tensor, Tensor):
            raise PrivacyError(
                f"{where}: input {name!r} of a batch is {type(tensor).__name__}, not a tensor: "
                "drop it from the records, or pass collate="
            )
    if labels and not isinstance(targets, Tensor):
        raise PrivacyError(
            f"{where}: labels=True, but the records carry no label tensor: give (input, label) tuples or dicts with "
            "'label' or 'labels', or pass labels=False"
        )
    return Probes(inputs, targets if labels else None)


def _named(inputs: Any) -> list[tuple[str, Any]]:
    if isinstance(inputs, dict):
        return list(inputs.items())
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return [(str(position), part) for position, part in enumerate(parts)]
