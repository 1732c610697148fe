"""Studies: arms (methods) that are tuned alike on each task, usually with the paper's CNN.

Every arm has the same number of tries. A try is one run without the last training records, on
which its accuracy is measured. The best try is then trained on all records, with seeds that were
not used before; only these final runs see the test set. Results are appended to a file as they
come, and a run that the file holds is not repeated.
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

from rich.console import Console

from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.accuracy_table import (
    Summary,
    accuracy_markdown,
    accuracy_table,
    plot_accuracy,
)
from dpkfc.app.reports.progress import bar
from experiments.common.arguments import EXPECTED_ERRORS, names_among
from experiments.common.options import ReproduceOptions
from experiments.common.setting import DATASETS, Data, Load, StudySetting, scaled, train

Row = dict[str, Any]  # one line of the file: key, setting, result
# The tries of each arm, the most promising first, as overrides of `StudySetting`.
Grid = dict[str, list[dict[str, Any]]]
SEEDS = (1, 2, 3)  # of the final runs; tries use the default seed
STAGES = ("tune", "final", "table")


@dataclass(frozen=True)
class Follow:
    """A task that reuses the choices of another one, with learning rates times `factor(arm)`."""

    task: str
    factor: Callable[[str], float]


@dataclass(frozen=True)
class Study:
    """The arms and tasks of a study.

    Args:
        module: The package that holds the study, as in `python -m MODULE`.
        about: One line for `--help`.
        title: The heading of its table.
        tasks: What all runs of a task have in common, as overrides of `StudySetting`.
        grid: Maps a task to the tries of its arms.
        published: The paper's accuracies in percent, by task and arm.
        follows: Tasks without a grid of their own.
        seeds: The seeds of the final runs.
        seeds_of: Seeds of tasks that have others.
        report: Writes further reports, in addition to the table.
    """

    module: str
    about: str
    title: str
    tasks: Mapping[str, Mapping[str, Any]]
    grid: Callable[[str], Grid]
    published: Mapping[tuple[str, str], float] = field(default_factory=dict)
    follows: Mapping[str, Follow] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    seeds_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    report: Callable[[Study, Sequence[Row], Path, Console], None] | None = None

    @property
    def arms(self) -> list[str]:
        grids = [self.grid(task) for task in self.tasks if task not in self.follows]
        return list(dict.fromkeys(arm for grid in grids for arm in grid))


def tries(
    study: Study, task: str, arms: Iterable[str], count: int | None = None
) -> list[StudySetting]:
    """Return the settings of the grid, or the first `count` of each arm.

    A task that follows another one has none.
    """
    if task in study.follows:
        return []
    grid = study.grid(task)
    return [
        StudySetting(arm=arm, **study.tasks[task], **choice)
        for arm in arms
        for choice in grid.get(arm, [])[:count]
    ]


def finals(study: Study, rows: Sequence[Row], task: str, arms: Iterable[str]) -> list[StudySetting]:
    """Return the chosen setting of every arm, trained on all records, once per seed."""
    followed = study.follows[task].task if task in study.follows else task
    chosen = [choose(study, rows, task, arm)[0] for arm in arms if arm in study.grid(followed)]
    seeds = study.seeds_of.get(task, study.seeds)
    return [replace(setting, validation=0, seed=seed) for seed in seeds for setting in chosen]


def choose(study: Study, rows: Sequence[Row], task: str, arm: str) -> tuple[StudySetting, str]:
    """Return the try with the best validation accuracy, and its weights: "last" or "average"."""
    if follow := study.follows.get(task):
        setting, weights = choose(study, rows, follow.task, arm)
        return replace(setting, **study.tasks[task], lr=setting.lr * follow.factor(arm)), weights
    candidates = [
        (row["result"][weights], StudySetting(**row["setting"]), weights)
        for row in recorded_tries(study, rows, task, arm)
        for weights in ("last", "average")
        if row["result"][weights] is not None
    ]
    if not candidates:
        raise ValueError(f"no try of {arm!r} on {task} was recorded: run --stage tune first")
    _, setting, weights = max(candidates, key=lambda candidate: candidate[0])
    return setting, weights


def recorded_tries(study: Study, rows: Sequence[Row], task: str, arm: str) -> list[Row]:
    """Return every recorded try, including those that are no longer in the grid."""
    common = {**study.tasks[task], "arm": arm}
    return [
        row
        for row in rows
        if row["setting"]["validation"]
        and all(row["setting"].get(name) == value for name, value in common.items())
    ]


def summarise(study: Study, rows: Sequence[Row]) -> list[Summary]:
    """Summarise every task and arm that has a recorded try."""
    by_key = {row["key"]: row for row in rows}
    summaries = []
    for task, arm in ((task, arm) for task in study.tasks for arm in study.arms):
        try:
            setting, weights = choose(study, rows, task, arm)
        except ValueError:
            continue
        recorded = recorded_tries(study, rows, task, arm)
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


def train_all(
    settings: Sequence[StudySetting], load: Load, out: Path, console: Console, device: str = "cpu"
) -> None:
    """Train every setting that the file does not hold yet; append each result to the file."""
    done = {row["key"] for row in read(out)}
    todo = [setting for setting in settings if setting.key not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{len(settings) - len(todo)} of {len(settings)} runs are in {out}",
        highlight=False,
        soft_wrap=True,
    )
    with bar(console) as progress:
        overall = progress.add_task("runs", total=len(todo))
        current = progress.add_task("steps", total=None)

        def on_step(done: int, total: int) -> None:
            progress.update(current, completed=done, total=total)

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
            progress.console.print(
                f"{setting.dataset}, {setting.arm}: {setting}, seed {setting.seed}: "
                f"{measured} ({speed})",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def read(file: Path) -> list[Row]:
    """Return the results in a file; none if it does not exist yet."""
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
    """Print the table of a results file, or of a folder of them; write accuracy.md and .png."""
    files = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    rows = [row for file in files for row in read(file)]
    summaries = summarise(study, rows)
    if not summaries:
        raise ValueError(f"{out} holds no results: run --stage tune first")
    remark = (
        "Test: mean ± standard deviation over the seeds (their number). Epsilon is that of each "
        "single run; the tries, and the choice among them by held-out training records, are not "
        "charged."
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
    """Run parts of a study from the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {study.module}", description=study.about)
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="the folder with mnist/, fashion-mnist/, ... (default $DPKFC_DATA)",
    )
    tasks = list(study.tasks)
    arms = study.arms
    parser.add_argument(
        "--task",
        type=names_among(tasks),
        default=tasks,
        metavar="A,B",
        help=f"a list of {', '.join(tasks)} (default: all)",
    )
    parser.add_argument(
        "--arms",
        type=names_among(arms),
        default=arms,
        metavar="A,B",
        help=f"a list of {', '.join(arms)} (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="results; for --stage table also a folder",
    )
    parser.add_argument(
        "--tries", type=int, metavar="N", help="the first N tries of every arm (default: all)"
    )
    parser.add_argument("--stage", choices=STAGES, help="default: all three, in this order")
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
    except EXPECTED_ERRORS as error:
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
    """Tune, train the chosen settings, show the table.

    A task whose data set is missing is skipped; if all are, that is an error.
    """

    @cache
    def load(dataset: str, scaling: Scaling) -> Data:
        return scaled(DATASETS[dataset][1](data_dir), scaling)

    missing: dict[str, FileNotFoundError] = {}
    for task in tasks:
        try:
            if task in study.follows and study.follows[task].task in missing:
                raise missing[study.follows[task].task]
            if "tune" in stages:
                train_all(tries(study, task, arms, count), load, out, console, device)
            if "final" in stages:
                train_all(finals(study, read(out), task, arms), load, out, console, device)
        except FileNotFoundError as error:
            missing[task] = error
            console.print(
                f"{task} is skipped: {error}", markup=False, highlight=False, soft_wrap=True
            )
    if missing and len(missing) == len(tasks):
        raise next(iter(missing.values()))
    if "table" in stages:
        show(study, out, console)


def with_options(study: Study, options: ReproduceOptions) -> Study:
    """Return the study with the seeds of `options`; quick: a tenth of an epoch, one seed."""
    tasks = {
        name: {**task, "epochs": 0.1} if options.quick else task
        for name, task in study.tasks.items()
    }
    return replace(
        study,
        tasks=tasks,
        seeds=options.seeds(study.seeds),
        seeds_of={task: options.seeds(seeds) for task, seeds in study.seeds_of.items()},
        published={} if options.quick else study.published,
    )


def reproduce_study(study: Study, options: ReproduceOptions) -> None:
    """Run the whole study; quick: one try per arm."""
    study = with_options(study, options)
    execute(
        study,
        [*study.tasks],
        study.arms,
        options.out / ("quick.jsonl" if options.quick else "results.jsonl"),
        options.data_dir,
        options.console,
        count=1 if options.quick else None,
        device=options.device,
    )
