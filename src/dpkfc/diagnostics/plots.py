"""Plots of the results. A result computed from records says so in a red title."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.diagnostics.result import is_public
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

    from dpkfc.diagnostics.alignment import Alignment
    from dpkfc.diagnostics.clip import Clipping
    from dpkfc.diagnostics.lanczos import HessianDensity
    from dpkfc.diagnostics.snr import SNR
    from dpkfc.diagnostics.spectrum import Spectra

MAX_PANELS = 12  # layers with their own panel
MAX_NAMED = 24  # layers whose names fit below an axis
MAX_NAME = 24  # characters of a layer's name
FLOOR = 1e-12  # eigenvalues below this share of the largest are rounding errors
NAN = float("nan")


def plot_snr(snr: SNR, file: Path) -> None:
    """One line per geometry over the layers."""
    layers = _short([row.layer for row in next(iter(snr.geometries.values()))])
    figure, ((panel,),) = new_figure(
        1, 1, max(5.0, 2.4 + 0.42 * min(len(layers), MAX_NAMED)), 3.6 + _name_height(layers)
    )
    for name, style in _styles(snr.geometries).items():
        ratios = [row.ratio or NAN for row in snr.geometries[name]]
        panel.plot(range(len(ratios)), ratios, label=name, **style)
    panel.axhline(1, color="0.35", linestyle=":", linewidth=1, zorder=0)
    panel.set(yscale="log", ylabel="signal / noise")
    plain_log_ticks(panel.yaxis, *panel.get_ylim())
    _name_layers(panel, layers)
    title = f"one step: σ = {snr.noise_multiplier:.3g}, B = {snr.batch_size}"
    _finish(figure, panel, file, title, snr.privacy)


def plot_clipping(clipping: Clipping, file: Path) -> None:
    """Percentiles of the norms in units of the clip norm, and each layer's share of the norm."""
    layers = list(next(iter(clipping.geometries.values())).shares)
    names = _short(layers)
    figure, ((left, right),) = new_figure(
        1, 2, max(9.0, 5.6 + 0.42 * min(len(layers), MAX_NAMED)), 3.6 + _name_height(names)
    )
    for name, style in _styles(clipping.geometries).items():
        effect = clipping.geometries[name]
        label = (
            f"{name}: R = {effect.clip:.3g}, {effect.clipped:.0%} clipped, "
            f"cosine {effect.cosine:.3f}"
        )
        norms = [norm / effect.clip or NAN for norm in effect.percentiles]
        left.plot(range(101), norms, label=label, **{**style, "markevery": 20})
        right.plot(range(len(layers)), [100 * effect.shares[layer] for layer in layers], **style)
    left.axhline(1, color="0.35", linestyle=":", linewidth=1, zorder=0)
    left.set(yscale="log", xlabel="percentile of the examples", ylabel="gradient norm / clip")
    plain_log_ticks(left.yaxis, *left.get_ylim())
    right.set(ylabel="share of the squared norm, %", ylim=(0, None))
    _name_layers(right, names)
    title = f"clipping of {clipping.examples} examples"
    _finish(figure, left, file, title, clipping.privacy, legend_columns=1)


def plot_spectra(spectra: Spectra, file: Path) -> None:
    """One panel per layer, for a selection of the layers if there are many.

    Curves of private sources are black and dashed.
    """
    layers = _short([row.layer for row in next(iter(spectra.sources.values()))])
    shown = _spread(len(layers), MAX_PANELS)
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    figure, panels = new_figure(rows, columns, max(4.5, 3.1 * columns), 0.6 + 2.8 * rows)
    flat = [panel for row in panels for panel in row]
    styles = _styles(spectra.sources, spectra.private_sources)
    for panel, number in zip(flat, shown, strict=False):
        largest = max(spectrum[number].values[0] for spectrum in spectra.sources.values())
        for name, style in styles.items():
            layer = spectra.sources[name][number]
            points = [
                (rank, value)
                for rank, value in zip(layer.ranks, layer.values, strict=True)
                if value > FLOOR * largest
            ]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, **{**style, "markevery": 0.2})
        panel.set(xscale="log", yscale="log")
        panel.set_title(layers[number], fontsize=10)
        light_grid(panel)
    for panel in flat[len(shown) :]:
        panel.set_axis_off()
    for row in panels:
        row[0].set_ylabel("eigenvalue of A ⊗ G")
    for number in range(len(shown)):
        if number + columns >= len(shown):
            flat[number].set_xlabel("rank")
    _finish(figure, flat[0], file, "", spectra.privacy)


