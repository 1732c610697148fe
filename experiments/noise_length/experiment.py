"""Sweeps over the learning rate, examined by learning rate and by noise length.

The noise length of a run is the root mean square of the noise in the weights of one unit
(`dpkfc.planning.recipe`):

    ρ = lr · clip · rmse · √(parameters / units)

A sweep is a set of runs that differ only in the learning rate. Some sweeps were recorded by the
studies in `experiments`, with the paper's CNN; the others are run here, with three small models on
scikit-learn's digits and `dpkfc.recipe` for everything but ρ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import nn

import dpkfc
from dpkfc.app.models import digits_cnn, mlp, paper_cnn
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from dpkfc.planning.choose_noise import evaluate
from dpkfc.planning.recipe import NOISE_LENGTH, count_units_and_parameters
from experiments.common.arguments import EXPECTED_ERRORS, results_file
from experiments.common.digits import HELD_OUT, DigitsResult, data, pink, train_all
from experiments.common.digits import train as train_on_digits
from experiments.common.options import ReproduceOptions
from experiments.common.setting import StudySetting, noise_of
from experiments.common.study import Row, read

MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits_cnn": digits_cnn,
    "mlp": lambda: mlp([64, 64, 10]),
    "linear": lambda: mlp([64, 10]),
}
EPSILONS = (1.0, 3.0)
DELTA = 1e-5
LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SEEDS = (1, 2, 3)
QUICK = (("linear",), (3.0,), (0.5, 2.0, 8.0))  # models, epsilons, lengths
RECORDS = 60_000  # of MNIST and FashionMNIST, including those that a try holds out
# Kinds of sweeps.
DIGITS = "dp-kfc on digits"
KFC = "dp-kfc"
POST = "dp-kfc with post map"
SGD = "dp-sgd"
# The lines of the summary, and the kinds of sweeps that each is about.
GROUPS: dict[str, tuple[str, ...]] = {
    "DP-KFC, recorded": (KFC,),
    "DP-KFC, digits": (DIGITS,),
    "DP-KFC, all": (KFC, DIGITS),
    "DP-KFC with a map after the noise": (POST,),
    "DP-SGD": (SGD,),
}


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep, or the mean over its seeds."""

    lr: float
    length: float  # ρ
    accuracy: float


@dataclass(frozen=True)
class RateSweep:
    """Runs that differ only in the learning rate, in increasing order of it."""

    kind: str
    model: str  # with the data set that it was trained on
    arm: str
    epsilon: float
    batch_size: int
    steps: int
    points: tuple[SweepPoint, ...]

    @property
    def best(self) -> SweepPoint:
        """The point with the best accuracy; among equals that of the smallest learning rate."""
        return max(self.points, key=lambda point: point.accuracy)

    @property
    def at_edge(self) -> bool:
        """Whether the best point is the first or the last, so that a better one may lie outside."""
        return self.best in (self.points[0], self.points[-1])

    def at(self, length: float) -> float | None:
        """Return the accuracy at a noise length, interpolated in log ρ; None outside the sweep."""
        lengths = [point.length for point in self.points]
        if not 0.999 * lengths[0] <= length <= 1.001 * lengths[-1]:
            return None
        return float(
            np.interp(math.log(length), np.log(lengths), [point.accuracy for point in self.points])
        )

    @property
    def loss(self) -> float | None:
        """The accuracy that the preset's ρ loses against the best point."""
        accuracy = self.at(NOISE_LENGTH)
        return None if accuracy is None else self.best.accuracy - accuracy


@dataclass(frozen=True)
class NoiseLengthRun:
    """One run on the digits; the recipe sets everything else."""

    model: str
    epsilon: float
    noise_length: float
    seed: int
    epochs: float = 30.0
    batch_size: int = 171  # about 200 steps


def train(run: NoiseLengthRun, device: str = "cpu") -> DigitsResult:
    """Train on the digits with the recipe at a given noise length."""
    torch.manual_seed(run.seed)
    model = MODELS[run.model]().to(device)
    recipe = dpkfc.recipe(
        model,
        records=len(data()[0]),
        epsilon=run.epsilon,
        delta=DELTA,
        epochs=run.epochs,
        batch_size=run.batch_size,
        probe=pink(),
        noise_length=run.noise_length,
    )
    averaged = recipe.averaged(model)
    return train_on_digits(
        model, recipe.optimizer(model), seed=run.seed, averaged=averaged, **recipe.arguments
    )


