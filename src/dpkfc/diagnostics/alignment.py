"""Agreement of the Kronecker factors of different sources (Figures 3, 8 and 9; Appendix G).

For a factor M* of the reference and M̂ of another source,

    CosSim(M*, M̂) = Tr(M*ᵀ M̂) / (‖M*‖_F ‖M̂‖_F)         direction
    RelFrob(M*, M̂) = ‖M* - M̂‖_F / ‖M*‖_F                 scale

for M = A, M = G, and the block F = A ⊗ G of the whole layer, for which traces and norms are
products: ``Tr(F*ᵀ F̂) = Tr(A*ᵀ Â) Tr(G*ᵀ Ĝ)``. A grouped convolution has one block per group; traces
and squared norms are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from dpkfc.diagnostics.factors import kronecker_factors, named_sources
from dpkfc.diagnostics.result import DiagnosticResult, empty_table, is_probe, privacy_statement
from dpkfc.geometry.factors import Spectrum
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss
from dpkfc.tables import TextTable

Triple = tuple[float, float, float]  # for A, G and A ⊗ G


@dataclass(frozen=True)
class FactorAlignment:
    """One layer of one source compared with the reference. NaN where a factor is zero."""

    layer: str
    cosine: Triple
    error: Triple


@dataclass(frozen=True)
class Alignment(DiagnosticResult):
    """The layers of every source compared with the reference."""

    reference: str
    sources: dict[str, tuple[FactorAlignment, ...]]
    privacy: str

    def table(self) -> TextTable:
        factors = ("A", "G", "A ⊗ G")
        headings = [f"{measure}\n{factor}" for measure in ("cosine", "error") for factor in factors]
        table = empty_table(
            f"Factors beside those of {self.reference}", self.privacy, ["layer", "source"], headings
        )
        for rows in zip(*self.sources.values(), strict=True):
            layer = rows[0].layer
            for source, row in zip(self.sources, rows, strict=True):
                cosines = (f"{x:.3f}" for x in row.cosine)
                errors = (f"{x:.3g}" for x in row.error)
                table.add_row(layer, source, *cosines, *errors)
                layer = ""
        return table

    def plot(self, file: str | Path) -> None:
        """Write a plot of cosine and error of A, G and A ⊗ G, layer by layer, to `file`."""
        from dpkfc.diagnostics.plots import plot_alignment

        plot_alignment(self, Path(file))


def factor_alignment(
    model: nn.Module,
    reference: Probe,
    sources: Probe | Mapping[str, Probe],
    *,
    loss: Loss = "cross_entropy",
    probes: int | None = None,
    approx: Literal["expand", "reduce"] = "expand",
    max_factor: int = 8192,
    vmap_modules: Iterable[str] = (),
    seed: int = 0,
) -> Alignment:
    """Compare the factors of each source with those of `reference`, at the present weights.

    Args:
        model: stays unchanged.
        reference: in the paper the private records: ``Oracle(train, labels=True)``.
        sources: one probe, or several by name.
        loss, probes, approx, max_factor, seed: as in `KFC`.
        vmap_modules: as in `Options`.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import factor_alignment
    >>> narrow, wide = dpkfc.probes.Tabular(4), dpkfc.probes.Tabular(4, std=2.0)
    >>> alignment = factor_alignment(torch.nn.Linear(4, 2), narrow, {"wider": wide})
    >>> 0.7 < alignment.sources["wider"][0].cosine[0] < 1
    True
    """
    if not is_probe(reference):
        raise TypeError(
            f"reference is {type(reference).__name__}: give one probe; records as "
            "dpkfc.probes.PublicData(records), or as dpkfc.probes.Oracle(records) if they are "
            "private"
        )
    named = named_sources(sources)
    factors_of = partial(
        kronecker_factors,
        model,
        loss=loss,
        probes=probes,
        approx=approx,
        max_factor=max_factor,
        vmap_modules=tuple(vmap_modules),
        seed=seed,
    )
    expected = factors_of(reference)
    rows = {}
    for name, source in named.items():
        factors = factors_of(source)
        rows[name] = tuple(_compare(layer, expected[layer], factors[layer]) for layer in expected)
    return Alignment(reference.name, rows, privacy_statement([reference, *named.values()]))


def _compare(
    layer: str, expected: tuple[Spectrum, Spectrum], factors: tuple[Spectrum, Spectrum]
) -> FactorAlignment:
    traces = [trace_of_product(x, y) for x, y in zip(expected, factors, strict=True)]
    expected_squares = [spectrum.values.square().sum(1) for spectrum in expected]
    squares = [spectrum.values.square().sum(1) for spectrum in factors]
    measured = []
    for per_group in (traces, expected_squares, squares):
        a, g = per_group
        measured.append([float(part.sum()) for part in (a, g, a * g)])
    pairs = [cosine_and_error(*values) for values in zip(*measured, strict=True)]
    (a_cosine, a_error), (g_cosine, g_error), (cosine, error) = pairs
    return FactorAlignment(layer, (a_cosine, g_cosine, cosine), (a_error, g_error, error))


def trace_of_product(x: Spectrum, y: Spectrum) -> Tensor:
    """``Tr(Xᵀ Y) = Σ_ij λ_i μ_j (v_i · w_j)²`` per group, for eigenpairs (λ, v) and (μ, w)."""
    overlap = x.vectors.transpose(1, 2) @ y.vectors
    return (x.values[:, :, None] * overlap.square() * y.values[:, None, :]).sum((1, 2))


def cosine_and_error(trace: float, expected_square: float, square: float) -> tuple[float, float]:
    """CosSim and RelFrob from ``Tr(M*ᵀ M̂)``, ``‖M*‖²`` and ``‖M̂‖²``.

    ``‖M* - M̂‖² = ‖M*‖² + ‖M̂‖² - 2 Tr(M*ᵀ M̂)``.
    """
    if expected_square <= 0:
        return math.nan, math.nan
    error = math.sqrt(max(expected_square + square - 2 * trace, 0.0) / expected_square)
    cosine = trace / math.sqrt(expected_square * square) if square > 0 else math.nan
    return cosine, error
