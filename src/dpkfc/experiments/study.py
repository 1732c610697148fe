"""Arms tuned alike on a data set, with the paper's CNN as a rule: the same number of tries each, chosen on validation.

Each try is run once without the last records of the training set, on which its accuracy is measured; the best one is
then trained on all records, with seeds that were not used before, and only these runs see the test set. Results are
appended as they come, and a run that is found in the file is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
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
from dpkfc.data.changes import CHANGES
from dpkfc.data.featured import FEATURED
from dpkfc.data.idx import Scaling
from dpkfc.data.sources import NAMED
from dpkfc.experiments.arguments import names_among
from dpkfc.geometry.probes.probe import Probe
from dpkfc.models import mlp, paper_cnn, tiny_vit
from dpkfc.noise.choose import Noise
from dpkfc.report.accuracy_table import Summary, accuracy_markdown, accuracy_table, plot_accuracy

DATASETS = NAMED | FEATURED
Data = tuple[TensorDataset, TensorDataset]  # for training, for testing
Load = Callable[[str, Scaling], Data]  # by the name of the data set
Row = dict[str, Any]  # one line of the file: key, setting, result
Grid = dict[str, list[dict[str, Any]]]  # what each arm tries, the likeliest first: overrides of `Setting`
SEEDS = (1, 2, 3)  # of the final runs; tries use the default
STAGES = ("tune", "final", "table")
COURSE = 2000  # records on which accuracy is measured on the way


@dataclass(frozen=True)
class Follow:
    """A task that takes over the settings chosen on another one, with their learning rates times `factor(arm)`."""

    task: str
    factor: Callable[[str], float]


@dataclass(frozen=True)
class Study:
    """What is compared on what. A task is what all its runs have in common: overrides of `Setting`."""

    module: str
    about: str
    title: str
    tasks: Mapping[str, Mapping[str, Any]]
    grid: Callable[[str], Grid]  # of a task, with the arms that it has
    published: Mapping[tuple[str, str], float] = field(default_factory=dict)  # percent, by task and arm
    follows: Mapping[str, Follow] = field(default_factory=dict)  # tasks that have no grid of their own
    seeds: tuple[int, ...] = SEEDS
    seeds_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of tasks that have others
    report: Callable[[Study, Sequence[Row], Path, Console], None] | None = None  # besides the table

    @property
    def arms(self) -> list[str]:
        grids = [self.grid(task) for task in self.tasks if task not in self.follows]
        return list(dict.fromkeys(arm for grid in grids for arm in grid))


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

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {  # by the shape of a record and the number of classes
    "cnn": lambda shape, classes: paper_cnn((shape[0], shape[1], shape[2]), classes),
    "mlp": lambda shape, classes: mlp([math.prod(shape), 256, 128, classes]),
    "vit": lambda shape, classes: tiny_vit(shape[1], 4, shape[0], classes, width=64, depth=2, heads=4),
    "linear": lambda shape, classes: mlp([math.prod(shape), classes]),
}

SCHEDULES: dict[str, Callable[[float], float]] = {  # factor of the learning rate, by the part of the run that is done
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


@dataclass(frozen=True)
class Setting:
    """All that a run depends on besides the data.

    `geometry` holds KFC's arguments, or with "kind": "Diagonal" those of AdaDPS; None is DP-SGD. Its `probe` holds the
    arguments of `PinkNoise`, or {"public": the name of a data set}, {"pool": the name of noise that took the way of the
    features}, {"sparse": the arguments of `Tabular.sparse`}, or {"oracle": "records"} for the private records
    themselves. `noise` holds the name of the noise and its arguments; None is independent. `optimizer` holds the name
    of the optimizer (Adam, AdamW, DPAdamBC, or DiSK around SGD) and its arguments; None is SGD. `model` is one of
    `MODELS`; None is the paper's CNN. `change` is one of `CHANGES`, made to every image of the data set; None is none.
    `course` is how often accuracy is measured on the way; None is never.
    """

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
    noise: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    model: str | None = None
    change: str | None = None
    course: int | None = None

    @property
    def key(self) -> str:
        """A hash of the contents."""
        added = ("noise", "optimizer", "model", "change", "course")
        contents = {k: v for k, v in asdict(self).items() if k not in added or v is not None}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        parts = [f"lr {self.lr:g}", f"clip {self.clip:g}"]
        parts += [f"smoothing {self.label_smoothing:g}"] if self.label_smoothing else []
        parts += [self.schedule] if self.schedule != "constant" else []
        parts += [f"{k} {v}" for k, v in (self.optimizer or {}).items() if k != "name"]
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
    course: tuple[float, ...] | None = None  # of the averaged iterates if there are, on the first `COURSE` records


def train(setting: Setting, load: Load, on_step: Callable[[int, int], None] = lambda done, of: None) -> Result:
    """A plain PyTorch loop; `on_step(done, of)` is called after every step."""
    records, measured = split(changed(load(setting.dataset, setting.scaling), setting.change), setting.validation)
    shape, classes = tuple(records.tensors[0].shape[1:]), len(DATASETS[setting.dataset][0])
    torch.manual_seed(setting.seed)
    model = MODELS[setting.model or "cnn"](shape, classes)
    if len(shape) == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(setting, model)
    private = dpkfc.make_private(
        model,
        optimizer,
        records,
        epsilon=setting.epsilon,
        delta=setting.delta,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        clip=setting.clip,
        geometry=geometry_of(setting, records, load),
        noise=noise_of(setting),
        seed=setting.seed,
    )
    steps, factor = private.plan.steps, SCHEDULES[setting.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / steps))
    weights = list(model.parameters())
    average = [w.detach().clone() for w in weights]
    stops = {round(steps * part / (setting.course or 1)) for part in range(1, 1 + (setting.course or 0))}
    course = []
    begun = time.perf_counter()
    for images, labels in private.loader:
        F.cross_entropy(model(images), labels, label_smoothing=setting.label_smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if setting.ema:
            pull = max(1 - setting.ema, 1 / private.steps)  # the plain mean at first, so the start is forgotten
            with at_iterate(optimizer):
                for mean, w in zip(average, weights, strict=True):
                    mean.lerp_(w.detach(), pull)
        if private.steps in stops:
            with at_iterate(optimizer), holding(weights, average if setting.ema else weights):
                course.append(accuracy(model, *(part[:COURSE] for part in measured.tensors)))
        on_step(private.steps, steps)
    seconds = time.perf_counter() - begun
    private.detach()
    with at_iterate(optimizer):
        last, averaged = accuracy(model, *measured.tensors), None
    if setting.ema:
        with holding(weights, average):
            averaged = accuracy(model, *measured.tensors)
    spent = (private.epsilon(), private.plan.noise_multiplier, private.steps, seconds)
    return Result(last, averaged, *spent, tuple(course) if setting.course else None)


@contextmanager
def holding(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Other values in the weights for a while."""
    own = [w.detach().clone() for w in weights]
    with torch.no_grad():
        torch._foreach_copy_(list(weights), list(values))
        yield
        torch._foreach_copy_(list(weights), own)


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


