"""What public and private tuning share: the validation records, and one try."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from dpkfc.app.models.default import Built, build, default_model
from dpkfc.app.readers.records import Records, content_digest, on_device, split
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.workflow.evaluation import count_correct
from dpkfc.app.workflow.preparation import model_inputs, start_run, take_steps
from dpkfc.app.workflow.search_space import Interval
from dpkfc.app.workflow.settings import Settings
from dpkfc.engine.run import PrivateRun
from dpkfc.planning.recipe import Recipe

if TYPE_CHECKING:
    from optuna import Trial

PUBLIC_TRIES = 20
EXPECTED_TRIES = 10.0  # on private data, where the number is random


def check_tries(tries: float | None, public: bool) -> float:
    """The number of tries; on private data, the expected number."""
    if tries is None:
        return PUBLIC_TRIES if public else EXPECTED_TRIES
    if not 1 <= tries < math.inf or (public and tries != int(tries)):
        raise ValueError(f"--tries {tries:g}: give at least 1, and on public data a whole number")
    return tries


@dataclass(frozen=True)
class HeldOut:
    """Training and test records, the validation records, and whether the latter are public."""

    loaded: Loaded
    validation: TensorDataset
    public: bool


def hold_out(loaded: Loaded, validation: str, load: Callable[[str], Loaded]) -> HeldOut:
    """Choose the validation records: a share of the training records, or a file of public records.

    Private records are held out by a hash of their content: adding or removing one record moves no
    other.

    Args:
        validation: the share, or the file or folder.
        load: reads the file or folder.
    """
    try:
        share = float(validation)
    except ValueError:
        other = load(validation)
        if (other.shape, other.names) != (loaded.shape, loaded.names):
            raise ValueError(
                f"--validation {validation}: inputs of shape {other.shape} and {other.classes} "
                f"classes, but the training records have {loaded.shape} and {loaded.classes}: "
                "they must agree"
            ) from None
        return HeldOut(loaded, other.train, public=True)
    if not 0 < share < 1:
        raise ValueError(
            f"--validation {validation}: give a share between 0 and 1, or a file of public records"
        )
    x, y = loaded.train.tensors
    digests = [
        content_digest(b"validation", row.numpy().tobytes(), str(label).encode())
        for row, label in zip(x, y.tolist(), strict=True)
    ]
    train, kept = split(Records(x, y, digests), share)
    if not len(train) or not len(kept):
        raise ValueError(
            f"--validation {validation}: {len(x)} records are too few to hold some of them out"
        )
    return HeldOut(
        replace(loaded, train=TensorDataset(train.x, train.y)),
        TensorDataset(kept.x, kept.y),
        public=False,
    )


@dataclass(frozen=True)
class TuningJob:
    """Everything that a try needs."""

    loaded: Loaded
    built: Built
    settings: Settings
    space: Mapping[str, Interval]  # the tuned settings, by name
    train: TensorDataset  # the inputs of the model, on the device
    validation: TensorDataset
    public_validation: bool

    def draw(self, trial: Trial) -> Settings:
        chosen: dict[str, Any] = {
            name: interval.draw(name, trial) for name, interval in self.space.items()
        }
        return replace(self.settings, **chosen)

    def run(self, recipe: Recipe, number: int) -> PrivateRun:
        """One private run from the common initial weights; its model gets the averaged weights."""
        seed = None if self.settings.seed is None else self.settings.seed + 1 + number
        if seed is not None:
            torch.manual_seed(seed)
        # A shallow copy is enough: a refresh replaces attributes and changes none in place.
        geometry = copy.copy(recipe.arguments["geometry"])
        recipe = replace(recipe, arguments={**recipe.arguments, "geometry": geometry})
        model = copy.deepcopy(self.built.model)
        run, averaged = start_run(model, recipe, self.train, self.settings, seed, None)
        for _ in take_steps(run):
            pass
        run.detach()
        model.load_state_dict(averaged.module.state_dict())
        return run

    def count_correct(self, run: PrivateRun) -> int:
        """The number of validation records that the model classifies correctly."""
        settings = self.settings
        return count_correct(
            run.model, self.validation, settings.device, settings.physical_batch_size
        )


def prepare(
    held_out: HeldOut, settings: Settings, space: Mapping[str, Interval], console: Console
) -> TuningJob:
    loaded = held_out.loaded
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    name = settings.model or default_model(loaded.kind, loaded.shape)
    built = build(name, loaded.kind, loaded.shape, loaded.classes, loaded.probe)
    built.model.to(settings.device).train()
    inputs = model_inputs(loaded.train, built, console, "training records")
    train = on_device(inputs, settings.device)
    validation = model_inputs(held_out.validation, built, console, "validation records")
    return TuningJob(loaded, built, settings, space, train, validation, held_out.public)
