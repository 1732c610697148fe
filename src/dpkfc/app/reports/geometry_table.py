"""A Kronecker geometry layer by layer: as a table in the terminal, and as a plot.

Condition numbers are those of the damped factor: ``A + μ I`` before, ``U (A + μ I) U`` after. With power 1 and every
direction told apart that is 1; what a low rank leaves over is seen there. (A itself is often singular: the
backprops of a softmax sum to zero.) The effective rank ``tr² / ‖·‖_F²`` is that of A before and of U A U, the
covariance of the mapped probes, after: as many directions as are truly whitened.

Directions that a low-rank map does not tell apart count with their own eigenvalues where these were computed.
Otherwise they stand as their mean, and the figures are bounds: "≥" and "≤".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dpkfc.app.reports.text import as_text
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot, Root, Spectrum, condition
from dpkfc.geometry.kronecker import KroneckerMap

if TYPE_CHECKING:
    from dpkfc.geometry.kfc import Refresh

Names = tuple[str, ...]
HEADINGS = (
    *("layer", "map", "size", "largest\neigenvalue", "smallest", "effective\nrank", "condition"),
    *("form", "products\na position", "memory", "refresh"),
)
SPECTRA, COSTS = range(7), (0, 1, 7, 8, 9, 10)  # a table each where one would be too wide
NOT_PRIVATE = "NOT PRIVATE: built from the private records, which all of this reveals"


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """The eigenvalues of one factor, of all its groups together, and what the map makes of them."""

    values: Tensor  # decreasing; those not computed stand as their mean
    listed: int  # of these, told apart by the map
    damping: tuple[float, float]  # μ, from the smallest to the largest over the groups
    exact: bool  # were all eigenvalues computed?
    effective_rank: tuple[float, float]  # before and after; upper bounds if not exact
    condition: tuple[float, float]  # before and after; lower bounds if not exact

    @property
    def largest(self) -> float:
        return float(self.values[0])

    @property
    def smallest(self) -> float:
        """An upper bound if not exact."""
        return float(self.values[-1])


@dataclass(frozen=True)
class FactorRow:
    """One factor of a layer and its root; a grouped convolution has a block of `size` for each group."""

    groups: int
    size: int
    rank: int  # directions that the root tells apart in a block
    form: Literal["full", "low rank", "none"]  # "none": the probes left the factor zero
    multiplications: int  # to map the vectors of one position
    memory: int  # bytes
    spectrum: Eigenvalues | None  # None if the map came from a checkpoint


@dataclass(frozen=True)
class LayerRow:
    """What is done to one layer, or to parameters that have no Kronecker form."""

    name: str
    kind: Literal["Kronecker", "scaled", "unchanged"]
    a: FactorRow | None = None
    g: FactorRow | None = None
    post: FactorRow | None = None  # the map after the noise: once a step, not for every position
    scale: tuple[float, float] | None = None  # smallest and largest
    memory: int = 0  # bytes of all its maps
    seconds: float | None = None  # of the last refresh

    @property
    def multiplications(self) -> int:
        """That mapping adds to one position of one training sample."""
        return sum(factor.multiplications for factor in (self.a, self.g) if factor is not None)

    @property
    def factors(self) -> dict[str, FactorRow]:
        return {
            name: row
            for name, row in (("A", self.a), ("G", self.g), ("post", self.post))
            if row is not None
        }


@dataclass(frozen=True)
class Description:
    """A geometry at its last refresh. Public, as the probes and the released weights are, unless `public` is False."""

    rows: tuple[LayerRow, ...]
    probe: str
    public: bool
    every: int
    step: (
        int | None
    )  # of the last refresh; None (as for `seconds`) if the maps came from a checkpoint
    seconds: float | None  # of the last refresh in all, with the probes' own passes

    def __str__(self) -> str:
        return as_text(self, width=160)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.public:
            yield Text(NOT_PRIVATE, style="bold red")
        yield Text(self.title, style="italic")
        whole = self._table(range(len(HEADINGS)))
        fits = (
            Measurement.get(console, options.update(width=1000), whole).maximum <= options.max_width
        )
        yield from [whole] if fits else [self._table(SPECTRA), self._table(COSTS)]
        seconds = (
            ""
            if self.seconds is None
            else f" and {_time(self.seconds)} a refresh, the probes' passes included"
        )
        yield Text(f"in all {_size(sum(row.memory for row in self.rows))}{seconds}", style="dim")
        yield Text(
            "before → after: effective rank of the factor, condition of the damped factor",
            style="dim",
        )

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, collapse_padding=True)
        for column in columns:
            table.add_column(
                HEADINGS[column], justify="left" if column < 2 else "right", overflow="fold"
            )
        for cells in (cells for row in self.rows for cells in _lines(row)):
            table.add_row(*(cells[column] for column in columns))
        return table

    @property
    def title(self) -> str:
        when = "maps from a checkpoint" if self.step is None else f"as of step {self.step}"
        return f"geometry from {self.probe}, {when}, refreshed every {self.every} steps"

    def plot(self, file: str | Path) -> None:
        """Eigenvalues and condition numbers of every factor, as an image."""
        from dpkfc.app.reports.geometry_plot import plot_geometry

        plot_geometry(self, Path(file))


@dataclass(frozen=True)
class Settings:
    """What the maps were built with."""

    probe: str
    public: bool
    every: int
    damping: float  # relative
    stability: float  # absolute
    power: float


def describe(
    maps: Mapping[Names, KroneckerMap | DiagonalMap],
    post: Mapping[Names, KroneckerMap],
    spectra: Mapping[Names, tuple[Spectrum, Spectrum | None]],
    last: Refresh | None,
    settings: Settings,
) -> Description:
    """The maps of a geometry, with what the last refresh found; None if they came from a checkpoint."""
    seconds = {} if last is None else last.layer_seconds
    rows = {
        names: _scaled(names, rule)
        if isinstance(rule, DiagonalMap)
        else _kronecker(
            names,
            rule,
            post.get(names),
            spectra.get(names, (None, None)),
            settings,
            seconds.get(names),
        )
        for names, rule in maps.items()
    }
    if last is not None:
        mapped = {name for names in maps for name in names}
        rows |= {
            (name,): LayerRow(name, "unchanged") for name in last.parameters if name not in mapped
        }
        place = {name: number for number, name in enumerate(last.parameters)}
        rows = {names: rows[names] for names in sorted(rows, key=lambda names: place[names[0]])}
    when = (None, None) if last is None else (last.step, last.seconds)
    return Description(tuple(rows.values()), settings.probe, settings.public, settings.every, *when)


def _scaled(names: Names, rule: DiagonalMap) -> LayerRow:
    name = names[0] if len(names) == 1 else names[0].rpartition(".")[0] or names[0]
    if isinstance(rule.scale, float):
        return LayerRow(name, "scaled", scale=(rule.scale, rule.scale))
    low, high = min(float(s.min()) for s in rule.scale), max(float(s.max()) for s in rule.scale)
    return LayerRow(name, "scaled", scale=(low, high), memory=sum(s.nbytes for s in rule.scale))


def _kronecker(
    names: Names,
    rule: KroneckerMap,
    post: KroneckerMap | None,
    spectra: tuple[Spectrum | None, Spectrum | None],
    settings: Settings,
    seconds: float | None,
) -> LayerRow:
    inputs = rule.inputs + len(names) - 1  # the bias is one more
    a = _factor(rule.a_root, rule.groups, inputs, spectra[0], settings)
    known = rule.g_root is not None or spectra[1] is not None
    g = _factor(rule.g_root, rule.groups, rule.outputs, spectra[1], settings) if known else None
    after = None if post is None else _factor(post.a_root, rule.groups, inputs, None, settings)
    memory = sum(factor.memory for factor in (a, g, after) if factor is not None)
    name = names[0].rpartition(".")[0] or names[0]
    return LayerRow(name, "Kronecker", a, g, after, memory=memory, seconds=seconds)


def _factor(
    root: Root | None, groups: int, size: int, known: Spectrum | None, settings: Settings
) -> FactorRow:
    spectrum = None if known is None else _eigenvalues(known, settings, mapped=root is not None)
    if root is None:
        return FactorRow(groups, size, 0, "none", 0, 0, spectrum)
    form: Literal["full", "low rank"] = "full" if isinstance(root, FullRoot) else "low rank"
    return FactorRow(groups, size, root.rank, form, groups * root.work, root.memory, spectrum)


def _eigenvalues(known: Spectrum, settings: Settings, mapped: bool) -> Eigenvalues:
    damping = known.damping(settings.damping, settings.stability)
    values, rest, mu = (
        x.double().cpu() for x in (known.values, known.rest()[:, None], damping[:, None])
    )
    missing = known.size - values.shape[1]
    tail = rest.expand(-1, missing) if known.tail is None else known.tail.double().cpu()
    every = torch.cat([values, tail], 1)
    told = torch.cat(
        [values, rest.expand(-1, missing)], 1
    )  # what the map takes the eigenvalues for
    squared = (told + mu) ** (-settings.power if mapped else 0.0)  # the eigenvalues of U²
    return Eigenvalues(
        values=every.flatten().sort(descending=True).values,
        listed=values.numel(),
        damping=(float(mu.min()), float(mu.max())),
        exact=known.tail is not None,
        effective_rank=(_effective_rank(every), _effective_rank(every * squared)),
        condition=(condition(every + mu), condition((every + mu) * squared)),
    )


def _effective_rank(values: Tensor) -> float:
    """``tr² / ‖·‖_F²``: d for d equal eigenvalues, 1 for a single one."""
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / squares if squares > 0 else 0.0


def _lines(row: LayerRow) -> Iterable[tuple[Text | str, ...]]:
    """One line a factor; the layer's name and time on the first."""
    seconds = "" if row.seconds is None else _time(row.seconds)
    if row.scale is not None:
        low, high = (f"{end:.3g}" for end in row.scale)
        form = f"× {low}" if low == high else f"× {low} … {high}"
        yield Text(row.name), row.kind, *[""] * 5, form, "", _size(row.memory), ""
    elif row.kind == "unchanged":
        yield Text(row.name), row.kind, *[""] * 9
    for number, (name, factor) in enumerate(row.factors.items()):
        form = f"rank {factor.rank}" if factor.form == "low rank" else factor.form
        size = f"{factor.groups} × {factor.size}" if factor.groups > 1 else str(factor.size)
        products = "" if name == "post" else f"{factor.multiplications:,}"
        first = (Text(row.name), seconds) if not number else ("", "")
        yield (
            first[0],
            name,
            size,
            *_figures(factor.spectrum),
            form,
            products,
            _size(factor.memory),
            first[1],
        )


def _figures(spectrum: Eigenvalues | None) -> tuple[str, str, str, str]:
    """Largest and smallest eigenvalue, effective rank, condition."""
    if spectrum is None:
        return "", "", "", ""
    least, most = ("", "") if spectrum.exact else ("≥ ", "≤ ")
    ranks = " → ".join(f"{x:.1f}" for x in spectrum.effective_rank)
    conditions = " → ".join(map(_ratio, spectrum.condition))
    return (
        f"{spectrum.largest:.2g}",
        f"{most}{spectrum.smallest:.2g}",
        most + ranks,
        least + conditions,
    )


def _ratio(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}" if x < 1e6 else f"{x:.1e}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _size(count: int) -> str:
    """
    >>> _size(512), _size(803_328)
    ('512 B', '784.5 KiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