def scaled(data: Data, scaling: Scaling) -> Data:
    """Pixels as they are, in [0, 1], or "centred": in [-1, 1]."""
    if scaling == "unit":
        return data
    (x, y), (other_x, other_y) = (part.tensors for part in data)
    return TensorDataset(2 * x - 1, y), TensorDataset(2 * other_x - 1, other_y)


def changed(data: Data, change: str | None) -> Data:
    """Every image changed in the same way, which no record tells."""
    if change is None:
        return data
    (x, y), (other_x, other_y) = (part.tensors for part in data)
    return TensorDataset(CHANGES[change](x), y), TensorDataset(CHANGES[change](other_x), other_y)


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(setting.optimizer or {"name": "SGD"})
    name = options.pop("name")
    if name in ("SGD", "DiSK"):
        sgd = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)
        return sgd if name == "SGD" else dpkfc.optim.DiSK(sgd, **options)
    make: Callable[..., torch.optim.Optimizer] = getattr(dpkfc.optim if name == "DPAdamBC" else torch.optim, name)
    return make(model.parameters(), lr=setting.lr, **options)


def at_iterate(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Where the model is to be looked at: DiSK stands ahead of its iterate."""
    return optimizer.iterate() if isinstance(optimizer, dpkfc.optim.DiSK) else nullcontext()


def geometry_of(setting: Setting, records: TensorDataset, load: Load) -> dpkfc.KFC | dpkfc.Diagonal | None:
    if setting.geometry is None:
        return None
    options = dict(setting.geometry)
    probe = probe_of(options.pop("probe"), setting, records, load)
    if options.pop("kind", "KFC") == "Diagonal":
        return dpkfc.Diagonal(source=probe, seed=setting.seed, **options)
    return dpkfc.KFC(probe=probe, seed=setting.seed, **options)


def probe_of(source: Mapping[str, Any], setting: Setting, records: TensorDataset, load: Load) -> Probe:
    shape = tuple(records.tensors[0].shape[1:])
    if "public" in source or "pool" in source:
        images, labels = load(source.get("public") or source["pool"], setting.scaling)[0].tensors
        return dpkfc.PublicData(TensorDataset(fitted(images, shape), labels))
    if "sparse" in source:
        return dpkfc.Tabular.sparse(shape[0], **source["sparse"])
    if "oracle" in source:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Oracle builds")  # on purpose, and told by the epsilon
            return dpkfc.Oracle(records)
    return dpkfc.PinkNoise(shape=shape, classes=len(DATASETS[setting.dataset][0]), **source)


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images [N, C, H, W] brought to another shape: grey or coloured, stretched. Features must have it already."""
    if len(shape) != 3:
        if tuple(images.shape[1:]) != shape:
            raise ValueError(f"features of shape {tuple(images.shape[1:])} are no probes for records of {shape}")
        return images
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images


def noise_of(setting: Setting) -> Noise | None:
    if setting.noise is None:
        return None
    options = dict(setting.noise)
    recipe: Callable[..., Noise] = getattr(dpkfc, options.pop("name"))
    return recipe(**options)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    right = [(model(part).argmax(1) == labels).sum() for part, labels in zip(x.split(1000), y.split(1000), strict=True)]
    return float(sum(right)) / len(y)


def tries(study: Study, task: str, arms: Iterable[str], count: int | None = None) -> list[Setting]:
    """The grid as settings, or the first `count` tries of each of its arms. A task that follows another has none."""
    if task in study.follows:
        return []
    grid = study.grid(task)
    return [Setting(arm=arm, **study.tasks[task], **choice) for arm in arms for choice in grid.get(arm, [])[:count]]


def finals(study: Study, rows: Sequence[Row], task: str, arms: Iterable[str]) -> list[Setting]:
    """The chosen setting of every arm, on all records, once a seed."""
    followed = study.follows[task].task if task in study.follows else task
    chosen = [choose(study, rows, task, arm)[0] for arm in arms if arm in study.grid(followed)]
    seeds = study.seeds_of.get(task, study.seeds)
    return [replace(setting, validation=0, seed=seed) for seed in seeds for setting in chosen]


def choose(study: Study, rows: Sequence[Row], task: str, arm: str) -> tuple[Setting, str]:
    """The try with the best accuracy on validation, and which of its weights had it: "last" or "average"."""
    if follow := study.follows.get(task):
        setting, weights = choose(study, rows, follow.task, arm)
        return replace(setting, **study.tasks[task], lr=setting.lr * follow.factor(arm)), weights
    found = [
        (row["result"][weights], Setting(**row["setting"]), weights)
        for row in tried(study, rows, task, arm)
        for weights in ("last", "average")
        if row["result"][weights] is not None
    ]
    if not found:
        raise ValueError(f"no try of {arm!r} on {task} was recorded: run --stage tune first")
    _, setting, weights = max(found, key=lambda entry: entry[0])
    return setting, weights


def tried(study: Study, rows: Sequence[Row], task: str, arm: str) -> list[Row]:
    """Every recorded try, also those that have left the grid since: they were looked at, so they count."""
    common = {**study.tasks[task], "arm": arm}
    return [
        row
        for row in rows
        if row["setting"]["validation"] and all(row["setting"].get(name) == value for name, value in common.items())
    ]


def summarise(study: Study, rows: Sequence[Row]) -> list[Summary]:
    """What there is to tell of every arm with a recorded try."""
    by_key = {row["key"]: row for row in rows}
    summaries = []
    for task, arm in ((task, arm) for task in study.tasks for arm in study.arms):
        try:
            setting, weights = choose(study, rows, task, arm)
        except ValueError:
            continue
        recorded = tried(study, rows, task, arm)
        keys = [final.key for final in finals(study, rows, task, [arm])]
        tests = tuple(by_key[key]["result"][weights] for key in keys if key in by_key)
        text = f"{setting}, {'averaged' if weights == 'average' else 'last'} weights"
        validation = by_key[setting.key]["result"][weights] if recorded else None
        summaries.append(Summary(task, arm, len(recorded), text, validation, tests, study.published.get((task, arm))))
    return summaries


def run(settings: Sequence[Setting], load: Load, out: Path, console: Console) -> None:
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
            result = train(setting, load, on_step)
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


def show(study: Study, out: Path, console: Console) -> None:
    """Print the table of `out`, a file or a folder of them; write accuracy.md and accuracy.png beside the results."""
    files = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    rows = [row for file in files for row in read(file)]
    summaries = summarise(study, rows)
    if not summaries:
        raise ValueError(f"{out} holds no results: run --stage tune first")
    remark = (
        "Test: mean ± standard deviation over the seeds (their number). Epsilon is that of each single run; the tries, "
        "and the choice among them by held-out training records, are not charged."
    )
    console.print(accuracy_table(summaries, study.title))
    console.print(remark, highlight=False)
    folder = out if out.is_dir() else out.parent
    (folder / "accuracy.md").write_text(accuracy_markdown(summaries, study.title, remark))
    if find_spec("matplotlib"):
        plot_accuracy([row for row in summaries if row.tests] or summaries, folder / "accuracy.png")
    else:
        console.print("matplotlib is not installed: no plot")
    if study.report:
        study.report(study, rows, folder, console)


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    """The command line of a study."""
    parser = argparse.ArgumentParser(prog=f"python -m {study.module}", description=study.about)
    parser.add_argument("--data-dir", type=Path, help="the folder with mnist/ and fashion-mnist/ (default $DPKFC_DATA)")
    tasks, arms = list(study.tasks), study.arms
    parser.add_argument("--task", type=names_among(tasks), default=tasks, metavar="A,B", help=f"of {', '.join(tasks)}")
    parser.add_argument("--arms", type=names_among(arms), default=arms, metavar="A,B", help=f"of {', '.join(arms)}")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="results; for the table, a folder"
    )
    parser.add_argument("--tries", type=int, metavar="N", help="the first N of every arm (default: all)")
    parser.add_argument("--stage", choices=STAGES, help="default: all of them, in this order")
    chosen = parser.parse_args(arguments)
    stages = [chosen.stage] if chosen.stage else STAGES
    try:
        execute(study, chosen.task, chosen.arms, chosen.out, chosen.data_dir, Console(), stages, chosen.tries)
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"{study.module}: {error}")


