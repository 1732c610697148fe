"""One private run in a folder of its own, which can be interrupted and resumed at any step.

config.json        the settings and the source; the same again resumes, anything else is refused
plan.json          the privacy plan
metrics.jsonl      steps and epsilon per epoch; only the times depend on the records
checkpoint/        during the run. Secret: it holds the keys of the noise. Removed at the end
model.safetensors  the averaged weights, which epsilon covers
geometry.png       the preconditioners of DP-KFC, layer by layer
snr.png, clipping.png   the effect of one step on probes
result.json        the result, with the test accuracy, which epsilon does not cover
report.html        all of it to read; `dpkfc report` writes it again
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch.optim.swa_utils import AveragedModel

from dpkfc.accounting.ledger import Ledger
from dpkfc.app.models.default import Built, build, default_model
from dpkfc.app.readers.records import on_device
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.reports.progress import bar
from dpkfc.app.reports.statements import lost_steps
from dpkfc.app.workflow.preparation import (
    adjust_recipe,
    base_recipe,
    model_inputs,
    open_ledger,
    start_run,
    take_steps,
)
from dpkfc.app.workflow.release import Trained, release
from dpkfc.app.workflow.run_folder import (
    Fingerprint,
    SaveSchedule,
    is_resumed,
    keep_metrics,
    locked,
    stoppable,
    write_json,
)
from dpkfc.app.workflow.settings import Settings, check_settings
from dpkfc.engine import checkpoint
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.planning.recipe import Recipe


@dataclass(frozen=True)
class FolderRun:
    """A private run with everything that its checkpoint holds."""

    private: PrivateRun
    averaged: AveragedModel
    recipe: Recipe
    data: Fingerprint
    out: Path

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"

    def save(self) -> None:
        self.private.save(self.checkpoint, averaged=self.averaged, data=self.data)

    def load(self) -> None:
        self.private.load(self.checkpoint, averaged=self.averaged, data=self.data)


def fit(
    loaded: Loaded,
    settings: Settings,
    out: Path,
    *,
    source: Mapping[str, Any] | None = None,
    console: Console | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> bool:
    """Train, or resume training, in the folder `out`.

    The same call resumes an interrupted run, with the same result bit for bit. After a kill the
    run continues from the last checkpoint with fresh noise: the steps after that checkpoint may
    have been seen.

    Args:
        loaded: the records, from `dpkfc.app.readers.sources.load`.
        source: how the data was loaded, for config.json; by default `loaded.source`.
        on_step: called after every step with the number of steps taken.

    Returns:
        False if the run was stopped (Ctrl-C) before its end.
    """
    console = console or Console()
    check_settings(settings)
    with locked(out):
        name = settings.model or default_model(loaded.kind, loaded.shape)
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        built = build(name, loaded.kind, loaded.shape, loaded.classes, loaded.probe)
        config = {
            "settings": {**asdict(settings), "model": name},
            "code": built.code,
            "source": dict(source or loaded.source),
            "shape": list(loaded.shape),
            "classes": list(loaded.names),
        }
        resumed = is_resumed(out, config)
        if resumed and (out / "result.json").exists():
            console.print("this run is finished; for a new one choose another --out")
            # The checkpoint is secret, and remains if the run was interrupted just before its end.
            checkpoint.discard(out / "checkpoint")
            return True
        with open_ledger(settings, len(loaded.train)) as ledger:
            run = _prepare(loaded, built, settings, ledger, out, console)
            if not _train(run, config, resumed, console, on_step):
                return False
            private = run.private
            trained = Trained(
                run.averaged.module,
                private.plan,
                run.recipe,
                private.epsilon(),
                private.steps,
                private.charged - private.steps,
                private.run_id,
            )
            release(loaded, built, settings, trained, out, console)
            checkpoint.discard(run.checkpoint)
            private.detach()
            return True


def _prepare(
    loaded: Loaded,
    built: Built,
    settings: Settings,
    ledger: Ledger | None,
    out: Path,
    console: Console,
) -> FolderRun:
    """Everything that can be refused is refused here, before anything is spent."""
    model = built.model.to(settings.device).train()
    with console.status("calibrating the noise"):
        records = settings.public_count(len(loaded.train))
        recipe = adjust_recipe(base_recipe(built, records, settings), settings)
    inputs = model_inputs(loaded.train, built, console, "training records")
    data = on_device(inputs, settings.device)
    private, averaged = start_run(model, recipe, data, settings, settings.seed, ledger)
    return FolderRun(private, averaged, recipe, Fingerprint.of(loaded.train), out)


def _train(
    run: FolderRun,
    config: dict[str, Any],
    resumed: bool,
    console: Console,
    on_step: Callable[[int], None],
) -> bool:
    """Take all remaining steps; False if the run was stopped before its end."""
    private = run.private
    try:
        if resumed:
            _load(run)
            console.print(f"resumed after step {private.steps} of {private.plan.steps}")
            if lost := private.charged - private.steps:
                console.print(lost_steps(lost), soft_wrap=True)
        else:
            console.print(run.recipe)
            _begin(run, config)
        console.print(private.plan)
        keep_metrics(run.out, private.steps)
        return _loop(run, console, on_step)
    except Exception:
        if not resumed and not private.charged:  # refused by the ledger, say: nothing was spent
            checkpoint.discard(run.checkpoint)
            for name in ("config.json", "plan.json", "metrics.jsonl"):
                (run.out / name).unlink(missing_ok=True)
        raise


def _begin(run: FolderRun, config: dict[str, Any]) -> None:
    """Write the folder and a checkpoint before the first step.

    After a kill, this checkpoint leads back to the run in the ledger.
    """
    write_json(run.out / "plan.json", run.private.plan.to_json())
    run.save()
    write_json(run.out / "config.json", config)


def _load(run: FolderRun) -> None:
    """Load the checkpoint. One that cannot be read says what to do."""
    try:
        run.load()
    except (PrivacyError, ValueError, SafetensorError) as problem:
        # Without such a cause the checkpoint could be read, and was refused.
        unreadable = isinstance(problem, SafetensorError) or isinstance(
            problem.__cause__, OSError | ValueError
        )
        if not unreadable:
            raise
        raise OSError(
            f"the checkpoint of {run.out} is lost or damaged ({problem}): restore the folder from "
            "a backup, or begin a new run with another --out. What a ledger has charged stays "
            "charged"
        ) from problem


def _loop(run: FolderRun, console: Console, on_step: Callable[[int], None]) -> bool:
    """The training loop with its checkpoints; False if the run was stopped."""
    private = run.private
    plan = private.plan
    steps_per_epoch = max(1, round(1 / plan.sampling_rate))
    epoch = private.steps // steps_per_epoch
    started = time.monotonic()
    saves = SaveSchedule(plan.steps, private.steps)
    with stoppable() as stopping, bar(console) as progress:
        task = progress.add_task("training", total=plan.steps, completed=private.charged)
        for step in take_steps(private):
            progress.update(task, completed=private.charged)
            on_step(step)
            if step // steps_per_epoch > epoch:
                epoch = step // steps_per_epoch
                _append_metrics(run, step, time.monotonic() - started)
            if stopping() or saves.is_due(step):
                with saves.saving(step):
                    run.save()
            if stopping():
                return False
        progress.update(task, completed=private.charged)
        run.save()  # `release` may be interrupted
    return True


def _append_metrics(run: FolderRun, step: int, seconds: float) -> None:
    line = {"step": step, "epsilon": run.private.epsilon(), "seconds": round(seconds, 3)}
    with (run.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
