"""The report of a training run: one HTML file from what the run left in its folder."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED, Unchecked
from dpkfc.app.reports.experiment_report import is_experiment, title_of, write_experiment_report
from dpkfc.app.reports.page import Facts, Grid, Picture, Section, Text, flat, picture, write_page
from dpkfc.app.reports.recompute import Spent, recompute
from dpkfc.diagnostics import clip_effect, layer_snr
from dpkfc.diagnostics.passes import watched
from dpkfc.diagnostics.result import is_public
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.geometry.kfc import KFC
from dpkfc.planning.plan import Plan
from dpkfc.probes.probe import Probe

FILES = ("result.json", "config.json", "plan.json")
BY_HAND = ("lr", "rho", "clip", "epochs", "batch_size")
MAJORITY = "always saying the most frequent class"
LARGE = 20.0  # epsilons above promise nothing: e^20 is half a billion
PROBES = 256  # that a step is looked at with
CAPTIONS = {  # what a picture shows to who cannot see it, and what is to be said of it
    "geometry.png": (
        "spectra and condition of every layer's map",
        "Public: from probes and the released weights.",
    ),
    "snr.png": (
        "signal to noise of one step, layer by layer",
        "Signal to noise of one step, layer by layer, at the run's clip and noise. Public: from synthetic probes with "
        "random labels and the released weights, so that the profile over the layers means something, the height not.",
    ),
    "clipping.png": (
        "lengths of the gradients of probes beside the clip, and the layers' shares",
        "Clipping of the same probes: how long their gradients are, and which layers take most of the length. Public.",
    ),
}


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished run, or of an experiment."""
    if folder.is_file():
        raise PrivacyError(
            f"{folder} is a file: give the folder of `dpkfc train`, `dpkfc tune` or `dpkfc reproduce`"
        )
    if not any((folder / name).exists() for name in FILES) and is_experiment(folder):
        return write_experiment_report(folder, title_of(folder))
    return write_run_report(folder)


