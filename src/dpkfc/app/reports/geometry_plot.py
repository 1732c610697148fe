"""A geometry as a plot: the eigenvalues of every factor, and the condition numbers before and after the map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.app.reports.geometry_table import NOT_PRIVATE, Description, Eigenvalues

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = dict[str, Eigenvalues]  # by layer

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)  # Okabe and Ito: told apart by all eyes
MARKERS = ("o", "s", "^", "D", "v", "P")
MOST = 40  # layers whose condition numbers have a line each, and a name
BELOW = 1e-3  # eigenvalues down to this share of the damping are shown
BEFORE: dict[str, Any] = {
    "marker": "o",
    "color": "black",
    "markerfacecolor": "white",
    "linestyle": "",
    "markersize": 6,
}
AFTER: dict[str, Any] = {**BEFORE, "markerfacecolor": "black"}
FACTORS = {"A": "activations, A", "G": "backprops, G"}


def plot_geometry(described: Description, file: Path) -> None:
    """A panel of eigenvalues for A and for G, with the damping μ marked; beside them the condition numbers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, Curves] = {factor: {} for factor in FACTORS}
    for row in described.rows:
        for factor, one in row.factors.items():
            if one.spectrum is not None and one.spectrum.largest > 0:
                curves[factor][row.name] = one.spectrum
    curves = {factor: found for factor, found in curves.items() if found}
    layers = list(dict.fromkeys(name for found in curves.values() for name in found))
    lines = min(len(layers), MOST) * len(curves)
    size = (4.2 * (len(curves) + 1), max(4.2, 1.6 + 0.22 * lines))
    figure, axes = plt.subplots(
        1, len(curves) + 1, figsize=size, squeeze=False, layout="constrained"
    )
    *panels, last = axes[0]
    styles = _styles(layers)
    for panel, (factor, found) in zip(panels, curves.items(), strict=True):
        _eigenvalues(panel, found, styles)
        panel.set_title(FACTORS[factor], fontsize=10)
    if panels:
        panels[0].set_ylabel("eigenvalue")
        _conditions(last, curves, layers)
        _legend(
            figure,
            panels[0],
            layers,
            any(s.listed < len(s.values) for c in curves.values() for s in c.values()),
        )
    else:
        last.set_axis_off()
        last.text(
            0.5, 0.5, "no eigenvalues known before the next refresh", ha="center", va="center"
        )
    title = described.title if described.public else f"{NOT_PRIVATE}\n{described.title}"
    figure.suptitle(title, color="black" if described.public else "#B00000", fontsize=11)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _styles(layers: list[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker a layer; where these run out, colours from dark to light with depth."""
    if len(layers) <= len(COLOURS):
        return {
            name: {"color": c, "marker": m}
            for name, c, m in zip(layers, COLOURS, MARKERS, strict=False)
        }
    from matplotlib import colormaps

    shades = colormaps["cividis"]
    return {
        name: {"color": shades(0.95 * k / (len(layers) - 1)), "marker": ""}
        for k, name in enumerate(layers)
    }


def _eigenvalues(panel: Axes, found: Curves, styles: dict[str, dict[str, Any]]) -> None:
    for name, spectrum in found.items():
        values, told = spectrum.values.numpy(), spectrum.listed
        places = range(1, len(values) + 1)
        marks = [0] + [int(told ** (k / 4)) - 1 for k in range(1, 5)]
        style = {**styles[name], "linewidth": 1.5, "markersize": 4, "markevery": sorted(set(marks))}
        panel.plot(places[:told], values[:told], label=name, **style)
        panel.plot(
            places[told - 1 :], values[told - 1 :], ":", color=styles[name]["color"], linewidth=1.5
        )
    levels = sorted(
        {level for spectrum in found.values() for level in spectrum.damping if level > 0}
    )
    for level in levels:
        panel.axhline(
            level,
            color="0.35",
            linestyle="--",
            linewidth=0.9 if len(levels) == 1 else 0.4,
            zorder=0,
        )
    panel.set(xscale="log", yscale="log", xlabel="number of the eigenvalue")
    _plain_ticks(panel, max(len(spectrum.values) for spectrum in found.values()))
    if levels:
        top = max(spectrum.largest for spectrum in found.values())
        panel.set_ylim(BELOW * levels[0], 3 * max(top, levels[-1]))
        where = ("damping μ", (1, levels[-1]), (-4, 3))
        panel.annotate(
            *where,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.35",
        )
    panel.grid(alpha=0.25)


def _conditions(panel: Axes, curves: dict[str, Curves], layers: list[str]) -> None:
    """Two dots a factor, joined: before and after."""
    both = [(name, factor) for name in layers for factor in curves if name in curves[factor]]
    for place, (name, factor) in enumerate(both):
        before, after = curves[factor][name].condition
        panel.plot([before, after], [place, place], color="0.7", linewidth=1.2, zorder=1)
        panel.plot(before, place, **BEFORE)
        panel.plot(after, place, **AFTER)
    step = -(-len(both) // (2 * MOST))
    panel.set_yticks(
        range(0, len(both), step),
        [f"{name}  {factor}" for name, factor in both[::step]],
        fontsize=8,
    )
    panel.set_ylim(len(both) - 0.4, -0.6)
    panel.set_xscale("log")
    _plain_ticks(panel, max(curves[factor][name].condition[0] for name, factor in both))
    panel.set_xlabel("largest / smallest eigenvalue")
    panel.set_title("condition of the damped factor", fontsize=10)
    panel.grid(axis="x", alpha=0.25)


def _plain_ticks(panel: Axes, largest: float) -> None:
    """1, 10, 100 along a logarithmic axis, with 2 and 5 between where it is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if largest < 100 else (1.0,)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    if largest < 1e5:
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))


def _legend(figure: Any, panel: Axes, layers: list[str], cut: bool) -> None:
    from matplotlib.lines import Line2D

    named = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    if len(layers) > len(COLOURS):
        named = {
            name: named[name]
            for name in (layers[0], layers[len(layers) // 2], layers[-1])
            if name in named
        }
    if cut:
        named["share one scale"] = Line2D([], [], color="0.35", linestyle=":", linewidth=1.5)
    named |= {"before": Line2D([], [], **BEFORE), "after the map": Line2D([], [], **AFTER)}
    figure.legend(
        named.values(),
        named.keys(),
        ncols=len(named),
        loc="outside lower center",
        fontsize=8,
        frameon=False,
    )
