"""DP-SGD beside DP-KFC on MNIST and FashionMNIST, tuned alike: the paper's CNN, Poisson sampling, PLD accounting.

    python -m dpkfc.experiments.geometry --data-dir DATA --dataset mnist --out runs/mnist.jsonl
    python -m dpkfc.experiments.geometry --stage table --out runs

Every arm has the same number of tries. Each is run once without the last records of the training set, on which its
accuracy is measured; the best one is then trained on all records, with seeds that were not used before, and only
these runs see the test set. Results are appended as they come, and a run that is found in the file is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.data.idx import CLASSES, SIDE, SOURCES, Scaling, idx_images
from dpkfc.models import paper_cnn
from dpkfc.report.accuracy_table import Summary, accuracy_markdown, accuracy_table, plot_accuracy

Data = tuple[TensorDataset, TensorDataset]  # for training, for testing
Row = dict[str, Any]  # one line of the file: key, setting, result

# The whitening of the paper as it was measured: activations only, all ranks, absolute stability, probes every 50 steps.
# What the accuracy depends on is named, so that it is part of a setting's key.
PAPER: dict[str, Any] = {
    "probe": {"alpha": 2.0, "std": 0.5},
    "every": 50,
    "probes": 512,
    "factors": "A",
    "approx": "expand",
    "rank": None,
    "power": 1.0,
    "stability": 1e-3,
    "damping": 0.0,
    "post": 0.0,
}
# Both are scalings that need no statistic of the data. FashionMNIST is centred because that helps plain DP-SGD by a
# point; DP-KFC does not mind. Probes about as bright as pixels are, on either scale:
SCALING: dict[str, Scaling] = {"mnist": "unit", "fashion-mnist": "centred"}
BRIGHT = {"unit": {"alpha": 2.0, "std": 0.3, "mean": 0.3}, "centred": {"alpha": 2.0, "std": 0.6, "mean": -0.4}}
ARMS = (
    "dp-sgd",
    "dp-kfc (paper)",
    "dp-kfc (paper at rank 32)",
    "dp-kfc (best)",
    "dp-sgd + smoothing",
    "dp-kfc (best) + smoothing",
)


def grid(dataset: str) -> dict[str, list[dict[str, Any]]]:
    """What each arm tries, the likeliest first: overrides of `Setting`, as many for every arm.

    "best" cuts factors at rank 32 and adds a milder map after the noise. lr · clip is the step that the noise takes.
    """
    rates = (0.04, 0.08, 0.02, 0.06, 0.03, 0.01)
    best = PAPER | {"probe": BRIGHT[SCALING[dataset]], "post": 0.5, "rank": 32}
    return {
        "dp-sgd": [{"lr": step / clip, "clip": clip} for clip in (1.0, 0.1) for step in (0.08, 0.04, 0.16)],
        "dp-kfc (paper)": [{"lr": lr, "geometry": PAPER} for lr in rates],
        "dp-kfc (paper at rank 32)": [{"lr": lr, "geometry": PAPER | {"rank": 32}} for lr in rates],
        "dp-kfc (best)": [
            *({"lr": lr, "geometry": best} for lr in (0.03, 0.02, 0.04, 0.06)),
            *({"lr": lr, "geometry": best | {"every": 15, "probes": 1024, "rank": 96}} for lr in (0.03, 0.04)),
        ],
        "dp-sgd + smoothing": [
            {"lr": 0.08, "label_smoothing": 0.1},
            *({"lr": lr, "label_smoothing": 0.3} for lr in (0.12, 0.08, 0.2, 0.05, 0.3)),
        ],
        "dp-kfc (best) + smoothing": [
            *({"lr": lr, "label_smoothing": 0.1, "geometry": best} for lr in (0.02, 0.03, 0.04)),
            *({"lr": lr, "label_smoothing": 0.3, "geometry": best} for lr in (0.04, 0.02, 0.08)),
        ],
    }


SEEDS = (1, 2, 3)  # of the final runs; tries use the default
PUBLISHED = {
    ("mnist", "dp-sgd"): 91.7,
    ("mnist", "dp-kfc (paper)"): 94.2,
    ("fashion-mnist", "dp-sgd"): 83.5,
    ("fashion-mnist", "dp-kfc (paper)"): 87.8,
}
SCHEDULES: dict[str, Callable[[float], float]] = {  # factor of the learning rate, by the part of the run that is done
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


@dataclass(frozen=True)
class Setting:
    """All that a run depends on besides the data. `geometry` holds KFC's arguments; None is DP-SGD."""

    dataset: str
    arm: str
    lr: float
    geometry: Mapping[str, Any] | None = None
    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: float = 5
    batch_size: int = 256
    clip: float = 1.0
    momentum: float = 0.9
    label_smoothing: float = 0.0
    schedule: str = "constant"
    ema: float = 0.99  # decay of the averaged copy of the iterates; 0 for none. Post-processing, so it is free
    scaling: Scaling = "unit"
    seed: int = 0
    validation: int = 5000  # training records held out at the end; 0 trains on all and measures on the test set

    @property
    def key(self) -> str:
        """A hash of the contents."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        parts = [f"lr {self.lr:g}", f"clip {self.clip:g}"]
        parts += [f"smoothing {self.label_smoothing:g}"] if self.label_smoothing else []
        parts += [self.schedule] if self.schedule != "constant" else []
        return ", ".join(parts + [f"{k} {v}" for k, v in (self.geometry or {}).items() if PAPER.get(k) != v])


@dataclass(frozen=True)
class Result:
    """Accuracies on the held-out records (if the setting has any) or the test set."""

    last: float  # of the last iterate
    average: float | None  # of the averaged iterates
    epsilon: float  # of this run alone
    noise_multiplier: float
    steps: int
    seconds: float


def train(setting: Setting, data: Data, on_step: Callable[[int, int], None] = lambda done, of: None) -> Result:
    """A plain PyTorch loop; `on_step(done, of)` is called after every step."""
    records, measured = split(data, setting.validation)
    torch.manual_seed(setting.seed)
    model = paper_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)
    budget = (setting.batch_size, setting.epochs, setting.epsilon, setting.delta)
    private = dpkfc.make_private(
        model,
        optimizer,
        records,
        noise_multiplier=calibrated(len(records), *budget),
        delta=setting.delta,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        clip=setting.clip,
        geometry=geometry_of(setting),
        seed=setting.seed,
    )
    steps, factor = private.plan.steps, SCHEDULES[setting.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / steps))
    weights = list(model.parameters())
    average = [w.detach().clone() for w in weights]
    begun = time.perf_counter()
    for images, labels in private.loader:
        F.cross_entropy(model(images), labels, label_smoothing=setting.label_smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if setting.ema:
            pull = max(1 - setting.ema, 1 / private.steps)  # the plain mean at first, so the start is forgotten
            for mean, w in zip(average, weights, strict=True):
                mean.lerp_(w.detach(), pull)
        on_step(private.steps, steps)
    seconds = time.perf_counter() - begun
    private.detach()
    last, averaged = accuracy(model, *measured.tensors), None
    if setting.ema:
        with torch.no_grad():
            for mean, w in zip(average, weights, strict=True):
                w.copy_(mean)
        averaged = accuracy(model, *measured.tensors)
    return Result(last, averaged, private.epsilon(), private.plan.noise_multiplier, private.steps, seconds)


def split(data: Data, validation: int) -> Data:
    """What is trained on and what accuracy is measured on: held-out training records, or the test set if none are."""
    records, test = data
    if not validation:
        return records, test
    if not 0 < validation < len(records):
        raise ValueError(f"validation={validation}: the training set has {len(records)} records")
    images, labels = records.tensors
    rest = len(records) - validation
    return TensorDataset(images[:rest], labels[:rest]), TensorDataset(images[rest:], labels[rest:])


@cache
def calibrated(records: int, batch_size: int, epochs: float, epsilon: float, delta: float) -> float:
    """The noise multiplier of a run of this size; it takes seconds to find and many runs share it."""
    plan = dpkfc.Plan.make(
        records=records, batch_size=batch_size, epochs=epochs, clip=1.0, epsilon=epsilon, delta=delta
    )
    return plan.noise_multiplier


def geometry_of(setting: Setting) -> dpkfc.KFC | None:
    if setting.geometry is None:
        return None
    options = dict(setting.geometry)
    probe = dpkfc.PinkNoise(shape=(1, SIDE, SIDE), classes=CLASSES, **options.pop("probe"))
    return dpkfc.KFC(probe=probe, seed=setting.seed, **options)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    right = [(model(part).argmax(1) == labels).sum() for part, labels in zip(x.split(1000), y.split(1000), strict=True)]
    return float(sum(right)) / len(y)


def tries(dataset: str, arms: Iterable[str], count: int | None = None) -> list[Setting]:
    """The grid as settings: all of it, or the first `count` tries of every arm."""
    scaling, choices = SCALING[dataset], grid(dataset)
    return [Setting(dataset, arm, scaling=scaling, **choice) for arm in arms for choice in choices[arm][:count]]


def finals(rows: Sequence[Row], dataset: str, arms: Iterable[str]) -> list[Setting]:
    """The chosen setting of every arm, on all records, once a seed."""
    chosen = [choose(rows, dataset, arm)[0] for arm in arms]
    return [replace(setting, validation=0, seed=seed) for setting in chosen for seed in SEEDS]


def choose(rows: Sequence[Row], dataset: str, arm: str) -> tuple[Setting, str]:
    """The try with the best accuracy on validation, and which of its weights had it: "last" or "average"."""
    found = [
        (row["result"][weights], Setting(**row["setting"]), weights)
        for row in tried(rows, dataset, arm)
        for weights in ("last", "average")
        if row["result"][weights] is not None
    ]
    if not found:
        raise ValueError(f"no try of {arm!r} on {dataset} was recorded: run --stage tune first")
    _, setting, weights = max(found, key=lambda entry: entry[0])
    return setting, weights


def tried(rows: Sequence[Row], dataset: str, arm: str) -> list[Row]:
    """Every recorded try, also those that have left the grid since: they were looked at, so they count."""
    return [
        row
        for row in rows
        if (row["setting"]["dataset"], row["setting"]["arm"]) == (dataset, arm) and row["setting"]["validation"]
    ]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """What there is to tell of every arm with a recorded try."""
    by_key = {row["key"]: row for row in rows}
    summaries = []
    for dataset, arm in ((dataset, arm) for dataset in SOURCES for arm in ARMS):
        recorded = tried(rows, dataset, arm)
        if not recorded:
            continue
        setting, weights = choose(rows, dataset, arm)
        keys = [final.key for final in finals(rows, dataset, [arm])]
        tests = tuple(by_key[key]["result"][weights] for key in keys if key in by_key)
        text = f"{setting}, {'averaged' if weights == 'average' else 'last'} weights"
        validation = by_key[setting.key]["result"][weights]
        summaries.append(Summary(dataset, arm, len(recorded), text, validation, tests, PUBLISHED.get((dataset, arm))))
    return summaries


def run(settings: Sequence[Setting], load: Callable[[Setting], Data], out: Path, console: Console) -> None:
    """Train every setting that the file does not hold yet; append each result as it comes."""
    done = {row["key"] for row in read(out)}
    todo = [setting for setting in settings if setting.key not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"{len(settings) - len(todo)} of {len(settings)} runs are in {out}", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        overall, current = progress.add_task("runs", total=len(todo)), progress.add_task("steps", total=None)

        def on_step(steps: int, of: int) -> None:
            progress.update(current, completed=steps, total=of)

        for setting in todo:
            progress.reset(current, total=None, description=setting.arm)
            result = train(setting, load(setting), on_step)
            row = {"key": setting.key, "setting": asdict(setting), "result": asdict(result)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            progress.advance(overall)
            measured = f"{'validation' if setting.validation else 'test'} {100 * result.last:.2f}"
            measured += "" if result.average is None else f", averaged {100 * result.average:.2f}"
            speed = f"{result.steps / result.seconds:.1f} steps/s"
            line = f"{setting.dataset}, {setting.arm}: {setting}, seed {setting.seed}: {measured} ({speed})"
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def read(file: Path) -> list[Row]:
    """The results in a file; none if it does not exist yet."""
    rows: list[Row] = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number} is cut off: remove the line, its run will be repeated") from error
    return rows


def show(out: Path, console: Console) -> None:
    """Print the table of `out`, a file or a folder of them; write accuracy.md and accuracy.png beside the results."""
    files = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    summaries = summarise([row for file in files for row in read(file)])
    if not summaries:
        raise ValueError(f"{out} holds no results: run --stage tune first")
    title = f"Accuracy at epsilon = {Setting.epsilon:g}, delta = {Setting.delta:g}"
    remark = (
        "Test: mean ± standard deviation over the seeds (their number). Epsilon is that of each single run; the tries, "
        "and the choice among them by held-out training records, are not charged."
    )
    console.print(accuracy_table(summaries, title))
    console.print(remark, highlight=False)
    folder = out if out.is_dir() else out.parent
    (folder / "accuracy.md").write_text(accuracy_markdown(summaries, title, remark))
    if find_spec("matplotlib"):
        plot_accuracy(summaries, folder / "accuracy.png")
    else:
        console.print("matplotlib is not installed: no plot")


def main(arguments: Sequence[str] | None = None) -> None:
    module, about = "dpkfc.experiments.geometry", (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--data-dir", type=Path, help="the folder with mnist/ and fashion-mnist/ (default $DPKFC_DATA)")
    parser.add_argument("--dataset", type=_names(SOURCES), default=list(SOURCES), metavar="A,B", help="default: both")
    parser.add_argument("--arms", type=_names(ARMS), default=list(ARMS), metavar="A,B", help="default: all")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="results; for the table, a folder"
    )
    parser.add_argument("--tries", type=int, metavar="N", help="the first N of every arm (default: all)")
    parser.add_argument("--stage", choices=("tune", "final", "table"), help="default: all of them, in this order")
    chosen = parser.parse_args(arguments)
    console = Console()
    stages = [chosen.stage] if chosen.stage else ["tune", "final", "table"]

    @cache
    def data(dataset: str, scaling: Scaling) -> Data:
        return idx_images(dataset, chosen.data_dir, scaling)

    def load(setting: Setting) -> Data:
        return data(setting.dataset, setting.scaling)

    try:
        for dataset in chosen.dataset:
            if "tune" in stages:
                run(tries(dataset, chosen.arms, chosen.tries), load, chosen.out, console)
            if "final" in stages:
                run(finals(read(chosen.out), dataset, chosen.arms), load, chosen.out, console)
        if "table" in stages:
            show(chosen.out, console)
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"{module}: {error}")


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known: choose from {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
