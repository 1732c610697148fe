"""Tuning in a folder: on public data every try is kept; on private data only the best is released.

On public data the folder has tuning.db (of Optuna), tries.md, best.json and report.html. On private
data it has the files of a run: see `dpkfc.app.workflow.fit`. During a private tuning it also has a
folder `secret`, which no epsilon covers.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

from dpkfc import tuning
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.selection import BestOf
from dpkfc.app.models.default import Built, build, default_model
from dpkfc.app.readers.records import Records, content_digest, on_device, split
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.reports.experiment_report import write_experiment_report
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.reports.tuning_progress import elapsed_time, tuning_bar
from dpkfc.app.workflow.evaluation import count_correct
from dpkfc.app.workflow.preparation import (
    adjust_recipe,
    base_recipe,
    batch_size,
    model_inputs,
    open_ledger,
    start_run,
    take_steps,
)
from dpkfc.app.workflow.release import Trained, finish, release
from dpkfc.app.workflow.run_folder import Fingerprint, is_resumed, write_json
from dpkfc.app.workflow.search_space import Interval
from dpkfc.app.workflow.settings import Settings
from dpkfc.engine.options import Options
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import evaluate
from dpkfc.planning.plan import Plan, batches
from dpkfc.planning.recipe import EPOCHS, Recipe, count_units_and_parameters, usual_delta
from dpkfc.tuning.search import Selected, Tuned

if TYPE_CHECKING:
    from optuna import Trial

PUBLIC_TRIES = 20
EXPECTED_TRIES = 10.0  # on private data, where the number is random
SCORE_NOISE = 50.0  # over epsilon: a score with this noise costs little beside the runs
MUCH_SCORE_NOISE = 0.05  # of the validation records: with more noise, the choice is nearly random
SECRET = "secret"


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


# Public data


def tune_publicly(
    job: TuningJob, tries: int, config: dict[str, Any], out: Path, console: Console
) -> None:
    """Make `tries` tries, each informed by the earlier ones, and write all of them."""
    recipes: dict[float | None, Recipe] = {}

    def objective(trial: Trial) -> float:
        settings = job.draw(trial)
        if settings.epochs not in recipes:
            records = settings.public_count(len(job.train))
            recipes[settings.epochs] = base_recipe(job.built, records, settings)
        recipe = adjust_recipe(recipes[settings.epochs], settings)
        trial.set_user_attr("learning rate", recipe.lr)
        return job.count_correct(job.run(recipe, trial.number)) / len(job.validation)

    out.mkdir(parents=True, exist_ok=True)
    # Another command has its own tries in the same file.
    name = f"tuning {sha256(json.dumps(config).encode()).hexdigest()[:12]}"
    seed = job.settings.seed
    with tuning_bar() as on_progress:
        tuned = tuning.tune(
            objective,
            tries=tries,
            storage=out / "tuning.db",
            name=name,
            seed=None if seed is None else seed % 2**31,  # NumPy takes no larger ones
            on_progress=on_progress,
        )
    headings, rows = _table_of_tries(tuned)
    table = Table(
        *headings, title=f"{len(rows)} tries, the best first", title_justify="left", pad_edge=False
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    command = _train_command(replace(job.settings, **tuned.settings))
    best = {**tuned.settings, "accuracy": tuned.score, "records": len(job.validation)}
    write_json(out / "best.json", best)
    (out / "tries.md").write_text(_markdown(job, headings, rows, command), encoding="utf-8")
    report = write_experiment_report(out, f"Tuning on public data: {out.resolve().name}")
    for line in (f"for private data of this kind: {command}", f"report: {report}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _train_command(best: Settings) -> str:
    values = {name: getattr(best, name) for name in ("rho", "lr", "clip", "epochs")}
    given = "".join(f" --{name} {value:.3g}" for name, value in values.items() if value is not None)
    return f"dpkfc train SOURCE --epsilon {best.epsilon:g}{given} --method {best.method}"


def _table_of_tries(tuned: Tuned) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row per try, the best first."""
    trials = [(trial.value, trial) for trial in tuned.study.trials if trial.value is not None]
    names = sorted({name for _, trial in trials for name in trial.params})
    rows = []
    for accuracy, trial in sorted(trials, key=lambda pair: -pair[0]):
        values = [trial.params[name] for name in names]
        figures = [f"{value:.3g}" for value in (*values, trial.user_attrs["learning rate"])]
        rows.append([str(trial.number), f"{100 * accuracy:.2f}", *figures])
    return ["try", "accuracy %", *names, "learning rate"], rows


def _markdown(job: TuningJob, headings: list[str], rows: list[list[str]], command: str) -> str:
    space = ", ".join(f"{name} {interval}" for name, interval in job.space.items())
    return (
        f"# The tries\n\n{markdown_table(headings, rows, left=0)}\n\n"
        f"Accuracy on {len(job.validation):,} validation records, of a model trained at epsilon "
        f"{round_up(job.settings.epsilon, 6)} on {len(job.train):,} other records; {space}. The "
        "best of many tries is partly luck. These records are treated as public: on private "
        "records, epsilon would cover neither the tries nor the choice.\n\n"
        f"For private data of this kind:\n\n    {command}\n"
    )


# Private data


