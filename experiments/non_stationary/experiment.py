"""FashionMNIST with every image changed by the same fixed map, so that pink noise is a wrong model.

The changes (`experiments.common.data.changes`) put pixels in a random order, shrink the image into
a corner, scale it by position within a range of 100, smoothly or pixel by pixel, or filter it so
that the spectrum grows with frequency. The geometry still comes from bright pink noise. It is
compared with white noise, the oracle (factors from the private records, so not private) and
DP-SGD, in the short runs of `experiments.falsify`, with three seeds. The perceptron, which ignores
which pixels are neighbours, has two learning rates to try, the CNN one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from experiments.common.differences import PairedDifference, by_seed, differences_to, verdict
from experiments.common.options import ReproduceOptions
from experiments.common.study import Grid, Row, Study, reproduce_study
from experiments.falsify.experiment import COLORS, SHORT, kfc, pink

RATES = {"mlp": (0.16, 0.32), "cnn": (0.16,)}
INPUTS = {
    "mlp": ("natural", "permuted", "cornered", "ramped", "scaled at random", "blue"),
    "cnn": ("permuted", "ramped", "blue"),
}
COMMON: dict[str, Any] = {"dataset": "fashion-mnist", "scaling": "unit"}
GEOMETRIES: dict[str, dict[str, Any] | None] = {
    "dp-sgd": None,
    "synthetic": kfc(pink("unit")),
    "white noise": kfc(pink("unit", alpha=0.0)),
    "oracle": kfc({"oracle": "records"}),
}


def grid(task: str) -> Grid:
    """Return the tries of a task: the same learning rates for every geometry."""
    rates = RATES[task.rsplit(maxsplit=1)[1]]
    return {
        arm: [{"geometry": geometry, "lr": lr} for lr in rates]
        for arm, geometry in GEOMETRIES.items()
    }


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
    """Write non-stationary.md and .png: accuracies, and differences to the oracle and DP-SGD."""
    gaps = {
        reference: differences_to(study, rows, reference, ["synthetic"])
        for reference in ("oracle", "dp-sgd")
    }
    tests = {
        (task, arm): by_seed(study, rows, task, arm) for task in study.tasks for arm in GEOMETRIES
    }
    tasks = [task for task in study.tasks if any(tests[task, arm] for arm in GEOMETRIES)]
    cells = [
        [task, *(mean_and_spread([*tests[task, arm].values()]) for arm in GEOMETRIES)]
        for task in tasks
    ]
    differences = [
        [
            task,
            *(cell for gap in gaps.values() for cell in _cells(gap.get((task, "synthetic")))),
        ]
        for task in tasks
    ]
    text = [
        "# Inputs that are unlike natural images",
        "    dpkfc reproduce non-stationary",
        finding(gaps["oracle"], gaps["dp-sgd"]),
        "FashionMNIST, with images changed so that pink noise is a wrong model of them. Test "
        "accuracy, %, at epsilon 1, after one epoch of the perceptron or half an epoch of the CNN: "
        "mean ± standard deviation over seeds.",
        markdown_table(["images, model", *GEOMETRIES], cells),
        "Synthetic geometry minus the oracle's, and minus DP-SGD, within a seed, in points: mean "
        "and 95% interval.",
        markdown_table(["images, model", "minus the oracle", "", "minus DP-SGD", ""], differences),
        "![test accuracy by images and arm](non-stationary.png)",
    ]
    publish(
        folder / "non-stationary", "\n\n".join(text) + "\n", console, partial(plot, tasks, tests)
    )


def _cells(difference: PairedDifference | None) -> tuple[str, str]:
    return ("too few runs", "") if difference is None else (str(difference), verdict(difference))


def finding(
    oracle: Mapping[tuple[str, str], PairedDifference],
    dpsgd: Mapping[tuple[str, str], PairedDifference],
) -> str:
    """Say where synthetic geometry loses most to the oracle's, and where it is worse than none."""
    if not oracle or not dpsgd:
        return "Too few runs for a finding."

    def tasks(differences: Mapping[tuple[str, str], PairedDifference], outcome: str) -> str:
        names = [task for (task, _), gap in differences.items() if verdict(gap) == outcome]
        return ", ".join(names) or "nowhere"

    (worst, _), loss = min(oracle.items(), key=lambda entry: entry[1].mean)
    return "\n".join(
        [
            f"- Synthetic loses most to the oracle on {worst}: {loss}.",
            f"- Materially worse than the oracle: {tasks(oracle, 'materially worse')}.",
            f"- Materially worse than DP-SGD: {tasks(dpsgd, 'materially worse')}.",
            f"- Materially better than DP-SGD: {tasks(dpsgd, 'materially better')}.",
        ]
    )


def plot(
    tasks: Sequence[str], tests: Mapping[tuple[str, str], Mapping[int, float]], file: Path
) -> None:
    """Draw one row per task: for each arm a dot per seed and a bar at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 1.2 + 0.55 * len(tasks)), layout="constrained")
    for place, task in enumerate(tasks):
        panel.axhline(place + 0.5, color="lightgray", linewidth=0.8)
        for number, arm in enumerate(GEOMETRIES):
            values = [100 * value for value in tests[task, arm].values()]
            height = place + 0.17 * (number - 1.5)
            panel.plot(
                values, [height] * len(values), "o", markersize=4, alpha=0.5, color=COLORS[arm]
            )
            if values:
                label = arm if not place else None
                panel.plot(
                    fmean(values),
                    height,
                    "|",
                    markersize=11,
                    markeredgewidth=2,
                    color=COLORS[arm],
                    label=label,
                )
    panel.set_yticks(range(len(tasks)), tasks)
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set_xlabel("test accuracy, %")
    panel.grid(axis="x", alpha=0.3)
    figure.legend(ncols=len(GEOMETRIES), loc="outside upper center")
    figure.savefig(file, dpi=150)
    plt.close(figure)


STUDY = Study(
    module="experiments.non_stationary",
    about="Where data-free geometry breaks: images whose statistics pink noise does not share.",
    title="Images changed on purpose, FashionMNIST at epsilon = 1, delta = 1e-05",
    tasks={
        f"{images} {model}": {
            **COMMON,
            **SHORT[model],
            "change": None if images == "natural" else images,
        }
        for model, kinds in INPUTS.items()
        for images in kinds
    },
    grid=grid,
    report=report,
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
