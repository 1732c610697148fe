"""Probes for flat features: Gaussian ones, and sparse non-negative ones such as TF-IDF."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.arguments import distinct_ids, real, share, whole
from dpkfc.probes.probe import Probes
from dpkfc.probes.zipf import zipf


@dataclass(frozen=True, eq=False)
class Tabular:
    """Gaussian rows [features] with the given public `mean` and `std`, one number or one a feature.

    `correlation` ρ between any two features comes from a part that they share: ``√ρ shared + √(1-ρ) own``.

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
        whole("Tabular: features", self.features, 1)
        share("Tabular: correlation", self.correlation)
        whole("Tabular: count", self.count, 1)
        if self.classes is not None:
            whole("Tabular: classes", self.classes, 1)
        for where, value in (("mean", self.mean), ("std", self.std)):
            given = torch.as_tensor(value)
            if given.shape not in ((), (self.features,)):
                raise PrivacyError(
                    f"Tabular: {where} has shape {tuple(given.shape)}: give one number, or features={self.features}"
                )
            if not given.isfinite().all() or (where == "std" and (given <= 0).any()):
                raise PrivacyError(
                    f"Tabular: {where}: give finite numbers{' above 0' * (where == 'std')}"
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
        whole("Tabular.draw: count", count, 1)
        rows = torch.randn(count, self.features, generator=generator, dtype=torch.float32)
        if self.correlation:
            shared = torch.randn(count, 1, generator=generator, dtype=torch.float32)
            rows = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * rows
        mean, std = (
            torch.as_tensor(value, dtype=torch.float32, device="cpu")
            for value in (self.mean, self.std)
        )
        return Probes(rows * std + mean)


@dataclass(frozen=True)
class SparseTabular:
    """Bags of words without a text: TF-IDF-like rows [features] with `nonzeros` positive entries.

    Which features a row has follows Zipf's law over their ranks, ``p ∝ 1/(rank + 2.7)^exponent``: the order of the
    columns, or `order`, the columns from the most to the least frequent. The value of feature j is a log-normal
    count times ``1 + log(1/π_j)``, where ``π_j = 1 - (1 - p_j)^nonzeros`` is about the share of rows that have it
    (so the weights need no fitted document frequencies); rows are then scaled to length 1 if `normalise`.

    >>> import torch
    >>> row = Tabular.sparse(features=100, nonzeros=7).draw(1, torch.Generator().manual_seed(0)).inputs
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
        whole("SparseTabular: features", self.features, 1)
        whole("SparseTabular: count", self.count, 1)
        real("SparseTabular: exponent", self.exponent, least=0)
        if self.classes is not None:
            whole("SparseTabular: classes", self.classes, 1)
        if self.order is not None:
            object.__setattr__(
                self, "order", distinct_ids("SparseTabular: order", self.order, self.features)
            )
        available = self.features if self.order is None else len(self.order)
        if whole("SparseTabular: nonzeros", self.nonzeros, 1) > available:
            raise PrivacyError(
                f"SparseTabular: nonzeros={self.nonzeros}: a row has only {available} features to use"
            )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        whole("SparseTabular.draw: count", count, 1)
        columns = torch.arange(self.features) if self.order is None else torch.tensor(self.order)
        often = zipf(len(columns), self.exponent)
        weight = (1 - torch.log(-torch.expm1(self.nonzeros * torch.log1p(-often)))).float()
        chosen = _without_replacement(often, count, self.nonzeros, generator)
        values = torch.exp(
            torch.randn(count, self.nonzeros, generator=generator, dtype=torch.float32) / 2
        )
        values = values * weight[chosen]
        if self.normalise:
            values = values / values.norm(dim=1, keepdim=True)
        return Probes(values.new_zeros(count, self.features).scatter_(1, columns[chosen], values))


def _without_replacement(often: Tensor, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] different indices a row, by weight: the largest of ``log p + Gumbel noise``."""
    uniform = torch.rand(rows, len(often), generator=generator, dtype=torch.float64)
    return (torch.log(often) - torch.log(-torch.log(uniform))).topk(size, dim=1).indices