def digits_sweeps(results: Mapping[NoiseLengthRun, DigitsResult]) -> list[RateSweep]:
    """Group runs by model and epsilon; a point is the mean over the seeds, of averaged weights."""
    sweeps = []
    for model, epsilon in dict.fromkeys((run.model, run.epsilon) for run in results):
        group = {
            run: result
            for run, result in results.items()
            if (run.model, run.epsilon) == (model, epsilon)
        }
        points = []
        for length in sorted({run.noise_length for run in group}):
            seeds = [result for run, result in group.items() if run.noise_length == length]
            points.append(
                SweepPoint(seeds[0].lr, length, fmean(result.average or 0.0 for result in seeds))
            )
        (first_run, first_result), *_ = group.items()
        sweeps.append(
            RateSweep(
                kind=DIGITS,
                model=f"digits, {model}",
                arm=f"dp-kfc, {first_result.noise}",
                epsilon=epsilon,
                batch_size=first_run.batch_size,
                steps=first_result.steps,
                points=tuple(points),
            )
        )
    return sweeps


def recorded_sweeps(folder: Path) -> list[RateSweep]:
    """Collect sweeps of at least three learning rates from the results files in a folder.

    Only tries of studies by SGD at a constant rate count. A point is the better of the last and
    the averaged weights, because a study chooses between them as well.
    """
    sweeps: dict[str, dict[float, Row]] = {}
    for row in (
        row for file in sorted(folder.rglob("*.jsonl")) for row in read(file) if "key" in row
    ):
        setting = StudySetting(**row["setting"])
        if setting.validation and setting.optimizer is None and setting.schedule == "constant":
            rest = {name: value for name, value in asdict(setting).items() if name != "lr"}
            sweeps.setdefault(json.dumps(rest, sort_keys=True), {})[setting.lr] = row
    return [_recorded(list(rows.values())) for rows in sweeps.values() if len(rows) >= 3]


def _recorded(rows: Sequence[Row]) -> RateSweep:
    """Return the sweep of recorded tries that differ only in the learning rate."""
    setting = StudySetting(**rows[0]["setting"])
    steps = int(rows[0]["result"]["steps"])
    scale = length_per_rate(setting, steps)
    points = []
    for row in rows:
        accuracies = [row["result"][weights] for weights in ("last", "average")]
        lr = row["setting"]["lr"]
        points.append(
            SweepPoint(lr, lr * scale, max(value for value in accuracies if value is not None))
        )
    arm = setting.arm
    arm += f", smoothing {setting.label_smoothing:g}" if setting.label_smoothing else ""
    arm += f", clip {setting.clip:g}" if setting.clip != 1 else ""
    return RateSweep(
        kind=kind_of(setting),
        model=f"{setting.dataset}, paper_cnn",
        arm=arm,
        epsilon=setting.epsilon,
        batch_size=setting.batch_size,
        steps=steps,
        points=tuple(sorted(points, key=lambda point: point.lr)),
    )


def kind_of(setting: StudySetting) -> str:
    """Return the kind of sweep that a try belongs to."""
    if setting.geometry is None:
        return SGD
    if "kind" in setting.geometry:
        return str(setting.geometry["kind"])
    return POST if setting.geometry.get("post") else KFC


def length_per_rate(setting: StudySetting, steps: int) -> float:
    """Return ρ / lr = clip · rmse · √(parameters / units), with the rmse at clip 1."""
    candidate = evaluate(
        noise_of(setting) or dpkfc.noise.Independent(),
        dpkfc.noise.Workload.sgd(momentum=setting.momentum),
        records=RECORDS - setting.validation,
        batch_size=setting.batch_size,
        steps=steps,
        clip=1.0,
        epsilon=setting.epsilon,
        delta=setting.delta,
    )
    units, parameters = count_units_and_parameters(paper_cnn())
    return setting.clip * candidate.rmse * math.sqrt(parameters / units)


