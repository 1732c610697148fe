"""`dpkfc demo`: a small CNN on real digits, trained privately by DP-SGD and by DP-KFC while you watch.

`dpkfc reproduce demo` repeats it over five seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from experiments.common.options import ReproduceOptions
from experiments.common.setting import accuracy
from experiments.common.study import read
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
from dpkfc.geometry.identity import Geometry

BATCH_SIZE, MOMENTUM = 256, 0.9
EPSILON, DELTA, EPOCHS, QUICK_EPOCHS, SEEDS = 3.0, 1e-5, 40.0, 4.0, (0, 1, 2, 3, 4)
LOOKS = 25  # at the test accuracy on the way
COLOURS = {"DP-SGD": "#0072B2", "DP-KFC": "#E69F00"}


@dataclass(frozen=True)
class Method:
    """What sets one method apart: its geometry, and the clip and learning rate that suit it."""

    name: str
    geometry: Callable[[], Geometry]
    learning_rate: float
    clip: float


def kfc() -> Geometry:
    return dpkfc.KFC(
        dpkfc.probes.PinkNoise(shape=(1, 8, 8), classes=10, mean=0.3, std=0.3), every=20
    )


# Each at the best of five learning rates, by three runs without the last 300 training records, measured on those.
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
    course: list[tuple[int, float]]  # test accuracy after so many steps


def run_demo(
    epsilon: float,
    delta: float,
    epochs: float,
    seed: int | None,
    console: Console,
    device: str = "cpu",
) -> list[Outcome]:
    """Train each method on the digits at the same budget, with a progress bar, and print the table."""
    train_set, test_set = digits()
    outcomes = [
        train(method, train_set, test_set, epsilon, delta, epochs, seed, console, device)
        for method in METHODS
    ]
    seeded = "" if seed is None else f", seed {seed}"
    table = Table(title=f"digits: 1,437 records, delta = {delta:g}{seeded}", title_justify="left")
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
    """A plain PyTorch loop; `make_private` is the only line that is not."""
    if seed is not None:
        torch.manual_seed(seed)
    model = digits_cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=method.learning_rate, momentum=MOMENTUM)
    with console.status("calibrating the noise"):
        private = dpkfc.make_private(
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
    console.print(private.plan)
    steps, seconds, course = private.plan.steps, 0.0, []
    stops = {round(steps * part / LOOKS) for part in range(1, LOOKS + 1)}
    begun = time.perf_counter()
    with bar(console) as progress:
        task = progress.add_task(method.name, total=steps)
        for images, labels in private.loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, completed=private.steps)
            if private.steps in stops:
                seconds += time.perf_counter() - begun
                course.append((private.steps, accuracy(model, *test_set.tensors)))
                begun = time.perf_counter()
    return Outcome(
        method.name,
        course[-1][1],
        private.epsilon(),
        private.plan.noise_multiplier,
        private.steps,
        private.not_private.samples / seconds,
        course,
    )


def run(order: ReproduceOptions) -> None:
    """The demo once a seed; quick: one seed, a tenth as long."""
    seeds, epochs, console = (
        order.seeds(SEEDS),
        QUICK_EPOCHS if order.quick else EPOCHS,
        order.console,
    )
    file = order.out / ("quick.jsonl" if order.quick else "demo.jsonl")
    try:
        order.out.mkdir(parents=True, exist_ok=True)
        done = {row["seed"]: [Outcome(**one) for one in row["methods"]] for row in read(file)}
        for seed in seeds:
            if seed not in done:
                done[seed] = run_demo(EPSILON, DELTA, epochs, seed, console, order.device)
                with file.open("a") as opened:
                    opened.write(
                        json.dumps({"seed": seed, "methods": [asdict(one) for one in done[seed]]})
                        + "\n"
                    )
        found = [done[seed] for seed in seeds]
        publish(file, markdown(found, DELTA, file.stem), console, partial(plot, found), order.quick)
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error


def keep(outcomes: Sequence[Outcome], delta: float, out: Path) -> Path:
    """The table and the picture of one demo, in a folder; the report of both."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        publish(
            out / "demo.md",
            markdown([outcomes], delta, "demo"),
            Console(quiet=True),
            partial(plot, [outcomes]),
        )
    except OSError as error:
        raise dpkfc.PrivacyError(f"--out {out}: {error}") from error
    return write_report(out)


def markdown(seeds: Sequence[Sequence[Outcome]], delta: float, picture: str) -> str:
    """A line a method, and its course."""
    lines = []
    for rows in zip(*seeds, strict=True):
        every = ", ".join(f"{100 * row.accuracy:.1f}" for row in rows)
        lines.append(
            [
                rows[0].method,
                mean_and_spread([row.accuracy for row in rows]),
                every,
                str(rows[0].steps),
            ]
        )
    table = markdown_table(["method", "test %", "each seed", "steps"], lines)
    remark = (
        f"digits_cnn on 1,437 digits, tested on 360; epsilon {round_up(seeds[0][0].epsilon)}, delta {delta:g}; mean ± "
        "standard deviation over the seeds (their number). Each method has the best of five learning rates, chosen on "
        "held-out training records, which is not charged."
    )
    course = (
        f"![test accuracy along the steps: the mean, and from the least to the most]({picture}.png)"
    )
    title = "The demo" + (" over several seeds" if len(seeds) > 1 else "")
    return f"# {title}\n\n{table}\n\n{remark}\n\n{course}\n"


def plot(seeds: Sequence[Sequence[Outcome]], file: Path) -> None:
    """Test accuracy along the steps: the mean over the seeds, and from the least to the most as a band."""
    figure, [[panel]] = new_figure(1, 1, 7, 4.4)
    for rows in zip(*seeds, strict=True):
        steps = [step for step, _ in rows[0].course]
        values = list(zip(*([100 * right for _, right in row.course] for row in rows), strict=True))
        low, middle, high = ([function(some) for some in values] for function in (min, fmean, max))
        colour = COLOURS[rows[0].method]
        panel.plot(steps, middle, color=colour, label=rows[0].method, marker="o", markersize=3)
        panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    spent = round_up(seeds[0][0].epsilon)
    panel.set(
        xlabel="steps", ylabel="test accuracy, %", title=f"epsilon = {spent} at the last step"
    )
    finish(figure, panel, file)
