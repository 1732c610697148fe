"""Eigenvalues of the Kronecker-factored curvature, layer by layer and source by source (Figures 2 and 6, Eq. 48)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from dpkfc.diagnostics.factors import by_name, factors_of
from dpkfc.diagnostics.result import Result, privacy_of, table_of
from dpkfc.geometry.factors import Spectrum
from dpkfc.probes.arguments import check_integer
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss

FORMED = 1 << 22  # products up to which all of them are formed and sorted
HALVINGS = 42  # of an interval of logarithms: to some eleven digits


@dataclass(frozen=True)
class LayerSpectrum:
    """The eigenvalues of ``A ⊗ G`` of one layer, at some of their ranks (1 is the largest)."""

    layer: str
    sizes: tuple[int, int, int]  # groups, and of A and G in a group
    ranks: tuple[int, ...]
    values: tuple[float, ...]
    trace: float
    effective_rank: float  # tr² / ‖·‖_F²

    @property
    def total(self) -> int:
        groups, a, g = self.sizes
        return groups * a * g


@dataclass(frozen=True)
class Spectra(Result):
    """The layers of every source."""

    sources: dict[str, tuple[LayerSpectrum, ...]]
    private_sources: tuple[str, ...]  # those that read private records
    privacy: str

    def __rich__(self) -> Table:
        headings = ["eigenvalues", "largest", "median", "trace", "effective rank"]
        table = table_of("Eigenvalues of A ⊗ G", self.privacy, ["layer", "source"], headings)
        for rows in zip(*self.sources.values(), strict=True):
            for number, (source, row) in enumerate(zip(self.sources, rows, strict=True)):
                middle = row.values[_nearest(row.ranks, (row.total + 1) // 2)]
                figures = (row.values[0], middle, row.trace)
                first = (row.layer, f"{row.total:,}") if not number else ("", "")
                table.add_row(
                    first[0],
                    source,
                    first[1],
                    *(f"{x:.2e}" for x in figures),
                    f"{row.effective_rank:.1f}",
                )
        return table

    def plot(self, file: str | Path) -> None:
        """A panel a layer, a curve a source, as an image."""
        from dpkfc.diagnostics.plots import plot_spectra

        plot_spectra(self, Path(file))


def kronecker_spectrum(
    model: nn.Module,
    sources: Probe | Mapping[str, Probe],
    *,
    points: int = 256,
    loss: Loss = "cross_entropy",
    probes: int | None = None,
    approx: Literal["expand", "reduce"] = "expand",
    max_factor: int = 8192,
    vmap_modules: Iterable[str] = (),
    seed: int = 0,
) -> Spectra:
    """The spectrum of every layer from one source, or from several to compare: oracle, public, synthetic.

    Args:
        sources: a probe, or several by name: ``{"oracle": Oracle(train), "synthetic": PinkNoise(...)}``.
        points: eigenvalues to keep of a layer, at ranks that are evenly spread on a logarithmic axis.
        loss, probes, approx, max_factor, seed: as in `KFC`. Labels are random unless a source has labels=True.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import kronecker_spectrum
    >>> found = kronecker_spectrum(torch.nn.Linear(4, 2), dpkfc.probes.Tabular(4))
    >>> found.sources["Gaussian features"][0].total
    10
    """
    named, points = by_name(sources), check_integer("points", points, 2)
    spectra: dict[str, tuple[LayerSpectrum, ...]] = {}
    for name, source in named.items():
        factors = factors_of(
            model,
            source,
            loss=loss,
            probes=probes,
            approx=approx,
            max_factor=max_factor,
            vmap_modules=vmap_modules,
            seed=seed,
        )
        spectra[name] = tuple(_layer(layer, a, g, points) for layer, (a, g) in factors.items())
    private = tuple(name for name, source in named.items() if not source.public)
    return Spectra(spectra, private, privacy_of(named.values()))


def _layer(layer: str, a: Spectrum, g: Spectrum, points: int) -> LayerSpectrum:
    of_a, of_g = _every(a), _every(g)
    sizes = (len(of_a), of_a.shape[1], of_g.shape[1])
    ranks = _ranks(sizes[0] * sizes[1] * sizes[2], points)
    trace = float((of_a.sum(1) * of_g.sum(1)).sum())
    squares = float((of_a.square().sum(1) * of_g.square().sum(1)).sum())
    values = kronecker_eigenvalues(of_a, of_g, ranks)
    effective = trace**2 / squares if squares > 0 else 0.0
    return LayerSpectrum(
        layer, sizes, tuple(ranks.tolist()), tuple(values.tolist()), trace, effective
    )


def _every(factor: Spectrum) -> Tensor:
    """All eigenvalues, [groups, size]."""
    assert factor.tail is not None
    return torch.cat([factor.values, factor.tail], 1).double().cpu()


def _ranks(total: int, points: int) -> Tensor:
    if total <= points:
        return torch.arange(1, total + 1)
    exponents = torch.linspace(0, 1, points, dtype=torch.float64)
    ranks: Tensor = (float(total) ** exponents).round().long().clamp(1, total).unique()
    return ranks


def _nearest(ranks: tuple[int, ...], rank: int) -> int:
    return min(range(len(ranks)), key=lambda k: abs(ranks[k] - rank))


def kronecker_eigenvalues(a: Tensor, g: Tensor, ranks: Tensor) -> Tensor:
    """``Λ_F = sort({λ_i^A · λ_j^G})`` at the given ranks (Eq. 48), for eigenvalues [groups, size] of each factor.

    Where the products are too many to form, the value at rank k is found by halving an interval: for any t the pairs
    with ``λ_i^A λ_j^G ≥ t`` are counted by searching each ``t / λ_i^A`` among the sorted λ^G. That takes
    memory for one factor times the number of ranks.

    >>> kronecker_eigenvalues(torch.tensor([[3.0, 1.0]]), torch.tensor([[5.0, 2.0]]), torch.tensor([1, 2, 4]))
    tensor([15.,  6.,  2.])
    """
    if a.numel() * g.shape[1] <= FORMED:
        every = (a[:, :, None] * g[:, None, :]).flatten().sort(descending=True).values
        return every[ranks - 1]
    return by_counting(a, g, ranks)


def by_counting(a: Tensor, g: Tensor, ranks: Tensor) -> Tensor:
    """The products at the given ranks, without forming them."""
    logs = [(x[x > 0].log(), y[y > 0].log().sort().values) for x, y in zip(a, g, strict=True)]
    logs = [(x, y) for x, y in logs if len(x) and len(y)]
    positive = sum(len(x) * len(y) for x, y in logs)
    if not positive:
        return torch.zeros(len(ranks), dtype=a.dtype)
    low = torch.full(
        (len(ranks),), min(float(x.min() + y[0]) for x, y in logs) - 1e-9, dtype=a.dtype
    )
    high = torch.full_like(low, max(float(x.max() + y[-1]) for x, y in logs) + 1e-9)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = torch.stack(
            [(len(y) - torch.searchsorted(y, middle[:, None] - x)).sum(1) for x, y in logs]
        ).sum(0)
        low, high = (
            torch.where(above >= ranks, middle, low),
            torch.where(above >= ranks, high, middle),
        )
    return torch.where(ranks <= positive, low.exp(), torch.zeros_like(low))
