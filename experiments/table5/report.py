"""Accuracy against epsilon: a table and a panel a task, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from dpkfc.app.reports.accuracy_table import mean_and_spread

LOOKS = {  # colour and marker
    "dp-sgd": ("tab:blue", "o"),
    "dp-adam": ("tab:cyan", "D"),
    "dp-kfc": ("tab:red", "s"),
    "public dp-kfc": ("tab:purple", "^"),
    "public dp-kfc (sst-2)": ("tab:pink", "v"),
}


@dataclass(frozen=True)
class Point:
    """One arm at one epsilon: test accuracies, one a seed, and the paper's, in percent."""

    arm: str
    epsilon: float
    tests: tuple[float, ...]
    paper: float | None


@dataclass(frozen=True)
class Panel:
    """A task. `plain` are test accuracies without privacy."""

    heading: str
    about: str
    points: tuple[Point, ...]
    plain: tuple[float, ...]
    paper_plain: float

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(point.arm for point in self.points))

    def of(self, arm: str) -> list[Point]:
        return sorted(
            (point for point in self.points if point.arm == arm), key=lambda point: point.epsilon
        )


def panel_markdown(panel: Panel) -> str:
    """A line an epsilon, a column an arm: the test accuracy, and the paper's in brackets."""
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
    """Means with the standard deviation over seeds; hollow markers are the paper's, dashed lines without privacy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, places = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.4), squeeze=False, layout="constrained"
    )
    for place, panel in zip(places[0], panels, strict=True):
        for arm in panel.arms:
            ours = [point for point in panel.of(arm) if point.tests]
            means = [100 * fmean(point.tests) for point in ours]
            spread = [100 * stdev(point.tests) if len(point.tests) > 1 else 0.0 for point in ours]
            (colour, marker), xs = LOOKS[arm], [point.epsilon for point in ours]
            look = {"marker": marker, "markersize": 4, "capsize": 2, "linewidth": 1.2}
            place.errorbar(xs, means, spread, color=colour, label=arm, **look)
            papers = [point for point in panel.of(arm) if point.paper is not None]
            xs, theirs = [point.epsilon for point in papers], [point.paper for point in papers]
            place.plot(xs, theirs, marker, color=colour, fillstyle="none", markersize=7)
        if panel.plain:
            place.axhline(100 * fmean(panel.plain), linestyle="--", color="black", linewidth=1)
        place.axhline(panel.paper_plain, linestyle=":", color="grey", linewidth=1)
        epsilons = sorted({point.epsilon for point in panel.points})
        place.set_xscale("log")
        place.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        place.minorticks_off()
        place.set_title(panel.heading.replace(" (", "\n("), fontsize=10)
        place.set_xlabel("epsilon")
        place.grid(alpha=0.3)
    places[0][0].set_ylabel("test accuracy, %")
    entries = {
        label: line
        for place in places[0]
        for line, label in zip(*place.get_legend_handles_labels(), strict=True)
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