def plot_alignment(alignment: Alignment, file: Path) -> None:
    """Cosine in the first row, relative error in the second; A, G and A ⊗ G side by side."""
    layers = _short([row.layer for row in next(iter(alignment.sources.values()))])
    figure, panels = new_figure(
        2, 3, max(9.0, 3.6 + 0.9 * min(len(layers), MAX_NAMED)), 5.2 + _name_height(layers)
    )
    for column, factor in enumerate(("activations, A", "backprops, G", "layer, A ⊗ G")):
        above, below = panels[0][column], panels[1][column]
        for name, style in _styles(alignment.sources).items():
            rows = alignment.sources[name]
            above.plot(range(len(rows)), [row.cosine[column] for row in rows], label=name, **style)
            below.plot(range(len(rows)), [row.error[column] or NAN for row in rows], **style)
        above.set_title(factor, fontsize=10)
        above.set_ylim(min(0.0, above.get_ylim()[0]), 1.04)
        below.set_yscale("log")
        plain_log_ticks(below.yaxis, *below.get_ylim())
        _name_layers(above, layers, named=False)
        _name_layers(below, layers)
    panels[0][0].set_ylabel("cosine")
    panels[1][0].set_ylabel("relative Frobenius error")
    _finish(figure, panels[0][0], file, f"beside {alignment.reference}", alignment.privacy)


def plot_density(density: HessianDensity, file: Path) -> None:
    """The smoothed density, and the sorted magnitudes."""
    figure, ((left, right),) = new_figure(1, 2, 9.0, 3.8)
    for name, style in _styles(density.sources, density.private_sources).items():
        quadrature = density.sources[name]
        left.plot(*quadrature.density(), **{**style, "marker": ""})
        ranks, sizes = quadrature.magnitudes()
        kept = [size if size > FLOOR * sizes[0] else NAN for size in sizes]
        right.plot(ranks, kept, label=name, **{**style, "markevery": 0.2})
    size = next(iter(density.sources.values())).size
    top = left.get_ylim()[1]
    left.set(yscale="log", xlabel="eigenvalue", ylabel="density", ylim=(1e-3 * top / size, 3 * top))
    right.set(xscale="log", yscale="log", xlabel="rank", ylabel="|eigenvalue|")
    light_grid(left)
    light_grid(right)
    name = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}[density.matrix]
    _finish(figure, right, file, f"{name}, {size:,} parameters", density.privacy)


def _styles(names: Iterable[str], private: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name; black and dashed for private sources."""
    styles = {}
    number = 0
    for name in names:
        style: dict[str, Any] = {"linewidth": 1.5, "markersize": 4.5}
        if name in private:
            style |= {"color": "black", "linestyle": "--", "marker": ""}
        else:
            style["color"] = COLOURS[number % len(COLOURS)]
            style["marker"] = MARKERS[number % len(MARKERS)]
            number += 1
        styles[name] = style
    return styles


def _spread(total: int, most: int) -> list[int]:
    """At most `most` evenly spread numbers below `total`, including the first and the last."""
    if total <= most:
        return list(range(total))
    return sorted({round(k * (total - 1) / (most - 1)) for k in range(most)})


def _short(layers: list[str]) -> list[str]:
    """Names without the modules that contain all layers; only the end of a long name.

    >>> _short(["net.block.0.conv", "net.head"])
    ['block.0.conv', 'head']
    >>> _short(["encoder.layer.0.attention.output.dense", "classifier"])
    ['….attention.output.dense', 'classifier']
    """
    paths = [layer.split(".") for layer in layers]
    shared = 0
    while len(layers) > 1 and len({tuple(path[: shared + 1]) for path in paths}) == 1:
        shared += 1
    names = [".".join(path[min(shared, len(path) - 1) :]) for path in paths]
    return [name if len(name) <= MAX_NAME else "…" + name[1 - MAX_NAME :] for name in names]


def _name_height(layers: list[str]) -> float:
    """Inches that the slanted names need."""
    return 0.04 * max(map(len, layers))


def _name_layers(panel: Axes, layers: list[str], named: bool = True) -> None:
    shown = _spread(len(layers), MAX_NAMED)
    names = [layers[k] if named else "" for k in shown]
    panel.set_xticks(shown, names, rotation=40, ha="right", fontsize=8)
    panel.set_xlim(-0.4, len(layers) - 0.6)
    light_grid(panel)


def _finish(
    figure: Any,
    panel: Axes,
    file: Path,
    title: str,
    privacy: str,
    legend_columns: int | None = None,
) -> None:
    """Add the legend of `panel` and the title, and write the file."""
    handles, labels = panel.get_legend_handles_labels()
    add_legend(figure, handles, labels, legend_columns or min(len(labels), 4))
    public = is_public(privacy)
    warning = "" if public else privacy.upper()[:11] + privacy[11:]
    heading = "\n".join(line for line in (title, warning) if line)
    figure.suptitle(heading, color="black" if public else RED, fontsize=10)
    save_figure(figure, file)
