"""Geometry from public data that matches or not, from noise, and from the private records.

MNIST is the public data. FashionMNIST resembles it: objects on a dark background. PathMNIST
(tissue) does not, nor do two replacements for where it is not available: PneumoniaMNIST (X-rays,
few records) and CIFAR-10 (photographs). The paper's CNN is trained at epsilon 1 by SGD with
momentum: 5 epochs of batches of 256, 10 epochs on PneumoniaMNIST because it has few records, 2 on
CIFAR-10. Every arm has three learning rates to try, chosen on validation. The oracle takes its
factors from the private records: its epsilon is infinite, and it is an upper bound, not a
competitor. The pink noise is one guess for all images, dark or bright.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from experiments.common.differences import PairedDifference, by_seed, differences_to
from experiments.common.options import ReproduceOptions
from experiments.common.setting import ADADPS, BRIGHT, PAPER
from experiments.common.study import Grid, Row, Study, reproduce_study

ORACLE = "oracle (not private)"
DPSGD = "dp-sgd"
PUBLIC = "public dp-kfc"
SYNTHETIC = "synthetic dp-kfc"
TASKS: dict[str, dict[str, Any]] = {
    "fashion <- mnist": {"dataset": "fashion-mnist"},
    "path <- mnist": {"dataset": "pathmnist"},
    "pneumonia <- mnist": {"dataset": "pneumoniamnist", "epochs": 10, "validation": 482},
    "cifar-10 <- mnist": {"dataset": "cifar-10", "epochs": 2},
}
RATES = {
    "fashion <- mnist": 0.04,
    "path <- mnist": 0.04,
    "pneumonia <- mnist": 0.06,
    "cifar-10 <- mnist": 0.06,
}
COLOURED = ("pathmnist", "cifar-10")
# The paper's accuracies in percent, on FashionMNIST and PathMNIST.
PUBLISHED = {
    ORACLE: (88.3, 78.4),
    DPSGD: (83.5, 68.5),
    "adadps (public)": (84.7, 70.5),
    "adadps (pink)": (84.2, 71.2),
    PUBLIC: (87.6, 73.4),
    SYNTHETIC: (87.8, 78.2),
}


def grid(task: str) -> Grid:
    """Return the tries of a task: three learning rates per arm."""
    dataset = TASKS[task]["dataset"]
    pink = BRIGHT["centred"] | ({"channel_correlation": 0.9} if dataset in COLOURED else {})
    refresh = {"every": 15} if dataset == "pneumoniamnist" else {}
    kfc = PAPER | {"post": 0.5, "rank": 32} | refresh
    diagonal = ADADPS | refresh
    mnist = {"public": "mnist"}
    middle = RATES[task]
    rates = (middle, 0.75 * middle, 1.5 * middle)
    larger = (4 * middle, 2 * middle, 8 * middle)
    arms: dict[str, tuple[dict[str, Any] | None, tuple[float, ...]]] = {
        ORACLE: (kfc | {"probe": {"oracle": "records"}}, rates),
        DPSGD: (None, larger),
        "adadps (public)": (diagonal | {"probe": mnist}, larger),
        "adadps (pink)": (diagonal | {"probe": pink}, larger),
        PUBLIC: (kfc | {"probe": mnist}, rates),
        SYNTHETIC: (kfc | {"probe": pink}, rates),
    }
    return {
        arm: [{"geometry": geometry, "lr": round(lr, 4)} for lr in arm_rates]
        for arm, (geometry, arm_rates) in arms.items()
    }


def paper_order(difference: PairedDifference) -> str:
    """Say whether synthetic is at least as good as public, as in the paper's table."""
    order = "holds" if difference.mean >= 0 else "is reversed"
    return f"{order}, {'clearly' if difference.significant else 'within chance'}"


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
    """Write table2.md: the lead of synthetic DP-KFC over other arms, task by task."""
    others = (PUBLIC, ORACLE, DPSGD)
    leads = {other: differences_to(study, rows, other, [SYNTHETIC]) for other in others}
    completed = [
        task for task in study.tasks if any(by_seed(study, rows, task, arm) for arm in study.arms)
    ]
    cells = []
    for task in completed:
        differences = [leads[other].get((task, SYNTHETIC)) for other in others]
        over_public = differences[0]
        cells.append(
            [
                task,
                *(str(difference or "too few runs") for difference in differences),
                paper_order(over_public) if over_public else "",
            ]
        )
    absent = [task for task in study.tasks if task not in completed]
    text = [
        "# Table 2: geometry from noise and from the wrong public data",
        "    dpkfc reproduce table2",
        "Lead of synthetic DP-KFC in points of test accuracy, within each seed: mean and 95% "
        "interval. The oracle takes its factors from the private records. In the paper synthetic "
        "is at least as good as public; the last column says whether that order holds.",
        markdown_table(
            ["task", *(f"over {other}" for other in others), "the paper's order"], cells
        ),
        *([f"Not run: {', '.join(absent)}."] if absent else []),
        "PneumoniaMNIST: 62.5% of the 624 test records are of one class. PathMNIST is the paper's "
        "data set; the other images of texture replace it. Accuracies, tries and the paper's "
        "figures are in accuracy.md.",
    ]
    publish(folder / "table2", "\n\n".join(text) + "\n", console)


STUDY = Study(
    module="experiments.table2",
    about="Table 2 of the paper: geometry from noise, from public data and from private records.",
    title="Transfer from MNIST at epsilon = 1, delta = 1e-05",
    tasks={task: {"scaling": "centred", **common} for task, common in TASKS.items()},
    grid=grid,
    published={
        (task, arm): percent
        for arm, percents in PUBLISHED.items()
        for task, percent in zip(("fashion <- mnist", "path <- mnist"), percents, strict=True)
    },
    seeds_of={"pneumonia <- mnist": (1, 2, 3, 4, 5)},
    report=report,
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
