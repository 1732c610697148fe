"""Accuracy against epsilon: one table and one panel per task, with the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from dpkfc.app.reports.accuracy_table import mean_and_spread

STYLES = {  # colour and marker
    "dp-sgd": ("tab:blue", "o"),
    "dp-adam": ("tab:cyan", "D"),
    "dp-kfc": ("tab:red", "s"),
    "public dp-kfc": ("tab:purple", "^"),
    "public dp-kfc (sst-2)": ("tab:pink", "v"),
}


@dataclass(frozen=True)
class Point:
    """One arm at one epsilon: test accuracies, one per seed, and the paper's in percent."""

    arm: str
    epsilon: float
    tests: tuple[float, ...]
    paper: float | None


@dataclass(frozen=True)
class Panel:
    """The results of a task. `plain` holds test accuracies without privacy."""

    heading: str
    about: str
    points: tuple[Point, ...]
    plain: tuple[float, ...]
    paper_plain: float

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(point.arm for point in self.points))

    def of(self, arm: str) -> list[Point]:
        """Return the points of an arm by increasing epsilon."""
        return sorted(
            (point for point in self.points if point.arm == arm), key=lambda point: point.epsilon
        )


def panel_markdown(panel: Panel) -> str:
    """Format one line per epsilon and one column per arm, with the paper's figures in brackets."""
    cells = {(point.epsilon, point.arm): _cell(point.tests, point.paper) for point in panel.points}
    lines = [["epsilon", *panel.arms], ["---:", *["---"] * len(panel.arms)]]
    for epsilon in sorted({point.epsilon for point in panel.points}):
        lines.append([f"{epsilon:g}", *(cells.get((epsilon, arm), "") for arm in panel.arms)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    plain = f"Without privacy: {_cell(panel.plain, panel.paper_plain)}."
    return f"## {panel.heading}\n\n{panel.about}\n\nTest % [paper]:\n\n{table}\n\n{plain}\n"


def _cell(tests: Sequence[float], paper: float | None) -> str:
    return mean_and_spread(tests) + ("" if paper is None else f" [{paper:.1f}]")


def plot_panels(panels: Sequence[Panel], file: Path) -> None:
    """Draw means with the standard deviation over seeds.

    Hollow markers are the paper's figures, dashed lines are without privacy.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.4), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for arm in panel.arms:
            ours = [point for point in panel.of(arm) if point.tests]
            means = [100 * fmean(point.tests) for point in ours]
            spread = [100 * stdev(point.tests) if len(point.tests) > 1 else 0.0 for point in ours]
            colour, marker = STYLES[arm]
            axis.errorbar(
                [point.epsilon for point in ours],
                means,
                spread,
                color=colour,
                label=arm,
                marker=marker,
                markersize=4,
                capsize=2,
                linewidth=1.2,
            )
            published = [point for point in panel.of(arm) if point.paper is not None]
            axis.plot(
                [point.epsilon for point in published],
                [point.paper for point in published],
                marker,
                color=colour,
                fillstyle="none",
                markersize=7,
            )
        if panel.plain:
            axis.axhline(100 * fmean(panel.plain), linestyle="--", color="black", linewidth=1)
        axis.axhline(panel.paper_plain, linestyle=":", color="grey", linewidth=1)
        epsilons = sorted({point.epsilon for point in panel.points})
        axis.set_xscale("log")
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.minorticks_off()
        axis.set_title(panel.heading.replace(" (", "\n("), fontsize=10)
        axis.set_xlabel("epsilon")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("test accuracy, %")
    entries = {
        label: line
        for axis in axes[0]
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    entries["hollow: the paper"] = Line2D(
        [], [], marker="s", linestyle="none", color="grey", fillstyle="none"
    )
    if any(panel.plain for panel in panels):
        entries["without privacy"] = Line2D([], [], linestyle="--", color="black", linewidth=1)
    entries["without privacy, the paper"] = Line2D([], [], linestyle=":", color="grey", linewidth=1)
    columns = min(2 * len(panels), 4)
    figure.legend(
        entries.values(), entries.keys(), ncols=columns, loc="outside lower center", fontsize=8
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)
