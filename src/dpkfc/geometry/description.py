"""A Kronecker geometry in numbers, layer by layer: a table and a plot.

Condition numbers are those of the damped factor: ``A + μ I`` before the map, ``U (A + μ I) U``
after it. With power 1 and a full-rank map the second is 1; a larger value shows what a low rank
leaves. (A itself is often singular: the backprops of a softmax sum to zero.) The effective rank
``tr² / ‖·‖_F²`` is that of A before the map. After it, it is that of U A U, the covariance of the
mapped probes, and counts the directions that are really whitened.

A low-rank map resolves only some directions. The others count with their own eigenvalues where
these were computed. Otherwise their mean stands for all of them, and the numbers are bounds, marked
"≥" and "≤".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot, Root, Spectrum, condition
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.tables import Column, TextTable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from dpkfc.geometry.kfc import Refresh

Names = tuple[str, ...]
HEADINGS = (
    *("layer", "map", "size", "largest\neigenvalue", "smallest", "effective\nrank", "condition"),
    *("form", "products\na position", "memory", "refresh"),
)
# Columns of the two tables into which the whole table is split where it would be too wide.
SPECTRUM_COLUMNS = tuple(range(7))
COST_COLUMNS = (0, 1, 7, 8, 9, 10)
TEXT_WIDTH = 160
LEGEND = "before → after: effective rank of the factor, condition of the damped factor"
NOT_PRIVATE = "NOT PRIVATE: built from the private records, which all of this reveals"


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """Eigenvalues of one factor over all its groups, and the effect of the map on them."""

    values: Tensor  # decreasing; the mean stands for those that were not computed
    resolved: int  # how many of them the map resolves
    damping: tuple[float, float]  # smallest and largest μ over the groups
    exact: bool  # all eigenvalues were computed
    effective_rank: tuple[float, float]  # before and after; upper bounds unless exact
    condition: tuple[float, float]  # before and after; lower bounds unless exact

    @property
    def largest(self) -> float:
        return float(self.values[0])

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue; an upper bound of it unless `exact`."""
        return float(self.values[-1])


@dataclass(frozen=True)
class FactorRow:
    """One factor of a layer and its root; a grouped convolution has one block per group."""

    groups: int
    size: int  # of one block
    rank: int  # directions per block that the root resolves
    form: Literal["full", "low rank", "none"]  # "none": the factor is zero on the probes
    multiplications: int  # to map the vectors of one position
    memory: int  # bytes
    spectrum: Eigenvalues | None  # None if the map came from a checkpoint


@dataclass(frozen=True)
class LayerRow:
    """The maps of one layer, or of a parameter without Kronecker factors."""

    name: str
    kind: Literal["Kronecker", "scaled", "unchanged"]
    a: FactorRow | None = None
    g: FactorRow | None = None
    post: FactorRow | None = None  # the map after the noise: once per step, not per position
    scale: tuple[float, float] | None = None  # smallest and largest
    memory: int = 0  # bytes of all its maps
    seconds: float | None = None  # of the last refresh

    @property
    def multiplications(self) -> int:
        """Multiplications that the map adds to one position of one training sample."""
        return sum(factor.multiplications for factor in (self.a, self.g) if factor is not None)

    @property
    def factors(self) -> dict[str, FactorRow]:
        named = {"A": self.a, "G": self.g, "post": self.post}
        return {name: factor for name, factor in named.items() if factor is not None}


