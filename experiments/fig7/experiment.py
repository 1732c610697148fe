"""Figure 7: the spectrum of the Hessian itself on private, public and synthetic inputs: `dpkfc reproduce fig7`.

Stochastic Lanczos quadrature estimates the density of eigenvalues. Sorted by magnitude they are compared with those of
the oracle as in `spectra`: by a scale, and by the distance in decades that is left once the scale is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from experiments.common.figures import (
    Claim,
    OnStep,
    about_runs,
    along,
    can_draw,
    claim_table,
    draw_range,
    evaluate,
    spread,
    text_table,
    write_page,
)
from experiments.common.options import ReproduceOptions
from experiments.common.setting import accuracy
from experiments.common.sources import (
    ABOUT,
    MATCHED,
    MISMATCHED,
    MODELS,
    ORACLE,
    OTHERS,
    RATES,
    SEEDS,
    STANDARDISED,
    STYLES,
    SYNTHETIC,
    WHITE,
    Run,
    Task,
    fresh,
    load,
    through_training,
)
from experiments.fig2.experiment import CLOSE, MARGINAL, STATES, distance, logarithms
from torch import nn

import dpkfc
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.diagnostics import Quadrature, hessian_density
from dpkfc.planning.plan import Plan

IMAGES, STEPS, LANCZOS, VECTORS = 256, 200, 24, 1
QUICK_IMAGES, QUICK_STEPS, QUICK_LANCZOS = 32, 3, 4
POINTS = 96  # ranks at which magnitudes are compared and drawn
DECADES = 3.0  # few steps of Lanczos say little of eigenvalues below 1e-3 of the largest
COMPARED = (OTHERS, MATCHED, MISMATCHED, SYNTHETIC, WHITE)
TITLE = "Eigenvalues of the Hessian on private, public and synthetic inputs (Figure 7)"
REMARK = (
    "The Hessian of the mean loss, all weights together. Sorted magnitudes beside those of the oracle: shape is their "
    "mean distance in decades with the scale taken out, scale the factor that was taken out, largest the ratio of the "
    "largest eigenvalues. Ranks are evenly spread on a logarithmic axis, and eigenvalues below 1e-3 of the largest, of "
    "which few steps of Lanczos say little, do not count. Inputs are standardised."
)


@dataclass(frozen=True)
class Setting:
    """One model, one seed."""

    run: Run
    inputs: str
    images: int  # of each source
    lanczos: int  # steps
    vectors: int
    sources: tuple[str, ...] = (ORACLE, *COMPARED)


@dataclass(frozen=True)
class Beside:
    """One source beside the oracle, a number for each seed."""

    shape: list[float]
    scale: list[float]
    largest: list[float]


Found = Mapping[Setting, Any]
Compared = dict[tuple[str, str, str], Beside]  # by model, state, source


def run(order: ReproduceOptions) -> None:
    """Print the tables; write density.json, density.md and density.png."""
    out, quick, console = order.out, order.quick, order.console
    task = load(order.data_dir)[STANDARDISED]
    images, steps, lanczos = (
        (QUICK_IMAGES, QUICK_STEPS, QUICK_LANCZOS) if quick else (IMAGES, STEPS, LANCZOS)
    )
    settings = [
        Setting(Run(model, seed, rate, (0, steps)), STANDARDISED, images, lanczos, VECTORS)
        for model, rate in RATES.items()
        for seed in order.seeds(SEEDS)
    ]
    found = evaluate(
        settings,
        lambda setting, on_step: measure(setting, task, on_step, order.device),
        out / "density.json",
        console,
    )
    compared = compare(found)
    claims = {"measured": check(compared)}
    console.print(text_table("Hessians beside that of the oracle", *cells(compared), left=3))
    console.print(claim_table(claims))
    command = order.command("fig7")
    method = f"Lanczos: {lanczos} steps from {VECTORS} random vector for each seed."
    rest = ["![sorted magnitudes](density.png)", markdown_table(*cells(compared), left=3)]
    write_page(
        out / "density.md",
        TITLE,
        command,
        [*ABOUT, about_runs(found), f"{REMARK} {method}"],
        claims,
        rest,
    )
    if can_draw(console):
        plot(found, out / "density.png")


def measure(setting: Setting, task: Task, on_step: OnStep, device: str = "cpu") -> dict[str, Any]:
    """The quadrature of every source at the initial weights and after training."""
    sources = {name: task.sources[name] for name in setting.sources}

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        density = hessian_density(
            model,
            sources,
            steps=setting.lanczos,
            vectors=setting.vectors,
            probes=setting.images,
            seed=setting.run.seed,
        )
        return {
            "accuracy": accuracy(model, *task.test.tensors),
            "quadratures": {name: _rounded(one) for name, one in density.sources.items()},
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return through_training(
        setting.run, fresh(setting.run, device), task.records, geometry, look, on_step
    )


def _rounded(one: Quadrature) -> dict[str, Any]:
    return {
        name: [float(f"{x:.6g}") for x in getattr(one, name)] for name in ("nodes", "weights")
    } | {"size": one.size}


def magnitudes(one: Mapping[str, Any]) -> tuple[Sequence[int], list[float]]:
    """Ranks, and log10 of the eigenvalues there by magnitude."""
    ranks, sizes = Quadrature(tuple(one["nodes"]), tuple(one["weights"]), one["size"]).magnitudes(
        POINTS
    )
    return ranks, logarithms(sizes)


def compare(found: Found) -> Compared:
    compared: Compared = {}
    for setting, looks in found.items():
        for state, look in zip(STATES, looks.values(), strict=True):
            logs = {name: magnitudes(one)[1] for name, one in look["quadratures"].items()}
            for name in COMPARED:
                shape, scale = distance(logs[ORACLE], logs[name], DECADES)
                beside = compared.setdefault((setting.run.model, state, name), Beside([], [], []))
                beside.shape.append(shape)
                beside.scale.append(scale)
                beside.largest.append(10 ** (logs[name][0] - logs[ORACLE][0]))
    return compared


def check(compared: Compared) -> list[Claim]:
    places = [(model, state) for model, state, name in compared if name == SYNTHETIC]
    shapes = {name: [fmean(compared[*place, name].shape) for place in places] for name in COMPARED}
    public = [
        abs(x - y)
        for name in (MATCHED, MISMATCHED)
        for x, y in zip(shapes[name], shapes[SYNTHETIC], strict=True)
    ]
    white = [abs(x - y) for x, y in zip(shapes[WHITE], shapes[SYNTHETIC], strict=True)]
    largest = [_middle(compared[*place, SYNTHETIC].largest) for place in places]
    scales = [
        _middle(compared[*place, SYNTHETIC].scale) for place in places if place[1] == STATES[1]
    ]
    shown = partial(along, places)
    return [
        Claim(
            "“The Synthetic DP-KFC estimator … tracks the decay profile of the Oracle spectrum … across all "
            "architectures”",
            f"shape within {CLOSE} decades (a factor of 2), before and after training",
            f"{shown(shapes[SYNTHETIC])}; other private images, for comparison: {shown(shapes[OTHERS])}",
            [shape <= CLOSE for shape in shapes[SYNTHETIC]],
        ),
        Claim(
            "“Public data sources … show similar alignment”",
            f"shapes of both public sources within {MARGINAL} decades of that of synthetic",
            f"matched: {shown(shapes[MATCHED])}; mismatched: {shown(shapes[MISMATCHED])}",
            [x <= MARGINAL for x in public],
        ),
        Claim(
            "“the support of the noise-estimated spectrum matches the true private spectrum across different "
            "architectures”",
            "largest eigenvalue by magnitude within a factor of 2 of the oracle's",
            shown(largest, ".2g"),
            list(map(_alike, largest)),
        ),
        Claim(
            "“network structure primarily determines the eigenvalue distribution”",
            f"then inputs without any structure do as well: white noise within {MARGINAL} decades of pink noise",
            f"apart by up to {max(white):.2f}",
            [x <= MARGINAL for x in white],
        ),
        Claim(
            "“the scale alignment, which is what the clipping norm relies on, remains accurate throughout (Figs. 3, "
            "7)”",
            "scale of synthetic within a factor of 2 of the oracle's after training",
            f"× {min(scales):.2g} to × {max(scales):.2g}",
            list(map(_alike, scales)),
        ),
    ]


def _alike(ratio: float) -> bool:
    return 0.5 <= ratio <= 2


def _middle(values: Sequence[float]) -> float:
    return float(np.exp(np.log(values).mean()))


def cells(compared: Compared) -> tuple[list[str], list[list[str]]]:
    rows = [
        [*place, spread(one.shape), f"× {_middle(one.scale):.2g}", f"× {_middle(one.largest):.2g}"]
        for place, one in compared.items()
    ]
    return ["model", "weights", "source", "shape", "scale", "largest"], rows


def plot(found: Found, file: Path) -> None:
    """A column a model; before training above, after it below. The geometric mean over the seeds, and their range."""
    models = [model for model in MODELS if any(setting.run.model == model for setting in found)]
    figure, panels = new_figure(2, len(models), 3.7 * len(models), 7)
    for column, model in enumerate(models):
        chosen = [
            list(looks.values()) for setting, looks in found.items() if setting.run.model == model
        ]
        for row, state in enumerate(STATES):
            panel = panels[row][column]
            for source in (ORACLE, *COMPARED):
                ranks, _ = magnitudes(chosen[0][row]["quadratures"][source])
                logs = [magnitudes(looks[row]["quadratures"][source])[1] for looks in chosen]
                draw_range(panel, ranks, logs, source, STYLES[source])
            panel.set_title(f"{model}, {state}", fontsize=10)
            if row:
                panel.set_xlabel("rank")
            if not column:
                panel.set_ylabel("|eigenvalue| of the Hessian")
    finish(figure, panels[0][0], file, columns=6)
