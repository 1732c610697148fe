"""Eigenvalues of the Kronecker-factored curvature by layer and source (Figures 2, 6; Eq. 48)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dpkfc.diagnostics.factors import kronecker_factors, named_sources
from dpkfc.diagnostics.result import DiagnosticResult, empty_table, privacy_statement
from dpkfc.geometry.factors import Spectrum
from dpkfc.probes.arguments import check_integer
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss
from dpkfc.tables import TextTable

MAX_PRODUCTS = 1 << 22  # up to here all products of eigenvalues are formed and sorted
BISECTIONS = 42  # of an interval of logarithms: about eleven digits


@dataclass(frozen=True)
class LayerSpectrum:
    """The eigenvalues of ``A ⊗ G`` of one layer, at some of their ranks (1 is the largest)."""

    layer: str
    sizes: tuple[int, int, int]  # number of groups, size of A and of G per group
    ranks: tuple[int, ...]
    values: tuple[float, ...]
    trace: float
    effective_rank: float  # tr² / ‖·‖_F²

    @property
    def total(self) -> int:
        """The number of eigenvalues."""
        groups, a, g = self.sizes
        return groups * a * g


@dataclass(frozen=True)
class Spectra(DiagnosticResult):
    """The spectra of all layers, for every source."""

    sources: dict[str, tuple[LayerSpectrum, ...]]
    private_sources: tuple[str, ...]  # those that read private records
    privacy: str

    def table(self) -> TextTable:
        headings = ["eigenvalues", "largest", "median", "trace", "effective rank"]
        table = empty_table("Eigenvalues of A ⊗ G", self.privacy, ["layer", "source"], headings)
        for rows in zip(*self.sources.values(), strict=True):
            layer = rows[0].layer
            total = f"{rows[0].total:,}"
            for source, row in zip(self.sources, rows, strict=True):
                median = row.values[_nearest(row.ranks, (row.total + 1) // 2)]
                figures = (f"{x:.2e}" for x in (row.values[0], median, row.trace))
                table.add_row(layer, source, total, *figures, f"{row.effective_rank:.1f}")
                layer = total = ""
        return table

    def plot(self, file: str | Path) -> None:
        """Write a plot with one panel per layer and one curve per source to `file`."""
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
    """The spectrum of every layer, from one source or from several to compare.

    Args:
        model: stays unchanged.
        sources: one probe, or several by name:
            ``{"oracle": Oracle(train), "synthetic": PinkNoise(...)}``.
        points: number of eigenvalues kept per layer, at ranks evenly spread on a logarithmic axis.
        loss, probes, approx, max_factor, seed: as in `KFC`. Labels are random unless a source has
            labels=True.
        vmap_modules: as in `Options`.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import kronecker_spectrum
    >>> spectra = kronecker_spectrum(torch.nn.Linear(4, 2), dpkfc.probes.Tabular(4))
    >>> spectra.sources["Gaussian features"][0].total
    10
    """
    named = named_sources(sources)
    points = check_integer("points", points, 2)
    spectra: dict[str, tuple[LayerSpectrum, ...]] = {}
    for name, source in named.items():
        factors = kronecker_factors(
            model,
            source,
            loss=loss,
            probes=probes,
            approx=approx,
            max_factor=max_factor,
            vmap_modules=vmap_modules,
            seed=seed,
        )
        spectra[name] = tuple(
            _layer_spectrum(layer, a, g, points) for layer, (a, g) in factors.items()
        )
    private = tuple(name for name, source in named.items() if not source.public)
    return Spectra(spectra, private, privacy_statement(named.values()))


def _layer_spectrum(layer: str, a: Spectrum, g: Spectrum, points: int) -> LayerSpectrum:
    a_values = _all_values(a)
    g_values = _all_values(g)
    sizes = (len(a_values), a_values.shape[1], g_values.shape[1])
    ranks = _ranks(sizes[0] * sizes[1] * sizes[2], points)
    values = kronecker_eigenvalues(a_values, g_values, ranks)
    trace = float((a_values.sum(1) * g_values.sum(1)).sum())
    squares = float((a_values.square().sum(1) * g_values.square().sum(1)).sum())
    return LayerSpectrum(
        layer=layer,
        sizes=sizes,
        ranks=tuple(ranks.tolist()),
        values=tuple(values.tolist()),
        trace=trace,
        effective_rank=trace**2 / squares if squares > 0 else 0.0,
    )


def _all_values(factor: Spectrum) -> Tensor:
    """All eigenvalues, [groups, size]."""
    assert factor.tail is not None
    return torch.cat([factor.values, factor.tail], 1).double().cpu()


def _ranks(total: int, points: int) -> Tensor:
    """At most `points` ranks from 1 to `total`, evenly spread on a logarithmic axis."""
    if total <= points:
        return torch.arange(1, total + 1)
    exponents = torch.linspace(0, 1, points, dtype=torch.float64)
    ranks: Tensor = (float(total) ** exponents).round().long().clamp(1, total).unique()
    return ranks


def _nearest(ranks: tuple[int, ...], rank: int) -> int:
    return min(range(len(ranks)), key=lambda k: abs(ranks[k] - rank))


def kronecker_eigenvalues(a: Tensor, g: Tensor, ranks: Tensor) -> Tensor:
    """``Λ_F = sort({λ_i^A · λ_j^G})`` at the given ranks (Eq. 48).

    If there are too many products to form them all, the value at rank k is computed by bisection:
    for any t, the pairs with ``λ_i^A λ_j^G ≥ t`` are counted by searching each ``t / λ_i^A`` among
    the sorted λ^G. This needs memory for one factor times the number of ranks.

    Args:
        a: eigenvalues of A, [groups, size].
        g: eigenvalues of G, [groups, size].
        ranks: 1 is the largest product.

    >>> a, g = torch.tensor([[3.0, 1.0]]), torch.tensor([[5.0, 2.0]])
    >>> kronecker_eigenvalues(a, g, torch.tensor([1, 2, 4]))
    tensor([15.,  6.,  2.])
    """
    if a.numel() * g.shape[1] <= MAX_PRODUCTS:
        products = (a[:, :, None] * g[:, None, :]).flatten().sort(descending=True).values
        return products[ranks - 1]
    return eigenvalues_by_bisection(a, g, ranks)


def eigenvalues_by_bisection(a: Tensor, g: Tensor, ranks: Tensor) -> Tensor:
    """The products at the given ranks, without forming all of them."""
    logs = [(x[x > 0].log(), y[y > 0].log().sort().values) for x, y in zip(a, g, strict=True)]
    logs = [(x, y) for x, y in logs if len(x) and len(y)]
    positive = sum(len(x) * len(y) for x, y in logs)
    if not positive:
        return torch.zeros(len(ranks), dtype=a.dtype)
    smallest = min(float(x.min() + y[0]) for x, y in logs) - 1e-9
    largest = max(float(x.max() + y[-1]) for x, y in logs) + 1e-9
    low = torch.full((len(ranks),), smallest, dtype=a.dtype)
    high = torch.full_like(low, largest)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        counts = [(len(y) - torch.searchsorted(y, middle[:, None] - x)).sum(1) for x, y in logs]
        enough = torch.stack(counts).sum(0) >= ranks
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return torch.where(ranks <= positive, low.exp(), torch.zeros_like(low))
