"""`dpkfc demo`: a small CNN on handwritten digits, trained privately by DP-SGD and by DP-KFC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.accounting.rounding import round_up
from dpkfc.app.models import digits_cnn
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.records import on_device
from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.progress import bar
from dpkfc.app.reports.run_report import write_report
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.geometry.identity import Geometry

BATCH_SIZE = 256
MOMENTUM = 0.9
EVALUATIONS = 25  # of the test accuracy, during a run
COLOURS = {"DP-SGD": "#0072B2", "DP-KFC": "#E69F00"}


@dataclass(frozen=True)
class Method:
    """A geometry, with the clip and the learning rate that suit it."""

    name: str
    geometry: Callable[[], Geometry]
    learning_rate: float
    clip: float


def kfc() -> Geometry:
    return dpkfc.KFC(
        dpkfc.probes.PinkNoise(shape=(1, 8, 8), classes=10, mean=0.3, std=0.3), every=20
    )


# Each method has the best of five learning rates, by three runs without the last 300 training
# records, scored on those records.
METHODS = (
    Method("DP-SGD", dpkfc.Identity, learning_rate=0.25, clip=0.3),
    Method("DP-KFC", kfc, learning_rate=0.05, clip=1.0),
)


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    method: str
    accuracy: float
    epsilon: float
    noise_multiplier: float
    steps: int
    samples_per_second: float
    course: list[tuple[int, float]]  # (steps, test accuracy) during the run


def run_demo(
    epsilon: float,
    delta: float,
    epochs: float,
    seed: int | None,
    console: Console,
    device: str = "cpu",
) -> list[Outcome]:
    """Train each method on the digits at the same budget, and print the table."""
    train_set, test_set = digits()
    outcomes = [
        train(method, train_set, test_set, epsilon, delta, epochs, seed, console, device)
        for method in METHODS
    ]
    seed_note = "" if seed is None else f", seed {seed}"
    title = f"digits: 1,437 records, delta = {delta:g}{seed_note}"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for heading in ("test accuracy", "epsilon spent", "sigma", "steps", "samples/s"):
        table.add_column(heading, justify="right")
    for row in outcomes:
        table.add_row(
            row.method,
            f"{row.accuracy:.1%}",
            round_up(row.epsilon),
            f"{row.noise_multiplier:.3f}",
            str(row.steps),
            f"{row.samples_per_second:,.0f}",
        )
    console.print(table)
    return outcomes


def train(
    method: Method,
    train_set: TensorDataset,
    test_set: TensorDataset,
    epsilon: float,
    delta: float,
    epochs: float,
    seed: int | None,
    console: Console,
    device: str,
) -> Outcome:
    """An ordinary PyTorch loop, made private by `make_private`."""
    if seed is not None:
        torch.manual_seed(seed)
    model = digits_cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=method.learning_rate, momentum=MOMENTUM)
    with console.status("calibrating the noise"):
        run = dpkfc.make_private(
            model,
            optimizer,
            on_device(train_set, device),
            epsilon=epsilon,
            delta=delta,
            epochs=epochs,
            batch_size=BATCH_SIZE,
            clip=method.clip,
            geometry=method.geometry(),
            seed=seed,
            loss=dpkfc.losses.cross_entropy,
        )
    console.print(run.plan)
    course: list[tuple[int, float]] = []
    evaluated = {
        round(run.plan.steps * number / EVALUATIONS) for number in range(1, EVALUATIONS + 1)
    }
    seconds = 0.0  # without those of the evaluations
    resumed = time.perf_counter()
    with bar(console) as progress:
        task = progress.add_task(method.name, total=run.plan.steps)
        for images, labels in run.loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, completed=run.steps)
            if run.steps in evaluated:
                seconds += time.perf_counter() - resumed
                course.append((run.steps, accuracy(model, *test_set.tensors)))
                resumed = time.perf_counter()
    return Outcome(
        method.name,
        course[-1][1],
        run.epsilon(),
        run.plan.noise_multiplier,
        run.steps,
        run.not_private.samples / seconds,
        course,
    )


def save_report(outcomes: Sequence[Outcome], delta: float, out: Path) -> Path:
    """Write the table, the figure and the report of one demo into a folder; returns the report."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        publish(
            out / "demo.md",
            markdown([outcomes], delta, "demo"),
            Console(quiet=True),
            partial(plot, [outcomes]),
        )
    except OSError as error:
        raise OSError(f"--out {out} cannot be used ({error}): choose another folder") from error
    return write_report(out)


def markdown(seeds: Sequence[Sequence[Outcome]], delta: float, figure: str) -> str:
    """The table with one line per method, over the outcomes of one or more seeds."""
    lines = []
    for rows in zip(*seeds, strict=True):
        accuracies = [row.accuracy for row in rows]
        each = ", ".join(f"{100 * value:.1f}" for value in accuracies)
        lines.append([rows[0].method, mean_and_spread(accuracies), each, str(rows[0].steps)])
    table = markdown_table(["method", "test %", "each seed", "steps"], lines)
    remark = (
        f"digits_cnn on 1,437 digits, tested on 360; epsilon {round_up(seeds[0][0].epsilon)}, "
        f"delta {delta:g}; mean ± standard deviation over the seeds (their number). Each method "
        "has the best of five learning rates, chosen on held-out training records; this choice is "
        "not charged."
    )
    caption = f"![test accuracy over the steps: mean and range over the seeds]({figure}.png)"
    title = "The demo" + (" over several seeds" if len(seeds) > 1 else "")
    return f"# {title}\n\n{table}\n\n{remark}\n\n{caption}\n"


def plot(seeds: Sequence[Sequence[Outcome]], file: Path) -> None:
    """Test accuracy over the steps: the mean over the seeds, and their range as a band."""
    figure, [[panel]] = new_figure(1, 1, 7, 4.4)
    for rows in zip(*seeds, strict=True):
        steps = [step for step, _ in rows[0].course]
        courses = [[100 * value for _, value in row.course] for row in rows]
        by_step = list(zip(*courses, strict=True))
        mean = [fmean(values) for values in by_step]
        low = [min(values) for values in by_step]
        high = [max(values) for values in by_step]
        colour = COLOURS[rows[0].method]
        panel.plot(steps, mean, color=colour, label=rows[0].method, marker="o", markersize=3)
        panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    spent = round_up(seeds[0][0].epsilon)
    panel.set(
        xlabel="steps", ylabel="test accuracy, %", title=f"epsilon = {spent} at the last step"
    )
    finish(figure, panel, file)
