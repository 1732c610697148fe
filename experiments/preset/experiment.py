"""What the preset reaches with the protocol free: fixed features, a linear model, no private tuning.

    dpkfc reproduce preset --data-dir DATA
    python -m experiments.preset --data-dir DATA --out runs/preset.jsonl

Scattering coefficients standardised by pink noise, a linear classifier that begins at zero, and `dpkfc.recipe` for all
the rest; the averaged weights are tested. The mark to beat at epsilon 3 is Tramèr and Boneh's (ICLR 2021), with
the same scattering features, a tuned linear model or CNN, and private or public normalisation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path

import torch
import torch.nn.functional as F
from experiments.common.arguments import names_among
from experiments.common.digits import results_file
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Data, accuracy, split
from experiments.common.study import SEEDS, Row, read
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.accounting.rounding import round_up
from dpkfc.app.readers.cifar import cifar10
from dpkfc.app.readers.idx import idx_images
from dpkfc.app.readers.records import on_device
from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table
from dpkfc.features import Scattering, standardised

MARKS = {"mnist": 98.7, "fashion-mnist": 89.7, "cifar-10": 69.3}  # at epsilon 3
EPSILONS, DELTA = (1.0, 3.0), 1e-5
PROBES, QUICK_PROBES = 2048, 256  # that features are standardised by
QUICK_RECORDS = (2000, 500)  # to train on, and to test on
TITLE = "Test accuracy of the preset, delta = 1e-5"
REMARK = (
    "Mean ± standard deviation over the seeds (their number), of the averaged weights. Epsilon is that of each single "
    "run, and covers all that was done with its training records. The rule for the learning rate comes from validation "
    "records of MNIST and FashionMNIST with other models; the way features are standardised was chosen on validation "
    "records of MNIST with this one."
)


@dataclass(frozen=True)
class Run:
    """What a run depends on besides the data."""

    dataset: str
    epsilon: float
    seed: int
    validation: int  # held-out training records that accuracy is measured on; 0: the test set
    epochs: float
    noise_length: float


@dataclass(frozen=True)
class Result:
    """Accuracies of the averaged and of the last weights, and what the recipe came to."""

    accuracy: float
    last: float
    epsilon: float
    noise: str
    noise_multiplier: float
    batch_size: int
    steps: int
    lr: float
    seconds: float


def images(dataset: str, data_dir: Path | None) -> Data:
    return cifar10(data_dir) if dataset == "cifar-10" else idx_images(dataset, data_dir)


def first(data: Data, train: int, test: int) -> Data:
    parts = zip(data, (train, test), strict=True)
    some = [TensorDataset(*(tensor[:count] for tensor in part.tensors)) for part, count in parts]
    return some[0], some[1]


def pink(shape: tuple[int, ...], count: int) -> dpkfc.probes.PinkNoise:
    """Noise for pixels in [0, 1]; the channels of natural images are alike."""
    correlation = 0.9 if shape[0] == 3 else 0.0
    return dpkfc.probes.PinkNoise(
        shape, 10, std=0.3, mean=0.3, limits=(0, 1), channel_correlation=correlation, count=count
    )


def features(
    data: Data, on_part: Callable[[float], None], probes: int = PROBES
) -> tuple[Data, dpkfc.probes.TransformedProbe]:
    """The features of all records, and the probe that takes the same way."""
    shape = tuple(data[0].tensors[0].shape[1:])
    probe = pink(shape, probes)
    transform = standardised(Scattering(shape), probe, probes)  # type: ignore[arg-type]
    total, done = sum(len(part) for part in data), 0
    found = []
    for part in data:
        parts = []
        for some in part.tensors[0].split(1000):
            parts.append(transform(some))
            done += len(some)
            on_part(done / total)
        found.append(TensorDataset(torch.cat(parts), part.tensors[1]))
    return (found[0], found[1]), dpkfc.probes.TransformedProbe(probe, transform)  # type: ignore[arg-type]


def train(
    run: Run,
    data: Data,
    probe: dpkfc.probes.TransformedProbe,
    on_step: Callable[[float], None] = lambda part: None,
    device: str = "cpu",
) -> Result:
    records, measured = split(data, run.validation)
    records = on_device(records, device)
    torch.manual_seed(run.seed)
    model = nn.Linear(records.tensors[0].shape[1], 10).to(device)
    nn.init.zeros_(model.weight)
    recipe = dpkfc.recipe(
        model,
        records=len(records),
        epsilon=run.epsilon,
        delta=DELTA,
        epochs=run.epochs,
        probe=probe,
        noise_length=run.noise_length,
    )
    recipe.arguments["geometry"].every = recipe.arguments[
        "steps"
    ]  # the inputs of a linear model never change
    optimizer, averaged = recipe.optimizer(model), recipe.averaged(model)
    private = dpkfc.make_private(
        model,
        optimizer,
        records,
        **recipe.arguments,
        seed=run.seed,
        loss=dpkfc.losses.cross_entropy,
    )
    begun = time.perf_counter()
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        on_step(private.steps / private.plan.steps)
    seconds = time.perf_counter() - begun
    private.detach()
    plan = private.plan
    return Result(
        accuracy=accuracy(averaged, *measured.tensors),
        last=accuracy(model, *measured.tensors),
        epsilon=private.epsilon(),
        noise=plan.noise,
        noise_multiplier=plan.noise_multiplier,
        batch_size=plan.batch_size,
        steps=plan.steps,
        lr=recipe.lr,
        seconds=seconds,
    )


def markdown(rows: Sequence[Row], quick: bool = False) -> str:
    """The table, beside the marks."""
    headings = [
        "data set",
        "epsilon",
        "test %",
        "mark %",
        "noise",
        "batch",
        "steps",
        "learning rate",
    ]
    lines = []
    for dataset in MARKS:
        for epsilon in EPSILONS:
            wanted = {"dataset": dataset, "epsilon": epsilon, "validation": 0}
            found = [
                Result(**row["result"]) for row in rows if wanted.items() <= row["run"].items()
            ]
            if found:
                one, mark = found[0], f"{MARKS[dataset]:.1f}" if epsilon == 3 and not quick else ""
                noise = f"{one.noise}, multiplier {one.noise_multiplier:.3g}"
                shown = mean_and_spread([result.accuracy for result in found])
                settings = [noise, str(one.batch_size), str(one.steps), f"{one.lr:.3g}"]
                lines.append([dataset, round_up(epsilon, 6), shown, mark, *settings])
    return f"# {TITLE}\n\n{markdown_table(headings, lines, left=len(headings))}\n\n{REMARK}\n"


def runs_of(
    datasets: Iterable[str],
    epsilons: Iterable[float],
    seeds: Iterable[int],
    validation: int = 0,
    epochs: float = dpkfc.planning.recipe.EPOCHS,
    noise_length: float = dpkfc.planning.recipe.NOISE_LENGTH,
) -> list[Run]:
    every = product(datasets, epsilons, seeds)
    return [
        Run(dataset, epsilon, seed, validation, epochs, noise_length)
        for dataset, epsilon, seed in every
    ]


def execute(runs: Iterable[Run], file: Path, order: ReproduceOptions) -> None:
    for _, some in groupby(runs, lambda run: run.dataset):
        run_all(list(some), file, order)
    publish(file, markdown(read(file), order.quick), order.console, quick=order.quick)


def run(order: ReproduceOptions) -> None:
    """The whole table; quick: one run on the first records of MNIST."""
    datasets, epsilons, name = (
        (["mnist"], [3.0], "quick") if order.quick else (MARKS, EPSILONS, "preset")
    )
    try:
        execute(runs_of(datasets, epsilons, order.seeds(SEEDS)), order.out / f"{name}.jsonl", order)
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.preset", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--data-dir", type=Path, help="with mnist/, fashion-mnist/, cifar-10/ (default $DPKFC_DATA)"
    )
    parser.add_argument("--dataset", type=names_among(MARKS), default=list(MARKS), metavar="A,B")
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seed", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=float, default=dpkfc.planning.recipe.EPOCHS)
    parser.add_argument("--noise-length", type=float, default=dpkfc.planning.recipe.NOISE_LENGTH)
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        help="hold out so many training records, and test on them",
    )
    parser.add_argument(
        "--out",
        type=results_file,
        required=True,
        metavar="FILE.jsonl",
        help="results; the table goes beside it",
    )
    chosen = parser.parse_args(arguments)
    common = (chosen.validation, chosen.epochs, chosen.noise_length)
    runs = runs_of(chosen.dataset, chosen.epsilon, chosen.seed, *common)
    try:
        execute(runs, chosen.out, ReproduceOptions(chosen.out.parent, data_dir=chosen.data_dir))
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"experiments.preset: {error}")


def run_all(runs: Sequence[Run], out: Path, order: ReproduceOptions) -> None:
    """Those on one data set that the file does not hold yet; the features are computed once."""
    done = [row["run"] for row in read(out)]
    todo = [run for run in runs if asdict(run) not in done]
    if not todo:
        return
    data, probes = images(todo[0].dataset, order.data_dir), PROBES
    if order.quick:
        data, probes = first(data, *QUICK_RECORDS), QUICK_PROBES
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=order.console) as progress:
        bar = progress.add_task(f"{todo[0].dataset}: features", total=1.0)

        def on_part(part: float) -> None:
            progress.update(bar, completed=part)

        found, probe = features(data, on_part, probes)
        for run in todo:
            progress.reset(
                bar,
                description=f"{run.dataset}: epsilon {round_up(run.epsilon, 6)}, seed {run.seed}",
            )
            result = train(run, found, probe, on_part, order.device)
            with out.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "result": asdict(result)}) + "\n")
            order.console.print(
                f"{run}: {100 * result.accuracy:.2f} %", markup=False, highlight=False
            )


if __name__ == "__main__":
    main()
