"""A private run from beginning to end in a folder of its own, that can be stopped and taken up again at any step.

config.json        what was asked for; the same again resumes, anything else is refused
plan.json          the privacy plan
metrics.jsonl      steps and epsilon spent, once an epoch: nothing that depends on the records but time
checkpoint/        while the run is under way. Secret: it holds the keys of the noise. Removed at the end
model.safetensors  the averaged weights, which epsilon covers
geometry.png       the maps of DP-KFC, layer by layer; snr.png, clipping.png: what a step does to probes
result.json        what `finish` shows, test accuracy included, which epsilon does not cover
report.html        all of it to read; `dpkfc report` writes it again
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from dpkfc.accounting.ledger import Ledger
from dpkfc.app.models.default import Built, build, default_model
from dpkfc.app.readers.records import on_device
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.reports.progress import bar
from dpkfc.app.reports.run_report import draw_pictures, lost_steps, result_table, write_report
from dpkfc.app.workflow.predict import predict as predict
from dpkfc.app.workflow.predict import restore as restore
from dpkfc.app.workflow.run_folder import (
    Fingerprint,
    keep_metrics,
    locked,
    resumes,
    stoppable,
    worth_saving,
    write_json,
    write_whole,
)
from dpkfc.engine import checkpoint
from dpkfc.engine.make_private import make_private
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Identity
from dpkfc.geometry.kfc import KFC
from dpkfc.losses import cross_entropy
from dpkfc.noise.independent import Independent
from dpkfc.planning.plan import Plan
from dpkfc.planning.recipe import EPOCHS, STEPS, Recipe, recipe, usual_delta

PART = 500  # records whose features are computed at once
FEWEST, USUAL = 8, 32  # records expected in a batch: at least, and at least by default
TEST_NOTE = "epsilon does not protect the test records: what is said of them is exact"


@dataclass(frozen=True)
class Settings:
    """What a run depends on besides the data. None: `dpkfc.recipe` decides."""

    epsilon: float
    delta: float | None = None
    model: str | None = None
    epochs: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    rho: float | None = None  # the length of the noise that the learning rate is chosen by
    clip: float | None = None
    method: Literal["kfc", "sgd"] = "kfc"
    noise: Literal["auto", "independent"] = "auto"
    physical_batch_size: int = 512
    ledger: str | None = None
    dataset: str | None = None  # its name in the ledger
    budget: tuple[float, float | None] | None = (
        None  # epsilon and delta of all runs in the ledger; None: the run's
    )
    records: int | None = (
        None  # their public number; None: that of the training records is taken as public
    )
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
        loaded: from `dpkfc.app.readers.sources.load`.
        source: how the data was loaded, for config.json; by default as `loaded` says.
        on_step: called after every step with the number of steps taken.

    The same call goes on where the last one stopped, bit for bit as if it had not. If it was killed, it goes on from
    the last checkpoint with fresh noise: what the steps after that one released may have been seen.
    """
    console = console or Console()
    check(settings)
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
        resumed = resumes(out, config)
        if resumed and (out / "result.json").exists():
            console.print("this run is finished; for a new one choose another --out")
            checkpoint.discard(out / "checkpoint")  # a secret, if the last moment was interrupted
            return True
        with ledger_of(settings, len(loaded.train)) as ledger:
            run = _start(loaded, built, settings, ledger, console)
            if not _train(run, out, config, resumed, console, on_step):
                return False
            private = run.private
            lost = private.charged - private.steps
            done = Trained(
                run.averaged.module,
                private.plan,
                run.recipe,
                private.epsilon(),
                private.steps,
                lost,
                private.run_id,
            )
            release(loaded, built, settings, done, out, console)
            checkpoint.discard(out / "checkpoint")
            private.detach()
            return True


