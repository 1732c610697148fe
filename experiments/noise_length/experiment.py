"""The best learning rates of private runs differ far more than the best lengths of their noise.

    dpkfc reproduce noise-length
    python -m experiments.noise_length --results docs/results --out runs/noise-length.jsonl

The noise length of a run is the root mean square of the noise in the weights of one unit (`dpkfc.planning.recipe`):

    ρ = lr · clip · rmse · √(parameters / units)

A sweep is a set of runs that differ in nothing but the learning rate. It is looked at twice, by lr and by ρ. Some were
recorded by the studies of this package, with the paper's CNN; the others are run here, with three small
models on the bundled digits and `dpkfc.recipe` for everything but ρ.
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
from experiments.common.digits import HELD_OUT, Result, data, pink, results_file, run_all
from experiments.common.digits import train as train_on_digits
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Setting, noise_of
from experiments.common.study import Row, read
from torch import nn

import dpkfc
from dpkfc.app.models import digits_cnn, mlp, paper_cnn
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from dpkfc.planning.choose_noise import evaluate
from dpkfc.planning.recipe import NOISE_LENGTH, size

MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits_cnn": digits_cnn,
    "mlp": lambda: mlp([64, 64, 10]),
    "linear": lambda: mlp([64, 10]),
}
EPSILONS, DELTA = (1.0, 3.0), 1e-5
LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SEEDS = (1, 2, 3)
QUICK = (("linear",), (3.0,), (0.5, 2.0, 8.0))  # models, epsilons, lengths
RECORDS = 60_000  # of MNIST and FashionMNIST, with those that a try holds out
DIGITS, KFC, POST, SGD = "dp-kfc on digits", "dp-kfc", "dp-kfc with post map", "dp-sgd"
GROUPS: dict[
    str, tuple[str, ...]
] = {  # a line of the summary: the kinds of sweeps that it is about
    "DP-KFC, recorded": (KFC,),
    "DP-KFC, digits": (DIGITS,),
    "DP-KFC, all": (KFC, DIGITS),
    "DP-KFC with a map after the noise": (POST,),
    "DP-SGD": (SGD,),
}


@dataclass(frozen=True)
class Point:
    lr: float
    length: float  # ρ
    accuracy: float


@dataclass(frozen=True)
class Sweep:
    """Runs that differ only in the learning rate, the smallest first."""

    kind: str
    model: str  # and what it was trained on
    arm: str
    epsilon: float
    batch_size: int
    steps: int
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        """The smallest learning rate of equals."""
        return max(self.points, key=lambda point: point.accuracy)

    @property
    def at_edge(self) -> bool:
        """Whether the best might lie outside."""
        return self.best in (self.points[0], self.points[-1])

    def at(self, length: float) -> float | None:
        """Accuracy there, interpolated in log ρ; None outside the sweep."""
        lengths = [point.length for point in self.points]
        if not 0.999 * lengths[0] <= length <= 1.001 * lengths[-1]:
            return None
        return float(
            np.interp(math.log(length), np.log(lengths), [point.accuracy for point in self.points])
        )

    @property
    def loss(self) -> float | None:
        """What the preset's ρ loses against the best."""
        found = self.at(NOISE_LENGTH)
        return None if found is None else self.best.accuracy - found


@dataclass(frozen=True)
class Run:
    """One run on the digits: all but ρ is left to the recipe, or the same for all."""

    model: str
    epsilon: float
    noise_length: float
    seed: int
    epochs: float = 30.0
    batch_size: int = 171  # makes 200 steps


def train(run: Run, device: str = "cpu") -> Result:
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


def digits_sweeps(results: Mapping[Run, Result]) -> list[Sweep]:
    """By model and epsilon; a point is the mean over the seeds, of the averaged weights."""
    sweeps = []
    for model, epsilon in dict.fromkeys((run.model, run.epsilon) for run in results):
        found = {
            run: result
            for run, result in results.items()
            if (run.model, run.epsilon) == (model, epsilon)
        }
        points = []
        for length in sorted({run.noise_length for run in found}):
            there = [result for run, result in found.items() if run.noise_length == length]
            points.append(
                Point(there[0].lr, length, fmean(result.average or 0.0 for result in there))
            )
        (run, one), *_ = found.items()
        arm = f"dp-kfc, {one.noise}"
        sweeps.append(
            Sweep(
                DIGITS, f"digits, {model}", arm, epsilon, run.batch_size, one.steps, tuple(points)
            )
        )
    return sweeps


