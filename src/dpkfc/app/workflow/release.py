"""The end of a run: write the weights, the result and the figures, and show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from dpkfc.app.models.default import Built
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.reports.run_figures import draw_figures
from dpkfc.app.reports.run_report import result_table, write_report
from dpkfc.app.workflow.evaluation import count_correct
from dpkfc.app.workflow.preparation import model_inputs
from dpkfc.app.workflow.run_folder import write_json, write_whole
from dpkfc.app.workflow.settings import Settings
from dpkfc.errors import PrivacyError
from dpkfc.planning.plan import Plan
from dpkfc.planning.recipe import Recipe

TEST_NOTE = "epsilon does not protect the test records: this is their exact accuracy"


@dataclass(frozen=True)
class Trained:
    """The model to release, whose weights epsilon covers, and how it was trained."""

    model: nn.Module
    plan: Plan
    recipe: Recipe
    epsilon: float
    steps: int
    lost_steps: int = 0  # charged too, but killed before a checkpoint had them
    run_id: str | None = None  # in the ledger


def release(
    loaded: Loaded,
    built: Built,
    settings: Settings,
    trained: Trained,
    out: Path,
    console: Console,
    selection: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights, result.json with the test accuracy, and the figures of the report.

    After an interruption it can be repeated.
    """
    plan = trained.plan
    steps = _keep_weights(trained.model, trained.steps, plan.steps, out / "model.safetensors")
    result = {
        "epsilon": trained.epsilon,
        "delta": plan.delta,
        "steps": steps,
        "lost_steps": trained.lost_steps - (steps - trained.steps),
        "run": trained.run_id,
        "records": plan.records,
        "batch_size": plan.batch_size,
        "noise_multiplier": plan.noise_multiplier,
        "noise": plan.noise,
        "geometry": plan.geometry,
        "lr": trained.recipe.lr,
        "model": built.name,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "recipe": [list(row) for row in trained.recipe.reasons],
        "remarks": list(loaded.all_remarks(settings.records)),
        "selection": None if selection is None else dict(selection),
        "test": _test(loaded, built, settings, trained.model, console),
    }
    write_json(out / "result.json", result)
    try:
        with console.status("drawing the figures of the report"):
            geometry = trained.recipe.arguments["geometry"]
            draw_figures(out, trained.model, geometry, built.probe, plan)
    except (PrivacyError, ValueError) as problem:
        # The model may have diverged, say. The run is paid for, and these are only figures.
        console.print(
            f"the report has no figures of probes: {problem}", markup=False, soft_wrap=True
        )


def finish(run_directory: Path, console: Console | None = None) -> None:
    """Write the report of a finished run, and show its result."""
    (console or Console()).print(result_table(run_directory, write_report(run_directory)))


def _test(
    loaded: Loaded, built: Built, settings: Settings, model: nn.Module, console: Console
) -> dict[str, Any] | None:
    """The test accuracy, and that of always predicting the most frequent class."""
    if loaded.test is None:
        return None
    data = model_inputs(loaded.test, built, console, "test records")
    correct = count_correct(model, data, settings.device, settings.physical_batch_size)
    most_frequent = int(data.tensors[1].bincount().max())
    return {
        "accuracy": correct / len(data),
        "majority": most_frequent / len(data),
        "records": len(data),
        "note": TEST_NOTE,
    }


def _keep_weights(model: nn.Module, steps: int, planned: int, file: Path) -> int:
    """Write the weights after `steps` steps, and return the number of steps of the kept weights.

    If the file has weights after more steps, which were paid for, these are kept and read instead.
    """
    if file.exists():
        try:
            with safe_open(str(file), "pt") as weights:
                # The file is written only at the end of a run: without metadata, all steps count.
                written = int((weights.metadata() or {}).get("steps", planned))
        except (SafetensorError, ValueError) as problem:
            raise ValueError(
                f"{file} cannot be read ({problem}): move it away, and repeat the command"
            ) from problem
        if written > steps:
            load_model(model, str(file))
            return written
    write_whole(file, lambda fresh: save_model(model, str(fresh), metadata={"steps": str(steps)}))
    return steps
