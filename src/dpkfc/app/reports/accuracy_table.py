"""Accuracy by data set and arm: as a table, as Markdown, and as a figure with every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = ("data set", "arm", "tries", "chosen", "validation %", "test %", "paper %")


@dataclass(frozen=True)
class Summary:
    """One arm on one data set: the setting chosen on validation, and the final test accuracies."""

    dataset: str
    arm: str
    tries: int
    chosen: str
    validation: float | None  # None if the setting was chosen on another data set
    tests: tuple[float, ...]  # one per seed
    paper: float | None = None  # in percent


def accuracy_table(summaries: Sequence[Summary], title: str) -> Table:
    """The table for the terminal, with one section per data set."""
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(
            heading, justify="left" if heading in ("data set", "arm", "chosen") else "right"
        )
    for before, row in zip([None, *summaries], summaries, strict=False):
        if before and before.dataset != row.dataset:
            table.add_section()
        table.add_row(*_cells(row))
    return table


def accuracy_markdown(summaries: Sequence[Summary], title: str, remark: str) -> str:
    """The table as Markdown. Many data sets have an overview first, with missing runs too."""
    known = [row for row in summaries if row.tries or row.tests]
    lines = [HEADINGS, ("---", "---", "---:", "---", "---:", "---:", "---:"), *map(_cells, known)]
    overview = (
        f"{_markdown(_overview(summaries))}\n\n"
        if len({row.dataset for row in summaries}) > 2
        else ""
    )
    return f"# {title}\n\n{overview}{_markdown(lines)}\n\n{remark}\n"


def _overview(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Arms by data sets: the test accuracy, and that of the paper in brackets."""
    datasets = list(dict.fromkeys(row.dataset for row in summaries))
    cells = {(row.arm, row.dataset): mean_and_spread(row.tests) + _paper(row) for row in summaries}
    arms = dict.fromkeys(row.arm for row in summaries)
    lines = [(arm, *(cells.get((arm, dataset), "") for dataset in datasets)) for arm in arms]
    return [("test % [paper]", *datasets), ("---",) * (1 + len(datasets)), *lines]


def _paper(row: Summary) -> str:
    return "" if row.paper is None else f" [{row.paper:.1f}]"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Summary) -> tuple[str, ...]:
    return (
        row.dataset,
        row.arm,
        str(row.tries),
        row.chosen,
        "" if row.validation is None else f"{100 * row.validation:.2f}",
        mean_and_spread(row.tests),
        "" if row.paper is None else f"{row.paper:.1f}",
    )


def mean_and_spread(accuracies: Sequence[float]) -> str:
    """Mean ± sample standard deviation, in percent, with the number of runs.

    >>> mean_and_spread([0.96, 0.97, 0.98])
    '97.00 ± 1.00 (3)'
    """
    if not accuracies:
        return "not run"
    spread = f" ± {100 * stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{100 * fmean(accuracies):.2f}{spread} ({len(accuracies)})"


def plot_accuracy(summaries: Sequence[Summary], file: Path) -> None:
    """One panel per data set: one dot per seed, a bar at the mean, a cross for the paper."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    datasets = list(dict.fromkeys(row.dataset for row in summaries))
    arms = list(dict.fromkeys(row.arm for row in summaries))
    columns = min(len(datasets), 4)
    rows = -(-len(datasets) // columns)
    size = (1.8 + 4.2 * columns, (1.4 + 0.5 * len(arms)) * rows)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    panels = grid.ravel()[: len(datasets)]
    for panel in grid.ravel()[len(datasets) :]:
        panel.set_axis_off()
    for panel, dataset in zip(panels, datasets, strict=True):
        for row in summaries:
            if row.dataset == dataset:
                _plot_arm(panel, row, arms.index(row.arm))
        panel.set_title(dataset)
        panel.set_xlabel("test accuracy, %")
        panel.set_yticks(range(len(arms)), arms)
        panel.set_ylim(len(arms) - 0.5, -0.6)
        panel.grid(axis="x", alpha=0.3)
    entries = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), ncols=3, loc="outside upper center", fontsize=8)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _plot_arm(panel: Axes, row: Summary, height: int) -> None:
    tests = [100 * accuracy for accuracy in row.tests]
    panel.plot(tests, [height] * len(tests), "o", color="tab:blue", alpha=0.6, label="one seed")
    if tests:
        mean = fmean(tests)
        panel.plot(mean, height, "|", color="black", markersize=18, label="mean")
        panel.annotate(
            f"{mean:.1f}",
            (mean, height),
            (0, 11),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    if row.paper is not None:
        panel.plot(row.paper, height, "x", color="tab:red", label="paper")
