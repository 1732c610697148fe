"""The report of a training run: one HTML file from what the run left in its folder."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpkfc.errors import PrivacyError
from dpkfc.plan import Plan
from dpkfc.report.page import Facts, Grid, Picture, Section, Text, page, picture

NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished run."""
    result, config = _read(folder / "result.json"), _read(folder / "config.json")
    plan = Plan.from_json(_read(folder / "plan.json"))
    sections = [
        Section("Privacy, in plain words", [Text(in_plain_words(result["epsilon"], result["delta"]))]),
        Section("The guarantee", [Facts(plan.statement())]),
        Section("What the model can do", _accuracy(result["test"])),
        Section("How the budget was spent", _spending(folder / "metrics.jsonl", plan)),
        Section("Settings, and why", [Grid(["what", "value", "why"], result["recipe"])]),
        Section("The geometry, layer by layer", _geometry(folder)),
        Section("The data", [Text(result["remarks"] or ["Nothing to remark."])]),
        Section("To repeat it", [Facts(_flat(config))]),
    ]
    lead = f"{result['model']}, {result['parameters']:,} parameters, {result['records']:,} records, {_budget(result)}"
    file = folder / NAME
    file.write_text(page(f"Private training: {folder.name}", lead, [s for s in sections if s.parts]), encoding="utf-8")
    return file


def in_plain_words(epsilon: float, delta: float) -> list[str]:
    """What epsilon means to a person who does not know it.

    For any guess about a person with prior odds o, the odds after seeing the model are at most e^ε o, but for a
    probability of δ.

    >>> in_plain_words(math.log(2.995), 1e-5)[1].split(":")[0]
    'Whatever somebody knows already, seeing the model changes the odds of any guess about one record at most 3.00-fold'
    """
    if not math.isfinite(epsilon):
        return ["This run is NOT private: what it released is not covered by any guarantee."]
    odds = math.ceil(100 * math.exp(epsilon)) / 100  # rounded up: what is printed is still a bound
    even = math.ceil(100 * odds / (1 + odds))
    return [
        "The model was trained so that it would have come out nearly the same if any one record had been left out.",
        f"Whatever somebody knows already, seeing the model changes the odds of any guess about one record at most "
        f"{odds:.2f}-fold: an even guess whether a certain record was used is right at most {even} % of "
        f"the time (epsilon = {epsilon:.3g}), but for a chance of {delta:.1g} (delta) that the promise fails.",
        "It protects one record at a time: people with several records, and what many records share, are not hidden.",
    ]


def _accuracy(test: dict[str, Any] | None) -> list[Text | Facts]:
    if test is None:
        return [Text(["There were no test records."])]
    low, high = wilson(test["accuracy"], test["records"])
    rows = [
        ("accuracy", f"{100 * test['accuracy']:.2f} % of {test['records']:,} test records"),
        ("uncertainty", f"{100 * low:.1f} to {100 * high:.1f} % (95 % interval, from the number of test records)"),
        ("note", test["note"]),
    ]
    return [Facts(rows)]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of `count` trials.

    >>> [round(bound, 3) for bound in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _spending(metrics: Path, plan: Plan) -> list[Text | Picture]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not rows or not find_spec("matplotlib"):
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.plot([0, *(row["step"] for row in rows)], [0, *(row["epsilon"] for row in rows)], "-o", markersize=3)
    if plan.target_epsilon is not None:
        axes.axhline(plan.target_epsilon, color="tab:red", linestyle="--", linewidth=1, label="the budget")
        axes.legend()
    axes.set(xlabel="step", ylabel="epsilon", ylim=(0, None))
    axes.grid(alpha=0.3)
    caption = "Epsilon is known before the run; the training loss is not shown, since it would not be private."
    return [picture(figure, "epsilon over the steps of the run", caption)]


def _geometry(folder: Path) -> list[Text | Picture]:
    file = folder / "geometry.png"
    if not file.exists():
        return []
    caption = "Public: from probes and the released weights."
    return [Picture(file.read_bytes(), "spectra and condition of every layer's map", caption)]


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines."""
    rows: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return rows


def _budget(result: dict[str, Any]) -> str:
    return f"epsilon {result['epsilon']:.3g} at delta {result['delta']:.1g}"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise PrivacyError(f"{file} is missing: a report needs the folder of a finished run of `dpkfc train`") from None
    except ValueError as problem:
        raise PrivacyError(f"{file} is damaged ({problem}): restore it, or train again") from problem
    return found
