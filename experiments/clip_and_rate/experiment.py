"""A grid over clip and learning rate, by DP-SGD and DP-KFC, on scikit-learn's digits.

The paper states that DP-SGD needs clip norm R and learning rate η on a narrow diagonal, while
DP-KFC works on a broad rectangle. With preconditioned gradients g and B expected records per
batch, a step adds to the weights

    η (Σ g min(1, R / ‖g‖) + σ R z) / B

If every g is longer than R, this is ``η R (Σ g / ‖g‖ + σ z) / B``, a function of η · R: a diagonal
of slope -1, whatever the preconditioner. If none is, the signal grows with η and the noise with
η · R, so that a larger R only adds noise. The experiment measures the outcome: both methods are
trained at every pair of a grid.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import dpkfc
from dpkfc.app.models import digits_cnn
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.demo import MOMENTUM, kfc
from dpkfc.geometry.base import Geometry
from experiments.common.arguments import EXPECTED_ERRORS, results_file
from experiments.common.digits import HELD_OUT, DigitsResult, train_all
from experiments.common.digits import train as train_on_digits
from experiments.common.options import ReproduceOptions

METHODS: dict[str, Callable[[], Geometry]] = {"DP-SGD": dpkfc.Identity, "DP-KFC": kfc}
CLIPS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS = (1, 2)
QUICK_CLIPS = (0.1, 1.0, 10.0)
QUICK_RATES = (0.01, 0.1, 1.0)
QUICK_STEPS = 20
EPSILON = 3.0
DELTA = 1e-5
GOOD = 0.02  # the accuracy that a good cell may lose against the best
LEVELS = (0.02, 0.05, 0.1)  # the same, in the summary


@dataclass(frozen=True)
class GridRun:
    """One cell of the grid, one seed."""

    method: str
    clip: float
    lr: float
    seed: int
    epsilon: float = EPSILON
    steps: int = 100
    batch_size: int = 96


def train(run: GridRun, device: str = "cpu") -> DigitsResult:
    """Train by SGD with momentum .9, with flat clipping and independent noise."""
    torch.manual_seed(run.seed)
    model = digits_cnn().to(device)
    return train_on_digits(
        model,
        torch.optim.SGD(model.parameters(), lr=run.lr, momentum=MOMENTUM),
        seed=run.seed,
        epsilon=run.epsilon,
        delta=DELTA,
        steps=run.steps,
        batch_size=run.batch_size,
        clip=run.clip,
        geometry=METHODS[run.method](),
    )


AccuracyGrid = NDArray[np.float64]  # mean over the seeds, [clip, learning rate]


@dataclass(frozen=True)
class GridFinding:
    """The grid of one method; cells `within` so much of its best are good."""

    clips: tuple[float, ...]
    rates: tuple[float, ...]
    grid: AccuracyGrid
    within: float = GOOD

    @property
    def level(self) -> float:
        return float(self.grid.max()) - self.within

    @property
    def good(self) -> float:
        """The share of good cells."""
        return float((self.grid >= self.level).mean())

    @property
    def widths_in_rate(self) -> list[float]:
        """Decades of good learning rates at each clip."""
        return [level_set(self.rates, row, self.level)[0] for row in self.grid]

    @property
    def widths_in_clip(self) -> list[float]:
        """Decades of good clips at each learning rate."""
        return [level_set(self.clips, column, self.level)[0] for column in self.grid.T]

    @property
    def usable(self) -> list[int]:
        """The numbers of the clips at which some learning rate is good; only these have a ridge."""
        return [number for number, row in enumerate(self.grid) if row.max() >= self.level]

    @property
    def slope(self) -> float:
        """d log lr / d log clip along the ridge.

        At each clip the ridge is the middle of the learning rates `within` the best of that clip.
        """
        if len(self.usable) < 2:
            return math.nan
        rows = [self.grid[number] for number in self.usable]
        ridge = [level_set(self.rates, row, row.max() - self.within)[1] for row in rows]
        clips = [self.clips[number] for number in self.usable]
        return float(np.polyfit(np.log10(clips), ridge, 1)[0])


def level_set(
    xs: Sequence[float], ys: Sequence[float] | AccuracyGrid, level: float
) -> tuple[float, float]:
    """Return the decades over which y, interpolated in log x, is at least `level`.

    The second number is the middle of that set, as log10 x.

    >>> level_set([0.1, 1.0, 10.0], [0.0, 1.0, 0.0], 0.5)
    (1.0, 0.0)
    """
    width = moment = 0.0
    places = [(math.log10(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    for (x1, y1), (x2, y2) in pairwise(places):
        above = [x for x, y in ((x1, y1), (x2, y2)) if y >= level]
        if len(above) == 1:
            above.append(x1 + (x2 - x1) * (level - y1) / (y2 - y1))
        if above:
            part = abs(above[1] - above[0])
            width, moment = width + part, moment + part * sum(above) / 2
    if width == 0:  # a single peak
        return 0.0, max(places, key=lambda place: place[1])[0]
    return width, moment / width


def find(results: Mapping[GridRun, DigitsResult], method: str) -> GridFinding:
    """Average the results of a method over the seeds."""
    runs = {run: result.last for run, result in results.items() if run.method == method}
    clips, rates = (tuple(sorted({getattr(run, name) for run in runs})) for name in ("clip", "lr"))

    def cell(clip: float, lr: float) -> float:
        return fmean(last for run, last in runs.items() if (run.clip, run.lr) == (clip, lr))

    return GridFinding(clips, rates, np.array([[cell(clip, lr) for lr in rates] for clip in clips]))


def verdict(findings: Mapping[str, GridFinding]) -> str:
    """Judge the paper's claim by the slope of DP-KFC's ridge."""
    slopes = {method: finding.slope for method, finding in findings.items()}
    described = " and ".join(f"{slope:.2f} with {method}" for method, slope in slopes.items())
    slope = slopes["DP-KFC"]
    if math.isnan(slope):
        return "**The claim cannot be judged:** a ridge needs at least two clips."
    answer = "does not hold" if slope < -0.75 else "holds" if slope > -0.25 else "holds in part"
    return (
        f"**The claim {answer} here:** that DP-SGD couples clip and learning rate in a narrow "
        "diagonal, while DP-KFC has a broad rectangle. The ridge of good settings has the slope "
        f"{described} (d log lr / d log clip: -1 is a diagonal, 0 a rectangle)."
    )


WHY = (
    "If all gradients are longer than the clip, a step depends on lr · clip alone, whatever the "
    "geometry: the lines of small clips coincide in the lower panels. If none is, a larger clip "
    "only adds noise: the lines fall."
)


def markdown(
    findings: Mapping[str, GridFinding],
    runs: Collection[GridRun],
    picture: str,
    quick: bool = False,
) -> str:
    """Return the report."""
    summary_headings = [
        "",
        "good: within",
        "cells",
        "median width in lr",
        "median width in clip",
        "clips with a good lr",
        "slope",
    ]
    summary = [
        _summary_cells(method, replace(finding, within=within))
        for within in LEVELS
        for method, finding in findings.items()
    ]
    first = next(iter(findings.values()))
    by_clip = [
        [f"{clip:g}", *(cell for of in findings.values() for cell in _clip_cells(of, number))]
        for number, clip in enumerate(first.clips)
    ]
    by_rate = [
        [f"{rate:g}", *(f"{of.widths_in_clip[number]:.2f}" for of in findings.values())]
        for number, rate in enumerate(first.rates)
    ]
    run = next(iter(runs))
    seeds = len({run.seed for run in runs})
    remark = (
        f"digits_cnn on scikit-learn's digits, epsilon {run.epsilon:g}, delta {DELTA:g}, "
        f"{run.steps} steps of {run.batch_size} expected records, SGD with momentum {MOMENTUM:g}, "
        f"flat clipping, last weights; the mean of {seeds} seeds on {HELD_OUT} held-out training "
        f"records. A cell is good if it is within {100 * GOOD:g} points (or what a line says) of "
        "the best of its method; widths are in decades, interpolated in log lr or log clip; "
        "medians are over those that are not 0. With so few seeds the best cell is partly chance, "
        "so that widths at two points are underestimated, for both methods alike."
    )
    headings = [
        f"{method}: {column}"
        for method in findings
        for column in ("best %", "at lr", "lr · clip", "width in lr")
    ]
    parts = [
        "# Clip and learning rate",
        *([] if quick else [verdict(findings)]),
        WHY,
        markdown_table(summary_headings, summary),
        f"![accuracy by clip and learning rate, and by their product]({picture})",
        "## Learning rates at each clip",
        markdown_table(["clip", *headings], by_clip),
        "## Clips at each learning rate",
        markdown_table(["lr", *(f"{method}: width in clip" for method in findings)], by_rate),
        remark,
    ]
    return "\n\n".join(parts) + "\n"


def _summary_cells(method: str, finding: GridFinding) -> list[str]:
    clips = [finding.clips[number] for number in finding.usable]
    return [
        f"{method}, best {100 * finding.grid.max():.1f} %",
        f"{100 * finding.within:g} points",
        f"{100 * finding.good:.0f} %",
        f"{median([width for width in finding.widths_in_rate if width] or [0]):.2f}",
        f"{median([width for width in finding.widths_in_clip if width] or [0]):.2f}",
        f"{clips[0]:g} to {clips[-1]:g}",
        f"{finding.slope:.2f}",
    ]


def _clip_cells(finding: GridFinding, number: int) -> list[str]:
    best = int(finding.grid[number].argmax())
    lr = finding.rates[best]
    return [
        f"{100 * finding.grid[number, best]:.1f}",
        f"{lr:g}",
        f"{lr * finding.clips[number]:.2g}",
        f"{finding.widths_in_rate[number]:.2f}",
    ]


def plot(findings: Mapping[str, GridFinding], file: Path) -> None:
    """Draw accuracy by clip and learning rate (top) and by their product (bottom).

    Good cells have a frame; below there is one line per clip.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, panels = plt.subplots(
        2, len(findings), figsize=(5.6 * len(findings), 8.4), layout="constrained"
    )
    for (method, finding), (above, below) in zip(findings.items(), panels.T, strict=True):
        image = above.imshow(
            100 * finding.grid, vmin=0, vmax=100, cmap="viridis", origin="lower", aspect="auto"
        )
        for (row, column), accuracy in np.ndenumerate(finding.grid):
            ink = "white" if accuracy < 0.6 else "black"
            above.text(
                column,
                row,
                f"{100 * accuracy:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color=ink,
            )
            if accuracy >= finding.level:
                frame = Rectangle(
                    (column - 0.46, row - 0.46), 0.92, 0.92, fill=False, color="red", linewidth=1.6
                )
                above.add_patch(frame)
        above.set_xticks(
            range(len(finding.rates)), [f"{rate:g}" for rate in finding.rates], rotation=60
        )
        above.set_yticks(range(len(finding.clips)), [f"{clip:g}" for clip in finding.clips])
        above.set(title=f"{method}: accuracy, %", xlabel="learning rate", ylabel="clip")
        for number, (clip, row) in enumerate(zip(finding.clips, finding.grid, strict=True)):
            colour: Any = plt.get_cmap("plasma")(number / len(finding.clips))
            below.plot(
                np.array(finding.rates) * clip,
                100 * row,
                "-o",
                markersize=3,
                color=colour,
                label=f"clip {clip:g}",
            )
        below.set(
            xscale="log",
            ylim=(0, 100),
            xlabel="learning rate · clip",
            ylabel="accuracy, %",
            title=method,
        )
        below.grid(alpha=0.3)
        below.legend(fontsize=8)
    figure.colorbar(image, ax=panels[0, -1])
    figure.savefig(file, dpi=150)
    plt.close(figure)


