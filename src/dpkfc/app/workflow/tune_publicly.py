"""Tuning on public data: every try is kept.

The folder has tuning.db (of Optuna), tries.md, best.json and report.html.
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dpkfc import tuning
from dpkfc.accounting.rounding import round_up
from dpkfc.app.reports.experiment_report import write_experiment_report
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.reports.tuning_progress import tuning_bar
from dpkfc.app.workflow.preparation import adjust_recipe, base_recipe
from dpkfc.app.workflow.run_folder import write_json
from dpkfc.app.workflow.settings import Settings
from dpkfc.app.workflow.tuning_job import TuningJob
from dpkfc.planning.recipe import Recipe
from dpkfc.tuning.search import Tuned

if TYPE_CHECKING:
    from optuna import Trial


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