def summary(sweeps: Sequence[RateSweep]) -> list[list[str]]:
    """Format one line per group of sweeps.

    It has the best learning rates and the best ρ, from the smallest to the largest and as a ratio,
    and the loss of the preset's ρ.
    """
    lines = []
    for name, kinds in GROUPS.items():
        group = [sweep for sweep in sweeps if sweep.kind in kinds]
        if group:
            losses = [sweep.loss for sweep in group if sweep.loss is not None]
            lines.append(
                [
                    name,
                    str(len(group)),
                    str(sum(sweep.at_edge for sweep in group)),
                    spread([sweep.best.lr for sweep in group]),
                    spread([sweep.best.length for sweep in group]),
                    f"{100 * median(losses):.1f}" if losses else "",
                    f"{100 * max(losses):.1f}" if losses else "",
                    str(len(group) - len(losses)),
                ]
            )
    return lines


def in_words(sweeps: Sequence[RateSweep]) -> str:
    """Return the finding that the preset rests on, as a sentence."""
    group = [sweep for sweep in sweeps if sweep.kind in (KFC, DIGITS)]
    losses = [100 * sweep.loss for sweep in group if sweep.loss is not None]
    if not losses:
        return ""
    rates, lengths = (
        ratio([getattr(sweep.best, name) for sweep in group]) for name in ("lr", "length")
    )
    return (
        f"In {len(group)} sweeps of DP-KFC, without a map after the noise, the best learning rates "
        f"differ by a factor of {rates:.2g}, the best noise lengths by {lengths:.2g}. The preset's "
        f"ρ = {NOISE_LENGTH:g} loses {median(losses):.1f} points in the median and "
        f"{max(losses):.1f} at worst."
    )


def ratio(values: Sequence[float]) -> float:
    return max(values) / min(values)


def spread(values: Sequence[float]) -> str:
    """Format the range of values and their ratio.

    >>> spread([0.5, 0.1, 1])
    '0.1 to 1: × 10'
    """
    return f"{min(values):.2g} to {max(values):.2g}: × {ratio(values):.2g}"


def cells(sweep: RateSweep) -> list[str]:
    """Format the line of a sweep."""
    at_preset = sweep.at(NOISE_LENGTH)
    mark = "*" if sweep.at_edge else ""
    return [
        sweep.model,
        sweep.arm,
        f"{sweep.epsilon:g}",
        str(sweep.batch_size),
        str(sweep.steps),
        str(len(sweep.points)),
        f"{sweep.best.lr:.3g}{mark}",
        f"{sweep.best.length:.2f}{mark}",
        f"{100 * sweep.best.accuracy:.1f}",
        "outside" if at_preset is None else f"{100 * at_preset:.1f}",
        "" if sweep.loss is None else f"{100 * sweep.loss:.1f}",
    ]