def recorded_sweeps(folder: Path) -> list[Sweep]:
    """From the results of studies: tries by SGD at a constant rate, in sweeps of at least three learning rates.

    A point is the better of the last and the averaged weights, between which a study chooses as well.
    """
    sweeps: dict[str, dict[float, Row]] = {}
    for row in (
        row for file in sorted(folder.rglob("*.jsonl")) for row in read(file) if "key" in row
    ):
        setting = Setting(**row["setting"])
        if setting.validation and setting.optimizer is None and setting.schedule == "constant":
            rest = {name: value for name, value in asdict(setting).items() if name != "lr"}
            sweeps.setdefault(json.dumps(rest, sort_keys=True), {})[setting.lr] = row
    return [_recorded(list(rows.values())) for rows in sweeps.values() if len(rows) >= 3]


def _recorded(rows: Sequence[Row]) -> Sweep:
    setting, steps = Setting(**rows[0]["setting"]), int(rows[0]["result"]["steps"])
    scale = length_per_rate(setting, steps)
    points = []
    for row in rows:
        accuracies = [row["result"][weights] for weights in ("last", "average")]
        lr = row["setting"]["lr"]
        points.append(Point(lr, lr * scale, max(a for a in accuracies if a is not None)))
    arm = setting.arm
    arm += f", smoothing {setting.label_smoothing:g}" if setting.label_smoothing else ""
    arm += f", clip {setting.clip:g}" if setting.clip != 1 else ""
    return Sweep(
        kind=kind_of(setting),
        model=f"{setting.dataset}, paper_cnn",
        arm=arm,
        epsilon=setting.epsilon,
        batch_size=setting.batch_size,
        steps=steps,
        points=tuple(sorted(points, key=lambda point: point.lr)),
    )


def kind_of(setting: Setting) -> str:
    if setting.geometry is None:
        return SGD
    if "kind" in setting.geometry:
        return str(setting.geometry["kind"])
    return POST if setting.geometry.get("post") else KFC


def length_per_rate(setting: Setting, steps: int) -> float:
    """ρ / lr = clip · rmse · √(parameters / units), with the rmse of clip 1."""
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
    units, parameters = size(paper_cnn())
    return setting.clip * candidate.rmse * math.sqrt(parameters / units)


def summary(sweeps: Sequence[Sweep]) -> list[list[str]]:
    """A line a group: the best learning rates and the best ρ, from, to and their ratio; the loss of the preset's ρ."""
    lines = []
    for name, kinds in GROUPS.items():
        of = [sweep for sweep in sweeps if sweep.kind in kinds]
        if of:
            losses = [sweep.loss for sweep in of if sweep.loss is not None]
            loss = (
                [f"{100 * median(losses):.1f}", f"{100 * max(losses):.1f}"] if losses else ["", ""]
            )
            rates, lengths = [sweep.best.lr for sweep in of], [sweep.best.length for sweep in of]
            counts = [str(len(of)), str(sum(sweep.at_edge for sweep in of))]
            lines.append(
                [name, *counts, spread(rates), spread(lengths), *loss, str(len(of) - len(losses))]
            )
    return lines


def in_words(sweeps: Sequence[Sweep]) -> str:
    """The line of the summary that the preset rests on."""
    of = [sweep for sweep in sweeps if sweep.kind in (KFC, DIGITS)]
    losses = [100 * sweep.loss for sweep in of if sweep.loss is not None]
    if not losses:
        return ""
    rates, lengths = (
        ratio([getattr(sweep.best, name) for sweep in of]) for name in ("lr", "length")
    )
    return (
        f"In {len(of)} sweeps of DP-KFC, without a map after the noise, the best learning rates differ by a factor of "
        f"{rates:.2g}, the best noise lengths by {lengths:.2g}. The preset's ρ = {NOISE_LENGTH:g} loses "
        f"{median(losses):.1f} points in the median and {max(losses):.1f} at worst."
    )


