"""Figures 10 and 11 of the paper from the trials of a search: surfaces and importances."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.table7.findings import (
    CLAIMED,
    GOOD,
    KFC_ONLY,
    SPACE,
    Array,
    Sweep,
    evaluator_name,
    importances,
    smooth,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "lr": "learning rate η",
    "clip": "clip C",
    "damping": "damping π",
    "alpha": "noise exponent α",
    "steps": "preconditioner steps",
}
SHORT = {
    "lr": "learning rate",
    "clip": "clip",
    "damping": "damping π",
    "alpha": "exponent α",
    "steps": "steps",
}
# Lettered as in the paper, which leaves out the last one.
PAIRS = [
    ("clip", "lr"),
    ("clip", "damping"),
    ("clip", "alpha"),
    ("lr", "damping"),
    ("lr", "alpha"),
    ("lr", "steps"),
    ("damping", "alpha"),
    ("damping", "steps"),
    ("alpha", "steps"),
    ("clip", "steps"),
]
TITLES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar-10": "CIFAR-10"}
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#BBBBBB"
DPI = 150
POINTS = 80  # of the grid of a surface, along each axis
WIDTH = 0.1  # of the kernel, as a share of each axis


def surface(sweep: Sweep, across: str, up: str) -> tuple[Array, Array, Array]:
    """Average the accuracy on a grid of two hyperparameters with a kernel.

    Returns:
        The values of `across` and of `up`, and the mean accuracies [up, across].
    """
    unit = np.linspace(0, 1, POINTS)
    mesh = np.stack(np.meshgrid(unit, unit), -1).reshape(-1, 2)
    trials = np.stack([SPACE[name].to_unit(sweep.values[name]) for name in (across, up)], -1)
    field = smooth(mesh, trials, sweep.accuracy, WIDTH).reshape(POINTS, POINTS)
    return _values(across, unit), _values(up, unit), field


def _values(name: str, unit: Array) -> Array:
    """Map [0, 1] back to values of a hyperparameter."""
    low, high = SPACE[name].low, SPACE[name].high
    return np.asarray(low * (high / low) ** unit if SPACE[name].log else low + (high - low) * unit)


def draw_surface(
    axes: Axes, sweep: Sweep, across: str, up: str, limits: tuple[float, float], title: str
) -> Any:
    """Draw trials over their kernel mean, a dashed line at 90 % of the best, a star at the best.

    Returns the filled contours, for a colour bar.
    """
    x, y, field = surface(sweep, across, up)
    low, high = limits
    colours: dict[str, Any] = {"cmap": "viridis", "vmin": 100 * low, "vmax": 100 * high}
    filled = axes.contourf(
        x, y, 100 * field, levels=np.linspace(100 * low, 100 * high, 25), **colours
    )
    level = GOOD * float(sweep.accuracy.max())
    if field.min() < level < field.max():
        axes.contour(
            x, y, field, levels=[level], colors="white", linestyles="dashed", linewidths=1.2
        )
    axes.scatter(
        sweep.values[across],
        sweep.values[up],
        c=100 * sweep.accuracy,
        s=22,
        edgecolors="black",
        linewidths=0.6,
        zorder=3,
        **colours,
    )
    best = sweep.best
    axes.scatter(
        best[across],
        best[up],
        marker="*",
        s=230,
        color="red",
        edgecolors="white",
        linewidths=0.8,
        zorder=4,
    )
    for name, axis in ((across, "x"), (up, "y")):
        scale = SPACE[name]
        axes.set(
            **{
                f"{axis}scale": "log" if scale.log else "linear",
                f"{axis}lim": (scale.low, scale.high),
                f"{axis}label": LABELS[name],
            }
        )
    axes.set_title(title, loc="left", fontsize=11)
    return filled


def draw_importances(axes: Axes, kfc: Sweep, title: str) -> None:
    """Draw bars of rank correlations (full) and of a forest's variance (hatched).

    The paper's figures are diamonds.
    """
    importance = importances(kfc)
    names = sorted(importance, key=lambda name: abs(importance[name].correlation))
    for place, name in enumerate(names):
        colour = ORANGE if name in KFC_ONLY else BLUE
        axes.barh(place + 0.2, abs(importance[name].correlation), height=0.38, color=colour)
        axes.barh(
            place - 0.2,
            importance[name].variance,
            height=0.38,
            facecolor="none",
            edgecolor=colour,
            hatch="////",
            linewidth=1,
        )
        if name in CLAIMED:
            axes.plot(
                CLAIMED[name],
                place + 0.2,
                marker="D",
                color="black",
                markersize=6,
                linestyle="none",
            )
    chance = 2 / np.sqrt(len(kfc.accuracy))
    axes.axvline(chance, color="black", linewidth=0.9, linestyle=":")
    axes.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axes.set(xlim=(0, 1), xlabel="importance")
    axes.set_title(title, loc="left", fontsize=11)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys = [
        Patch(facecolor="grey", label="|rank correlation|"),
        Patch(facecolor="none", edgecolor="grey", hatch="////", label=evaluator_name()),
        Line2D(
            [], [], marker="D", color="black", linestyle="none", markersize=6, label="the paper"
        ),
        Line2D([], [], color="black", linestyle=":", linewidth=0.9, label="chance (2/√trials)"),
    ]
    axes.legend(handles=keys, fontsize=8, loc="lower right")


def draw_summary(
    axes: Axes, sgd: Sweep, kfc: Sweep, paper: tuple[float, float], title: str
) -> None:
    """Draw the test accuracies of the best of either method, with the paper's in grey."""
    means = [100 * fmean(sweep.tests) for sweep in (sgd, kfc)]
    errors = [100 * spread(sweep.tests) for sweep in (sgd, kfc)]
    bars = axes.bar([0, 1], means, width=0.38, yerr=errors, capsize=4, color=[BLUE, ORANGE])
    published = axes.bar(
        [0.4, 1.4], paper, width=0.38, color=GREY, label="the paper (its full protocol)"
    )
    axes.bar_label(bars, [f"{mean:.1f}" for mean in means], padding=3, fontsize=10)
    axes.bar_label(
        published, [f"{figure:.1f}" for figure in paper], padding=3, fontsize=10, color="#666666"
    )
    axes.set_xticks([0.2, 1.2], ["DP-SGD", "DP-KFC"])
    axes.set(ylim=(0, 1.3 * max(*means, *paper)), ylabel="test accuracy, %")
    gain = f"Δ = {means[1] - means[0]:+.2f} points, best α = {kfc.best['alpha']:.2f}"
    axes.text(0.03, 0.96, gain, transform=axes.transAxes, va="top", fontsize=10)
    axes.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.91))
    axes.set_title(title, loc="left", fontsize=11)


