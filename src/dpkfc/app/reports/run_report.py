"""The report of a training run: one HTML file from the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from dpkfc.accounting.rounding import round_up
from dpkfc.app.reports.experiment_report import is_experiment, title_of, write_experiment_report
from dpkfc.app.reports.page import Facts, Grid, Picture, Section, Text, flat, picture, write_page
from dpkfc.app.reports.recompute import Spent, recompute
from dpkfc.app.reports.run_figures import read_figures
from dpkfc.app.reports.statements import in_plain_words, lost_steps, not_charged, wilson
from dpkfc.planning.plan import Plan

FILES = ("result.json", "config.json", "plan.json")
MAJORITY = "always predicting the most frequent class"


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished run, or of an experiment."""
    if folder.is_file():
        raise NotADirectoryError(
            f"{folder} is a file: give the folder of `dpkfc train`, `dpkfc tune` or `dpkfc "
            "reproduce`"
        )
    if not any((folder / name).exists() for name in FILES) and is_experiment(folder):
        return write_experiment_report(folder, title_of(folder))
    return write_run_report(folder)


def write_run_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished run."""
    result, config, plan, spent = _read_run(folder)
    uncovered = not_charged(result, config["settings"], plan.unchecked)
    settings = Grid(["setting", "value", "reason"], result["recipe"])
    sections = [
        Section(
            "Privacy, in plain words",
            [Text([*spent.remarks, *in_plain_words(spent.epsilon, spent.delta)])],
        ),
        Section("The guarantee", [Facts(plan.statement())]),
        Section("What was not charged", [Text(uncovered)]),
        Section("What the model can do", _accuracy(result["test"])),
        Section(
            "How the budget was spent", [*_lost(result), *_spending(folder / "metrics.jsonl", plan)]
        ),
        Section("Settings, and why", [settings, *_selection(result)]),
        Section("The geometry, layer by layer", read_figures(folder, "geometry.png")),
        Section("A step, seen on probes", read_figures(folder, "snr.png", "clipping.png")),
        Section("The data", [Text(result["remarks"] or ["No remarks."])]),
        Section("To repeat it", [Facts(flat(config))]),
    ]
    lead = (
        f"{result['model']}, {result['parameters']:,} parameters, {result['records']:,} records, "
        f"epsilon {round_up(spent.epsilon)} at delta {spent.delta:.1g}"
    )
    title = f"Private training: {folder.resolve().name}"
    return write_page(folder, title, lead, [section for section in sections if section.parts])


def result_table(folder: Path, report: Path) -> Table:
    """The result of a finished run, for the terminal."""
    result, _, _, spent = _read_run(folder)
    table = Table(title=str(folder), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row(
        "epsilon spent",
        f"{round_up(spent.epsilon)} at delta = {spent.delta:.3g}, add or remove one record",
    )
    for remark in spent.remarks:
        table.add_row("warning", remark)
    table.add_row(
        "model", f"{result['model']}, {result['parameters']:,} parameters, {result['geometry']}"
    )
    table.add_row(
        "steps",
        f"{result['steps']:,}, with {result['batch_size']:,} of {result['records']:,} records "
        "expected in each",
    )
    if lost := result.get("lost_steps", 0):
        table.add_row("lost", lost_steps(lost))
    table.add_row("noise", f"{result['noise']}, multiplier {result['noise_multiplier']:.4g}")
    table.add_row("learning rate", f"{result['lr']:.3g}")
    for name, value in _chosen(result.get("selection")):
        table.add_row(name, value)
    test = result["test"]
    if test is not None:
        low, high = wilson(test["accuracy"], test["records"])
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        accuracy = f"{test['accuracy']:.2%} of {test['records']:,} records ({interval})"
        table.add_row("test accuracy", f"{accuracy}; {test['note']}")
        if "majority" in test:  # missing in older runs
            table.add_row(
                "for comparison", f"{test['majority']:.2%} by {MAJORITY}, on the same records"
            )
    table.add_row("weights", str(folder / "model.safetensors"))
    table.add_row("report", str(report))
    return table


def _read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Plan, Spent]:
    """result.json, config.json, the plan, and the recomputed cost."""
    result, config, fields = (_read(folder / name) for name in FILES)
    plan = Plan.from_json(fields)
    return result, config, plan, recompute(folder, result, config, plan)


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} is missing: a report needs the folder of a finished run of `dpkfc train`, or "
            "of `dpkfc reproduce`"
        ) from None
    except ValueError as problem:
        raise ValueError(f"{file} is damaged ({problem}): restore it, or train again") from problem
    return content


def _accuracy(test: dict[str, Any] | None) -> list[Text | Facts]:
    if test is None:
        return [Text(["There were no test records."])]
    low, high = wilson(test["accuracy"], test["records"])
    rows = [
        ("accuracy", f"{100 * test['accuracy']:.2f} % of {test['records']:,} test records"),
        (
            "uncertainty",
            f"{100 * low:.1f} to {100 * high:.1f} % (95 % interval, from the number of test "
            "records)",
        ),
    ]
    if "majority" in test:  # missing in older runs
        comparison = f"{100 * test['majority']:.2f} % by {MAJORITY}, on the same records"
        rows.append(("for comparison", comparison))
    return [Facts([*rows, ("note", test["note"])])]


def _lost(result: Mapping[str, Any]) -> list[Text]:
    lost = result.get("lost_steps", 0)  # missing in older runs
    return [Text([f"{lost_steps(lost)}."])] if lost else []


def _spending(metrics: Path, plan: Plan) -> list[Text | Picture]:
    """A figure of epsilon over the steps."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if not lines or not find_spec("matplotlib"):
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in lines]
    steps = [0, *(row["step"] for row in rows)]
    epsilons = [0, *(row["epsilon"] for row in rows)]
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.plot(steps, epsilons, "-o", markersize=3)
    if plan.target_epsilon is not None:
        axes.axhline(
            plan.target_epsilon, color="tab:red", linestyle="--", linewidth=1, label="the budget"
        )
        axes.legend()
    axes.set(xlabel="step", ylabel="epsilon", ylim=(0, None))
    axes.grid(alpha=0.3)
    caption = (
        "Epsilon is known before the run. The training loss is not shown: it would not be private."
    )
    return [picture(figure, "epsilon over the steps of the run", caption)]


def _selection(result: Mapping[str, Any]) -> list[Facts]:
    chosen = _chosen(result.get("selection"))
    return [Facts(chosen)] if chosen else []


def _chosen(selection: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The settings that a private tuning chose, and their score."""
    if selection is None:
        return []
    settings = ", ".join(f"{name} {value:.3g}" for name, value in selection["settings"].items())
    return [("chosen", settings), ("score", selection["score"])]
