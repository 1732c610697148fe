"""From settings and records to a private run: the recipe, the inputs of the model, the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from dpkfc.accounting.ledger import Ledger
from dpkfc.app.models.default import Built
from dpkfc.app.reports.progress import bar
from dpkfc.app.workflow.settings import FEWEST_RECORDS, Settings
from dpkfc.engine.make_private import make_private
from dpkfc.engine.run import PrivateRun
from dpkfc.geometry.identity import Identity
from dpkfc.geometry.kfc import KFC
from dpkfc.losses import cross_entropy
from dpkfc.noise.independent import Independent
from dpkfc.planning.recipe import EPOCHS, STEPS, Recipe, recipe, usual_delta

FEATURE_BATCH = 500  # records whose features are computed at once
DEFAULT_SMALLEST_BATCH = 32


def base_recipe(built: Built, records: int, settings: Settings) -> Recipe:
    """The recipe before `adjust_recipe`. It looks at no record."""
    if records < FEWEST_RECORDS:
        raise ValueError(
            f"there are {records} training records: at least {FEWEST_RECORDS} are needed, and a "
            "useful model needs thousands"
        )
    base = recipe(
        built.model,
        records=records,
        epsilon=settings.epsilon,
        delta=settings.delta,
        epochs=settings.epochs,
        batch_size=batch_size(records, settings),
        probe=built.probe if settings.method == "kfc" else None,
        geometry=None if settings.method == "kfc" else Identity(),
        noise="auto" if settings.noise == "auto" else Independent(),
    )
    geometry = base.arguments["geometry"]
    if isinstance(geometry, KFC) and (built.name == "linear" or built.features is not None):
        # The inputs of a linear model never change, so its preconditioner is computed once.
        geometry.every = base.arguments["steps"]
    reasons = [
        (what, geometry.name if what == "geometry" else value, why)
        for what, value, why in base.reasons
    ]
    return replace(base, reasons=tuple(reasons))


def batch_size(records: int, settings: Settings) -> int:
    """The expected batch size: as given, or such that the recipe's number of steps results."""
    if settings.batch_size is None:
        default = round((settings.epochs or EPOCHS) * records / STEPS)
        return min(records, max(DEFAULT_SMALLEST_BATCH, default))
    if settings.batch_size > records:
        raise ValueError(
            f"--batch-size {settings.batch_size}: there are {records} training records: choose a "
            "batch size of at most that"
        )
    return settings.batch_size


def adjust_recipe(base: Recipe, settings: Settings) -> Recipe:
    """The recipe with the clip, and the learning rate or rho, of the settings.

    The noise in the weights is proportional to lr · clip, and so is the recipe's noise length ρ.
    """
    clip = settings.clip or base.arguments["clip"]
    rho = settings.rho or base.noise_length
    lr = settings.lr or base.lr * rho / base.noise_length * base.arguments["clip"] / clip
    reasons = {row[0]: row for row in base.reasons}
    if settings.clip is not None:
        reasons["clip"] = ("clip", f"{clip:.3g}", "given")
    if settings.rho is not None:
        reason = f"noise of norm {rho:.3g} in the weights of each unit"
        reasons["learning rate"] = ("learning rate", f"{lr:.3g}", reason)
    if settings.lr is not None:
        reasons["learning rate"] = ("learning rate", f"{lr:.3g}", "given")
    arguments = {**base.arguments, "clip": clip}
    return replace(
        base, arguments=arguments, lr=lr, noise_length=rho, reasons=tuple(reasons.values())
    )


def start_run(
    model: nn.Module,
    recipe: Recipe,
    data: TensorDataset,
    settings: Settings,
    seed: int | None,
    ledger: Ledger | None,
) -> tuple[PrivateRun, AveragedModel]:
    """Make the model private; also return the average of its weights, updated after each step."""
    averaged = recipe.averaged(model)
    run = make_private(
        model,
        recipe.optimizer(model),
        data,
        **recipe.arguments,
        seed=seed,
        ledger=ledger,
        loss=cross_entropy,
        records=settings.records,
        max_physical_batch_size=settings.physical_batch_size,
    )
    run.after_step(lambda: averaged.update_parameters(model))
    return run, averaged


def take_steps(run: PrivateRun) -> Iterator[int]:
    """Take the remaining steps; after each one, yield the number of steps so far."""
    model = run.model
    optimizer = run.optimizer
    for x, y in run.loader if run.charged < run.plan.steps else ():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.took_step:
            yield run.steps


def open_ledger(settings: Settings, records: int) -> AbstractContextManager[Ledger | None]:
    """The ledger of the settings, if any. It is closed at the end, so SQLite leaves no other files.

    A budget without a delta has the delta of the run, over `records` training records.
    """
    if settings.ledger is None:
        return nullcontext()
    budget = None
    if settings.budget is not None:
        epsilon, delta = settings.budget
        default = usual_delta(settings.public_count(records))
        budget = epsilon, delta or settings.delta or default
    return closing(Ledger(settings.ledger, settings.dataset or "data", budget=budget))


def model_inputs(data: TensorDataset, built: Built, console: Console, name: str) -> TensorDataset:
    """The inputs of the model: those of the records, or features computed from each of them."""
    if built.features is None:
        return data
    x, y = data.tensors
    with bar(console) as progress:
        features = [
            built.features(part)
            for part in progress.track(x.split(FEATURE_BATCH), description=f"features of {name}")
        ]
    return TensorDataset(torch.cat(features), y)