def ratio(values: Sequence[float]) -> float:
    return max(values) / min(values)


def spread(values: Sequence[float]) -> str:
    """
    >>> spread([0.5, 0.1, 1])
    '0.1 to 1: × 10'
    """
    return f"{min(values):.2g} to {max(values):.2g}: × {ratio(values):.2g}"


def cells(sweep: Sweep) -> list[str]:
    there, mark = sweep.at(NOISE_LENGTH), "*" if sweep.at_edge else ""
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
        "outside" if there is None else f"{100 * there:.1f}",
        "" if sweep.loss is None else f"{100 * sweep.loss:.1f}",
    ]


def markdown(sweeps: Sequence[Sweep], picture: str) -> str:
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
        "there %",
    ]
    headings += [f"{preset} %", "loss"]
    about = [
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
        f"Accuracies on held-out training records; losses in points. At the preset's {preset} accuracy is interpolated "
        "in log ρ between its neighbours, and not given outside a sweep. A star: the best is the first or the last of "
        "its sweep, and might lie outside. On the digits, the mean of three seeds, of the averaged weights, on "
        f"{HELD_OUT} records; elsewhere one run, the better of its last and averaged weights. The best of a sweep is "
        "in part luck, so that losses are overestimated. The preset's ρ was chosen with the recorded sweeps in view; "
        "the digits had no part in it."
    )
    parts = [
        "# Learning rates and noise lengths of private runs",
        in_words(sweeps),
        markdown_table(about, summary(sweeps)),
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


def plot(sweeps: Sequence[Sweep], file: Path) -> None:
    """A line a sweep: what is lost against its best, by the learning rate and by ρ, on equally long scales."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    order = list(STYLES)
    for sweep in sorted(
        sweeps, key=lambda sweep: order.index(sweep.kind) if sweep.kind in order else -1
    ):
        style = STYLES.get(sweep.kind, {"color": "0.85", "label": "others"})
        lost = [100 * (point.accuracy - sweep.best.accuracy) for point in sweep.points]
        for panel, name in zip(panels, ("lr", "length"), strict=True):
            places = [getattr(point, name) for point in sweep.points]
            panel.plot(places, lost, "-o", markersize=2.5, linewidth=1.1, alpha=0.8, **style)
            if sweep.loss is not None:
                place = places[0] * NOISE_LENGTH / sweep.points[0].length, -100 * sweep.loss
                panel.plot(
                    *place,
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
) -> list[Run]:
    return [Run(*one) for one in product(models, epsilons, lengths, seeds)]


def execute(
    runs: Sequence[Run], recorded: Sequence[Sweep], file: Path, order: ReproduceOptions
) -> None:
    results = run_all(runs, partial(train, device=order.device), file, order.console)
    sweeps = [*recorded, *digits_sweeps(results)]
    publish(
        file,
        markdown(sweeps, file.with_suffix(".png").name),
        order.console,
        partial(plot, sweeps),
        order.quick,
    )


def run(order: ReproduceOptions) -> None:
    """The sweeps on the digits, beside those that studies left in the same folder; quick: one of them."""
    out = order.out
    models, epsilons, lengths = QUICK if order.quick else (tuple(MODELS), EPSILONS, LENGTHS)
    runs = sweep_runs(models, epsilons, lengths, order.seeds(SEEDS))
    try:
        recorded = recorded_sweeps(out)
        execute(
            runs, recorded, out / ("quick.jsonl" if order.quick else "noise-length.jsonl"), order
        )
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error
    if not recorded:
        first = " and ".join(
            f"`dpkfc reproduce {name} --out {out / name}`" for name in ("geometry", "correlated")
        )
        advice = f"The digits alone: for sweeps of the paper's CNN run {first}, then this again."
        order.console.print(advice, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.noise_length", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="recorded studies (default: the digits only)"
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
                f"{chosen.results} holds no sweep: three tries that differ only in the learning rate"
            )
        execute(
            sweep_runs(MODELS, EPSILONS, LENGTHS, SEEDS),
            recorded,
            chosen.out,
            ReproduceOptions(chosen.out.parent),
        )
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"experiments.noise_length: {error}")


if __name__ == "__main__":
    main()
