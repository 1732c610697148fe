"""Does DP-KFC free the learning rate from the clip? The paper's Figure 10 on the bundled digits, by SGD.

    dpkfc reproduce clip-and-rate
    python -m experiments.clip_and_rate --out runs/clip-and-rate.jsonl

The paper: DP-SGD needs clip C and learning rate η on a narrow diagonal, DP-KFC works on a broad rectangle. What a step
adds to the weights, of mapped gradients g and B records expected in a batch, is

    η (Σ g min(1, C / ‖g‖) + σ C z) / B

If every g is longer than C, this is ``η C (Σ g / ‖g‖ + σ z) / B``, a function of η · C: a diagonal of slope -1,
whatever the map. If none is, the signal grows with η and the noise with η · C, so that a larger C only adds noise. What
comes of it is measured: both methods are trained at every pair of a grid.
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
from experiments.common.digits import HELD_OUT, Result, results_file, run_all
from experiments.common.digits import train as train_on_digits
from experiments.common.options import ReproduceOptions
from numpy.typing import NDArray
from rich.console import Console

import dpkfc
from dpkfc.app.models import digits_cnn
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.demo import MOMENTUM, kfc
from dpkfc.geometry.identity import Geometry

METHODS: dict[str, Callable[[], Geometry]] = {"DP-SGD": dpkfc.Identity, "DP-KFC": kfc}
CLIPS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS = (1, 2)
QUICK_CLIPS, QUICK_RATES, QUICK_STEPS = (0.1, 1.0, 10.0), (0.01, 0.1, 1.0), 20
EPSILON, DELTA = 3.0, 1e-5
GOOD, LEVELS = (
    0.02,
    (0.02, 0.05, 0.1),
)  # what a cell may lose to be good; the first is used where none is named


@dataclass(frozen=True)
class Run:
    """One cell, one seed."""

    method: str
    clip: float
    lr: float
    seed: int
    epsilon: float = EPSILON
    steps: int = 100
    batch_size: int = 96


def train(run: Run, device: str = "cpu") -> Result:
    """Flat clipping, independent noise, SGD with momentum .9, the last weights."""
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


Grid = NDArray[np.float64]  # mean accuracy over the seeds, [clip, learning rate]


@dataclass(frozen=True)
class Finding:
    """What the grid of one method shows, if cells `within` so much of its best are good."""

    clips: tuple[float, ...]
    rates: tuple[float, ...]
    grid: Grid
    within: float = GOOD

    @property
    def level(self) -> float:
        return float(self.grid.max()) - self.within

    @property
    def good(self) -> float:
        """The part of the cells that are good."""
        return float((self.grid >= self.level).mean())

    @property
    def widths_in_rate(self) -> list[float]:
        """Decades of good learning rates, at each clip."""
        return [level_set(self.rates, row, self.level)[0] for row in self.grid]

    @property
    def widths_in_clip(self) -> list[float]:
        """Decades of good clips, at each learning rate."""
        return [level_set(self.clips, column, self.level)[0] for column in self.grid.T]

    @property
    def usable(self) -> list[int]:
        """The clips at which some learning rate is good; elsewhere there is no ridge to follow."""
        return [place for place, row in enumerate(self.grid) if row.max() >= self.level]

    @property
    def slope(self) -> float:
        """d log lr / d log clip along the ridge: the middle of what is within so much of the best of each clip."""
        if len(self.usable) < 2:
            return math.nan
        rows = [self.grid[place] for place in self.usable]
        ridge = [level_set(self.rates, row, row.max() - self.within)[1] for row in rows]
        return float(
            np.polyfit(np.log10([self.clips[place] for place in self.usable]), ridge, 1)[0]
        )


def level_set(xs: Sequence[float], ys: Sequence[float] | Grid, level: float) -> tuple[float, float]:
    """Where y, interpolated in log x, is at least `level`: how many decades in all, and the middle of them as log10.

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


def find(results: Mapping[Run, Result], method: str) -> Finding:
    runs = {run: result.last for run, result in results.items() if run.method == method}
    clips, rates = (tuple(sorted({getattr(run, name) for run in runs})) for name in ("clip", "lr"))

    def cell(clip: float, lr: float) -> float:
        return fmean(last for run, last in runs.items() if (run.clip, run.lr) == (clip, lr))

    return Finding(clips, rates, np.array([[cell(clip, lr) for lr in rates] for clip in clips]))


def verdict(findings: Mapping[str, Finding]) -> str:
    """By the slope of DP-KFC's ridge."""
    slopes = {method: finding.slope for method, finding in findings.items()}
    said = " and ".join(f"{slope:.2f} with {method}" for method, slope in slopes.items())
    slope = slopes["DP-KFC"]
    if math.isnan(slope):
        return "**Whether the claim holds cannot be told:** a ridge needs at least two clips."
    answer = "does not hold" if slope < -0.75 else "holds" if slope > -0.25 else "holds in part"
    return (
        f"**The claim {answer} here:** that DP-SGD couples clip and learning rate in a narrow diagonal, while DP-KFC "
        f"has a broad rectangle. The ridge of good settings has the slope {said} (d log lr / d log clip: -1 is a "
        "diagonal, 0 a rectangle)."
    )


WHY = (
    "If all gradients are longer than the clip, a step depends on lr · clip alone, whatever the geometry: the lines of "
    "small clips lie on each other in the lower panels. If none is, a larger clip only adds noise: the lines fall."
)


