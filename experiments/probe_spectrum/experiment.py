"""Probes with one property changed at a time: their spectrum, brightness, or channels.

DP-KFC is compared with DP-SGD and with the oracle (factors from the private records, so it is not
private), in the short runs of `experiments.falsify`: one epoch for the perceptron and half an
epoch for the CNN at epsilon 1, one learning rate for all arms, three seeds. All kinds of probes
have the same root mean square:

    dark      every image has mean 0: no DC component
    bright    every image has the mean that the library assumes for pixels
    varying   mean 0, with the DC component: images differ in brightness
    colour    bright, on CIFAR-10, with channels correlated by .9 as in photographs

The first factor of the perceptron is the covariance of whole images, that of the CNN the
covariance of 3x3 patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from experiments.common.differences import PairedDifference, by_seed, paired, verdict
from experiments.common.options import ReproduceOptions
from experiments.common.setting import BRIGHT
from experiments.common.study import Grid, Row, Study, reproduce_study
from experiments.falsify.experiment import SHORT, common, kfc

ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
ENDS = (0.0, 2.0)
RATES = {"cnn": 0.16, "mlp": 0.16}
TASKS: dict[str, dict[str, Any]] = {
    "mnist mlp": common("mnist", "mlp"),
    "fashion-mnist mlp": common("fashion-mnist", "mlp"),
    "fashion-mnist cnn": common("fashion-mnist", "cnn"),
    "cifar-10 cnn": {"dataset": "cifar-10", "scaling": "centred", **SHORT["cnn"]},
}
# The alphas of each kind of probe, by task.
KINDS: dict[str, dict[str, Sequence[float]]] = {
    "mnist mlp": {"dark": ALPHAS, "bright": ALPHAS, "varying": ENDS},
    "fashion-mnist mlp": {"dark": ALPHAS, "bright": ALPHAS, "varying": ENDS},
    "fashion-mnist cnn": {"bright": ALPHAS},
    "cifar-10 cnn": {"bright": ENDS, "colour": ENDS},
}
COLORS = {"dark": "tab:purple", "bright": "tab:blue", "varying": "tab:green", "colour": "tab:red"}


def probe(kind: str, alpha: float, scaling: Scaling) -> dict[str, Any]:
    """Return the arguments of `PinkNoise` for a kind of probe."""
    bright = BRIGHT[scaling] | {"alpha": alpha}
    if kind == "bright":
        return bright
    if kind == "colour":
        return bright | {"channel_correlation": 0.9}
    size = round(math.hypot(bright["mean"], bright["std"]), 4)
    return bright | {"mean": 0.0, "std": size} | ({"dc": True} if kind == "varying" else {})


def arm_name(kind: str, alpha: float) -> str:
    return f"{kind} {alpha:g}"


def grid(task: str) -> Grid:
    """Return one try per source of the factors, all at the same learning rate."""
    scaling = TASKS[task]["scaling"]
    lr = RATES[task.split()[1]]
    geometries: dict[str, dict[str, Any] | None] = {
        "dp-sgd": None,
        "oracle": kfc({"oracle": "records"}),
    }
    for kind, alphas in KINDS[task].items():
        geometries |= {arm_name(kind, alpha): kfc(probe(kind, alpha, scaling)) for alpha in alphas}
    return {arm: [{"geometry": geometry, "lr": lr}] for arm, geometry in geometries.items()}


# A question, and the two arms whose difference answers it.
QUESTIONS = (
    ("pink, not white", "bright 2", "bright 0"),
    ("the same in the dark", "dark 2", "dark 0"),
    ("brightness", "bright 2", "dark 2"),
    ("varying brightness", "varying 2", "dark 2"),
    ("channels alike", "colour 2", "bright 2"),
    ("private records", "oracle", "bright 2"),
    ("any geometry", "bright 2", "dp-sgd"),
)


def answers(study: Study, rows: Sequence[Row]) -> dict[tuple[str, str], PairedDifference]:
    """Return the effect of each choice, by task and question."""
    effects = {}
    for task in study.tasks:
        for question, own, other in QUESTIONS:
            difference = paired(by_seed(study, rows, task, own), by_seed(study, rows, task, other))
            if difference is not None:
                effects[task, question] = difference
    return effects


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
    """Write probe-spectrum.md and .png: accuracies by alpha, and the effect of each choice."""
    tests = {
        (task, arm): by_seed(study, rows, task, arm)
        for task in study.tasks
        for arm in study.grid(task)
    }
    tasks = [task for task in study.tasks if any(tests[task, arm] for arm in study.grid(task))]
    lines = [
        [
            task,
            kind,
            *(
                mean_and_spread([*tests[task, arm_name(kind, alpha)].values()])
                if alpha in alphas
                else ""
                for alpha in ALPHAS
            ),
        ]
        for task in tasks
        for kind, alphas in KINDS[task].items()
    ]
    lines += [
        [task, arm, mean_and_spread([*tests[task, arm].values()])] + [""] * (len(ALPHAS) - 1)
        for task in tasks
        for arm in ("dp-sgd", "oracle")
    ]
    lines.sort(key=lambda line: tasks.index(line[0]))
    effects = answers(study, rows)
    effect_lines = [
        [
            task,
            question,
            f"{own} - {other}",
            str(effects[task, question]),
            verdict(effects[task, question]),
        ]
        for task in tasks
        for question, own, other in QUESTIONS
        if (task, question) in effects
    ]
    text = [
        "# What probes must look like",
        "    dpkfc reproduce probe-spectrum",
        finding(effects),
        "Test accuracy, %, of short runs at epsilon 1, by the exponent alpha of the probes' power "
        "spectrum 1/f^alpha; mean ± standard deviation over seeds. Dark: images of mean 0. Bright: "
        "images of the mean that is assumed for pixels. Varying: images of different brightness. "
        "Colour: bright, with correlated channels. DP-SGD and the oracle have no alpha.",
        markdown_table(
            ["task", "probes", *(f"alpha {alpha:g}" for alpha in ALPHAS)], lines, left=2
        ),
        "The effect of each choice within a seed, in points: mean and 95% interval.",
        markdown_table(["task", "choice", "arms", "points", "verdict"], effect_lines, left=3),
        "![test accuracy by alpha](probe-spectrum.png)",
    ]
    publish(
        folder / "probe-spectrum", "\n\n".join(text) + "\n", console, partial(plot, study, tests)
    )


def finding(effects: Mapping[tuple[str, str], PairedDifference]) -> str:
    """Summarise each choice: its effect, from the smallest to the largest over the tasks."""
    lines = []
    for question, *_ in QUESTIONS:
        by_task = {
            task: difference
            for (task, answered), difference in effects.items()
            if answered == question
        }
        if by_task:
            means = [difference.mean for difference in by_task.values()]
            material = [
                task
                for task, difference in by_task.items()
                if verdict(difference).startswith("materially")
            ]
            where = f"material on {', '.join(material)}" if material else "nowhere material"
            lines.append(f"- {question}: {min(means):+.1f} to {max(means):+.1f} points, {where}")
    if not lines:
        return "Too few runs for a finding."
    return "\n".join(["The effect of each choice:\n", *lines])


def plot(study: Study, tests: Mapping[tuple[str, str], Mapping[int, float]], file: Path) -> None:
    """Draw one panel per task: accuracy by alpha, with DP-SGD and the oracle as lines.

    Error bars are the standard deviation over seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in study.tasks if any(tests[task, arm] for arm in study.grid(task))]
    size = (3.5 * len(tasks) + 0.6, 3.8)
    figure, panels = plt.subplots(1, len(tasks), figsize=size, squeeze=False, layout="constrained")
    for panel, task in zip(panels[0], tasks, strict=True):
        for arm, style in (("dp-sgd", "--"), ("oracle", "-")):
            if values := [100 * value for value in tests[task, arm].values()]:
                panel.axhline(fmean(values), color="black", linestyle=style, linewidth=1, label=arm)
        for kind, alphas in KINDS[task].items():
            runs = {
                alpha: [100 * value for value in tests[task, arm_name(kind, alpha)].values()]
                for alpha in alphas
            }
            known = {alpha: values for alpha, values in runs.items() if len(values) > 1}
            means, spreads = [*map(fmean, known.values())], [*map(stdev, known.values())]
            panel.errorbar(
                [*known],
                means,
                spreads,
                fmt="o-",
                markersize=4,
                capsize=3,
                color=COLORS[kind],
                label=kind,
            )
        panel.set_title(task)
        panel.set_xlabel("alpha of 1/f^alpha")
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("test accuracy, %")
    entries = {
        label: handle
        for panel in panels[0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), ncols=len(entries), loc="outside upper center")
    figure.savefig(file, dpi=150)
    plt.close(figure)


STUDY = Study(
    module="experiments.probe_spectrum",
    about="What probes must look like: spectrum, brightness, channels.",
    title="Probes of different spectra, short runs at epsilon = 1, delta = 1e-05",
    tasks=TASKS,
    grid=grid,
    report=report,
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
