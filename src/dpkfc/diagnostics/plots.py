"""The results as images. What was computed from records says so in red."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.app.reports.geometry_plot import COLOURS, MARKERS
from dpkfc.diagnostics.result import is_public

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dpkfc.diagnostics.alignment import Alignment
    from dpkfc.diagnostics.clip import Clipping
    from dpkfc.diagnostics.lanczos import HessianDensity
    from dpkfc.diagnostics.snr import SNR
    from dpkfc.diagnostics.spectrum import Spectra

PANELS = 12  # layers with a panel of their own
NAMED = 24  # layers whose names fit below an axis
LONGEST = 24  # letters of a layer's name
FLOOR = 1e-12  # eigenvalues below this share of the largest are rounding


def plot_snr(snr: SNR, file: Path) -> None:
    """A line a geometry over the layers."""
    layers = _short([row.layer for row in next(iter(snr.geometries.values()))])
    figure, ((panel,),) = _figure(
        1, 1, max(5.0, 2.4 + 0.42 * min(len(layers), NAMED)), 3.6 + _depth(layers)
    )
    for name, style in _styles(snr.geometries).items():
        rows = snr.geometries[name]
        panel.plot(
            range(len(rows)), [row.ratio or float("nan") for row in rows], label=name, **style
        )
    panel.axhline(1, color="0.35", linestyle=":", linewidth=1, zorder=0)
    panel.set(yscale="log", ylabel="signal / noise")
    _plain_ticks(panel)
    _name_layers(panel, layers)
    _save(
        figure,
        panel,
        file,
        f"one step: σ = {snr.noise_multiplier:.3g}, B = {snr.batch_size}",
        snr.privacy,
    )


def plot_clipping(clipping: Clipping, file: Path) -> None:
    """Percentiles of the norms in units of the clip, and the layers' shares of the squared norm."""
    layers = list(next(iter(clipping.geometries.values())).shares)
    names = _short(layers)
    figure, ((left, right),) = _figure(
        1, 2, max(9.0, 5.6 + 0.42 * min(len(layers), NAMED)), 3.6 + _depth(names)
    )
    for name, style in _styles(clipping.geometries).items():
        effect = clipping.geometries[name]
        label = f"{name}: C = {effect.clip:.3g}, {effect.clipped:.0%} clipped, cosine {effect.cosine:.3f}"
        norms = [norm / effect.clip or float("nan") for norm in effect.percentiles]
        left.plot(range(101), norms, label=label, **{**style, "markevery": 20})
        right.plot(range(len(layers)), [100 * effect.shares[layer] for layer in layers], **style)
    left.axhline(1, color="0.35", linestyle=":", linewidth=1, zorder=0)
    left.set(yscale="log", xlabel="percentile of the examples", ylabel="gradient norm / clip")
    _plain_ticks(left)
    right.set(ylabel="share of the squared norm, %", ylim=(0, None))
    _name_layers(right, names)
    _save(
        figure, left, file, f"clipping of {clipping.examples} examples", clipping.privacy, columns=1
    )


def plot_spectra(spectra: Spectra, file: Path) -> None:
    """A panel a layer (of many, some from the first to the last); private sources black and dashed."""
    layers = _short([row.layer for row in next(iter(spectra.sources.values()))])
    shown = _some(len(layers), PANELS)
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    figure, panels = _figure(rows, columns, max(4.5, 3.1 * columns), 0.6 + 2.8 * rows)
    flat = [panel for row in panels for panel in row]
    styles = _styles(spectra.sources, spectra.private_sources)
    for panel, number in zip(flat, shown, strict=False):
        largest = max(layer[number].values[0] for layer in spectra.sources.values())
        for name, style in styles.items():
            one = spectra.sources[name][number]
            kept = [
                (rank, value)
                for rank, value in zip(one.ranks, one.values, strict=True)
                if value > FLOOR * largest
            ]
            if kept:
                panel.plot(*zip(*kept, strict=True), label=name, **{**style, "markevery": 0.2})
        panel.set(xscale="log", yscale="log")
        panel.set_title(layers[number], fontsize=10)
        panel.grid(alpha=0.25)
    for panel in flat[len(shown) :]:
        panel.set_axis_off()
    for row in panels:
        row[0].set_ylabel("eigenvalue of A ⊗ G")
    for number in range(len(shown)):
        if number + columns >= len(shown):
            flat[number].set_xlabel("rank")
    _save(figure, flat[0], file, "", spectra.privacy)