def markdown(
    findings: Mapping[str, Finding], runs: Collection[Run], picture: str, quick: bool = False
) -> str:
    about = [
        "",
        "good: within",
        "cells",
        "median width in lr",
        "median width in clip",
        "clips with a good lr",
        "slope",
    ]
    lines = [
        _about(method, replace(of, within=within))
        for within in LEVELS
        for method, of in findings.items()
    ]
    one = next(iter(findings.values()))
    by_clip = [
        [f"{clip:g}", *(cell for of in findings.values() for cell in _at_clip(of, place))]
        for place, clip in enumerate(one.clips)
    ]
    by_rate = [
        [f"{rate:g}", *(f"{of.widths_in_clip[place]:.2f}" for of in findings.values())]
        for place, rate in enumerate(one.rates)
    ]
    run, seeds = next(iter(runs)), len({run.seed for run in runs})
    remark = (
        f"digits_cnn on the bundled digits, epsilon {run.epsilon:g}, delta {DELTA:g}, {run.steps} steps of "
        f"{run.batch_size} expected records, SGD with momentum {MOMENTUM:g}, flat clipping, last weights; the mean of "
        f"{seeds} seeds on {HELD_OUT} held-out training records. A cell is good if it is within {100 * GOOD:g} "
        "points (or what a line says) of the best of its method; widths are in decades, interpolated in log lr or log "
        "clip; medians are over those that are not 0. With so few seeds the best cell is in part luck, so that widths "
        "at two points are underestimated, for both methods alike."
    )
    headings = [
        f"{method}: {what}"
        for method in findings
        for what in ("best %", "at lr", "lr · clip", "width in lr")
    ]
    parts = [
        "# Clip and learning rate",
        *([] if quick else [verdict(findings)]),
        WHY,
        markdown_table(about, lines),
        f"![accuracy by clip and learning rate, and by their product]({picture})",
        "## Learning rates at each clip",
        markdown_table(["clip", *headings], by_clip),
        "## Clips at each learning rate",
        markdown_table(["lr", *(f"{method}: width in clip" for method in findings)], by_rate),
        remark,
    ]
    return "\n\n".join(parts) + "\n"


def _about(method: str, of: Finding) -> list[str]:
    return [
        f"{method}, best {100 * of.grid.max():.1f} %",
        f"{100 * of.within:g} points",
        f"{100 * of.good:.0f} %",
        f"{median([width for width in of.widths_in_rate if width] or [0]):.2f}",
        f"{median([width for width in of.widths_in_clip if width] or [0]):.2f}",
        f"{of.clips[of.usable[0]]:g} to {of.clips[of.usable[-1]]:g}",
        f"{of.slope:.2f}",
    ]


def _at_clip(of: Finding, place: int) -> list[str]:
    best = int(of.grid[place].argmax())
    lr, width = of.rates[best], of.widths_in_rate[place]
    return [
        f"{100 * of.grid[place, best]:.1f}",
        f"{lr:g}",
        f"{lr * of.clips[place]:.2g}",
        f"{width:.2f}",
    ]


def plot(findings: Mapping[str, Finding], file: Path) -> None:
    """Above accuracy by clip and learning rate, good cells framed; below the same by their product, a line a clip."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, panels = plt.subplots(
        2, len(findings), figsize=(5.6 * len(findings), 8.4), layout="constrained"
    )
    for (method, of), (above, below) in zip(findings.items(), panels.T, strict=True):
        image = above.imshow(
            100 * of.grid, vmin=0, vmax=100, cmap="viridis", origin="lower", aspect="auto"
        )
        for (row, column), accuracy in np.ndenumerate(of.grid):
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
            if accuracy >= of.level:
                frame = Rectangle(
                    (column - 0.46, row - 0.46), 0.92, 0.92, fill=False, color="red", linewidth=1.6
                )
                above.add_patch(frame)
        above.set_xticks(range(len(of.rates)), [f"{rate:g}" for rate in of.rates], rotation=60)
        above.set_yticks(range(len(of.clips)), [f"{clip:g}" for clip in of.clips])
        above.set(title=f"{method}: accuracy, %", xlabel="learning rate", ylabel="clip")
        for place, (clip, row) in enumerate(zip(of.clips, of.grid, strict=True)):
            colour: Any = plt.get_cmap("plasma")(place / len(of.clips))
            below.plot(
                np.array(of.rates) * clip,
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


def grid(clips: Sequence[float], rates: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Every cell once before any is repeated."""
    return [
        Run(method, clip, lr, seed)
        for seed in seeds
        for method in METHODS
        for clip in clips
        for lr in rates
    ]


def execute(
    runs: Sequence[Run], file: Path, console: Console, quick: bool = False, device: str = "cpu"
) -> None:
    results = run_all(runs, partial(train, device=device), file, console)
    findings = {method: find(results, method) for method in METHODS}
    text = markdown(findings, runs, file.with_suffix(".png").name, quick)
    publish(file, text, console, partial(plot, findings), quick)


def run(order: ReproduceOptions) -> None:
    """The whole grid; quick: nine short cells."""
    runs, name = grid(CLIPS, RATES, order.seeds(SEEDS)), "clip-and-rate.jsonl"
    if order.quick:
        runs, name = grid(QUICK_CLIPS, QUICK_RATES, order.seeds(SEEDS)), "quick.jsonl"
        runs = [replace(one, steps=QUICK_STEPS) for one in runs]
    try:
        execute(runs, order.out / name, order.console, order.quick, order.device)
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.clip_and_rate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=results_file, required=True, metavar="FILE.jsonl", help="results of all runs"
    )
    chosen = parser.parse_args(arguments)
    try:
        execute(grid(CLIPS, RATES, SEEDS), chosen.out, Console())
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"experiments.clip_and_rate: {error}")


if __name__ == "__main__":
    main()
