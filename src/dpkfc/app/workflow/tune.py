"""Tuning in a folder of its own: every try of a run on public data, or the best of private ones and nothing else.

On public data: tuning.db (Optuna's), tries.md, best.json and report.html. On private data, the files of a run: see
`dpkfc.app.workflow.fit`; and while it is under way a folder `secret`, which no epsilon covers.
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

from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.selection import BestOf
from dpkfc.app.models.default import Built, build, default_model
from dpkfc.app.readers.records import Records, mark, on_device, split
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.reports.experiment_report import write_experiment_report
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.reports.tuning_progress import elapsed_time, tuning_bar
from dpkfc.app.workflow.fit import (
    Settings,
    Trained,
    adjusted,
    base_recipe,
    batch_size,
    correct,
    finish,
    inputs_of,
    joined,
    ledger_of,
    public_count,
    release,
    steps_of,
)
from dpkfc.app.workflow.run_folder import Fingerprint, resumes, write_json
from dpkfc.engine.options import Options
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import evaluate
from dpkfc.planning.plan import Plan, batches
from dpkfc.planning.recipe import EPOCHS, Recipe, count_units_and_parameters, usual_delta
from dpkfc.tuning import search as tuning

if TYPE_CHECKING:
    from optuna import Trial

TRIES, EXPECTED = 20, 10.0  # on public data, and on private data
SCORE_NOISE = 50.0  # over epsilon: a score with so much noise costs little beside the runs
MUCH = 0.05  # of the validation records: with more noise than that, the choice is made by lot
SECRET = "secret"


@dataclass(frozen=True)
class Spread:
    """A number, or a range from which one is drawn, evenly in its logarithm.

    >>> str(Spread.parse("rho", "0.5,8")), str(Spread.parse("clip", "1"))
    ('0.5,8', '1')
    """

    low: float
    high: float

    @staticmethod
    def parse(option: str, text: str) -> Spread:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if (
            len(numbers) not in (1, 2)
            or not all(0 < x < math.inf for x in numbers)
            or sorted(set(numbers)) != numbers
        ):
            raise PrivacyError(
                f"--{option} {text}: give a positive number, or two as LOW,HIGH with LOW below HIGH"
            )
        return Spread(numbers[0], numbers[-1])

    @property
    def tuned(self) -> bool:
        return self.low < self.high

    def __str__(self) -> str:
        return f"{self.low:g},{self.high:g}" if self.tuned else f"{self.low:g}"

    def draw(self, name: str, trial: Trial) -> float:
        return float(trial.suggest_float(name, self.low, self.high, log=True))


def read_tries(tries: float | None, public: bool) -> float:
    """How many tries; of private data how many are expected."""
    found = (TRIES if public else EXPECTED) if tries is None else tries
    if not 1 <= found < math.inf or (public and found != int(found)):
        raise PrivacyError(f"--tries {found:g}: give at least 1, and on public data a whole number")
    return found


@dataclass(frozen=True)
class HeldOut:
    """What is trained on (and the test part), what tries are scored on, and whether that is public."""

    loaded: Loaded
    validation: TensorDataset
    public: bool


def hold_out(loaded: Loaded, validation: str, load: Callable[[str], Loaded]) -> HeldOut:
    """A share of the training records, or the public records of a file or folder, which `load` reads.

    Private records are held out by a hash of their content, so that one more or less moves no other.
    """
    try:
        share = float(validation)
    except ValueError:
        other = load(validation)
        if (other.shape, other.names) != (loaded.shape, loaded.names):
            raise PrivacyError(
                f"--validation {validation}: inputs of shape {other.shape} and {other.classes} classes, but the "
                f"training records have {loaded.shape} and {loaded.classes}: they must agree"
            ) from None
        return HeldOut(loaded, other.train, public=True)
    if not 0 < share < 1:
        raise PrivacyError(
            f"--validation {validation}: a share of the records between 0 and 1, or public records"
        )
    x, y = loaded.train.tensors
    marks = [
        mark(b"validation", row.numpy().tobytes(), str(label).encode())
        for row, label in zip(x, y.tolist(), strict=True)
    ]
    rest, kept = split(Records(x, y, marks), share)
    if not len(rest) or not len(kept):
        raise PrivacyError(
            f"--validation {validation}: {len(x)} records are too few to hold some of them out"
        )
    return HeldOut(
        replace(loaded, train=TensorDataset(rest.x, rest.y)),
        TensorDataset(kept.x, kept.y),
        public=False,
    )


@dataclass(frozen=True)
class Work:
    """All that a try needs."""

    loaded: Loaded
    built: Built
    settings: Settings
    space: Mapping[str, Spread]  # what is chosen, by the names of settings
    train: TensorDataset  # as the model reads it, on the device
    validation: TensorDataset
    public_validation: bool

    def draw(self, trial: Trial) -> Settings:
        chosen: dict[str, Any] = {
            name: spread.draw(name, trial) for name, spread in self.space.items()
        }
        return replace(self.settings, **chosen)

    def run(self, found: Recipe, number: int) -> PrivateRun:
        """One private run from the weights that all tries begin with; its model ends with the averaged weights."""
        seed = None if self.settings.seed is None else self.settings.seed + 1 + number
        if seed is not None:
            torch.manual_seed(seed)
        geometry = copy.copy(
            found.arguments["geometry"]
        )  # a refresh replaces what it holds, and writes into none of it
        found = replace(found, arguments={**found.arguments, "geometry": geometry})
        model = copy.deepcopy(self.built.model)
        private, averaged = joined(model, found, self.train, self.settings, seed, None)
        for _ in steps_of(private):
            pass
        private.detach()
        model.load_state_dict(averaged.module.state_dict())
        return private

    def right(self, private: PrivateRun) -> int:
        """How many validation records the model gets right."""
        return correct(
            private.model, self.validation, self.settings.device, self.settings.physical_batch_size
        )


def prepare(
    held_out: HeldOut, settings: Settings, space: Mapping[str, Spread], console: Console
) -> Work:
    loaded = held_out.loaded
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    name = settings.model or default_model(loaded.kind, loaded.shape)
    built = build(name, loaded.kind, loaded.shape, loaded.classes, loaded.probe)
    built.model.to(settings.device).train()
    train = on_device(inputs_of(loaded.train, built, console, "training records"), settings.device)
    validation = inputs_of(held_out.validation, built, console, "validation records")
    return Work(loaded, built, settings, space, train, validation, held_out.public)


def publicly(work: Work, tries: int, config: dict[str, Any], out: Path, console: Console) -> None:
    """Every try is seen, and each learns from the earlier ones."""
    recipes: dict[float | None, Recipe] = {}

    def objective(trial: Trial) -> float:
        settings = work.draw(trial)
        if settings.epochs not in recipes:
            recipes[settings.epochs] = base_recipe(
                work.built, public_count(settings, len(work.train)), settings
            )
        found = adjusted(recipes[settings.epochs], settings)
        trial.set_user_attr("learning rate", found.lr)
        return work.right(work.run(found, trial.number)) / len(work.validation)

    out.mkdir(parents=True, exist_ok=True)
    name = f"tuning {sha256(json.dumps(config).encode()).hexdigest()[:12]}"  # another command has its own tries
    seed = (
        None if work.settings.seed is None else work.settings.seed % 2**31
    )  # NumPy takes no larger ones
    with tuning_bar() as on_progress:
        found = tuning.tune(
            objective,
            tries=tries,
            storage=out / "tuning.db",
            name=name,
            seed=seed,
            on_progress=on_progress,
        )
    headings, rows = _table(found)
    table = Table(
        *headings, title=f"{len(rows)} tries, the best first", title_justify="left", pad_edge=False
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    command = _command(replace(work.settings, **found.settings))
    write_json(
        out / "best.json",
        {**found.settings, "accuracy": found.score, "records": len(work.validation)},
    )
    (out / "tries.md").write_text(_markdown(work, headings, rows, command), encoding="utf-8")
    report = write_experiment_report(out, f"Tuning on public data: {out.resolve().name}")
    for line in (f"for private data of this kind: {command}", f"report: {report}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _command(best: Settings) -> str:
    values = {name: getattr(best, name) for name in ("rho", "lr", "clip", "epochs")}
    given = "".join(f" --{name} {value:.3g}" for name, value in values.items() if value is not None)
    return f"dpkfc train SOURCE --epsilon {best.epsilon:g}{given} --method {best.method}"


def _table(found: tuning.Tuned) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a try, the best first."""
    trials = [(trial.value, trial) for trial in found.study.trials if trial.value is not None]
    names = sorted({name for _, trial in trials for name in trial.params})
    rows = []
    for accuracy, trial in sorted(trials, key=lambda pair: -pair[0]):
        values = [trial.params[name] for name in names]
        figures = [f"{value:.3g}" for value in (*values, trial.user_attrs["learning rate"])]
        rows.append([str(trial.number), f"{100 * accuracy:.2f}", *figures])
    return ["try", "accuracy %", *names, "learning rate"], rows