def write_run_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished run."""
    result, config, fields = (_read(folder / name) for name in FILES)
    plan = Plan.from_json(fields)
    spent = recompute(folder, result, config, plan)
    sections = [
        Section(
            "Privacy, in plain words",
            [Text([*spent.remarks, *in_plain_words(spent.epsilon, spent.delta)])],
        ),
        Section("The guarantee", [Facts(plan.statement())]),
        Section(
            "What was not charged", [Text(not_charged(result, config["settings"], plan.unchecked))]
        ),
        Section("What the model can do", _accuracy(result["test"])),
        Section(
            "How the budget was spent", [*_lost(result), *_spending(folder / "metrics.jsonl", plan)]
        ),
        Section(
            "Settings, and why",
            [Grid(["what", "value", "why"], result["recipe"]), *_selection(result)],
        ),
        Section("The geometry, layer by layer", _pictures(folder, "geometry.png")),
        Section("A step, seen on probes", _pictures(folder, "snr.png", "clipping.png")),
        Section("The data", [Text(result["remarks"] or ["Nothing to remark."])]),
        Section("To repeat it", [Facts(flat(config))]),
    ]
    lead = f"{result['model']}, {result['parameters']:,} parameters, {result['records']:,} records, {_budget(spent)}"
    return write_page(
        folder, f"Private training: {folder.resolve().name}", lead, [s for s in sections if s.parts]
    )


def result_table(folder: Path, report: Path) -> Table:
    """What a finished run came to, for the terminal."""
    found, config, fields = (_read(folder / name) for name in FILES)
    spent = recompute(folder, found, config, Plan.from_json(fields))
    table = Table(title=str(folder), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row(
        "epsilon spent",
        f"{round_up(spent.epsilon)} at delta = {spent.delta:.3g}, add or remove one record",
    )
    for remark in spent.remarks:
        table.add_row("beware", remark)
    table.add_row(
        "model", f"{found['model']}, {found['parameters']:,} parameters, {found['geometry']}"
    )
    table.add_row(
        "steps",
        f"{found['steps']:,} of {found['batch_size']:,} expected records of {found['records']:,}",
    )
    if lost := found.get("lost_steps", 0):
        table.add_row("lost", lost_steps(lost))
    table.add_row("noise", f"{found['noise']}, multiplier {found['noise_multiplier']:.4g}")
    table.add_row("learning rate", f"{found['lr']:.3g}")
    for name, value in _chosen(found.get("selection")):
        table.add_row(name, value)
    test = found["test"]
    if test is not None:
        low, high = wilson(test["accuracy"], test["records"])
        shown = f"{test['accuracy']:.2%} of {test['records']:,} records (95 % interval {low:.1%} to {high:.1%})"
        table.add_row("test accuracy", f"{shown}; {test['note']}")
        if "majority" in test:  # older runs do not say
            table.add_row(
                "for comparison", f"{test['majority']:.2%} by {MAJORITY}, on the same records"
            )
    table.add_row("weights", str(folder / "model.safetensors"))
    table.add_row("report", str(report))
    return table


def draw_pictures(
    folder: Path, model: nn.Module, geometry: Geometry, probe: Probe, plan: Plan
) -> None:
    """The geometry's maps at these weights, and what a step of the run does to probes. No record has a part in them.

    For correlated noise, σ is that of the noise as it is drawn.
    """
    if not find_spec("matplotlib"):
        return
    if isinstance(geometry, KFC):
        fresh = copy.copy(geometry)  # a refresh replaces what it holds, and writes into none of it
        with watched(model) as (copied, capture):
            fresh.prepare(copied, capture)
            fresh.refresh(copied, capture, plan.steps)
        fresh.describe().plot(folder / "geometry.png")
    step: dict[str, Any] = {"clip": plan.clip, "geometry": geometry, "probes": PROBES}
    sigma = plan.noise_multiplier * plan.noise_sensitivity
    snr = layer_snr(model, probe, noise_multiplier=sigma, batch_size=plan.batch_size, **step)
    clipping = clip_effect(model, probe, **step)
    if is_public(snr.privacy) and is_public(clipping.privacy):
        clipping.plot(folder / "clipping.png")
        if len(snr.geometries["DP-SGD"]) > 1:  # one layer has no profile
            snr.plot(folder / "snr.png")


def not_charged(
    result: Mapping[str, Any], settings: Mapping[str, Any], unchecked: Sequence[Unchecked] = ()
) -> list[str]:
    """What epsilon does not cover, of this very run."""
    said = []
    if result.get("selection"):
        said.append("The choice of the best try is charged: epsilon covers the whole tuning.")
    if given := [name for name in BY_HAND if settings.get(name) is not None]:
        said.append(
            f"Settings were given by hand ({', '.join(given)}). If they were chosen by looking at these records, in "
            "earlier runs say, that choice is not charged here."
        )
    else:
        said.append(
            "No setting was given by hand; a recipe made them that looks at no record, so there is no charge."
        )
    count = (
        "The number of records"
        if settings.get("records") is None
        else "The number of records that was stated"
    )
    said.append(
        f"{count}, the shape of the inputs and the list of classes are taken as public. What was done with the records "
        "before, such as cleaning, or reading a schema off them, is not charged."
    )
    if result["test"]:
        said.append(
            "Accuracy on the test records is exact, and so is the share of their most frequent class: both numbers are "
            "released without a charge."
        )
    if settings.get("ledger"):
        said.append(
            f"The run is charged in the ledger {settings['ledger']}, as {settings['dataset']}."
        )
    else:
        said.append(
            "The run is in no ledger: what other runs on the same people cost is not added to its epsilon."
        )
    if settings.get("seed") is not None:
        said.append(
            "The noise comes from a seed, and whoever knows the seed can take the noise away."
        )
    told = {
        "ledger": True,
        "records": settings.get("records") is None,
        "seed": settings.get("seed") is not None,
    }
    said += [f"{NOT_CHECKED.get(what, what)}." for what in unchecked if not told.get(what)]
    return said


def in_plain_words(epsilon: float, delta: float) -> list[str]:
    """What epsilon means to a person who does not know it.

    For any guess about a person with prior odds o, the odds after seeing the model are at most e^ε o, but for a
    probability of δ.

    >>> in_plain_words(math.log(2.995), 1e-5)[1].split(":")[0]
    'Whatever somebody knows already, seeing the model changes the odds of any guess about one record at most 3.00-fold'
    """
    if not math.isfinite(epsilon):
        return ["This run is NOT private: what it released is not covered by any guarantee."]
    if epsilon > LARGE:
        return [
            f"So large an epsilon ({round_up(epsilon)}) promises nothing: whoever sees the model may be as good as "
            "certain whether a certain record was used. For a promise train with a smaller one, of 10 at most.",
        ]
    odds = math.ceil(100 * math.exp(epsilon)) / 100  # rounded up: what is printed is still a bound
    even = math.ceil(100 * odds / (1 + odds))
    return [
        "The model was trained so that it would have come out nearly the same if any one record had been left out.",
        f"Whatever somebody knows already, seeing the model changes the odds of any guess about one record at most "
        f"{odds:.2f}-fold: an even guess whether a certain record was used is right at most {even} % of "
        f"the time (epsilon = {round_up(epsilon)}), but for a chance of {delta:.1g} (delta) that the promise fails.",
        "It protects one record at a time: people with several records, and what many records share, are not hidden.",
    ]


def _accuracy(test: dict[str, Any] | None) -> list[Text | Facts]:
    if test is None:
        return [Text(["There were no test records."])]
    low, high = wilson(test["accuracy"], test["records"])
    rows = [
        ("accuracy", f"{100 * test['accuracy']:.2f} % of {test['records']:,} test records"),
        (
            "uncertainty",
            f"{100 * low:.1f} to {100 * high:.1f} % (95 % interval, from the number of test records)",
        ),
        ("note", test["note"]),
    ]
    if "majority" in test:  # older runs do not say
        rows.insert(
            2,
            (
                "for comparison",
                f"{100 * test['majority']:.2f} % by {MAJORITY}, on the same records",
            ),
        )
    return [Facts(rows)]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of `count` trials.

    >>> [round(bound, 3) for bound in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def lost_steps(count: int) -> str:
    """What is to be said of steps that were paid for in vain.

    >>> lost_steps(1)
    '1 step after the last checkpoint was charged, and the result was lost with the process: the charge stays'
    """
    what = (
        "1 step after the last checkpoint was"
        if count == 1
        else f"{count:,} steps after the last checkpoint were"
    )
    return f"{what} charged, and the result was lost with the process: the charge stays"


def _lost(result: Mapping[str, Any]) -> list[Text]:
    lost = result.get("lost_steps", 0)  # older runs do not say
    return [Text([f"{lost_steps(lost)}."])] if lost else []


def _spending(metrics: Path, plan: Plan) -> list[Text | Picture]:
    rows = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    if not rows or not find_spec("matplotlib"):
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.plot(
        [0, *(row["step"] for row in rows)],
        [0, *(row["epsilon"] for row in rows)],
        "-o",
        markersize=3,
    )
    if plan.target_epsilon is not None:
        axes.axhline(
            plan.target_epsilon, color="tab:red", linestyle="--", linewidth=1, label="the budget"
        )
        axes.legend()
    axes.set(xlabel="step", ylabel="epsilon", ylim=(0, None))
    axes.grid(alpha=0.3)
    caption = "Epsilon is known before the run; the training loss is not shown, since it would not be private."
    return [picture(figure, "epsilon over the steps of the run", caption)]


def _pictures(folder: Path, *names: str) -> list[Picture]:
    return [
        Picture((folder / name).read_bytes(), *CAPTIONS[name])
        for name in names
        if (folder / name).exists()
    ]


def _selection(result: Mapping[str, Any]) -> list[Facts]:
    found = _chosen(result.get("selection"))
    return [Facts(found)] if found else []


def _chosen(selection: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What a private tuning chose, and by what."""
    if selection is None:
        return []
    settings = ", ".join(f"{name} {value:.3g}" for name, value in selection["settings"].items())
    return [("chosen", settings), ("score", selection["score"])]


def _budget(spent: Spent) -> str:
    return f"epsilon {round_up(spent.epsilon)} at delta {spent.delta:.1g}"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise PrivacyError(
            f"{file} is missing: a report needs the folder of a finished run of `dpkfc train`, or of `dpkfc reproduce`"
        ) from None
    except ValueError as problem:
        raise PrivacyError(
            f"{file} is damaged ({problem}): restore it, or train again"
        ) from problem
    return found
