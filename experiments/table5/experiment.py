"""Accuracy against epsilon on four tasks, tuned alike.

Where the paper's own model or data are not available, a task of the same form replaces it; see
`TASKS`. Within a task all arms have the same data, features, model, number of epochs, batch size
and number of tries at epsilon 1. The other epsilons reuse the choice made there and keep the noise
that a step adds to the weights: learning rates of SGD grow as the noise multiplier falls, those of
Adam, which divides by the noise, stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from dpkfc.app.readers.records import on_device
from dpkfc.app.reports.accuracy_table import Summary, accuracy_markdown, accuracy_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.planning.plan import Plan
from experiments.common import study
from experiments.common.arguments import EXPECTED_ERRORS, names_among
from experiments.common.options import ReproduceOptions
from experiments.common.setting import DATASETS, MODELS, Data, StudySetting, split
from experiments.common.study import Follow, Grid, Row, Study
from experiments.table1 import experiment as table1
from experiments.table5.report import Panel, Point, panel_markdown, plot_panels

EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0)
TITLE = "Accuracy against epsilon on four tasks, delta = 1e-5"
SEEDS = (1, 2, 3)
NEIGHBOURS = ("optimizers", "table1", "table6")  # folders whose runs on MNIST are the same
REMARK = (
    "Test: mean ± standard deviation over the seeds (their number). Epsilon is that of each single "
    "run, by PLD accounting of Poisson sampling, at delta = 1e-5 (the paper: RDP, delta = 1 / N, "
    "which is larger); the tries, and the choice among them by held-out training records, are not "
    "charged. Below, the other epsilons reuse the choice made at epsilon 1."
)
# Training without privacy.
PLAIN: dict[str, Any] = {"rates": (1e-3, 3e-3, 1e-2), "epochs": 10, "batch_size": 256}
HEAD: dict[str, Any] = {"model": "linear", "epochs": 30, "ema": 0.95}
# The inputs of a linear model do not depend on its weights, so one refresh is enough.
LINEAR: dict[str, Any] = {
    "every": 100_000,
    "probes": 2048,
    "factors": "A",
    "rank": 128,
    "power": 1.0,
    "stability": 0.0,
    "damping": 0.1,
    "post": 0.0,
}


@dataclass(frozen=True)
class AccuracyTask:
    """One task of Table 5.

    Args:
        figure: The figure of the paper that shows it.
        heading: The heading of its table and panel.
        about: A paragraph on the data, the model and the choices behind them.
        common: What all its runs have in common, as overrides of `StudySetting`.
        records: The number of training records.
        arms: The overrides of each arm.
        rates: The learning rates of each arm, tried at epsilon 1.
        paper: The paper's accuracies in percent, by arm and epsilon.
        paper_without_privacy: The paper's accuracy without privacy, in percent.
        epsilons: The budgets.
    """

    figure: int
    heading: str
    about: str
    common: Mapping[str, Any]
    records: int
    arms: Mapping[str, Mapping[str, Any]]
    rates: Mapping[str, tuple[float, ...]]
    paper: Mapping[str, Mapping[float, float]]
    paper_without_privacy: float
    epsilons: tuple[float, ...] = EPSILONS


def by_epsilon(
    epsilons: Sequence[float], arms: Mapping[str, Sequence[float]]
) -> dict[str, dict[float, float]]:
    return {arm: dict(zip(epsilons, values, strict=True)) for arm, values in arms.items()}


MNIST_ARMS = ("dp-sgd", "dp-adam", "dp-kfc", "public dp-kfc")
TASKS = {
    "imdb": AccuracyTask(
        figure=5,
        heading="IMDB, logistic regression",
        about="Sentiment of 25,000 film reviews, logistic regression on TF-IDF, as in the paper "
        "except for the vocabulary: the 5,000 most frequent words of SST-2 with their document "
        "frequencies there, not those of the private reviews. 15 epochs, expected batches of "
        "1,250. Probes: rows of 100 words by Zipf's law; public: AG News, as in the paper, and "
        "SST-2.\n\n"
        "Not counted in the tries: the words of SST-2 were preferred to those of AG News by the "
        "accuracy of a non-private model, seen on the test reviews and then on held-out ones (87.2 "
        "against 85.3 % or less). Batch size, clip, rank and damping were chosen on held-out "
        "reviews, in about 110 runs of DP-SGD and 230 of DP-KFC. The rates of the DP-KFC arms were "
        "moved up once, after three tries had their best at the edge.",
        common=HEAD | {"dataset": "imdb/tfidf-5000", "epochs": 15, "batch_size": 1250},
        records=25_000,
        arms={
            "dp-sgd": {"clip": 0.5},
            "dp-kfc": {"clip": 15.0, "geometry": LINEAR | {"probe": {"sparse": {"nonzeros": 100}}}},
            "public dp-kfc": {
                "clip": 15.0,
                "geometry": LINEAR | {"probe": {"public": "ag-news/tfidf-5000"}},
            },
            "public dp-kfc (sst-2)": {
                "clip": 15.0,
                "geometry": LINEAR | {"probe": {"public": "sst-2/tfidf-5000"}},
            },
        },
        rates={
            "dp-sgd": (2.8, 2.0, 4.0, 1.4, 3.4),
            "dp-kfc": (0.13, 0.09, 0.18, 0.065, 0.045),
            "public dp-kfc": (0.13, 0.09, 0.18, 0.065, 0.045),
            "public dp-kfc (sst-2)": (0.13, 0.09, 0.18, 0.065, 0.045),
        },
        epsilons=(0.5, 1.0, 1.5, 2.8, 8.0),
        paper=by_epsilon(
            (1.0, 1.5, 2.8, 8.0),
            {
                "dp-sgd": (82.9, 83.1, 83.1, 83.2),
                "dp-kfc": (85.1, 85.5, 85.9, 86.0),
                "public dp-kfc": (85.1, 85.5, 85.8, 86.0),
            },
        ),
        paper_without_privacy=88.0,
    ),
    "stackoverflow": AccuracyTask(
        figure=5,
        heading="StackOverflow, tags by a frozen MiniLM (the paper: next word, BERT)",
        about="A replacement: which of 20 tags 15,950 titles of questions have (the paper predicts "
        "the next word), by a linear classifier on the frozen encoder all-MiniLM-L6-v2 (the paper: "
        "on bert-base-uncased). So the paper's figures are of another task. The encoder was itself "
        "trained on posts of StackOverflow, perhaps these: epsilon covers what the classifier "
        "learns from them. 30 epochs, expected batches of 1,000. Probes: token noise through the "
        "encoder; public: AG News. The rates were placed by 4 runs of DP-SGD and 24 of DP-KFC on "
        "held-out titles, which are not counted in the tries.",
        common=HEAD | {"dataset": "stackoverflow/minilm", "batch_size": 1000, "validation": 3000},
        records=15_950,
        arms={
            "dp-sgd": {},
            "dp-adam": {"optimizer": {"name": "AdamW"}},
            "dp-kfc": {"geometry": LINEAR | {"probe": {"pool": "tokens/minilm"}}},
            "public dp-kfc": {"geometry": LINEAR | {"probe": {"public": "ag-news/minilm"}}},
        },
        rates={
            "dp-sgd": (0.05, 0.035, 0.07, 0.1),
            "dp-adam": (2e-3, 1e-3, 4e-3, 8e-3),
            "dp-kfc": (0.05, 0.035, 0.07, 0.1),
            "public dp-kfc": (0.05, 0.035, 0.07, 0.1),
        },
        paper=by_epsilon(
            EPSILONS,
            {
                "dp-adam": (78.9, 89.5, 92.9, 93.6, 94.2, 94.6, 94.8),
                "dp-kfc": (81.3, 91.8, 95.4, 95.9, 96.4, 96.5, 96.6),
                "public dp-kfc": (89.8, 96.1, 97.5, 97.9, 98.1, 98.2, 98.3),
            },
        ),
        paper_without_privacy=99.0,
    ),
    "cifar-100": AccuracyTask(
        figure=4,
        heading="CIFAR-100, frozen EfficientNet-Lite0 (the paper: CrossViT)",
        about="A replacement: a linear classifier on the frozen features of EfficientNet-Lite0, "
        "trained on ImageNet, at 96 pixels (the paper trains all of CrossViT-Tiny at 240). 50,000 "
        "images, 8 epochs, expected batches of 1,250. Probes: pink noise through the network; "
        "public: CIFAR-10.",
        common=HEAD | {"dataset": "cifar-100/efficientnet", "epochs": 8, "batch_size": 1250},
        records=50_000,
        arms={
            "dp-sgd": {},
            "dp-adam": {"optimizer": {"name": "AdamW"}},
            "dp-kfc": {"geometry": LINEAR | {"probe": {"pool": "pink/efficientnet"}}},
            "public dp-kfc": {"geometry": LINEAR | {"probe": {"public": "cifar-10/efficientnet"}}},
        },
        rates={
            "dp-sgd": (0.14, 0.1, 0.2, 0.28),
            "dp-adam": (2e-3, 1e-3, 4e-3, 8e-3),
            "dp-kfc": (0.14, 0.1, 0.2, 0.28),
            "public dp-kfc": (0.14, 0.1, 0.2, 0.28),
        },
        paper=by_epsilon(
            EPSILONS[1:],
            {
                "dp-adam": (56.2, 58.5, 59.5, 60.7, 61.4, 62.0),
                "dp-kfc": (57.6, 59.8, 60.9, 62.0, 62.7, 63.2),
                "public dp-kfc": (57.3, 59.6, 60.6, 61.6, 62.4, 62.9),
            },
        ),
        paper_without_privacy=68.3,
    ),
    "mnist": AccuracyTask(
        figure=4,
        heading="MNIST, CNN",
        about="As in the paper: its CNN from scratch, 5 epochs, expected batches of 256. Probes: "
        "pink noise; public: FashionMNIST. The runs are those of Table 1 (`dpkfc reproduce "
        "table1`).",
        common={"dataset": "mnist", "scaling": "unit", "label_smoothing": 0.0},
        records=60_000,
        arms={arm: table1.ARMS[arm] for arm in MNIST_ARMS},
        rates={arm: table1.RATES["plain"][arm] for arm in MNIST_ARMS},
        paper=by_epsilon(
            EPSILONS[1:],
            {
                "dp-adam": (91.7, 92.5, 92.9, 93.4, 93.7, 94.0),
                "dp-kfc": (94.2, 95.0, 95.3, 95.7, 95.9, 96.0),
                "public dp-kfc": (95.3, 95.7, 96.0, 96.2, 96.4, 96.5),
            },
        ),
        paper_without_privacy=98.8,
    ),
}


def task_name(task: str, epsilon: float) -> str:
    return f"{task} at epsilon {epsilon:g}"


def grid(name: str) -> Grid:
    """Return the tries of a task at epsilon 1."""
    task = TASKS[name.split()[0]]
    return {
        arm: [{**options, "lr": lr} for lr in task.rates[arm]] for arm, options in task.arms.items()
    }


@cache
def noise_multiplier(task: str, epsilon: float) -> float:
    """Return the multiplier of independent noise in the protocol of a task."""
    common = StudySetting(arm="", lr=0.0, **TASKS[task].common)
    plan = Plan.make(
        records=TASKS[task].records,
        clip=1.0,
        batch_size=common.batch_size,
        epochs=common.epochs,
        epsilon=epsilon,
        delta=common.delta,
    )
    return plan.noise_multiplier


def follow(task: str, epsilon: float) -> Follow:
    """Reuse the choice at epsilon 1, with learning rates scaled by the noise multiplier."""

    def factor(arm: str) -> float:
        if "adam" in arm:
            return 1.0
        return round(noise_multiplier(task, 1.0) / noise_multiplier(task, epsilon), 2)

    return Follow(task_name(task, 1.0), factor)


def epsilons(task: str) -> list[float]:
    """Return the budgets of a task, first the one that the others follow."""
    return sorted(TASKS[task].epsilons, key=lambda epsilon: (epsilon != 1.0, epsilon))


STUDY = Study(
    module="experiments.table5",
    about="Table 5 and Figures 4 and 5 of the paper: accuracy against epsilon on four tasks.",
    title=TITLE,
    tasks={
        task_name(task, epsilon): {**TASKS[task].common, "epsilon": epsilon}
        for task in TASKS
        for epsilon in epsilons(task)
    },
    grid=grid,
    published={
        (task_name(task, epsilon), arm): percent
        for task in TASKS
        for arm, percents in TASKS[task].paper.items()
        for epsilon, percent in percents.items()
    },
    follows={
        task_name(task, epsilon): follow(task, epsilon)
        for task in TASKS
        for epsilon in epsilons(task)[1:]
    },
    seeds=SEEDS,
)


def adopt(folder: Path) -> int:
    """Copy the runs on MNIST of Table 1 if its folder is beside this one; return how many."""
    file = folder / "results.jsonl"
    known = {row["key"] for row in study.read(file)}
    rows = [
        row
        for neighbour in NEIGHBOURS
        for row in study.read(folder.parent / neighbour / "results.jsonl")
    ]
    new = {row["key"]: row for row in rows if _on_mnist(row["setting"]) and row["key"] not in known}
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("a") as results:
        results.writelines(json.dumps(row) + "\n" for row in new.values())
    return len(new)


def _on_mnist(setting: Mapping[str, Any]) -> bool:
    common = TASKS["mnist"].common
    return setting["arm"] in MNIST_ARMS and all(
        setting.get(field) == value for field, value in common.items()
    )


def without_privacy(task: str, data: Data, device: str = "cpu") -> Row:
    """Train the same model without privacy, by Adam at the best of a few learning rates.

    The rate is chosen on validation records; the result holds the test accuracies.
    """
    common = StudySetting(arm="", lr=0.0, **TASKS[task].common)

    def train(lr: float, seed: int, parts: Data) -> float:
        torch.manual_seed(seed)
        records = on_device(parts[0], device)
        measured = parts[1]
        shape = tuple(records.tensors[0].shape[1:])
        classes = len(DATASETS[common.dataset][0])
        model = MODELS[common.model or "cnn"](shape, classes).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(PLAIN["epochs"]):
            for rows in torch.randperm(len(records)).split(PLAIN["batch_size"]):
                images, labels = (tensor[rows] for tensor in records.tensors)
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return accuracy(model, *measured.tensors)

    validation = {lr: train(lr, 0, split(data, common.validation)) for lr in PLAIN["rates"]}
    best = max(validation, key=lambda lr: validation[lr])
    return {
        "lr": best,
        "validation": validation[best],
        "tests": [train(best, seed, data) for seed in SEEDS],
    }


def measure_references(tasks: Sequence[str], options: ReproduceOptions) -> None:
    """Write accuracies without privacy to reference.json; those that it holds are not repeated."""
    for task in track(tasks, "without privacy", console=options.console, transient=True):
        references = _references(options.out)
        if task not in references:
            try:
                data = DATASETS[TASKS[task].common["dataset"]][1](options.data_dir)
                references[task] = without_privacy(task, data, options.device)
            except FileNotFoundError as error:
                options.console.print(
                    f"{task} is skipped: {error}", markup=False, highlight=False, soft_wrap=True
                )
                continue
            (options.out / "reference.json").write_text(json.dumps(references, indent=1) + "\n")


def _references(folder: Path) -> dict[str, Row]:
    file = folder / "reference.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def show(folder: Path, console: Console, table: Study = STUDY) -> None:
    """Print the results in `folder`; write accuracy.md, figure4.png and figure5.png."""
    rows = [row for file in sorted(folder.glob("*.jsonl")) for row in study.read(file)]
    summaries = study.summarise(table, rows)
    if not summaries:
        raise ValueError(f"{folder} holds no results: run without --stage table first")
    panels = {task: panel_of(task, summaries, _references(folder).get(task, {})) for task in TASKS}
    console.print(accuracy_table([row for row in summaries if row.tries or row.tests], TITLE))
    parts = [accuracy_markdown([row for row in summaries if row.tries], TITLE, REMARK)]
    parts += [panel_markdown(panel) for panel in panels.values() if panel.points]
    (folder / "accuracy.md").write_text("\n".join(parts))
    if not find_spec("matplotlib"):
        console.print("matplotlib is not installed: no figures")
        return
    for figure in (4, 5):
        chosen = [panels[task] for task in TASKS if TASKS[task].figure == figure]
        if chosen := [panel for panel in chosen if any(point.tests for point in panel.points)]:
            plot_panels(chosen, folder / f"figure{figure}.png")


def panel_of(task_key: str, summaries: Sequence[Summary], reference: Row) -> Panel:
    """Collect the results of a task over all epsilons."""
    task = TASKS[task_key]
    epsilon_of = {task_name(task_key, epsilon): epsilon for epsilon in task.epsilons}
    rows = sorted(
        (row for row in summaries if row.dataset in epsilon_of),
        key=lambda row: list(task.arms).index(row.arm),
    )
    points = tuple(Point(row.arm, epsilon_of[row.dataset], row.tests, row.paper) for row in rows)
    return Panel(
        task.heading,
        task.about,
        points,
        tuple(reference.get("tests", ())),
        task.paper_without_privacy,
    )


def execute(tasks: Sequence[str], options: ReproduceOptions, table: Study = STUDY) -> None:
    """Tune and train, then train without privacy, then report.

    Runs that the folder holds are not repeated.
    """
    if "mnist" in tasks and not options.quick:
        count = adopt(options.out)
        options.console.print(f"{count} runs on MNIST are copied from Table 1", highlight=False)
    study.execute(
        table,
        [name for name in table.tasks if name.split()[0] in tasks],
        table.arms,
        options.out / ("quick.jsonl" if options.quick else "results.jsonl"),
        options.data_dir,
        options.console,
        stages=("tune", "final"),
        count=1 if options.quick else None,
        device=options.device,
    )
    if not options.quick:
        measure_references(tasks, options)
    show(options.out, options.console, table)


def reproduce(options: ReproduceOptions) -> None:
    """Run all four tasks; quick: at epsilon 1, a tenth of an epoch, one try and seed per arm."""
    table = study.with_options(STUDY, options)
    if options.quick:
        names = [task_name(task, 1.0) for task in TASKS]
        table = replace(table, tasks={name: table.tasks[name] for name in names}, follows={})
    execute(list(TASKS), options, table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run some of the tasks from the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {STUDY.module}", description=STUDY.about)
    parser.add_argument(
        "--data-dir", type=Path, help="the folder with the data sets (default $DPKFC_DATA)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results")
    tasks = list(TASKS)
    parser.add_argument(
        "--task",
        type=names_among(tasks),
        default=tasks,
        metavar="A,B",
        help=f"a list of {', '.join(tasks)} (default: all)",
    )
    parser.add_argument(
        "--only-show", action="store_true", help="write the table and figures of existing results"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.only_show:
            show(chosen.out, Console())
        else:
            execute(chosen.task, ReproduceOptions(chosen.out, data_dir=chosen.data_dir))
    except EXPECTED_ERRORS as error:
        sys.exit(f"{STUDY.module}: {error}")
