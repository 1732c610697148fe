"""A private run from beginning to end in a folder of its own, that can be stopped and taken up again at any step.

config.json        what was asked for; the same again resumes, anything else is refused
plan.json          the privacy plan
metrics.jsonl      steps and epsilon spent, once an epoch: nothing that depends on the records but time
checkpoint/        while the run is under way. Secret: it holds the keys of the noise. Removed at the end
model.safetensors  the averaged weights, which epsilon covers
geometry.png       the maps of DP-KFC, layer by layer
result.json        what `finish` shows, test accuracy included, which epsilon does not cover
report.html        all of it to read; `dpkfc report` writes it again
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from dpkfc.accounting.ledger import Ledger
from dpkfc.data.sources import Loaded
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Identity
from dpkfc.geometry.kfc import KFC
from dpkfc.models.default import Built, build, default_model
from dpkfc.noise.independent import Independent
from dpkfc.presets import EPOCHS, STEPS, Recipe, recipe
from dpkfc.private import make_private
from dpkfc.report.run_report import write_report
from dpkfc.run import Private
from dpkfc.run_folder import Fingerprint, keep_metrics, resumes, stoppable, write_json, write_whole

SAVE_EVERY = 60.0  # seconds
PART = 500  # records whose features are computed at once
FEWEST, USUAL = 8, 32  # records expected in a batch: at least, and at least by default
TEST_NOTE = "epsilon does not protect the test records: their accuracy is exact"


@dataclass(frozen=True)
class Settings:
    """What a run depends on besides the data. None: `dpkfc.recipe` decides."""

    epsilon: float
    delta: float | None = None
    model: str | None = None
    epochs: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    method: Literal["kfc", "sgd"] = "kfc"
    noise: Literal["auto", "independent"] = "auto"
    physical_batch_size: int = 512
    ledger: str | None = None
    dataset: str | None = None  # its name in the ledger
    seed: int | None = None
    device: str = "cpu"


def fit(
    loaded: Loaded,
    settings: Settings,
    out: Path,
    *,
    source: Mapping[str, Any] | None = None,
    console: Console | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> bool:
    """Train, or go on training, in the folder `out`; False if it was stopped (Ctrl-C) before the end.

    Args:
        loaded: from `dpkfc.data.sources.load`.
        source: how the data was loaded, for config.json.
        on_step: called after every step with the number of steps taken.

    The same call goes on where the last one stopped, bit for bit as if it had not.
    """
    console = console or Console()
    _check(settings)
    name = settings.model or default_model(loaded.kind, loaded.shape)
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    built = build(name, loaded.kind, loaded.shape, loaded.classes, loaded.probe)
    config = {
        "settings": {**asdict(settings), "model": name},
        "code": built.code,
        "source": dict(source or {}),
        "shape": list(loaded.shape),
        "classes": list(loaded.names),
    }
    resumed = resumes(out, config)
    if resumed and (out / "result.json").exists():
        console.print("this run is finished; for a new one choose another --out")
        return True
    run = _start(loaded, built, settings, console)
    try:
        if resumed:
            run.private.load(out / "checkpoint", averaged=run.averaged, data=run.data)
            console.print(f"resumed after step {run.private.steps} of {run.private.plan.steps}")
        else:
            console.print(run.recipe)
            _begin(out, config, run)
        console.print(run.private.plan)
        keep_metrics(out, run.private.steps)
        if not _loop(run, out, console, on_step):
            return False
    except PrivacyError:
        if not resumed and not run.private.charged:  # refused by the ledger, say: nothing was spent
            shutil.rmtree(out / "checkpoint", ignore_errors=True)
            for name in ("config.json", "plan.json", "metrics.jsonl"):
                (out / name).unlink(missing_ok=True)
        raise
    _release(loaded, built, settings, run, out, console)
    return True


@dataclass(frozen=True)
class Run:
    private: Private
    averaged: AveragedModel
    recipe: Recipe
    data: Fingerprint


def _check(settings: Settings) -> None:
    for what, value in (("lr", settings.lr), ("epochs", settings.epochs), ("epsilon", settings.epsilon)):
        if value is not None and not 0 < value < float("inf"):
            raise PrivacyError(f"--{what} {value:g}: must be a positive number")
    if settings.batch_size is not None and settings.batch_size < FEWEST:
        raise PrivacyError(
            f"--batch-size {settings.batch_size}: noise drowns a batch with so few records: expect at least {FEWEST}"
        )
    if settings.method not in ("kfc", "sgd"):
        raise PrivacyError(f"--method {settings.method}: choose kfc or sgd")
    if settings.noise not in ("auto", "independent"):
        raise PrivacyError(f"--noise {settings.noise}: choose auto or independent")
    try:
        torch.zeros(1, device=settings.device)
    except (RuntimeError, AssertionError) as problem:
        first = str(problem).splitlines()[0]
        raise PrivacyError(f"--device {settings.device} cannot be used ({first}): use cpu") from problem


def _start(loaded: Loaded, built: Built, settings: Settings, console: Console) -> Run:
    """All that can be refused is refused here, before anything is spent."""
    records = len(loaded.train)
    if records < FEWEST:
        raise PrivacyError(
            f"there are {records} training records: at least {FEWEST} are needed, thousands to learn much"
        )
    model = built.model.to(settings.device).train()
    batch = settings.batch_size
    if batch is None:
        batch = min(records, max(USUAL, round((settings.epochs or EPOCHS) * records / STEPS)))
    with console.status("calibrating the noise"):
        found = recipe(
            model,
            records=records,
            epsilon=settings.epsilon,
            delta=settings.delta,
            epochs=settings.epochs,
            batch_size=batch,
            probe=built.probe if settings.method == "kfc" else None,
            geometry=None if settings.method == "kfc" else Identity(),
            noise="auto" if settings.noise == "auto" else Independent(),
        )
    if settings.lr is not None:
        given = ("learning rate", f"{settings.lr:g}", "given")
        reasons = tuple(given if row[0] == "learning rate" else row for row in found.reasons)
        found = replace(found, lr=settings.lr, reasons=reasons)
    geometry = found.arguments["geometry"]
    if isinstance(geometry, KFC) and (built.name == "linear" or built.features is not None):
        geometry.every = found.arguments["steps"]  # the inputs of a linear model never change
    train = _inputs(loaded.train, built, console, "training records")
    averaged = found.averaged(model)
    private = make_private(
        model,
        found.optimizer(model),
        TensorDataset(*(tensor.to(settings.device) for tensor in train.tensors)),
        **found.arguments,
        seed=settings.seed,
        ledger=_ledger(settings),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        max_physical_batch_size=settings.physical_batch_size,
    )
    return Run(private, averaged, found, Fingerprint.of(loaded.train))


def _ledger(settings: Settings) -> Ledger | None:
    if settings.ledger is None:
        return None
    return Ledger(settings.ledger, settings.dataset or "data")


def _inputs(data: TensorDataset, built: Built, console: Console, what: str) -> TensorDataset:
    """What the model reads: the inputs, or the features of each."""
    x, y = data.tensors
    if built.features is None:
        return data
    parts = x.split(PART)
    with bar(console) as progress:
        found = [built.features(part) for part in progress.track(parts, description=f"features of {what}")]
    return TensorDataset(torch.cat(found), y)


def bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _begin(out: Path, config: dict[str, Any], run: Run) -> None:
    """The folder, with a checkpoint before the first step: a kill after it finds its run in the ledger again."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", run.private.plan.to_json())
    run.private.save(out / "checkpoint", averaged=run.averaged, data=run.data)
    write_json(out / "config.json", config)


