"""What must probes look like? Their spectrum 1/f^alpha, their brightness, and how alike their channels are.

    dpkfc reproduce probe-spectrum --data-dir DATA
    python -m experiments.probe_spectrum --data-dir DATA --task "mnist mlp" --out runs/probe-spectrum.jsonl

DP-KFC with one choice changed at a time, beside DP-SGD and the oracle (factors from the private records, so it is not
private), in the short runs of `falsify`: one epoch by the perceptron and half a one by the CNN at epsilon 1, one
learning rate for all, three seeds. All kinds have the same root mean square:

    dark      every image has mean 0: no DC component
    bright    every image has the mean of the library's guess at what pixels are
    varying   mean 0, with the DC component: images differ in brightness
    colour    bright, on CIFAR-10, with channels that are alike (correlation .9) as in photographs

The perceptron's first factor is the covariance of whole images, the CNN's that of 3x3 patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.common.study import Grid, Row, Study, main
from experiments.falsify.experiment import SHORT, Difference, by_seed, common, kfc, paired, verdict
from experiments.geometry.experiment import BRIGHT
from rich.console import Console

from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table

ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
ENDS = (0.0, 2.0)
RATES = {"cnn": 0.16, "mlp": 0.16}
TASKS: dict[str, dict[str, Any]] = {
    "mnist mlp": common("mnist", "mlp"),
    "fashion-mnist mlp": common("fashion-mnist", "mlp"),
    "fashion-mnist cnn": common("fashion-mnist", "cnn"),
    "cifar-10 cnn": {"dataset": "cifar-10", "scaling": "centred", **SHORT["cnn"]},
}
KINDS: dict[str, dict[str, Sequence[float]]] = {  # alphas of each kind of probe
    "mnist mlp": {"dark": ALPHAS, "bright": ALPHAS, "varying": ENDS},
    "fashion-mnist mlp": {"dark": ALPHAS, "bright": ALPHAS, "varying": ENDS},
    "fashion-mnist cnn": {"bright": ALPHAS},
    "cifar-10 cnn": {"bright": ENDS, "colour": ENDS},
}
COLORS = {"dark": "tab:purple", "bright": "tab:blue", "varying": "tab:green", "colour": "tab:red"}


def probe(kind: str, alpha: float, scaling: Scaling) -> dict[str, Any]:
    bright = BRIGHT[scaling] | {"alpha": alpha}
    if kind == "bright":
        return bright
    if kind == "colour":
        return bright | {"channel_correlation": 0.9}
    size = round(math.hypot(bright["mean"], bright["std"]), 4)
    return bright | {"mean": 0.0, "std": size} | ({"dc": True} if kind == "varying" else {})


def name(kind: str, alpha: float) -> str:
    return f"{kind} {alpha:g}"


def grid(task: str) -> Grid:
    scaling, lr = TASKS[task]["scaling"], RATES[task.split()[1]]
    geometries: dict[str, dict[str, Any] | None] = {
        "dp-sgd": None,
        "oracle": kfc({"oracle": "records"}),
    }
    for kind, alphas in KINDS[task].items():
        geometries |= {name(kind, alpha): kfc(probe(kind, alpha, scaling)) for alpha in alphas}
    return {arm: [{"geometry": geometry, "lr": lr}] for arm, geometry in geometries.items()}


QUESTIONS = (  # one arm less another: what it asks, the two
    ("pink, not white", "bright 2", "bright 0"),
    ("the same in the dark", "dark 2", "dark 0"),
    ("brightness", "bright 2", "dark 2"),
    ("varying brightness", "varying 2", "dark 2"),
    ("channels alike", "colour 2", "bright 2"),
    ("private records", "oracle", "bright 2"),
    ("any geometry", "bright 2", "dp-sgd"),
)


def answers(study: Study, rows: Sequence[Row]) -> dict[tuple[str, str], Difference]:
    """What each choice is worth, by task and question."""
    found = {}
    for task in study.tasks:
        for question, own, other in QUESTIONS:
            difference = paired(by_seed(study, rows, task, own), by_seed(study, rows, task, other))
            if difference is not None:
                found[task, question] = difference
    return found


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
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
                mean_and_spread([*tests[task, name(kind, a)].values()]) if a in alphas else ""
                for a in ALPHAS
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
    found = answers(study, rows)
    asked = [
        [
            task,
            question,
            f"{own} - {other}",
            str(found[task, question]),
            verdict(found[task, question]),
        ]
        for task in tasks
        for question, own, other in QUESTIONS
        if (task, question) in found
    ]
    text = [
        "# What probes must look like",
        "    dpkfc reproduce probe-spectrum",
        finding(found),
        "Test accuracy, %, of short runs at epsilon 1, by the exponent alpha of the probes' power spectrum "
        "1/f^alpha; mean ± standard deviation over seeds. Dark: images of mean 0. Bright: of the mean that pixels are "
        "guessed to have. Varying: of different brightness. Colour: bright, with channels alike. DP-SGD and the oracle "
        "have no alpha.",
        markdown_table(
            ["task", "probes", *(f"alpha {alpha:g}" for alpha in ALPHAS)], lines, left=2
        ),
        "What each choice is worth, within a seed, in points: mean and 95% interval.",
        markdown_table(["task", "choice", "arms", "points", "verdict"], asked, left=3),
        "![test accuracy by alpha](probe-spectrum.png)",
    ]
    publish(
        folder / "probe-spectrum", "\n\n".join(text) + "\n", console, partial(plot, study, tests)
    )


def finding(found: Mapping[tuple[str, str], Difference]) -> str:
    """For each choice, what it was worth, least to most of the tasks, and where that is material."""
    told = []
    for question, *_ in QUESTIONS:
        here = {
            task: difference for (task, asked), difference in found.items() if asked == question
        }
        if here:
            means = [difference.mean for difference in here.values()]
            material = [
                task
                for task, difference in here.items()
                if verdict(difference).startswith("materially")
            ]
            where = f"material on {', '.join(material)}" if material else "nowhere material"
            told.append(f"- {question}: {min(means):+.1f} to {max(means):+.1f} points, {where}")
    return (
        "\n".join(["What each choice is worth:\n", *told])
        if told
        else "Too few runs for a finding."
    )


def plot(study: Study, tests: Mapping[tuple[str, str], Mapping[int, float]], file: Path) -> None:
    """A panel a task: accuracy by alpha, mean and standard deviation over seeds; DP-SGD and the oracle as lines."""
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
                a: [100 * value for value in tests[task, name(kind, a)].values()] for a in alphas
            }
            known = {a: values for a, values in runs.items() if len(values) > 1}
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

if __name__ == "__main__":
    main(STUDY)