def _train(
    run: Run,
    out: Path,
    config: dict[str, Any],
    resumed: bool,
    console: Console,
    on_step: Callable[[int], None],
) -> bool:
    """All steps, in the folder; False if it was asked to stop before the end."""
    try:
        if resumed:
            _take_up(run, out)
            console.print(f"resumed after step {run.private.steps} of {run.private.plan.steps}")
            if lost := run.private.charged - run.private.steps:
                console.print(lost_steps(lost), soft_wrap=True)
        else:
            console.print(run.recipe)
            _begin(out, config, run)
        console.print(run.private.plan)
        keep_metrics(out, run.private.steps)
        return _loop(run, out, console, on_step)
    except (PrivacyError, ValueError):
        if not resumed and not run.private.charged:  # refused by the ledger, say: nothing was spent
            checkpoint.discard(out / "checkpoint")
            for name in ("config.json", "plan.json", "metrics.jsonl"):
                (out / name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Run:
    private: PrivateRun
    averaged: AveragedModel
    recipe: Recipe
    data: Fingerprint


@dataclass(frozen=True)
class Trained:
    """What is released: the model with the weights that epsilon covers, and how it came about."""

    model: nn.Module
    plan: Plan
    recipe: Recipe
    epsilon: float
    steps: int
    lost_steps: int = 0  # charged as well, but killed before a checkpoint had them
    run: str | None = None  # its name in the ledger


def check(settings: Settings) -> None:
    """Refuse what cannot be, before anything is loaded or spent."""
    for what in ("lr", "rho", "clip", "epochs", "epsilon"):
        value = getattr(settings, what)
        if value is not None and not 0 < value < float("inf"):
            raise PrivacyError(f"--{what} {value:g}: must be a positive number")
    check_seed(settings.seed)
    check_budget(settings)
    if settings.records is not None and settings.records < FEWEST:
        raise PrivacyError(
            f"--records {settings.records}: the public number of training records, at least {FEWEST}; thousands to "
            "learn much"
        )
    if settings.lr is not None and settings.rho is not None:
        raise PrivacyError("--lr and --rho both say how large steps are: give one of them")
    if settings.batch_size is not None and settings.batch_size < FEWEST:
        raise PrivacyError(
            f"--batch-size {settings.batch_size}: noise drowns a batch with so few records: expect at least {FEWEST}"
        )
    if settings.physical_batch_size < 1:
        raise PrivacyError(
            f"--physical-batch-size {settings.physical_batch_size}: must be at least 1"
        )
    if settings.delta is not None and not 0 < settings.delta < 1:
        raise PrivacyError(
            f"--delta {settings.delta:g}: must lie between 0 and 1, and well below 1 / records"
        )
    if settings.method not in ("kfc", "sgd"):
        raise PrivacyError(f"--method {settings.method}: choose kfc or sgd")
    if settings.noise not in ("auto", "independent"):
        raise PrivacyError(f"--noise {settings.noise}: choose auto or independent")
    check_device(settings.device)


def read_budget(text: str) -> tuple[float, float | None]:
    """EPSILON or EPSILON,DELTA of --budget.

    >>> read_budget("8,1e-5"), read_budget("8")
    ((8.0, 1e-05), (8.0, None))
    """
    try:
        epsilon, *rest = [float(part) for part in text.split(",")]
    except ValueError:
        epsilon, rest = float("nan"), []
    delta = rest[0] if rest else None
    if not 0 < epsilon < float("inf") or len(rest) > 1 or (delta is not None and not 0 < delta < 1):
        raise PrivacyError(
            f"--budget {text}: give EPSILON or EPSILON,DELTA, as in --budget 8,1e-5: epsilon positive and finite, "
            "delta between 0 and 1"
        )
    return epsilon, delta


def check_budget(settings: Settings) -> None:
    """Refuse one that is kept nowhere, or that this run alone exceeds."""
    if settings.budget is None:
        return
    epsilon, delta = settings.budget
    read_budget(f"{epsilon}" if delta is None else f"{epsilon},{delta}")
    if settings.ledger is None:
        raise PrivacyError(
            "--budget is the cap for all runs together, and is kept in a ledger: give --ledger FILE too"
        )
    if epsilon < settings.epsilon and delta in (None, settings.delta):
        raise PrivacyError(
            f"--budget {epsilon:g} for all runs together is less than --epsilon {settings.epsilon:g} of this one: give "
            "a smaller --epsilon, or a larger budget if none is kept yet"
        )


def check_seed(seed: int | None) -> None:
    """Refuse one that torch does not take."""
    if seed is not None and not 0 <= seed < 2**63:
        raise PrivacyError(
            f"--seed {seed}: give a whole number from 0 to {2**63 - 1}, or none: then noise is secret"
        )


def check_device(device: str) -> None:
    """Refuse one that cannot compute."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        first, there = str(problem).splitlines()[0], ", ".join(devices())
        raise PrivacyError(
            f"--device {device} cannot be used ({first}): choose from {there}"
        ) from problem


def devices() -> list[str]:
    """What is there to compute on."""
    found = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _start(
    loaded: Loaded, built: Built, settings: Settings, ledger: Ledger | None, console: Console
) -> Run:
    """All that can be refused is refused here, before anything is spent."""
    model = built.model.to(settings.device).train()
    with console.status("calibrating the noise"):
        found = adjusted(
            base_recipe(built, public_count(settings, len(loaded.train)), settings), settings
        )
    data = on_device(inputs_of(loaded.train, built, console, "training records"), settings.device)
    private, averaged = joined(model, found, data, settings, settings.seed, ledger)
    return Run(private, averaged, found, Fingerprint.of(loaded.train))


def public_count(settings: Settings, records: int) -> int:
    """The number of records that everything is computed from: the stated one, or that of the data."""
    return records if settings.records is None else settings.records


def base_recipe(built: Built, records: int, settings: Settings) -> Recipe:
    """The recipe, but for what `adjusted` changes of it. It looks at no record."""
    if records < FEWEST:
        raise PrivacyError(
            f"there are {records} training records: at least {FEWEST} are needed, thousands to learn much"
        )
    found = recipe(
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
    geometry = found.arguments["geometry"]
    if isinstance(geometry, KFC) and (built.name == "linear" or built.features is not None):
        geometry.every = found.arguments["steps"]  # the inputs of a linear model never change
    reasons = [
        (what, geometry.name if what == "geometry" else value, why)
        for what, value, why in found.reasons
    ]
    return replace(found, reasons=tuple(reasons))


def batch_size(records: int, settings: Settings) -> int:
    if settings.batch_size is not None and settings.batch_size > records:
        raise PrivacyError(
            f"--batch-size {settings.batch_size}: there are {records} training records, and no more can be drawn: "
            "choose a smaller one"
        )
    return settings.batch_size or min(
        records, max(USUAL, round((settings.epochs or EPOCHS) * records / STEPS))
    )


def adjusted(found: Recipe, settings: Settings) -> Recipe:
    """With the clip, and the learning rate or the noise length, that were asked for.

    The noise in the weights is proportional to lr · clip, and the recipe's noise length to that.
    """
    clip, rho = settings.clip or found.arguments["clip"], settings.rho or found.noise_length
    lr = settings.lr or found.lr * rho / found.noise_length * found.arguments["clip"] / clip
    reasons = {row[0]: row for row in found.reasons}
    if settings.clip is not None:
        reasons["clip"] = ("clip", f"{clip:.3g}", "given")
    if settings.rho is not None:
        reasons["learning rate"] = (
            "learning rate",
            f"{lr:.3g}",
            f"noise of length {rho:.3g} in each unit's weights",
        )
    if settings.lr is not None:
        reasons["learning rate"] = ("learning rate", f"{lr:.3g}", "given")
    arguments = {**found.arguments, "clip": clip}
    return replace(
        found, arguments=arguments, lr=lr, noise_length=rho, reasons=tuple(reasons.values())
    )


def joined(
    model: nn.Module,
    found: Recipe,
    data: TensorDataset,
    settings: Settings,
    seed: int | None,
    ledger: Ledger | None,
) -> tuple[PrivateRun, AveragedModel]:
    averaged = found.averaged(model)
    private = make_private(
        model,
        found.optimizer(model),
        data,
        **found.arguments,
        seed=seed,
        ledger=ledger,
        loss=cross_entropy,
        records=settings.records,
        max_physical_batch_size=settings.physical_batch_size,
    )
    private.after_step(lambda: averaged.update_parameters(model))
    return private, averaged


def steps_of(private: PrivateRun) -> Iterator[int]:
    """Take the steps that are left, one each time; yields how many were taken."""
    model, optimizer = private.model, private.optimizer
    for x, y in private.loader if private.charged < private.plan.steps else ():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if private.took_step:
            yield private.steps


def ledger_of(settings: Settings, records: int) -> AbstractContextManager[Ledger | None]:
    """It is closed at the end, so that SQLite leaves no files beside it.

    A budget without a delta has the delta of the run, over `records` training records.
    """
    if settings.ledger is None:
        return nullcontext()
    budget = None
    if settings.budget is not None:
        epsilon, delta = settings.budget
        budget = epsilon, delta or settings.delta or usual_delta(public_count(settings, records))
    return closing(Ledger(settings.ledger, settings.dataset or "data", budget=budget))


def inputs_of(data: TensorDataset, built: Built, console: Console, what: str) -> TensorDataset:
    """What the model reads: the inputs, or the features of each."""
    x, y = data.tensors
    if built.features is None:
        return data
    parts = x.split(PART)
    with bar(console) as progress:
        found = [
            built.features(part)
            for part in progress.track(parts, description=f"features of {what}")
        ]
    return TensorDataset(torch.cat(found), y)


def _begin(out: Path, config: dict[str, Any], run: Run) -> None:
    """The folder, with a checkpoint before the first step: a kill after it finds its run in the ledger again."""
    write_json(out / "plan.json", run.private.plan.to_json())
    run.private.save(out / "checkpoint", averaged=run.averaged, data=run.data)
    write_json(out / "config.json", config)


def _take_up(run: Run, out: Path) -> None:
    try:
        run.private.load(out / "checkpoint", averaged=run.averaged, data=run.data)
    except (PrivacyError, SafetensorError) as problem:
        if isinstance(problem, PrivacyError) and not isinstance(
            problem.__cause__, OSError | ValueError
        ):
            raise  # it can be read
        raise PrivacyError(
            f"the checkpoint of {out} is lost or damaged ({problem}): restore the folder from a backup, or begin anew "
            "with another --out. What a ledger has charged stays charged"
        ) from problem


def _loop(run: Run, out: Path, console: Console, on_step: Callable[[int], None]) -> bool:
    """The steps that are left; False if it was asked to stop."""
    private, plan = run.private, run.private.plan
    per_epoch = max(1, round(1 / plan.sampling_rate))
    epochs, begun = private.steps // per_epoch, time.monotonic()
    saved, saved_at, saving = begun, private.steps, 0.0
    with stoppable() as stopping, bar(console) as progress:
        task = progress.add_task("training", total=plan.steps, completed=private.charged)
        for step in steps_of(private):
            progress.update(task, completed=private.charged)
            on_step(step)
            now = time.monotonic()
            if step // per_epoch > epochs:
                epochs = step // per_epoch
                line = {
                    "step": step,
                    "epsilon": private.epsilon(),
                    "seconds": round(now - begun, 3),
                }
                with (out / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if stopping() or worth_saving(
                step - saved_at, plan.steps, now - saved, saving, now - begun
            ):
                private.save(out / "checkpoint", averaged=run.averaged, data=run.data)
                saved, saved_at = time.monotonic(), step
                saving += saved - now
            if stopping():
                return False
        progress.update(task, completed=private.charged)
        private.save(
            out / "checkpoint", averaged=run.averaged, data=run.data
        )  # `release` may be interrupted
    return True


def release(
    loaded: Loaded,
    built: Built,
    settings: Settings,
    done: Trained,
    out: Path,
    console: Console,
    selection: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights, what the run came to, with accuracy on the test part, and the pictures of the report.

    Interrupted, it can be repeated.
    """
    model, plan = done.model, done.plan
    steps = _keep_weights(model, done.steps, plan.steps, out / "model.safetensors")
    lost = done.lost_steps - (steps - done.steps)
    test = None
    if loaded.test is not None:
        data = inputs_of(loaded.test, built, console, "test records")
        right = correct(model, data, settings.device, settings.physical_batch_size)
        most = int(data.tensors[1].bincount().max())
        test = {
            "accuracy": right / len(data),
            "majority": most / len(data),
            "records": len(data),
            "note": TEST_NOTE,
        }
    write_json(
        out / "result.json",
        {
            "epsilon": done.epsilon,
            "delta": plan.delta,
            "steps": steps,
            "lost_steps": lost,
            "run": done.run,
            "records": plan.records,
            "batch_size": plan.batch_size,
            "noise_multiplier": plan.noise_multiplier,
            "noise": plan.noise,
            "geometry": plan.geometry,
            "lr": done.recipe.lr,
            "model": built.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "recipe": [list(row) for row in done.recipe.reasons],
            "remarks": list(loaded.all_remarks(settings.records)),
            "selection": None if selection is None else dict(selection),
            "test": test,
        },
    )
    try:
        with console.status("drawing the pictures of the report"):
            draw_pictures(out, model, done.recipe.arguments["geometry"], built.probe, plan)
    except (
        PrivacyError,
        ValueError,
    ) as problem:  # of a model that has diverged, say: the run is paid for, and this is only a picture
        console.print(
            f"the report has no pictures of probes: {problem}", markup=False, soft_wrap=True
        )


def _keep_weights(model: nn.Module, steps: int, planned: int, file: Path) -> int:
    """Write the weights after `steps`, unless the file has those after more, which were paid for: then read them.

    Returns the steps of the weights that are kept.
    """
    if file.exists():
        try:
            with safe_open(str(file), "pt") as there:
                found = int(
                    (there.metadata() or {}).get("steps", planned)
                )  # it is written at a run's end only
        except (SafetensorError, ValueError) as problem:
            raise PrivacyError(
                f"{file} cannot be read ({problem}): move it away, and repeat the command"
            ) from problem
        if found > steps:
            load_model(model, str(file))
            return found
    write_whole(file, lambda fresh: save_model(model, str(fresh), metadata={"steps": str(steps)}))
    return steps


@torch.no_grad()
def correct(model: nn.Module, data: TensorDataset, device: str, batch: int) -> int:
    """How many records are classified rightly."""
    model.eval()
    parts = zip(*(tensor.split(batch) for tensor in data.tensors), strict=True)
    return sum(int((model(x.to(device)).argmax(1).cpu() == y.cpu()).sum()) for x, y in parts)


def finish(run_directory: Path, console: Console | None = None) -> None:
    """Write the report of a finished run, and show what it came to."""
    (console or Console()).print(result_table(run_directory, write_report(run_directory)))