def plot_alignment(alignment: Alignment, file: Path) -> None:
    """Cosine above, relative error below; A, G and A ⊗ G side by side."""
    layers = _short([row.layer for row in next(iter(alignment.sources.values()))])
    figure, panels = _figure(
        2, 3, max(9.0, 3.6 + 0.9 * min(len(layers), NAMED)), 5.2 + _depth(layers)
    )
    for column, factor in enumerate(("activations, A", "backprops, G", "layer, A ⊗ G")):
        above, below = panels[0][column], panels[1][column]
        for name, style in _styles(alignment.sources).items():
            rows = alignment.sources[name]
            above.plot(range(len(rows)), [row.cosine[column] for row in rows], label=name, **style)
            below.plot(
                range(len(rows)), [row.error[column] or float("nan") for row in rows], **style
            )
        above.set_title(factor, fontsize=10)
        above.set_ylim(min(0.0, above.get_ylim()[0]), 1.04)
        below.set_yscale("log")
        _plain_ticks(below)
        _name_layers(above, layers, named=False)
        _name_layers(below, layers)
    panels[0][0].set_ylabel("cosine")
    panels[1][0].set_ylabel("relative Frobenius error")
    _save(figure, panels[0][0], file, f"beside {alignment.reference}", alignment.privacy)


def plot_density(density: HessianDensity, file: Path) -> None:
    """The smoothed density, and the sorted magnitudes."""
    figure, ((left, right),) = _figure(1, 2, 9.0, 3.8)
    for name, style in _styles(density.sources, density.private_sources).items():
        one = density.sources[name]
        places, values = one.density()
        left.plot(places, values, **{**style, "marker": ""})
        ranks, sizes = one.magnitudes()
        sizes = tuple(size if size > FLOOR * sizes[0] else float("nan") for size in sizes)
        right.plot(ranks, sizes, label=name, **{**style, "markevery": 0.2})
    size = next(iter(density.sources.values())).size
    top = left.get_ylim()[1]
    left.set(yscale="log", xlabel="eigenvalue", ylabel="density", ylim=(1e-3 * top / size, 3 * top))
    right.set(xscale="log", yscale="log", xlabel="rank", ylabel="|eigenvalue|")
    left.grid(alpha=0.25)
    right.grid(alpha=0.25)
    name = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}[density.matrix]
    _save(figure, right, file, f"{name}, {size:,} parameters", density.privacy)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    return figure, panels


def _styles(names: Iterable[str], private: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """A colour and a marker each; black and dashed for private sources."""
    styles, number = {}, 0
    for name in names:
        style: dict[str, Any] = {"linewidth": 1.5, "markersize": 4.5}
        if name in private:
            style |= {"color": "black", "linestyle": "--", "marker": ""}
        else:
            style |= {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            number += 1
        styles[name] = style
    return styles


def _some(total: int, most: int) -> list[int]:
    """At most `most` numbers below `total`, evenly spread, with the first and the last."""
    if total <= most:
        return list(range(total))
    return sorted({round(k * (total - 1) / (most - 1)) for k in range(most)})


def _short(layers: list[str]) -> list[str]:
    """Names that fit: without the modules that all of them are in, and only the end of long ones.

    >>> _short(["net.block.0.conv", "net.head"]), _short(["encoder.layer.0.attention.output.dense", "classifier"])
    (['block.0.conv', 'head'], ['….attention.output.dense', 'classifier'])
    """
    parts = [layer.split(".") for layer in layers]
    shared = 0
    while len(layers) > 1 and len({tuple(one[: shared + 1]) for one in parts}) == 1:
        shared += 1
    names = [".".join(one[min(shared, len(one) - 1) :]) for one in parts]
    return [name if len(name) <= LONGEST else "…" + name[1 - LONGEST :] for name in names]


def _depth(layers: list[str]) -> float:
    """Inches that the slanted names need."""
    return 0.04 * max(map(len, layers))


def _name_layers(panel: Axes, layers: list[str], named: bool = True) -> None:
    shown = _some(len(layers), NAMED)
    panel.set_xticks(
        shown, [layers[k] if named else "" for k in shown], rotation=40, ha="right", fontsize=8
    )
    panel.set_xlim(-0.4, len(layers) - 0.6)
    panel.grid(alpha=0.25)


def _plain_ticks(panel: Axes) -> None:
    """0.1, 1, 10 along the logarithmic height, with 2 and 5 between where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    if low > 1e-3 and high < 1e5:
        panel.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _save(
    figure: Any, panel: Axes, file: Path, title: str, privacy: str, columns: int | None = None
) -> None:
    import matplotlib.pyplot as plt

    handles, labels = panel.get_legend_handles_labels()
    place = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles, labels, ncols=columns or min(len(labels), 4), **place)
    public = is_public(privacy)
    heading = "\n".join(
        part for part in (title, "" if public else privacy.upper()[:11] + privacy[11:]) if part
    )
    figure.suptitle(heading, color="black" if public else "#B00000", fontsize=10)
    figure.savefig(file, dpi=150)
    plt.close(figure)