def markdown(sweeps: Sequence[RateSweep], picture: str) -> str:
    """Return the report."""
    preset = f"ρ = {NOISE_LENGTH:g}"
    headings = [
        "sweep",
        "method",
        "epsilon",
        "batch",
        "steps",
        "rates",
        "best lr",
        "best ρ",
        "at best ρ %",
        f"{preset} %",
        "loss",
    ]
    summary_headings = [
        "",
        "sweeps",
        "best at an edge",
        "best lr",
        "best ρ",
        f"median loss of {preset}",
        "worst",
        "outside",
    ]
    remark = (
        "Accuracies on held-out training records; losses in points. At the preset's "
        f"{preset} accuracy is interpolated in log ρ between its neighbours, and not given outside "
        "a sweep. A star: the best is the first or the last point of its sweep, so that a better "
        "one may lie outside. On the digits, the mean of three seeds, of the averaged weights, on "
        f"{HELD_OUT} records; elsewhere one run, the better of its last and averaged weights. The "
        "best of a sweep is partly chance, so that losses are overestimated. The preset's ρ was "
        "chosen with the recorded sweeps in view, and without the digits."
    )
    parts = [
        "# Learning rates and noise lengths of private runs",
        in_words(sweeps),
        markdown_table(summary_headings, summary(sweeps)),
        f"![accuracy against the learning rate and against the noise length]({picture})",
        markdown_table(headings, [cells(sweep) for sweep in sweeps], left=2),
        remark,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


STYLES: dict[str, dict[str, Any]] = {
    SGD: {"color": "0.65", "label": "DP-SGD"},
    POST: {"color": "tab:orange", "label": "DP-KFC with a map after the noise"},
    KFC: {"color": "tab:blue", "label": "DP-KFC, MNIST and FashionMNIST"},
    DIGITS: {"color": "tab:green", "label": "DP-KFC, digits"},
}


def plot(sweeps: Sequence[RateSweep], file: Path) -> None:
    """Draw one line per sweep: its loss against its best, by learning rate and by ρ.

    Both axes span the same number of decades.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    kinds = list(STYLES)
    for sweep in sorted(
        sweeps, key=lambda sweep: kinds.index(sweep.kind) if sweep.kind in kinds else -1
    ):
        style = STYLES.get(sweep.kind, {"color": "0.85", "label": "others"})
        lost = [100 * (point.accuracy - sweep.best.accuracy) for point in sweep.points]
        for panel, name in zip(panels, ("lr", "length"), strict=True):
            places = [getattr(point, name) for point in sweep.points]
            panel.plot(places, lost, "-o", markersize=2.5, linewidth=1.1, alpha=0.8, **style)
            if sweep.loss is not None:
                panel.plot(
                    places[0] * NOISE_LENGTH / sweep.points[0].length,
                    -100 * sweep.loss,
                    "D",
                    color=style["color"],
                    markeredgecolor="black",
                    markersize=5,
                    zorder=3,
                )
    panels[0].plot(
        [], [], "D", color="white", markeredgecolor="black", label=f"preset, ρ = {NOISE_LENGTH:g}"
    )
    panels[0].set(
        xlabel="learning rate", ylabel="accuracy minus the best of the sweep, points", ylim=(-16, 1)
    )
    panels[1].set(xlabel="noise length ρ")
    for panel in panels:
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    ends = [panel.get_xlim() for panel in panels]
    half = max(math.sqrt(high / low) for low, high in ends)
    for panel, (low, high) in zip(panels, ends, strict=True):
        panel.set_xlim(math.sqrt(low * high) / half, math.sqrt(low * high) * half)
        if half < 10:
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
    entries = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        entries.values(), entries.keys(), ncols=len(entries), loc="outside upper center", fontsize=8
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def sweep_runs(
    models: Iterable[str], epsilons: Iterable[float], lengths: Iterable[float], seeds: Iterable[int]
) -> list[NoiseLengthRun]:
    """Return one run per model, epsilon, noise length and seed."""
    return [NoiseLengthRun(*values) for values in product(models, epsilons, lengths, seeds)]


def execute(
    runs: Sequence[NoiseLengthRun],
    recorded: Sequence[RateSweep],
    file: Path,
    options: ReproduceOptions,
) -> None:
    """Train all runs that the file does not hold yet, and write the report."""
    results = train_all(runs, partial(train, device=options.device), file, options.console)
    sweeps = [*recorded, *digits_sweeps(results)]
    publish(
        file,
        markdown(sweeps, file.with_suffix(".png").name),
        options.console,
        partial(plot, sweeps),
        options.quick,
    )


def reproduce(options: ReproduceOptions) -> None:
    """Run the sweeps on the digits; include those that studies left in the same folder.

    Quick: one sweep.
    """
    out = options.out
    models, epsilons, lengths = QUICK if options.quick else (tuple(MODELS), EPSILONS, LENGTHS)
    runs = sweep_runs(models, epsilons, lengths, options.seeds(SEEDS))
    recorded = recorded_sweeps(out)
    file = out / ("quick.jsonl" if options.quick else "noise-length.jsonl")
    execute(runs, recorded, file, options)
    if not recorded:
        first = " and ".join(
            f"`dpkfc reproduce {name} --out {out / name}`" for name in ("geometry", "correlated")
        )
        options.console.print(
            f"Only the digits: for sweeps of the paper's CNN run {first}, then this again.",
            soft_wrap=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sweeps on the digits from the command line; include those of studies."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.noise_length", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="results of studies (default: none)"
    )
    parser.add_argument(
        "--out",
        type=results_file,
        required=True,
        metavar="FILE.jsonl",
        help="results on the digits",
    )
    chosen = parser.parse_args(arguments)
    try:
        recorded = recorded_sweeps(chosen.results) if chosen.results else []
        if chosen.results and not recorded:
            raise ValueError(
                f"{chosen.results} holds no sweep (three tries that differ only in the learning "
                "rate): name a folder with results of studies"
            )
        execute(
            sweep_runs(MODELS, EPSILONS, LENGTHS, SEEDS),
            recorded,
            chosen.out,
            ReproduceOptions(chosen.out.parent),
        )
    except EXPECTED_ERRORS as error:
        sys.exit(f"experiments.noise_length: {error}")
