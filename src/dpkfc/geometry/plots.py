"""Plot of a geometry: eigenvalues of every factor, condition numbers before and after the map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.geometry.description import NOT_PRIVATE, Description, Eigenvalues
from dpkfc.plotting import (
    COLOURS,
    MARKERS,
    RED,
    add_legend,
    light_grid,
    new_figure,
    plain_log_ticks,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = dict[str, Eigenvalues]  # by layer

MAX_NAMED_LAYERS = 40  # up to here every layer has its own line and name among the conditions
SHOWN_BELOW_DAMPING = 1e-3  # the axis ends at this share of the damping
BEFORE: dict[str, Any] = {
    "marker": "o",
    "color": "black",
    "markerfacecolor": "white",
    "linestyle": "",
    "markersize": 6,
}
AFTER: dict[str, Any] = {**BEFORE, "markerfacecolor": "black"}
FACTORS = {"A": "activations, A", "G": "backprops, G"}


def plot_geometry(description: Description, file: Path) -> None:
    """One panel of eigenvalues for A and for G, with the damping μ; one of condition numbers."""
    curves: dict[str, Curves] = {factor: {} for factor in FACTORS}
    for row in description.rows:
        for factor, factor_row in row.factors.items():
            if factor_row.spectrum is not None and factor_row.spectrum.largest > 0:
                curves[factor][row.name] = factor_row.spectrum
    curves = {factor: by_layer for factor, by_layer in curves.items() if by_layer}
    layers = list(dict.fromkeys(name for by_layer in curves.values() for name in by_layer))
    lines = min(len(layers), MAX_NAMED_LAYERS) * len(curves)
    figure, panels = new_figure(
        1, len(curves) + 1, 4.2 * (len(curves) + 1), max(4.2, 1.6 + 0.22 * lines)
    )
    *spectrum_panels, condition_panel = panels[0]
    styles = _styles(layers)
    for panel, (factor, by_layer) in zip(spectrum_panels, curves.items(), strict=True):
        _draw_eigenvalues(panel, by_layer, styles)
        panel.set_title(FACTORS[factor], fontsize=10)
    if spectrum_panels:
        spectrum_panels[0].set_ylabel("eigenvalue")
        _draw_conditions(condition_panel, curves, layers)
        spectra = [spectrum for by_layer in curves.values() for spectrum in by_layer.values()]
        low_rank = any(spectrum.resolved < len(spectrum.values) for spectrum in spectra)
        _draw_legend(figure, spectrum_panels[0], layers, low_rank)
    else:
        condition_panel.set_axis_off()
        text = "no eigenvalues known before the next refresh"
        condition_panel.text(0.5, 0.5, text, ha="center", va="center")
    title = description.title if description.public else f"{NOT_PRIVATE}\n{description.title}"
    figure.suptitle(title, color="black" if description.public else RED, fontsize=11)
    save_figure(figure, file)


def _styles(layers: list[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker per layer; for many layers, shades from dark to light with depth."""
    if len(layers) <= len(COLOURS):
        return {
            name: {"color": colour, "marker": marker}
            for name, colour, marker in zip(layers, COLOURS, MARKERS, strict=False)
        }
    from matplotlib import colormaps

    shades = colormaps["cividis"]
    return {
        name: {"color": shades(0.95 * k / (len(layers) - 1)), "marker": ""}
        for k, name in enumerate(layers)
    }


def _draw_eigenvalues(panel: Axes, by_layer: Curves, styles: dict[str, dict[str, Any]]) -> None:
    for name, spectrum in by_layer.items():
        values = spectrum.values.numpy()
        resolved = spectrum.resolved
        ranks = range(1, len(values) + 1)
        marks = {0, *(int(resolved ** (k / 4)) - 1 for k in range(1, 5))}
        style = {**styles[name], "linewidth": 1.5, "markersize": 4, "markevery": sorted(marks)}
        panel.plot(ranks[:resolved], values[:resolved], label=name, **style)
        shared = slice(resolved - 1, None)
        colour = styles[name]["color"]
        panel.plot(ranks[shared], values[shared], ":", color=colour, linewidth=1.5)
    levels = sorted(
        {level for spectrum in by_layer.values() for level in spectrum.damping if level > 0}
    )
    line_width = 0.9 if len(levels) == 1 else 0.4
    for level in levels:
        panel.axhline(level, color="0.35", linestyle="--", linewidth=line_width, zorder=0)
    panel.set(xscale="log", yscale="log", xlabel="number of the eigenvalue")
    plain_log_ticks(panel.xaxis, 1, max(len(s.values) for s in by_layer.values()))
    if levels:
        top = max(spectrum.largest for spectrum in by_layer.values())
        panel.set_ylim(SHOWN_BELOW_DAMPING * levels[0], 3 * max(top, levels[-1]))
        panel.annotate(
            "damping μ",
            (1, levels[-1]),
            (-4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.35",
        )
    light_grid(panel)


def _draw_conditions(panel: Axes, curves: dict[str, Curves], layers: list[str]) -> None:
    """Two dots per factor, joined by a line: before and after."""
    pairs = [(name, factor) for name in layers for factor in curves if name in curves[factor]]
    for height, (name, factor) in enumerate(pairs):
        before, after = curves[factor][name].condition
        panel.plot([before, after], [height, height], color="0.7", linewidth=1.2, zorder=1)
        panel.plot(before, height, **BEFORE)
        panel.plot(after, height, **AFTER)
    step = -(-len(pairs) // (2 * MAX_NAMED_LAYERS))
    names = [f"{name}  {factor}" for name, factor in pairs[::step]]
    panel.set_yticks(range(0, len(pairs), step), names, fontsize=8)
    panel.set_ylim(len(pairs) - 0.4, -0.6)
    panel.set_xscale("log")
    plain_log_ticks(panel.xaxis, 1, max(curves[f][name].condition[0] for name, f in pairs))
    panel.set_xlabel("largest / smallest eigenvalue")
    panel.set_title("condition of the damped factor", fontsize=10)
    light_grid(panel, axis="x")


def _draw_legend(figure: Any, panel: Axes, layers: list[str], low_rank: bool) -> None:
    from matplotlib.lines import Line2D

    entries = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    if len(layers) > len(COLOURS):
        some = (layers[0], layers[len(layers) // 2], layers[-1])
        entries = {name: entries[name] for name in some if name in entries}
    if low_rank:
        entries["share one scale"] = Line2D([], [], color="0.35", linestyle=":", linewidth=1.5)
    entries["before"] = Line2D([], [], **BEFORE)
    entries["after the map"] = Line2D([], [], **AFTER)
    add_legend(figure, entries.values(), entries.keys(), len(entries))
