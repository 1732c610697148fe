"""Private runs on the bundled digits, as small experiments repeat them: on held-out records, into a file, resumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.nn.functional as F
from experiments.common.setting import Data, accuracy, split
from experiments.common.study import read
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import dpkfc
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.records import on_device
from dpkfc.app.reports.progress import bar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HELD_OUT = 300  # the last training records, on which accuracy is measured
SHAPE, CLASSES = (1, 8, 8), 10
Setting = TypeVar("Setting", bound="DataclassInstance")  # all that a run depends on; hashable


@dataclass(frozen=True)
class Result:
    """Accuracies on the held-out records, and what the run came to."""

    last: float  # of the last weights
    average: float | None  # of the averaged weights, if there are any
    epsilon: float
    noise: str
    noise_multiplier: float
    steps: int
    lr: float


@cache
def data() -> Data:
    """What is trained on, and the held-out training records; the test set stays where it is."""
    return split(digits(), HELD_OUT)


def pink() -> dpkfc.probes.PinkNoise:
    """Probes about as bright as the digits."""
    return dpkfc.probes.PinkNoise(shape=SHAPE, classes=CLASSES, mean=0.3, std=0.3)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    seed: int,
    averaged: AveragedModel | None = None,
    **arguments: Any,
) -> Result:
    """A plain PyTorch loop; `arguments` are those of `make_private`."""
    records, measured = data()
    records = on_device(records, next(model.parameters()).device)
    private = dpkfc.make_private(
        model, optimizer, records, seed=seed, loss=dpkfc.losses.cross_entropy, **arguments
    )
    for images, labels in private.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(model)
    private.detach()
    return Result(
        last=accuracy(model, *measured.tensors),
        average=None if averaged is None else accuracy(averaged, *measured.tensors),
        epsilon=private.epsilon(),
        noise=private.plan.noise,
        noise_multiplier=private.plan.noise_multiplier,
        steps=private.steps,
        lr=optimizer.param_groups[0]["lr"],
    )


def run_all(
    settings: Sequence[Setting], run: Callable[[Setting], Result], out: Path, console: Console
) -> dict[Setting, Result]:
    """The results of all settings. Those in the file are taken from it, the others are appended as they come."""
    kept = _read(settings, out)
    todo = [setting for setting in settings if setting not in kept]
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{len(settings) - len(todo)} of {len(settings)} runs are in {out}",
        highlight=False,
        soft_wrap=True,
    )
    with bar(console) as progress:
        overall = progress.add_task("runs", total=len(todo))
        for setting in todo:
            kept[setting] = result = run(setting)
            with out.open("a") as file:
                file.write(
                    json.dumps({"setting": asdict(setting), "result": asdict(result)}) + "\n"
                )
            progress.advance(overall)
            shown = 100 * (result.last if result.average is None else result.average)
            progress.console.print(
                f"{setting}: {shown:.1f} %", markup=False, highlight=False, soft_wrap=True
            )
    return {setting: kept[setting] for setting in settings}


def _read(settings: Sequence[Setting], file: Path) -> dict[Setting, Result]:
    """The results in a file, by setting; a file of another experiment is refused."""
    kind = type(settings[0])
    names = {field.name for field in fields(kind)}
    rows = read(file)
    if any(row.keys() != {"setting", "result"} or row["setting"].keys() != names for row in rows):
        raise ValueError(f"{file} does not hold results of this experiment: name another --out")
    return {kind(**row["setting"]): Result(**row["result"]) for row in rows}


def results_file(text: str) -> Path:
    """For argparse's `type`: the table and the picture are written beside it, under the same name."""
    file = Path(text)
    if file.suffix != ".jsonl":
        raise argparse.ArgumentTypeError(
            f"{text!r} must end in .jsonl: the .md and the .png go beside it"
        )
    return file