def _markdown(work: Work, headings: list[str], rows: list[list[str]], command: str) -> str:
    space = ", ".join(f"{name} {spread}" for name, spread in work.space.items())
    return (
        f"# The tries\n\n{markdown_table(headings, rows, left=0)}\n\nAccuracy on {len(work.validation):,} validation "
        f"records, of a model trained at epsilon {round_up(work.settings.epsilon, 6)} on {len(work.train):,} others; "
        f"{space}. The best of many is in part luck. These records are taken as public: on private ones, neither the "
        f"tries nor the choice would be covered by epsilon.\n\nFor private data of this kind:\n\n    {command}\n"
    )


def privately(
    work: Work,
    tries: float,
    score_noise: float | None,
    config: dict[str, Any],
    out: Path,
    console: Console,
) -> None:
    """Only the best of a random number of tries is released: nothing is shown of the others, nor how many they were."""
    resumed, secret = resumes(out, config), out / SECRET
    if resumed and (out / "result.json").exists():
        console.print("this tuning is finished; for a new one choose another --out")
        shutil.rmtree(secret, ignore_errors=True)
        return finish(out, console)
    best_of = _best_of(work, tries, score_noise, console)
    with console.status("calibrating the noise"):
        found, plan = priced(work, best_of)
    console.print(found)
    console.print(plan)
    console.print(
        f"A try takes {plan.steps:,} steps. How many are made is a secret, and so is the time that is left."
    )
    _begin(work, plan, config, out, resumed)
    begun = resumed

    def objective(trial: Trial) -> tuple[PrivateRun, float]:
        nonlocal begun
        begun = True
        private = work.run(adjusted(found, work.draw(trial)), trial.number)
        return private, float(work.right(private))

    try:
        with ledger_of(work.settings, len(work.train)) as ledger, elapsed_time():
            selected = tuning.tune_privately(
                objective,
                plan=plan,
                storage=secret / "tuning.db",
                ledger=ledger,
                seed=work.settings.seed,
            )
    except (PrivacyError, ValueError):
        if not begun:  # refused by the ledger, say: nothing was spent
            shutil.rmtree(secret, ignore_errors=True)
            for name in ("config.json", "plan.json"):
                (out / name).unlink(missing_ok=True)
        raise
    _release(work, selected, found, out, console)
    shutil.rmtree(secret, ignore_errors=True)
    finish(out, console)


