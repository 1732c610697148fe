"""Private runs on scikit-learn's digits, measured on held-out records and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import dpkfc
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.records import on_device
from dpkfc.app.reports.progress import bar
from dpkfc.app.workflow.evaluation import accuracy
from experiments.common.setting import Data, split
from experiments.common.study import read

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HELD_OUT = 300  # the last training records, on which accuracy is measured
SHAPE = (1, 8, 8)
CLASSES = 10
# A hashable dataclass of everything a run depends on.
RunSetting = TypeVar("RunSetting", bound="DataclassInstance")


@dataclass(frozen=True)
class DigitsResult:
    """Accuracies of a run on the held-out records, and its privacy parameters."""

    last: float  # accuracy of the last weights
    average: float | None  # accuracy of the averaged weights, if they were kept
    epsilon: float
    noise: str
    noise_multiplier: float
    steps: int
    lr: float


@cache
def data() -> Data:
    """Return the records to train on and the held-out ones; the test set is not used."""
    return split(digits(), HELD_OUT)


def pink() -> dpkfc.probes.PinkNoise:
    """Return probes about as bright as the digits."""
    return dpkfc.probes.PinkNoise(shape=SHAPE, classes=CLASSES, mean=0.3, std=0.3)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    seed: int,
    averaged: AveragedModel | None = None,
    **arguments: Any,
) -> DigitsResult:
    """Train with a plain PyTorch loop; `arguments` are those of `make_private`."""
    records, measured = data()
    records = on_device(records, next(model.parameters()).device)
    run = dpkfc.make_private(
        model, optimizer, records, seed=seed, loss=dpkfc.losses.cross_entropy, **arguments
    )
    for images, labels in run.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(model)
    run.detach()
    return DigitsResult(
        last=accuracy(model, *measured.tensors),
        average=None if averaged is None else accuracy(averaged, *measured.tensors),
        epsilon=run.epsilon(),
        noise=run.plan.noise,
        noise_multiplier=run.plan.noise_multiplier,
        steps=run.steps,
        lr=optimizer.param_groups[0]["lr"],
    )


def train_all(
    settings: Sequence[RunSetting],
    train_one: Callable[[RunSetting], DigitsResult],
    out: Path,
    console: Console,
) -> dict[RunSetting, DigitsResult]:
    """Return the results of all settings; those that the file does not hold are trained first."""
    results = _read(settings, out)
    todo = [setting for setting in settings if setting not in results]
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{len(settings) - len(todo)} of {len(settings)} runs are in {out}",
        highlight=False,
        soft_wrap=True,
    )
    with bar(console) as progress:
        overall = progress.add_task("runs", total=len(todo))
        for setting in todo:
            results[setting] = result = train_one(setting)
            with out.open("a") as file:
                file.write(
                    json.dumps({"setting": asdict(setting), "result": asdict(result)}) + "\n"
                )
            progress.advance(overall)
            shown = 100 * (result.last if result.average is None else result.average)
            progress.console.print(
                f"{setting}: {shown:.1f} %", markup=False, highlight=False, soft_wrap=True
            )
    return {setting: results[setting] for setting in settings}


def _read(settings: Sequence[RunSetting], file: Path) -> dict[RunSetting, DigitsResult]:
    """Return the results in a file by setting; refuse a file of another experiment."""
    setting_class = type(settings[0])
    names = {field.name for field in fields(setting_class)}
    rows = read(file)
    if any(row.keys() != {"setting", "result"} or row["setting"].keys() != names for row in rows):
        raise ValueError(f"{file} does not hold results of this experiment: name another --out")
    return {setting_class(**row["setting"]): DigitsResult(**row["result"]) for row in rows}
