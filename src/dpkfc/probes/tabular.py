"""Probes for flat features: Gaussian rows, and sparse non-negative rows such as TF-IDF."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from dpkfc.probes.arguments import (
    check_distinct_ids,
    check_fraction,
    check_integer,
    check_number,
)
from dpkfc.probes.probe import Probes
from dpkfc.probes.zipf import zipf


@dataclass(frozen=True, eq=False)
class Tabular:
    """Gaussian rows [features].

    Args:
        features: the number of features.
        mean, std: public statistics, one number or one per feature.
        correlation: ρ between any two features, through a shared part:
            ``√ρ shared + √(1-ρ) own``.
        classes: the number of classes of the model, which is compared with its output.
        count: probes per refresh.

    >>> import torch
    >>> Tabular(features=5, std=2.0).draw(3, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([3, 5])
    """

    features: int
    _: KW_ONLY
    mean: float | Tensor = 0.0
    std: float | Tensor = 1.0
    correlation: float = 0.0
    classes: int | None = None
    count: int = 256

    name = "Gaussian features"
    public = True

    def __post_init__(self) -> None:
        check_integer("Tabular: features", self.features, 1)
        check_fraction("Tabular: correlation", self.correlation)
        check_integer("Tabular: count", self.count, 1)
        if self.classes is not None:
            check_integer("Tabular: classes", self.classes, 1)
        for argument, value in (("mean", self.mean), ("std", self.std)):
            numbers = torch.as_tensor(value)
            if numbers.shape not in ((), (self.features,)):
                raise ValueError(
                    f"Tabular: {argument} has shape {tuple(numbers.shape)}: give one number, or "
                    f"features={self.features}"
                )
            if not numbers.isfinite().all() or (argument == "std" and (numbers <= 0).any()):
                raise ValueError(
                    f"Tabular: {argument}: give finite numbers{' above 0' * (argument == 'std')}"
                )

    @staticmethod
    def sparse(
        features: int,
        nonzeros: int,
        *,
        exponent: float = 1.0,
        normalise: bool = True,
        order: Sequence[int] | None = None,
        classes: int | None = None,
        count: int = 256,
    ) -> SparseTabular:
        """Non-negative rows with `nonzeros` entries each, such as TF-IDF: see `SparseTabular`."""
        return SparseTabular(
            features,
            nonzeros,
            exponent=exponent,
            normalise=normalise,
            order=order,
            classes=classes,
            count=count,
        )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` rows."""
        check_integer("Tabular.draw: count", count, 1)
        rows = torch.randn(count, self.features, generator=generator, dtype=torch.float32)
        if self.correlation:
            shared = torch.randn(count, 1, generator=generator, dtype=torch.float32)
            rows = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * rows
        mean = torch.as_tensor(self.mean, dtype=torch.float32, device="cpu")
        std = torch.as_tensor(self.std, dtype=torch.float32, device="cpu")
        return Probes(rows * std + mean)


@dataclass(frozen=True)
class SparseTabular:
    """Synthetic bags of words: TF-IDF-like rows [features] with `nonzeros` positive entries.

    The features of a row are drawn by Zipf's law over their ranks,
    ``p ∝ 1/(rank + 2.7)^exponent``. The value of feature j is a log-normal count times
    ``1 + log(1/π_j)``, where ``π_j = 1 - (1 - p_j)^nonzeros`` is about the share of rows that have
    it, so the weights need no fitted document frequencies.

    Args:
        features: the number of columns.
        nonzeros: positive entries per row.
        exponent: of Zipf's law.
        normalise: scale rows to length 1.
        order: the columns from the most to the least frequent; by default their own order.
        classes: the number of classes of the model, which is compared with its output.
        count: probes per refresh.

    >>> import torch
    >>> probe = Tabular.sparse(features=100, nonzeros=7)
    >>> row = probe.draw(1, torch.Generator().manual_seed(0)).inputs
    >>> int((row > 0).sum()), round(float(row.norm()), 5)
    (7, 1.0)
    """

    features: int
    nonzeros: int
    _: KW_ONLY
    exponent: float = 1.0
    normalise: bool = True
    order: Sequence[int] | None = None
    classes: int | None = None
    count: int = 256

    name = "sparse features"
    public = True

    def __post_init__(self) -> None:
        check_integer("SparseTabular: features", self.features, 1)
        check_integer("SparseTabular: count", self.count, 1)
        check_number("SparseTabular: exponent", self.exponent, least=0)
        if self.classes is not None:
            check_integer("SparseTabular: classes", self.classes, 1)
        if self.order is not None:
            order = check_distinct_ids("SparseTabular: order", self.order, self.features)
            object.__setattr__(self, "order", order)
        available = self.features if self.order is None else len(self.order)
        if check_integer("SparseTabular: nonzeros", self.nonzeros, 1) > available:
            raise ValueError(
                f"SparseTabular: nonzeros={self.nonzeros}: a row has only {available} features to "
                "use"
            )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` rows."""
        check_integer("SparseTabular.draw: count", count, 1)
        columns = torch.arange(self.features) if self.order is None else torch.tensor(self.order)
        frequencies = zipf(len(columns), self.exponent)
        row_share = -torch.expm1(self.nonzeros * torch.log1p(-frequencies))
        weights = (1 - torch.log(row_share)).float()
        chosen = _without_replacement(frequencies, count, self.nonzeros, generator)
        normals = torch.randn(count, self.nonzeros, generator=generator, dtype=torch.float32)
        values = torch.exp(normals / 2) * weights[chosen]
        if self.normalise:
            values = values / values.norm(dim=1, keepdim=True)
        return Probes(values.new_zeros(count, self.features).scatter_(1, columns[chosen], values))


def _without_replacement(
    frequencies: Tensor, rows: int, size: int, generator: torch.Generator
) -> Tensor:
    """[rows, size], distinct indices per row: the largest of ``log p + Gumbel noise``."""
    uniform = torch.rand(rows, len(frequencies), generator=generator, dtype=torch.float64)
    return (torch.log(frequencies) - torch.log(-torch.log(uniform))).topk(size, dim=1).indices
