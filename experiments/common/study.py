"""Arms tuned alike on a data set, with the paper's CNN as a rule: the same number of tries each, chosen on validation.

Each try is run once without the last records of the training set, on which its accuracy is measured; the best one is
then trained on all records, with seeds that were not used before, and only these runs see the test set. Results are
appended as they come, and a run that is found in the file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.common.arguments import names_among
from experiments.common.options import ReproduceOptions
from experiments.common.setting import DATASETS, Data, Load, Setting, scaled, train
from rich.console import Console

import dpkfc
from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.accuracy_table import (
    Summary,
    accuracy_markdown,
    accuracy_table,
    plot_accuracy,
)
from dpkfc.app.reports.progress import bar

Row = dict[str, Any]  # one line of the file: key, setting, result
Grid = dict[
    str, list[dict[str, Any]]
]  # what each arm tries, the likeliest first: overrides of `Setting`
SEEDS = (1, 2, 3)  # of the final runs; tries use the default
STAGES = ("tune", "final", "table")


@dataclass(frozen=True)
class Follow:
    """A task that takes over the settings chosen on another one, with their learning rates times `factor(arm)`."""

    task: str
    factor: Callable[[str], float]


@dataclass(frozen=True)
class Study:
    """What is compared on what. A task is what all its runs have in common: overrides of `Setting`."""

    module: str
    about: str
    title: str
    tasks: Mapping[str, Mapping[str, Any]]
    grid: Callable[[str], Grid]  # of a task, with the arms that it has
    published: Mapping[tuple[str, str], float] = field(
        default_factory=dict
    )  # percent, by task and arm
    follows: Mapping[str, Follow] = field(
        default_factory=dict
    )  # tasks that have no grid of their own
    seeds: tuple[int, ...] = SEEDS
    seeds_of: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # of tasks that have others
    report: Callable[[Study, Sequence[Row], Path, Console], None] | None = None  # besides the table

    @property
    def arms(self) -> list[str]:
        grids = [self.grid(task) for task in self.tasks if task not in self.follows]
        return list(dict.fromkeys(arm for grid in grids for arm in grid))


def tries(study: Study, task: str, arms: Iterable[str], count: int | None = None) -> list[Setting]:
    """The grid as settings, or the first `count` tries of each of its arms. A task that follows another has none."""
    if task in study.follows:
        return []
    grid = study.grid(task)
    return [
        Setting(arm=arm, **study.tasks[task], **choice)
        for arm in arms
        for choice in grid.get(arm, [])[:count]
    ]


def finals(study: Study, rows: Sequence[Row], task: str, arms: Iterable[str]) -> list[Setting]:
    """The chosen setting of every arm, on all records, once a seed."""
    followed = study.follows[task].task if task in study.follows else task
    chosen = [choose(study, rows, task, arm)[0] for arm in arms if arm in study.grid(followed)]
    seeds = study.seeds_of.get(task, study.seeds)
    return [replace(setting, validation=0, seed=seed) for seed in seeds for setting in chosen]


def choose(study: Study, rows: Sequence[Row], task: str, arm: str) -> tuple[Setting, str]:
    """The try with the best accuracy on validation, and which of its weights had it: "last" or "average"."""
    if follow := study.follows.get(task):
        setting, weights = choose(study, rows, follow.task, arm)
        return replace(setting, **study.tasks[task], lr=setting.lr * follow.factor(arm)), weights
    found = [
        (row["result"][weights], Setting(**row["setting"]), weights)
        for row in tried(study, rows, task, arm)
        for weights in ("last", "average")
        if row["result"][weights] is not None
    ]
    if not found:
        raise ValueError(f"no try of {arm!r} on {task} was recorded: run --stage tune first")
    _, setting, weights = max(found, key=lambda entry: entry[0])
    return setting, weights


def tried(study: Study, rows: Sequence[Row], task: str, arm: str) -> list[Row]:
    """Every recorded try, also those that have left the grid since: they were looked at, so they count."""
    common = {**study.tasks[task], "arm": arm}
    return [
        row
        for row in rows
        if row["setting"]["validation"]
        and all(row["setting"].get(name) == value for name, value in common.items())
    ]


def summarise(study: Study, rows: Sequence[Row]) -> list[Summary]:
    """What there is to tell of every arm with a recorded try."""
    by_key = {row["key"]: row for row in rows}
    summaries = []
    for task, arm in ((task, arm) for task in study.tasks for arm in study.arms):
        try:
            setting, weights = choose(study, rows, task, arm)
        except ValueError:
            continue
        recorded = tried(study, rows, task, arm)
        keys = [final.key for final in finals(study, rows, task, [arm])]
        tests = tuple(by_key[key]["result"][weights] for key in keys if key in by_key)
        text = f"{setting}, {'averaged' if weights == 'average' else 'last'} weights"
        validation = by_key[setting.key]["result"][weights] if recorded else None
        summaries.append(
            Summary(
                task, arm, len(recorded), text, validation, tests, study.published.get((task, arm))
            )
        )
    return summaries


def run(
    settings: Sequence[Setting], load: Load, out: Path, console: Console, device: str = "cpu"
) -> None:
    """Train every setting that the file does not hold yet; append each result as it comes."""
    done = {row["key"] for row in read(out)}
    todo = [setting for setting in settings if setting.key not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{len(settings) - len(todo)} of {len(settings)} runs are in {out}",
        highlight=False,
        soft_wrap=True,
    )
    with bar(console) as progress:
        overall, current = (
            progress.add_task("runs", total=len(todo)),
            progress.add_task("steps", total=None),
        )

        def on_step(steps: int, of: int) -> None:
            progress.update(current, completed=steps, total=of)

        for setting in todo:
            progress.reset(current, total=None, description=setting.arm)
            result = train(setting, load, on_step, device)
            row = {"key": setting.key, "setting": asdict(setting), "result": asdict(result)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            progress.advance(overall)
            measured = f"{'validation' if setting.validation else 'test'} {100 * result.last:.2f}"
            measured += "" if result.average is None else f", averaged {100 * result.average:.2f}"
            speed = f"{result.steps / result.seconds:.1f} steps/s"
            line = f"{setting.dataset}, {setting.arm}: {setting}, seed {setting.seed}: {measured} ({speed})"
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def read(file: Path) -> list[Row]:
    """The results in a file; none if it does not exist yet."""
    rows: list[Row] = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {number} is cut off: remove the line, its run will be repeated"
            ) from error
    return rows


def show(study: Study, out: Path, console: Console) -> None:
    """Print the table of `out`, a file or a folder of them; write accuracy.md and accuracy.png beside the results."""
    files = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    rows = [row for file in files for row in read(file)]
    summaries = summarise(study, rows)
    if not summaries:
        raise ValueError(f"{out} holds no results: run --stage tune first")
    remark = (
        "Test: mean ± standard deviation over the seeds (their number). Epsilon is that of each single run; the tries, "
        "and the choice among them by held-out training records, are not charged."
    )
    console.print(accuracy_table(summaries, study.title))
    console.print(remark, highlight=False)
    folder = out if out.is_dir() else out.parent
    (folder / "accuracy.md").write_text(accuracy_markdown(summaries, study.title, remark))
    if find_spec("matplotlib"):
        plot_accuracy([row for row in summaries if row.tests] or summaries, folder / "accuracy.png")
    else:
        console.print("matplotlib is not installed: no plot")
    if study.report:
        study.report(study, rows, folder, console)


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    """The command line of a study."""
    parser = argparse.ArgumentParser(prog=f"python -m {study.module}", description=study.about)
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="the folder with mnist/ and fashion-mnist/ (default $DPKFC_DATA)",
    )
    tasks, arms = list(study.tasks), study.arms
    parser.add_argument(
        "--task",
        type=names_among(tasks),
        default=tasks,
        metavar="A,B",
        help=f"of {', '.join(tasks)}",
    )
    parser.add_argument(
        "--arms", type=names_among(arms), default=arms, metavar="A,B", help=f"of {', '.join(arms)}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="results; for the table, a folder",
    )
    parser.add_argument(
        "--tries", type=int, metavar="N", help="the first N of every arm (default: all)"
    )
    parser.add_argument("--stage", choices=STAGES, help="default: all of them, in this order")
    chosen = parser.parse_args(arguments)
    stages = [chosen.stage] if chosen.stage else STAGES
    try:
        execute(
            study,
            chosen.task,
            chosen.arms,
            chosen.out,
            chosen.data_dir,
            Console(),
            stages,
            chosen.tries,
        )
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"{study.module}: {error}")


def execute(
    study: Study,
    tasks: Sequence[str],
    arms: Sequence[str],
    out: Path,
    data_dir: Path | None,
    console: Console,
    stages: Sequence[str] = STAGES,
    count: int | None = None,
    device: str = "cpu",
) -> None:
    """Tune, train what was chosen, show the table. Tasks whose data is not there are skipped, unless all are."""

    @cache
    def load(dataset: str, scaling: Scaling) -> Data:
        return scaled(DATASETS[dataset][1](data_dir), scaling)

    missing: dict[str, FileNotFoundError] = {}
    for task in tasks:
        try:
            if task in study.follows and study.follows[task].task in missing:
                raise missing[study.follows[task].task]
            if "tune" in stages:
                run(tries(study, task, arms, count), load, out, console, device)
            if "final" in stages:
                run(finals(study, read(out), task, arms), load, out, console, device)
        except FileNotFoundError as error:
            missing[task] = error
            console.print(
                f"{task} is skipped: {error}", markup=False, highlight=False, soft_wrap=True
            )
    if missing and len(missing) == len(tasks):
        raise next(iter(missing.values()))
    if "table" in stages:
        show(study, out, console)


def ordered(study: Study, order: ReproduceOptions) -> Study:
    """The study with the seeds that were asked for; quick: a tenth of an epoch, and one seed an arm."""
    tasks = {
        name: {**task, "epochs": 0.1} if order.quick else task for name, task in study.tasks.items()
    }
    seeds_of = {task: order.seeds(seeds) for task, seeds in study.seeds_of.items()}
    published = {} if order.quick else study.published
    return replace(
        study, tasks=tasks, seeds=order.seeds(study.seeds), seeds_of=seeds_of, published=published
    )


def reproduce(study: Study, order: ReproduceOptions) -> None:
    """The whole study; quick: one try an arm."""
    study, quick = ordered(study, order), order.quick
    file, count = order.out / ("quick.jsonl" if quick else "results.jsonl"), 1 if quick else None
    try:
        execute(
            study,
            [*study.tasks],
            study.arms,
            file,
            order.data_dir,
            order.console,
            count=count,
            device=order.device,
        )
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error