def execute(
    study: Study,
    tasks: Sequence[str],
    arms: Sequence[str],
    out: Path,
    data_dir: Path | None,
    console: Console,
    stages: Sequence[str] = STAGES,
    count: int | None = None,
) -> None:
    """Tune, train what was chosen, show the table. Tasks whose data is not there are skipped, unless all are."""

    @cache
    def load(dataset: str, scaling: Scaling) -> Data:
        return scaled(DATASETS[dataset][1](data_dir), scaling)

    missing: dict[str, FileNotFoundError] = {}
    for task in tasks:
        try:
            if task in study.follows and study.follows[task].task in missing:
                raise missing[study.follows[task].task]
            if "tune" in stages:
                run(tries(study, task, arms, count), load, out, console)
            if "final" in stages:
                run(finals(study, read(out), task, arms), load, out, console)
        except FileNotFoundError as error:
            missing[task] = error
            console.print(f"{task} is skipped: {error}", markup=False, highlight=False, soft_wrap=True)
    if missing and len(missing) == len(tasks):
        raise next(iter(missing.values()))
    if "table" in stages:
        show(study, out, console)


def reproduce(study: Study, out: Path, quick: bool, console: Console, data_dir: Path | None) -> None:
    """The whole study into the folder `out`; quick: a tenth of an epoch, one try and one seed an arm."""
    if quick:
        tasks = {name: {**task, "epochs": 0.1} for name, task in study.tasks.items()}
        study = replace(study, tasks=tasks, seeds=study.seeds[:1], seeds_of={}, published={})
    file = out / ("quick.jsonl" if quick else "results.jsonl")
    try:
        execute(study, list(study.tasks), study.arms, file, data_dir, console, count=1 if quick else None)
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error
