"""Geometry from noise compared with geometry from the private records, at equal noise.

Model, batches, noise and clip are the same within a seed; only the source of the factors differs:
synthetic pink noise, the private records (the oracle, which is not private), another public data
set, white noise, or no geometry (DP-SGD). Runs are short, at epsilon 1: one epoch for the
perceptron, half an epoch for the CNN. Every arm has two learning rates to try, chosen on
validation records, and then five new seeds. Two quantities are measured: the test accuracy at the
end, and convergence, which is the mean of the accuracies at eight times of the run. Differences to
the oracle are taken within a seed, with a 95% interval of Student's t; see
`experiments.common.differences` for the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from experiments.common.differences import (
    MARGIN,
    PairedDifference,
    differences_to,
    final_accuracy,
    mean_accuracy,
    verdict,
)
from experiments.common.options import ReproduceOptions
from experiments.common.setting import BRIGHT, PAPER, SCALING
from experiments.common.study import Grid, Row, Study, finals, reproduce_study

# Short runs by model: 118 and 235 steps of 256 records.
SHORT: dict[str, dict[str, Any]] = {
    "cnn": {"model": None, "epochs": 0.5, "ema": 0.95, "course": 8},
    "mlp": {"model": "mlp", "epochs": 1, "ema": 0.95, "course": 8},
}
RATES = {"cnn": (0.16, 0.08), "mlp": (0.16, 0.32)}
PUBLIC = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
COLORS = {
    "dp-sgd": "tab:gray",
    "synthetic": "tab:blue",
    "oracle": "black",
    "public": "tab:green",
    "white noise": "tab:orange",
}


def kfc(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's map, before the noise only, at rank 32, with factors from `probe`."""
    return PAPER | {"probe": dict(probe), "rank": 32}


def pink(scaling: Scaling, **changes: Any) -> dict[str, Any]:
    """Return the arguments of bright pink noise, with some of them changed."""
    return {**BRIGHT[scaling], **changes}


def common(dataset: str, model: str) -> dict[str, Any]:
    """Return what all runs of a task have in common."""
    return {"dataset": dataset, "scaling": SCALING[dataset], **SHORT[model]}


def grid(task: str) -> Grid:
    """Return the tries of a task: two learning rates for every source of the factors."""
    dataset, model = task.split()
    scaling = SCALING[dataset]
    geometries: dict[str, dict[str, Any] | None] = {
        "dp-sgd": None,
        "synthetic": kfc(pink(scaling)),
        "oracle": kfc({"oracle": "records"}),
        "public": kfc({"public": PUBLIC[dataset]}),
        "white noise": kfc(pink(scaling, alpha=0.0)),
    }
    return {
        arm: [{"lr": lr, "geometry": geometry} for lr in RATES[model]]
        for arm, geometry in geometries.items()
    }


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
    """Write falsify.md and falsify.png: the differences to the oracle and their verdicts."""
    final = differences_to(study, rows, "oracle", study.arms, final_accuracy)
    course = differences_to(study, rows, "oracle", study.arms, mean_accuracy)
    cells = [
        [*name, str(end), verdict(end), str(course[name]), verdict(course[name])]
        for name, end in final.items()
    ]
    headings = ["task", "arm", "at the end, points", "", "during training, points", ""]
    text = "\n\n".join(
        [
            "# Geometry from noise against geometry from the private records",
            "    dpkfc reproduce falsify",
            finding(final, course),
            "Accuracy minus that of the oracle, whose factors come from the private records (so it "
            "is not private), at the same noise, batches and initial weights: mean over seeds and "
            "95% interval. At the end: test accuracy after one epoch (mlp) or half an epoch (cnn). "
            "During training: the mean accuracy at eight times of the run, which measures how fast "
            "it converges. "
            f"Material: the interval lies beyond ±{MARGIN:g} points. Accuracies and tries are in "
            "accuracy.md.",
            markdown_table(headings, cells, left=2),
            "![accuracy during training, by arm](falsify.png)",
        ]
    )
    publish(folder / "falsify", text + "\n", console, partial(plot, study, rows))


def finding(
    final: Mapping[tuple[str, str], PairedDifference],
    course: Mapping[tuple[str, str], PairedDifference],
) -> str:
    """Say whether the claim survives that synthetic geometry is as good as the oracle's."""
    by_verdict: dict[str, list[str]] = {}
    significant = []
    for when, differences in (("at the end", final), ("during training", course)):
        for (task, arm), difference in differences.items():
            if arm == "synthetic":
                by_verdict.setdefault(verdict(difference), []).append(f"{task} {when}")
                if difference.significant:
                    significant.append(f"{task} {when} ({difference.mean:+.2f})")
    if not by_verdict:
        return "Too few runs for a finding."
    summary = "; ".join(f"{outcome}: {', '.join(where)}" for outcome, where in by_verdict.items())
    summary += f". Intervals that exclude zero: {', '.join(significant) or 'none'}"
    if "materially worse" in by_verdict:
        return (
            "**The data-free claim is refuted in part.** "
            f"Synthetic against the oracle is {summary}."
        )
    if "materially better" in by_verdict:
        return f"**Synthetic geometry is at least as good as the oracle's.** It is {summary}."
    return (
        "**Not refuted: no difference is shown to be material.** "
        f"Synthetic against the oracle is {summary}."
    )


def plot(study: Study, rows: Sequence[Row], file: Path) -> None:
    """Draw one panel per task: accuracy during training, its mean over seeds and its range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    courses = {
        (task, arm): _courses(study, rows, task, arm) for task in study.tasks for arm in study.arms
    }
    tasks = [task for task in study.tasks if any(courses[task, arm] for arm in study.arms)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(3.6 * len(tasks) + 0.6, 3.6), squeeze=False, layout="constrained"
    )
    for panel, task in zip(panels[0], tasks, strict=True):
        for arm in study.arms:
            if runs := courses[task, arm]:
                times = [(1 + number) / len(runs[0]) for number in range(len(runs[0]))]
                by_time = [
                    [100 * accuracy for accuracy in accuracies]
                    for accuracies in zip(*runs, strict=True)
                ]
                panel.plot(
                    times, [*map(fmean, by_time)], "o-", markersize=3, color=COLORS[arm], label=arm
                )
                panel.fill_between(
                    times, [*map(min, by_time)], [*map(max, by_time)], color=COLORS[arm], alpha=0.12
                )
        panel.set_title(task)
        panel.set_xlabel("part of the run")
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("test accuracy, %")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), ncols=len(study.arms), loc="outside upper center"
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _courses(study: Study, rows: Sequence[Row], task: str, arm: str) -> list[list[float]]:
    """Return the accuracies during training of every final run of an arm."""
    recorded = {row["key"]: row["result"]["course"] for row in rows if row["result"].get("course")}
    try:
        return [
            recorded[final.key]
            for final in finals(study, rows, task, [arm])
            if final.key in recorded
        ]
    except ValueError:
        return []


STUDY = Study(
    module="experiments.falsify",
    about="Geometry from synthetic noise and from the private records, at equal noise.",
    title="Geometry from noise, from the private records and from public ones, "
    "epsilon = 1, delta = 1e-05",
    tasks={f"{dataset} {model}": common(dataset, model) for model in RATES for dataset in PUBLIC},
    grid=grid,
    seeds=(1, 2, 3, 4, 5),
    report=report,
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