def plot_analysis(
    sgd: Sweep, kfc: Sweep, dataset: str, paper: tuple[float, float], file: Path
) -> None:
    """Draw Figure 10: surfaces, importances and test accuracies."""
    plt = _pyplot()
    limits = _limits(sgd, kfc)
    figure, panels = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    (a, b, c), (d, e, f) = panels
    filled = draw_surface(a, sgd, "clip", "lr", limits, "(a) DP-SGD: clip × learning rate")
    draw_surface(b, kfc, "clip", "lr", limits, "(b) DP-KFC: clip × learning rate")
    draw_importances(c, kfc, "(c) DP-KFC: importance of parameters")
    draw_surface(d, kfc, "lr", "damping", limits, "(d) DP-KFC: learning rate × damping")
    draw_surface(e, kfc, "lr", "alpha", limits, "(e) DP-KFC: learning rate × noise exponent")
    draw_summary(f, sgd, kfc, paper, "(f) The best trial of either method")
    figure.colorbar(
        filled, ax=[a, b, d, e], label="validation accuracy, %", ticks=_ticks(limits), aspect=40
    )
    figure.suptitle(
        f"{TITLES[dataset]}, {len(kfc.accuracy)} trials a method "
        "(points; a star is the best, dashes 90 % of it)"
    )
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def plot_pairs(kfc: Sweep, dataset: str, file: Path) -> None:
    """Draw Figure 11: the surface of every pair of hyperparameters of DP-KFC."""
    plt = _pyplot()
    limits = _limits(kfc)
    figure, panels = plt.subplots(2, 5, figsize=(19, 7.6), layout="constrained")
    for letter, panel, (across, up) in zip("abcdefghij", panels.flat, PAIRS, strict=True):
        filled = draw_surface(
            panel, kfc, across, up, limits, f"({letter}) {SHORT[across]} × {SHORT[up]}"
        )
    figure.colorbar(
        filled, ax=panels, label="validation accuracy, %", ticks=_ticks(limits), aspect=40
    )
    count = len(kfc.accuracy)
    figure.suptitle(
        f"DP-KFC on {TITLES[dataset]}, {count} trials "
        "(points; a star is the best, dashes 90 % of it)"
    )
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _limits(*sweeps: Sweep) -> tuple[float, float]:
    """Return the least and the best accuracy, the limits of the colours of all panels."""
    low, high = (
        float(pick([pick(sweep.accuracy) for sweep in sweeps])) for pick in (np.min, np.max)
    )
    return low, max(high, low + 0.01)


def _ticks(limits: tuple[float, float]) -> list[int]:
    """Return about eight round percentages within the limits.

    >>> _ticks((0.08, 0.91))
    [10, 20, 30, 40, 50, 60, 70, 80, 90]
    """
    low, high = (100 * limit for limit in limits)
    step = next((step for step in (1, 2, 5, 10) if high - low < 10 * step), 20)
    return list(range(step * math.ceil(low / step), math.floor(high) + 1, step))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
