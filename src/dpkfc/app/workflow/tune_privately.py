"""Tuning on private data: only the best of a random number of tries is released.

The folder has the files of a run: see `dpkfc.app.workflow.fit`. During the tuning it also has a
folder `secret`, which no epsilon covers.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpkfc import tuning
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.selection import BestOf
from dpkfc.app.reports.tuning_progress import elapsed_time
from dpkfc.app.workflow.preparation import adjust_recipe, base_recipe, batch_size, open_ledger
from dpkfc.app.workflow.release import Trained, finish, release
from dpkfc.app.workflow.run_folder import Fingerprint, is_resumed, write_json
from dpkfc.app.workflow.tuning_job import TuningJob
from dpkfc.engine.options import Options
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import evaluate
from dpkfc.planning.plan import Plan, batches
from dpkfc.planning.recipe import EPOCHS, Recipe, count_units_and_parameters, usual_delta
from dpkfc.tuning.search import Selected

if TYPE_CHECKING:
    from optuna import Trial

SCORE_NOISE = 50.0  # over epsilon: a score with this noise costs little beside the runs
MUCH_SCORE_NOISE = 0.05  # of the validation records: with more noise, the choice is nearly random
SECRET = "secret"


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