@dataclass(frozen=True)
class Description:
    """A geometry at its last refresh.

    It is public, as the probes and the released weights are, unless `public` is False.
    """

    rows: tuple[LayerRow, ...]
    probe: str
    public: bool
    every: int
    step: int | None  # of the last refresh; None if the maps came from a checkpoint
    seconds: float | None  # the last refresh, including the probes' passes; None as for `step`

    @property
    def title(self) -> str:
        when = "maps from a checkpoint" if self.step is None else f"as of step {self.step}"
        return f"geometry from {self.probe}, {when}, refreshed every {self.every} steps"

    def tables(self, width: int) -> list[TextTable]:
        """One table, or two where one would be wider than `width`."""
        whole = self._table(range(len(HEADINGS)))
        if whole.natural_width <= width:
            return [whole]
        return [self._table(SPECTRUM_COLUMNS), self._table(COST_COLUMNS)]

    def plot(self, file: str | Path) -> None:
        """Write a plot of the eigenvalues and condition numbers of every factor to `file`."""
        from dpkfc.geometry.plots import plot_geometry

        plot_geometry(self, Path(file))

    def __str__(self) -> str:
        lines = [] if self.public else [NOT_PRIVATE]
        lines += [self.title, "", *map(str, self.tables(TEXT_WIDTH)), "", self._totals, LEGEND]
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if not self.public:
            yield Text(NOT_PRIVATE, style="bold red")
        yield Text(self.title, style="italic")
        yield from self.tables(options.max_width)
        yield Text(self._totals, style="dim")
        yield Text(LEGEND, style="dim")

    @property
    def _totals(self) -> str:
        memory = f"in all {_bytes(sum(row.memory for row in self.rows))}"
        if self.seconds is None:
            return memory
        return f"{memory} and {_time(self.seconds)} a refresh, the probes' passes included"

    def _table(self, columns: Sequence[int]) -> TextTable:
        table = TextTable(
            "",
            [Column(HEADINGS[k], "left" if k < 2 else "right", wrap=True) for k in columns],
            border=False,
            width=TEXT_WIDTH,
        )
        for row in self.rows:
            for cells in _cells(row):
                table.add_row(*(cells[k] for k in columns))
        return table


@dataclass(frozen=True)
class MapSettings:
    """The settings that the maps were built with."""

    probe: str
    public: bool
    every: int
    damping: float  # π, relative to the mean eigenvalue
    stability: float  # γ, absolute
    power: float


def describe(
    maps: Mapping[Names, KroneckerMap | DiagonalMap],
    post: Mapping[Names, KroneckerMap],
    spectra: Mapping[Names, tuple[Spectrum, Spectrum | None]],
    last: Refresh | None,
    settings: MapSettings,
) -> Description:
    """Describe the maps of a geometry.

    Args:
        maps: by the names of the parameters that each maps.
        post: the maps after the noise, by the same names.
        spectra: eigenvalues of A and G at the last refresh.
        last: the last refresh; None if the maps came from a checkpoint.
        settings: what the maps were built with.
    """
    seconds = {} if last is None else last.layer_seconds
    rows: dict[Names, LayerRow] = {}
    for names, layer_map in maps.items():
        if isinstance(layer_map, DiagonalMap):
            rows[names] = _scaled_row(names, layer_map)
        else:
            spectrum = spectra.get(names, (None, None))
            rows[names] = _kronecker_row(
                names, layer_map, post.get(names), spectrum, settings, seconds.get(names)
            )
    if last is not None:
        mapped = {name for names in maps for name in names}
        for name in last.parameters:
            if name not in mapped:
                rows[(name,)] = LayerRow(name, "unchanged")
        order = {name: number for number, name in enumerate(last.parameters)}
        rows = {names: rows[names] for names in sorted(rows, key=lambda names: order[names[0]])}
    return Description(
        tuple(rows.values()),
        settings.probe,
        settings.public,
        settings.every,
        None if last is None else last.step,
        None if last is None else last.seconds,
    )


def _scaled_row(names: Names, diagonal: DiagonalMap) -> LayerRow:
    name = names[0] if len(names) == 1 else _layer_name(names)
    scale = diagonal.scale
    if isinstance(scale, float):
        return LayerRow(name, "scaled", scale=(scale, scale))
    extremes = (min(float(s.min()) for s in scale), max(float(s.max()) for s in scale))
    return LayerRow(name, "scaled", scale=extremes, memory=sum(s.nbytes for s in scale))


def _kronecker_row(
    names: Names,
    kronecker: KroneckerMap,
    post: KroneckerMap | None,
    spectra: tuple[Spectrum | None, Spectrum | None],
    settings: MapSettings,
    seconds: float | None,
) -> LayerRow:
    groups = kronecker.groups
    inputs = kronecker.inputs + len(names) - 1  # the bias is one more input
    a = _factor_row(kronecker.a_root, groups, inputs, spectra[0], settings)
    g = None
    if kronecker.g_root is not None or spectra[1] is not None:
        g = _factor_row(kronecker.g_root, groups, kronecker.outputs, spectra[1], settings)
    after = None if post is None else _factor_row(post.a_root, groups, inputs, None, settings)
    memory = sum(factor.memory for factor in (a, g, after) if factor is not None)
    return LayerRow(_layer_name(names), "Kronecker", a, g, after, memory=memory, seconds=seconds)