def grid(clips: Sequence[float], rates: Sequence[float], seeds: Sequence[int]) -> list[GridRun]:
    """Return all runs, every cell with the first seed before any with the next."""
    return [
        GridRun(method, clip, lr, seed)
        for seed in seeds
        for method in METHODS
        for clip in clips
        for lr in rates
    ]


def execute(
    runs: Sequence[GridRun], file: Path, console: Console, quick: bool = False, device: str = "cpu"
) -> None:
    """Train all runs that the file does not hold yet, and write the report."""
    results = train_all(runs, partial(train, device=device), file, console)
    findings = {method: find(results, method) for method in METHODS}
    text = markdown(findings, runs, file.with_suffix(".png").name, quick)
    publish(file, text, console, partial(plot, findings), quick)


def reproduce(options: ReproduceOptions) -> None:
    """Run the whole grid; quick: nine short cells per method."""
    seeds = options.seeds(SEEDS)
    if options.quick:
        short = grid(QUICK_CLIPS, QUICK_RATES, seeds)
        runs = [replace(run, steps=QUICK_STEPS) for run in short]
        file = options.out / "quick.jsonl"
    else:
        runs = grid(CLIPS, RATES, seeds)
        file = options.out / "clip-and-rate.jsonl"
    execute(runs, file, options.console, options.quick, options.device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the whole grid from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.clip_and_rate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=results_file, required=True, metavar="FILE.jsonl", help="results of all runs"
    )
    chosen = parser.parse_args(arguments)
    try:
        execute(grid(CLIPS, RATES, SEEDS), chosen.out, Console())
    except EXPECTED_ERRORS as error:
        sys.exit(f"experiments.clip_and_rate: {error}")