def _best_of(work: Work, tries: float, score_noise: float | None, console: Console) -> BestOf:
    if work.public_validation:
        if score_noise is not None:
            raise PrivacyError("--score-noise: the validation records are public, and need none")
        return BestOf(tries)
    scale = SCORE_NOISE / work.settings.epsilon if score_noise is None else score_noise
    if scale > MUCH * len(work.validation):
        console.print(
            f"- the noise on the score ({scale:.3g}) is large beside {len(work.validation):,} validation records: the "
            "choice is made nearly by lot. Score on public records if there are any, or hold out more (--validation)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return BestOf(tries, score_noise=scale)


def priced(work: Work, best_of: BestOf) -> tuple[Recipe, Plan]:
    """The recipe of one try, and its plan: the noise is what the price of the whole tuning asks for.

    The recipe is asked at the epsilon that a single run with this noise would have, so that it chooses by the noise
    that there will be.
    """
    settings, records = work.settings, public_count(work.settings, len(work.train))
    expected, steps = batches(
        records, batch_size(records, settings), settings.epochs or EPOCHS, None
    )
    run: dict[str, Any] = {
        "records": records,
        "batch_size": expected,
        "steps": steps,
        "clip": 1.0,
        "epsilon": settings.epsilon,
        "delta": usual_delta(records) if settings.delta is None else settings.delta,
        "best_of": best_of,
    }
    alone = replace(Plan.make(**run), best_of=None, accountant="pld").epsilon()
    found = base_recipe(work.built, records, replace(settings, epsilon=alone))
    candidate = evaluate(found.arguments["noise"], Workload.sgd(momentum=found.momentum), **run)
    units, parameters = count_units_and_parameters(work.built.model)
    lr = found.noise_length * math.sqrt(units / parameters) / candidate.rmse
    price = (
        "epsilon, delta",
        f"{round_up(settings.epsilon, 6)}, {run['delta']:.3g}",
        "the price of the whole tuning",
    )
    arguments = {
        **found.arguments,
        "epsilon": settings.epsilon,
        "options": Options(best_of=best_of),
    }
    plan = replace(candidate.plan, geometry=found.arguments["geometry"].name)
    return replace(found, arguments=arguments, lr=lr, reasons=(price, *found.reasons[1:])), plan


def _begin(work: Work, plan: Plan, config: dict[str, Any], out: Path, resumed: bool) -> None:
    """The folder; what is taken up again is the same tuning of the same records."""
    file, records = out / SECRET / "records", Fingerprint.of(work.loaded.train)
    if resumed:
        if not file.exists():
            raise PrivacyError(
                f"{file.parent} is gone, and with it the tries that were paid for: choose another --out"
            )
        return records.load_state_dict({"digest": file.read_text()})
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(records.digest)
    write_json(out / "plan.json", plan.to_json())
    write_json(out / "config.json", config)


def _release(
    work: Work, selected: tuning.Selected, found: Recipe, out: Path, console: Console
) -> None:
    if selected.settings is None or selected.state_dict is None or selected.score is None:
        raise PrivacyError(
            "no try came to an end, so there is nothing to release; the price is spent all the same"
        )
    recipe, best_of = (
        adjusted(found, replace(work.settings, **selected.settings)),
        selected.plan.best_of,
    )
    plan = replace(selected.plan, clip=recipe.arguments["clip"])
    write_json(out / "plan.json", plan.to_json())
    work.built.model.load_state_dict(selected.state_dict)
    noise = None if best_of is None else best_of.score_noise
    by = (
        "public validation records"
        if noise is None
        else f"validation records, plus noise of {noise:.3g}, priced in"
    )
    selection = {
        "settings": selected.settings,
        "score": f"{selected.score:.1f} right of {len(work.validation):,} {by}",
    }
    done = Trained(
        work.built.model, plan, recipe, selected.epsilon, plan.steps, run=selected.run_id
    )
    release(work.loaded, work.built, work.settings, done, out, console, selection)
