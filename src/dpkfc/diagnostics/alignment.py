"""How well the factors of one source agree with those of another (Figures 3, 8 and 9; Appendix G).

For a factor C* of the reference and Ĉ of another source,

    CosSim(C*, Ĉ) = Tr(C*ᵀ Ĉ) / (‖C*‖_F ‖Ĉ‖_F)         direction
    RelFrob(C*, Ĉ) = ‖C* - Ĉ‖_F / ‖C*‖_F                 scale

for C = A, C = G, and the block F = A ⊗ G of the whole layer, for which traces and norms are products:
``Tr(F*ᵀ F̂) = Tr(A*ᵀ Â) Tr(G*ᵀ Ĝ)``. A grouped convolution has a block for each group; traces and squared norms add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from dpkfc.diagnostics.factors import by_name, factors_of
from dpkfc.diagnostics.result import Result, empty_table, is_probe, privacy_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.factors import Spectrum
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss
from dpkfc.tables import TextTable

Triple = tuple[float, float, float]  # of A, of G, of A ⊗ G


@dataclass(frozen=True)
class FactorAlignment:
    """One layer of one source beside the reference. NaN where a factor is zero."""

    layer: str
    cosine: Triple
    error: Triple


@dataclass(frozen=True)
class Alignment(Result):
    """The layers of every source beside the reference."""

    reference: str
    sources: dict[str, tuple[FactorAlignment, ...]]
    privacy: str

    def table(self) -> TextTable:
        headings = [
            f"{what}\n{factor}" for what in ("cosine", "error") for factor in ("A", "G", "A ⊗ G")
        ]
        table = empty_table(
            f"Factors beside those of {self.reference}", self.privacy, ["layer", "source"], headings
        )
        for rows in zip(*self.sources.values(), strict=True):
            for number, (source, row) in enumerate(zip(self.sources, rows, strict=True)):
                figures = (*(f"{x:.3f}" for x in row.cosine), *(f"{x:.3g}" for x in row.error))
                table.add_row("" if number else row.layer, source, *figures)
        return table

    def plot(self, file: str | Path) -> None:
        """Cosine and error of A, G and A ⊗ G, layer by layer, as an image."""
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
    """The factors of each source beside those of `reference`, at the model's present weights.

    Args:
        reference: in the paper the private records: ``Oracle(train, labels=True)``.
        sources: a probe, or several by name.
        loss, probes, approx, max_factor, seed: as in `KFC`.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import factor_alignment
    >>> found = factor_alignment(torch.nn.Linear(4, 2), dpkfc.probes.Tabular(4), {"wider": dpkfc.probes.Tabular(4, std=2.0)})
    >>> 0.7 < found.sources["wider"][0].cosine[0] < 1
    True
    """
    if not is_probe(reference):
        raise PrivacyError(
            f"reference is {type(reference).__name__}: give one probe; records as dpkfc.probes.PublicData(records), or as "
            "dpkfc.probes.Oracle(records) if they are private"
        )
    named = by_name(sources)
    of = partial(
        factors_of,
        model,
        loss=loss,
        probes=probes,
        approx=approx,
        max_factor=max_factor,
        vmap_modules=tuple(vmap_modules),
        seed=seed,
    )
    wanted, rows = of(reference), {}
    for name, source in named.items():
        found = of(source)
        rows[name] = tuple(_compare(layer, wanted[layer], found[layer]) for layer in wanted)
    return Alignment(reference.name, rows, privacy_of([reference, *named.values()]))


def _compare(
    layer: str, wanted: tuple[Spectrum, Spectrum], found: tuple[Spectrum, Spectrum]
) -> FactorAlignment:
    both = [inner(x, y) for x, y in zip(wanted, found, strict=True)]
    of_wanted, of_found = ([x.values.square().sum(1) for x in one] for one in (wanted, found))
    measured = [
        similarity(*(float(part.sum()) for part in parts))
        for parts in (
            *zip(both, of_wanted, of_found, strict=True),
            (both[0] * both[1], of_wanted[0] * of_wanted[1], of_found[0] * of_found[1]),
        )
    ]
    a, g, f = measured
    return FactorAlignment(layer, (a[0], g[0], f[0]), (a[1], g[1], f[1]))


def inner(x: Spectrum, y: Spectrum) -> Tensor:
    """``Tr(Xᵀ Y) = Σ_ij λ_i μ_j (v_i · w_j)²`` for each group, from eigenvalues λ, μ and eigenvectors v, w."""
    overlap = x.vectors.transpose(1, 2) @ y.vectors
    return (x.values[:, :, None] * overlap.square() * y.values[:, None, :]).sum((1, 2))


def similarity(trace: float, wanted: float, found: float) -> tuple[float, float]:
    """CosSim and RelFrob from ``Tr(C*ᵀ Ĉ)``, ``‖C*‖²`` and ``‖Ĉ‖²``; ``‖C* - Ĉ‖² = ‖C*‖² + ‖Ĉ‖² - 2 Tr(C*ᵀ Ĉ)``."""
    cosine = trace / math.sqrt(wanted * found) if wanted > 0 and found > 0 else math.nan
    error = math.sqrt(max(wanted + found - 2 * trace, 0.0) / wanted) if wanted > 0 else math.nan
    return cosine, error