def _loop(run: Run, out: Path, console: Console, on_step: Callable[[int], None]) -> bool:
    """The steps that are left; False if it was asked to stop."""
    private, averaged, model = run.private, run.averaged, run.private.model
    optimizer, plan = private.optimizer, private.plan
    per_epoch = max(1, round(1 / plan.sampling_rate))
    epochs, begun = private.steps // per_epoch, time.monotonic()
    saved = begun
    with stoppable() as stopping, bar(console) as progress:
        task = progress.add_task("training", total=plan.steps, completed=private.charged)
        for x, y in private.loader if private.charged < plan.steps else ():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not private.took_step:
                continue
            averaged.update_parameters(model)
            progress.update(task, completed=private.charged)
            on_step(private.steps)
            now = time.monotonic()
            if private.steps // per_epoch > epochs:
                epochs = private.steps // per_epoch
                line = {"step": private.steps, "epsilon": private.epsilon(), "seconds": round(now - begun, 3)}
                with (out / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if stopping() or now - saved > SAVE_EVERY:
                private.save(out / "checkpoint", averaged=averaged, data=run.data)
                saved = now
            if stopping():
                return False
        progress.update(task, completed=private.charged)
    return True


def _release(loaded: Loaded, built: Built, settings: Settings, run: Run, out: Path, console: Console) -> None:
    """The averaged weights, and accuracy on the test part; then the checkpoint is no longer needed."""
    private, model = run.private, run.averaged.module
    write_whole(out / "model.safetensors", lambda file: save_model(model, str(file)))
    right = None
    if loaded.test is not None:
        test = _inputs(loaded.test, built, console, "test records")
        right = correct(model, test, settings.device, settings.physical_batch_size)
    if isinstance(private.geometry, KFC) and find_spec("matplotlib"):
        private.geometry.describe().plot(out / "geometry.png")
    plan = private.plan
    write_json(
        out / "result.json",
        {
            "epsilon": private.epsilon(),
            "delta": plan.delta,
            "steps": private.steps,
            "records": plan.records,
            "batch_size": plan.batch_size,
            "noise_multiplier": plan.noise_multiplier,
            "noise": plan.noise,
            "geometry": plan.geometry,
            "lr": run.recipe.lr,
            "model": built.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "recipe": [list(row) for row in run.recipe.reasons],
            "remarks": list(loaded.remarks),
            "test": None
            if right is None or loaded.test is None
            else {"accuracy": right / len(loaded.test), "records": len(loaded.test), "note": TEST_NOTE},
        },
    )
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    private.detach()


@torch.no_grad()
def correct(model: nn.Module, data: TensorDataset, device: str, batch: int) -> int:
    """How many records are classified rightly."""
    model.eval()
    parts = zip(*(tensor.split(batch) for tensor in data.tensors), strict=True)
    return sum(int((model(x.to(device)).argmax(1).cpu() == y.cpu()).sum()) for x, y in parts)


def finish(run_directory: Path, console: Console | None = None) -> None:
    """Show what a finished run came to."""
    found = json.loads((run_directory / "result.json").read_text())
    table = Table(title=str(run_directory), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("epsilon spent", f"{found['epsilon']:.4g} at delta = {found['delta']:.3g}, add or remove one record")
    table.add_row("model", f"{found['model']}, {found['parameters']:,} parameters, {found['geometry']}")
    table.add_row("steps", f"{found['steps']:,} of {found['batch_size']:,} expected records of {found['records']:,}")
    table.add_row("noise", f"{found['noise']}, multiplier {found['noise_multiplier']:.4g}")
    table.add_row("learning rate", f"{found['lr']:.3g}")
    test = found["test"]
    if test is not None:
        table.add_row("test accuracy", f"{test['accuracy']:.2%} of {test['records']:,} records ({test['note']})")
    table.add_row("weights", str(run_directory / "model.safetensors"))
    table.add_row("report", str(write_report(run_directory)))
    (console or Console()).print(table)


def restore(run_directory: Path, loaded: Loaded) -> nn.Module:
    """The trained model of a finished run; it reads inputs as `loaded` has them."""
    settings = json.loads((run_directory / "config.json").read_text())["settings"]
    built = build(settings["model"], loaded.kind, loaded.shape, loaded.classes, loaded.probe)
    load_model(built.model, str(run_directory / "model.safetensors"))
    return Restored(built).eval()


class Restored(nn.Module):
    """The features of inputs, and the model on top of them."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.features, self.model = built.features, built.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x if self.features is None else self.features(x))  # type: ignore[no-any-return]