def _layer_name(names: Names) -> str:
    return names[0].rpartition(".")[0] or names[0]


def _factor_row(
    root: Root | None, groups: int, size: int, spectrum: Spectrum | None, settings: MapSettings
) -> FactorRow:
    eigenvalues = None
    if spectrum is not None:
        eigenvalues = _eigenvalues(spectrum, settings, mapped=root is not None)
    if root is None:
        return FactorRow(groups, size, 0, "none", 0, 0, eigenvalues)
    form: Literal["full", "low rank"] = "full" if isinstance(root, FullRoot) else "low rank"
    return FactorRow(groups, size, root.rank, form, groups * root.work, root.memory, eigenvalues)


def _eigenvalues(spectrum: Spectrum, settings: MapSettings, mapped: bool) -> Eigenvalues:
    values = spectrum.values.double().cpu()
    mean_of_rest = spectrum.rest()[:, None].double().cpu()
    mu = spectrum.damping(settings.damping, settings.stability)[:, None].double().cpu()
    shared = mean_of_rest.expand(-1, spectrum.size - values.shape[1])
    tail = shared if spectrum.tail is None else spectrum.tail.double().cpu()
    every = torch.cat([values, tail], 1)
    assumed = torch.cat([values, shared], 1)  # the eigenvalues as the map assumes them
    squared = (assumed + mu) ** (-settings.power if mapped else 0.0)  # the eigenvalues of U²
    return Eigenvalues(
        values=every.flatten().sort(descending=True).values,
        resolved=values.numel(),
        damping=(float(mu.min()), float(mu.max())),
        exact=spectrum.tail is not None,
        effective_rank=(_effective_rank(every), _effective_rank(every * squared)),
        condition=(condition(every + mu), condition((every + mu) * squared)),
    )


def _effective_rank(values: Tensor) -> float:
    """``tr² / ‖·‖_F²``: d for d equal eigenvalues, 1 for a single one."""
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / squares if squares > 0 else 0.0


def _cells(row: LayerRow) -> Iterator[tuple[str, ...]]:
    """One line per factor; the first also has the layer's name and its time."""
    if row.scale is not None:
        low, high = (f"{end:.3g}" for end in row.scale)
        form = f"× {low}" if low == high else f"× {low} … {high}"
        yield row.name, row.kind, *[""] * 5, form, "", _bytes(row.memory), ""
    elif row.kind == "unchanged":
        yield row.name, row.kind, *[""] * 9
    name = row.name
    seconds = "" if row.seconds is None else _time(row.seconds)
    for letter, factor in row.factors.items():
        yield (
            name,
            letter,
            f"{factor.groups} × {factor.size}" if factor.groups > 1 else str(factor.size),
            *_spectrum_cells(factor.spectrum),
            f"rank {factor.rank}" if factor.form == "low rank" else factor.form,
            "" if letter == "post" else f"{factor.multiplications:,}",
            _bytes(factor.memory),
            seconds,
        )
        name = seconds = ""


def _spectrum_cells(spectrum: Eigenvalues | None) -> tuple[str, str, str, str]:
    """Largest and smallest eigenvalue, effective rank, condition."""
    if spectrum is None:
        return "", "", "", ""
    at_least = "" if spectrum.exact else "≥ "
    at_most = "" if spectrum.exact else "≤ "
    ranks = " → ".join(f"{rank:.1f}" for rank in spectrum.effective_rank)
    conditions = " → ".join(map(_ratio, spectrum.condition))
    return (
        f"{spectrum.largest:.2g}",
        f"{at_most}{spectrum.smallest:.2g}",
        at_most + ranks,
        at_least + conditions,
    )


def _ratio(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}" if x < 1e6 else f"{x:.1e}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _bytes(count: int) -> str:
    """
    >>> _bytes(512), _bytes(803_328)
    ('512 B', '784.5 KiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
