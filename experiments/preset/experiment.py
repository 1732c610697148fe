"""Scattering features, a linear model and `dpkfc.recipe`, compared with published accuracies.

The features are scattering coefficients standardised by pink noise. A linear classifier starts at
zero, `dpkfc.recipe` sets everything else, and the averaged weights are tested. The published
accuracies at epsilon 3 are those of Tramèr and Boneh (ICLR 2021), with the same scattering
features, a tuned linear model or CNN, and private or public normalisation.
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
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.features import Scattering, standardised
from dpkfc.planning.recipe import EPOCHS, NOISE_LENGTH
from experiments.common.arguments import EXPECTED_ERRORS, names_among, results_file
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Data, split
from experiments.common.study import SEEDS, Row, read

PUBLISHED = {"mnist": 98.7, "fashion-mnist": 89.7, "cifar-10": 69.3}  # percent, at epsilon 3
EPSILONS = (1.0, 3.0)
DELTA = 1e-5
PROBES = 2048  # by which features are standardised
QUICK_PROBES = 256
QUICK_RECORDS = (2000, 500)  # to train on, and to test on
TITLE = "Test accuracy of the preset, delta = 1e-5"
REMARK = (
    "Mean ± standard deviation over the seeds (their number), of the averaged weights. Epsilon is "
    "that of each single run, and covers all that was done with its training records. The rule for "
    "the learning rate comes from validation records of MNIST and FashionMNIST with other models; "
    "the way features are standardised was chosen on validation records of MNIST with this one."
)


@dataclass(frozen=True)
class PresetRun:
    """Everything a run depends on besides the data.

    `validation` training records are held out to measure accuracy on; 0 uses the test set.
    """

    dataset: str
    epsilon: float
    seed: int
    validation: int
    epochs: float
    noise_length: float


@dataclass(frozen=True)
class PresetResult:
    """Accuracies of the averaged and of the last weights, and the values that the recipe chose."""

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
    """Load a data set by its name."""
    return cifar10(data_dir) if dataset == "cifar-10" else idx_images(dataset, data_dir)


def first(data: Data, train: int, test: int) -> Data:
    """Return the first records to train on and to test on."""
    train_part, test_part = (
        TensorDataset(*(tensor[:count] for tensor in part.tensors))
        for part, count in zip(data, (train, test), strict=True)
    )
    return train_part, test_part


def pink(shape: tuple[int, ...], count: int) -> dpkfc.probes.PinkNoise:
    """Return noise for pixels in [0, 1], with the correlated channels of natural images."""
    correlation = 0.9 if shape[0] == 3 else 0.0
    return dpkfc.probes.PinkNoise(
        shape, 10, std=0.3, mean=0.3, limits=(0, 1), channel_correlation=correlation, count=count
    )


def features(
    data: Data, on_part: Callable[[float], None], probes: int = PROBES
) -> tuple[Data, dpkfc.probes.TransformedProbe]:
    """Return the features of all records, and a probe mapped by the same features."""
    shape = tuple(data[0].tensors[0].shape[1:])
    probe = pink(shape, probes)
    transform = standardised(Scattering(shape), probe, probes)  # type: ignore[arg-type]
    total = sum(len(part) for part in data)
    done = 0
    featured = []
    for part in data:
        chunks = []
        for chunk in part.tensors[0].split(1000):
            chunks.append(transform(chunk))
            done += len(chunk)
            on_part(done / total)
        featured.append(TensorDataset(torch.cat(chunks), part.tensors[1]))
    train_part, test_part = featured
    mapped_probe = dpkfc.probes.TransformedProbe(probe, transform)  # type: ignore[arg-type]
    return (train_part, test_part), mapped_probe


def train(
    setting: PresetRun,
    data: Data,
    probe: dpkfc.probes.TransformedProbe,
    on_step: Callable[[float], None] = lambda part: None,
    device: str = "cpu",
) -> PresetResult:
    """Train a linear model with a plain PyTorch loop; `on_step` receives the completed fraction."""
    records, measured = split(data, setting.validation)
    records = on_device(records, device)
    torch.manual_seed(setting.seed)
    model = nn.Linear(records.tensors[0].shape[1], 10).to(device)
    nn.init.zeros_(model.weight)
    recipe = dpkfc.recipe(
        model,
        records=len(records),
        epsilon=setting.epsilon,
        delta=DELTA,
        epochs=setting.epochs,
        probe=probe,
        noise_length=setting.noise_length,
    )
    # The inputs of a linear model never change, so the geometry is built once.
    recipe.arguments["geometry"].every = recipe.arguments["steps"]
    optimizer = recipe.optimizer(model)
    averaged = recipe.averaged(model)
    run = dpkfc.make_private(
        model,
        optimizer,
        records,
        **recipe.arguments,
        seed=setting.seed,
        loss=dpkfc.losses.cross_entropy,
    )
    started = time.perf_counter()
    for x, y in run.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        on_step(run.steps / run.plan.steps)
    seconds = time.perf_counter() - started
    run.detach()
    plan = run.plan
    return PresetResult(
        accuracy=accuracy(averaged, *measured.tensors),
        last=accuracy(model, *measured.tensors),
        epsilon=run.epsilon(),
        noise=plan.noise,
        noise_multiplier=plan.noise_multiplier,
        batch_size=plan.batch_size,
        steps=plan.steps,
        lr=recipe.lr,
        seconds=seconds,
    )


def markdown(rows: Sequence[Row], quick: bool = False) -> str:
    """Format the table, with the published accuracies."""
    headings = [
        "data set",
        "epsilon",
        "test %",
        "published %",
        "noise",
        "batch",
        "steps",
        "learning rate",
    ]
    lines = []
    for dataset in PUBLISHED:
        for epsilon in EPSILONS:
            wanted = {"dataset": dataset, "epsilon": epsilon, "validation": 0}
            results = [
                PresetResult(**row["result"])
                for row in rows
                if wanted.items() <= row["run"].items()
            ]
            if results:
                first_result = results[0]
                multiplier = f"multiplier {first_result.noise_multiplier:.3g}"
                lines.append(
                    [
                        dataset,
                        round_up(epsilon, 6),
                        mean_and_spread([result.accuracy for result in results]),
                        f"{PUBLISHED[dataset]:.1f}" if epsilon == 3 and not quick else "",
                        f"{first_result.noise}, {multiplier}",
                        str(first_result.batch_size),
                        str(first_result.steps),
                        f"{first_result.lr:.3g}",
                    ]
                )
    return f"# {TITLE}\n\n{markdown_table(headings, lines, left=len(headings))}\n\n{REMARK}\n"


def runs_of(
    datasets: Iterable[str],
    epsilons: Iterable[float],
    seeds: Iterable[int],
    validation: int = 0,
    epochs: float = EPOCHS,
    noise_length: float = NOISE_LENGTH,
) -> list[PresetRun]:
    """Return one run per data set, epsilon and seed."""
    return [
        PresetRun(dataset, epsilon, seed, validation, epochs, noise_length)
        for dataset, epsilon, seed in product(datasets, epsilons, seeds)
    ]


def train_all(runs: Sequence[PresetRun], out: Path, options: ReproduceOptions) -> None:
    """Train the runs on one data set that the file does not hold; features are computed once."""
    done = [row["run"] for row in read(out)]
    todo = [run for run in runs if asdict(run) not in done]
    if not todo:
        return
    data = images(todo[0].dataset, options.data_dir)
    probes = PROBES
    if options.quick:
        data = first(data, *QUICK_RECORDS)
        probes = QUICK_PROBES
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=options.console) as progress:
        bar = progress.add_task(f"{todo[0].dataset}: features", total=1.0)

        def on_part(part: float) -> None:
            progress.update(bar, completed=part)

        featured, probe = features(data, on_part, probes)
        for run in todo:
            progress.reset(
                bar,
                description=f"{run.dataset}: epsilon {round_up(run.epsilon, 6)}, seed {run.seed}",
            )
            result = train(run, featured, probe, on_part, options.device)
            with out.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "result": asdict(result)}) + "\n")
            options.console.print(
                f"{run}: {100 * result.accuracy:.2f} %", markup=False, highlight=False
            )


def execute(runs: Iterable[PresetRun], file: Path, options: ReproduceOptions) -> None:
    """Train all runs that the file does not hold yet, and write the table."""
    for _, dataset_runs in groupby(runs, lambda run: run.dataset):
        train_all(list(dataset_runs), file, options)
    publish(file, markdown(read(file), options.quick), options.console, quick=options.quick)


def reproduce(options: ReproduceOptions) -> None:
    """Write the whole table; quick: one run on the first records of MNIST."""
    if options.quick:
        runs = runs_of(["mnist"], [3.0], options.seeds(SEEDS))
        file = options.out / "quick.jsonl"
    else:
        runs = runs_of(PUBLISHED, EPSILONS, options.seeds(SEEDS))
        file = options.out / "preset.jsonl"
    execute(runs, file, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train some of the runs from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.preset", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--data-dir", type=Path, help="with mnist/, fashion-mnist/, cifar-10/ (default $DPKFC_DATA)"
    )
    parser.add_argument(
        "--dataset", type=names_among(PUBLISHED), default=list(PUBLISHED), metavar="A,B"
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seed", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--noise-length", type=float, default=NOISE_LENGTH)
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        help="number of training records to hold out and measure accuracy on",
    )
    parser.add_argument(
        "--out",
        type=results_file,
        required=True,
        metavar="FILE.jsonl",
        help="results; the table is written beside it",
    )
    chosen = parser.parse_args(arguments)
    runs = runs_of(
        chosen.dataset,
        chosen.epsilon,
        chosen.seed,
        chosen.validation,
        chosen.epochs,
        chosen.noise_length,
    )
    try:
        execute(runs, chosen.out, ReproduceOptions(chosen.out.parent, data_dir=chosen.data_dir))
    except EXPECTED_ERRORS as error:
        sys.exit(f"experiments.preset: {error}")