def tune_privately(
    job: TuningJob,
    tries: float,
    score_noise: float | None,
    config: dict[str, Any],
    out: Path,
    console: Console,
) -> None:
    """Release the best of a random number of tries.

    Nothing about the other tries is shown, nor their number.
    """
    secret = out / SECRET
    resumed = is_resumed(out, config)
    if resumed and (out / "result.json").exists():
        console.print("this tuning is finished; for a new one choose another --out")
        shutil.rmtree(secret, ignore_errors=True)
        return finish(out, console)
    best_of = _best_of(job, tries, score_noise, console)
    with console.status("calibrating the noise"):
        recipe, plan = priced_recipe(job, best_of)
    console.print(recipe)
    console.print(plan)
    console.print(
        f"Each try takes {plan.steps:,} steps. The number of tries is secret, and so is the "
        "remaining time."
    )
    _begin(job, plan, config, out, resumed)
    has_tries = resumed

    def objective(trial: Trial) -> tuple[PrivateRun, float]:
        nonlocal has_tries
        has_tries = True
        run = job.run(adjust_recipe(recipe, job.draw(trial)), trial.number)
        return run, float(job.count_correct(run))

    try:
        with open_ledger(job.settings, len(job.train)) as ledger, elapsed_time():
            selected = tuning.tune_privately(
                objective,
                plan=plan,
                storage=secret / "tuning.db",
                ledger=ledger,
                seed=job.settings.seed,
            )
    except Exception:
        if not has_tries:  # refused by the ledger, say: nothing was spent
            shutil.rmtree(secret, ignore_errors=True)
            for name in ("config.json", "plan.json"):
                (out / name).unlink(missing_ok=True)
        raise
    _release(job, selected, recipe, out, console)
    shutil.rmtree(secret, ignore_errors=True)
    finish(out, console)


def _best_of(job: TuningJob, tries: float, score_noise: float | None, console: Console) -> BestOf:
    if job.public_validation:
        if score_noise is not None:
            raise ValueError(
                "--score-noise: the validation records are public, and their score needs no noise"
            )
        return BestOf(tries)
    scale = SCORE_NOISE / job.settings.epsilon if score_noise is None else score_noise
    if scale > MUCH_SCORE_NOISE * len(job.validation):
        console.print(
            f"- the noise on the score ({scale:.3g}) is large compared with "
            f"{len(job.validation):,} validation records: the choice is nearly random. Score on "
            "public records if you have any, or hold out more (--validation)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return BestOf(tries, score_noise=scale)


def priced_recipe(job: TuningJob, best_of: BestOf) -> tuple[Recipe, Plan]:
    """The recipe of one try, and its plan, with the noise that the whole tuning requires.

    The recipe is computed at the epsilon of a single run with this noise, so that its choices fit
    the actual noise.
    """
    settings = job.settings
    records = settings.public_count(len(job.train))
    expected_batch, steps = batches(
        records, batch_size(records, settings), settings.epochs or EPOCHS, None
    )
    run: dict[str, Any] = {
        "records": records,
        "batch_size": expected_batch,
        "steps": steps,
        "clip": 1.0,
        "epsilon": settings.epsilon,
        "delta": usual_delta(records) if settings.delta is None else settings.delta,
        "best_of": best_of,
    }
    single_epsilon = replace(Plan.make(**run), best_of=None, accountant="pld").epsilon()
    recipe = base_recipe(job.built, records, replace(settings, epsilon=single_epsilon))
    candidate = evaluate(recipe.arguments["noise"], Workload.sgd(momentum=recipe.momentum), **run)
    units, parameters = count_units_and_parameters(job.built.model)
    lr = recipe.noise_length * math.sqrt(units / parameters) / candidate.rmse
    price = (
        "epsilon, delta",
        f"{round_up(settings.epsilon, 6)}, {run['delta']:.3g}",
        "the price of the whole tuning",
    )
    arguments = {
        **recipe.arguments,
        "epsilon": settings.epsilon,
        "options": Options(best_of=best_of),
    }
    plan = replace(candidate.plan, geometry=recipe.arguments["geometry"].name)
    return replace(recipe, arguments=arguments, lr=lr, reasons=(price, *recipe.reasons[1:])), plan


def _begin(job: TuningJob, plan: Plan, config: dict[str, Any], out: Path, resumed: bool) -> None:
    """Write the folder; a resumed tuning must have the same records."""
    file = out / SECRET / "records"
    records = Fingerprint.of(job.loaded.train)
    if resumed:
        if not file.exists():
            raise PrivacyError(
                f"{file.parent} is missing, and with it the tries that were paid for: choose "
                "another --out"
            )
        return records.load_state_dict({"digest": file.read_text()})
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(records.digest)
    write_json(out / "plan.json", plan.to_json())
    write_json(out / "config.json", config)


def _release(job: TuningJob, selected: Selected, base: Recipe, out: Path, console: Console) -> None:
    if selected.settings is None or selected.state_dict is None or selected.score is None:
        raise PrivacyError(
            "no try was completed, so there is nothing to release; the price is spent all the same"
        )
    recipe = adjust_recipe(base, replace(job.settings, **selected.settings))
    plan = replace(selected.plan, clip=recipe.arguments["clip"])
    write_json(out / "plan.json", plan.to_json())
    job.built.model.load_state_dict(selected.state_dict)
    noise = None if plan.best_of is None else plan.best_of.score_noise
    scored_on = (
        "public validation records"
        if noise is None
        else f"validation records, plus noise of {noise:.3g}, priced in"
    )
    selection = {
        "settings": selected.settings,
        "score": f"{selected.score:.1f} right of {len(job.validation):,} {scored_on}",
    }
    trained = Trained(
        job.built.model, plan, recipe, selected.epsilon, plan.steps, run_id=selected.run_id
    )
    release(job.loaded, job.built, job.settings, trained, out, console, selection)
