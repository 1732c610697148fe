"""The spectrum of the Hessian on private, public and synthetic inputs.

Stochastic Lanczos quadrature estimates the density of eigenvalues. Sorted by magnitude, they are
compared with those of the oracle as in `experiments.fig2`: by a scale, and by the distance in
decades that remains after removing the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from torch import nn

import dpkfc
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.diagnostics import Quadrature, hessian_density
from dpkfc.planning.plan import Plan
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
    DiagnosticTask,
    TrainingRun,
    initial_model,
    load,
    observe_training,
)
from experiments.fig2.experiment import CLOSE, MARGINAL, STATES, distance, logarithms

IMAGES = 256
STEPS = 200
LANCZOS = 24
VECTORS = 1
QUICK_IMAGES = 32
QUICK_STEPS = 3
QUICK_LANCZOS = 4
POINTS = 96  # ranks at which magnitudes are compared and drawn
DECADES = 3.0  # few Lanczos steps do not resolve eigenvalues below 1e-3 of the largest
COMPARED = (OTHERS, MATCHED, MISMATCHED, SYNTHETIC, WHITE)
TITLE = "Eigenvalues of the Hessian on private, public and synthetic inputs (Figure 7)"
REMARK = (
    "The Hessian of the mean loss, with respect to all weights. Sorted magnitudes are compared "
    "with those of the oracle: shape is their mean distance in decades after removing the scale, "
    "scale the common factor that was removed, largest the ratio of the largest eigenvalues. Ranks "
    "are evenly spread on a logarithmic axis, and eigenvalues below 1e-3 of the largest, which few "
    "Lanczos steps do not resolve, are not compared. Inputs are standardised."
)


@dataclass(frozen=True)
class DensitySetting:
    """One model, one seed: `images` per source, `lanczos` steps from each of `vectors` vectors."""

    run: TrainingRun
    inputs: str
    images: int
    lanczos: int
    vectors: int
    sources: tuple[str, ...] = (ORACLE, *COMPARED)


@dataclass(frozen=True)
class SpectrumComparison:
    """A source compared with the oracle, one number per seed."""

    shape: list[float]
    scale: list[float]
    largest: list[float]


Results = Mapping[DensitySetting, Any]
Comparisons = dict[tuple[str, str, str], SpectrumComparison]  # by model, state, source


def reproduce(options: ReproduceOptions) -> None:
    """Print the tables; write density.json, density.md and density.png."""
    out = options.out
    console = options.console
    task = load(options.data_dir)[STANDARDISED]
    images, steps, lanczos = (
        (QUICK_IMAGES, QUICK_STEPS, QUICK_LANCZOS) if options.quick else (IMAGES, STEPS, LANCZOS)
    )
    settings = [
        DensitySetting(
            TrainingRun(model, seed, rate, (0, steps)), STANDARDISED, images, lanczos, VECTORS
        )
        for model, rate in RATES.items()
        for seed in options.seeds(SEEDS)
    ]
    results = evaluate(
        settings,
        lambda setting, on_step: measure(setting, task, on_step, options.device),
        out / "density.json",
        console,
    )
    comparisons = compare(results)
    claims = {"measured": check(comparisons)}
    console.print(text_table("Hessians compared with the oracle's", *cells(comparisons), left=3))
    console.print(claim_table(claims))
    method = f"Lanczos: {lanczos} steps from {VECTORS} random vector per seed."
    write_page(
        out / "density.md",
        TITLE,
        options.command("fig7"),
        [*ABOUT, about_runs(results), f"{REMARK} {method}"],
        claims,
        ["![sorted magnitudes](density.png)", markdown_table(*cells(comparisons), left=3)],
    )
    if can_draw(console):
        plot(results, out / "density.png")


def measure(
    setting: DensitySetting, task: DiagnosticTask, on_step: OnStep, device: str = "cpu"
) -> dict[str, Any]:
    """Measure the quadrature of every source at the initial weights and after training."""
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
            "quadratures": {
                name: _rounded(quadrature) for name, quadrature in density.sources.items()
            },
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return observe_training(
        setting.run, initial_model(setting.run, device), task.records, geometry, look, on_step
    )


def _rounded(quadrature: Quadrature) -> dict[str, Any]:
    """Return the contents of a quadrature with six significant digits."""
    return {
        name: [float(f"{x:.6g}") for x in getattr(quadrature, name)]
        for name in ("nodes", "weights")
    } | {"size": quadrature.size}


def magnitudes(recorded: Mapping[str, Any]) -> tuple[Sequence[int], list[float]]:
    """Return ranks, and log10 of the magnitudes of the eigenvalues there."""
    quadrature = Quadrature(tuple(recorded["nodes"]), tuple(recorded["weights"]), recorded["size"])
    ranks, sizes = quadrature.magnitudes(POINTS)
    return ranks, logarithms(sizes)


def compare(results: Results) -> Comparisons:
    """Compare every source with the oracle."""
    comparisons: Comparisons = {}
    for setting, looks in results.items():
        for state, look in zip(STATES, looks.values(), strict=True):
            logs = {name: magnitudes(recorded)[1] for name, recorded in look["quadratures"].items()}
            for name in COMPARED:
                shape, scale = distance(logs[ORACLE], logs[name], DECADES)
                comparison = comparisons.setdefault(
                    (setting.run.model, state, name), SpectrumComparison([], [], [])
                )
                comparison.shape.append(shape)
                comparison.scale.append(scale)
                comparison.largest.append(10 ** (logs[name][0] - logs[ORACLE][0]))
    return comparisons


def check(comparisons: Comparisons) -> list[Claim]:
    """Check the statements of the paper about Figure 7."""
    places = [(model, state) for model, state, name in comparisons if name == SYNTHETIC]
    shapes = {
        name: [fmean(comparisons[*place, name].shape) for place in places] for name in COMPARED
    }
    public = [
        abs(x - y)
        for name in (MATCHED, MISMATCHED)
        for x, y in zip(shapes[name], shapes[SYNTHETIC], strict=True)
    ]
    white = [abs(x - y) for x, y in zip(shapes[WHITE], shapes[SYNTHETIC], strict=True)]
    largest = [_geometric_mean(comparisons[*place, SYNTHETIC].largest) for place in places]
    scales = [
        _geometric_mean(comparisons[*place, SYNTHETIC].scale)
        for place in places
        if place[1] == STATES[1]
    ]
    shown = partial(along, places)
    return [
        Claim(
            "“The Synthetic DP-KFC estimator … tracks the decay profile of the Oracle spectrum … "
            "across all architectures”",
            f"shape within {CLOSE} decades (a factor of 2), before and after training",
            f"{shown(shapes[SYNTHETIC])}; other private images, for comparison: "
            f"{shown(shapes[OTHERS])}",
            [shape <= CLOSE for shape in shapes[SYNTHETIC]],
        ),
        Claim(
            "“Public data sources … show similar alignment”",
            f"shapes of both public sources within {MARGINAL} decades of that of synthetic",
            f"matched: {shown(shapes[MATCHED])}; mismatched: {shown(shapes[MISMATCHED])}",
            [x <= MARGINAL for x in public],
        ),
        Claim(
            "“the support of the noise-estimated spectrum matches the true private spectrum "
            "across different architectures”",
            "largest eigenvalue by magnitude within a factor of 2 of the oracle's",
            shown(largest, ".2g"),
            list(map(_within_factor_2, largest)),
        ),
        Claim(
            "“network structure primarily determines the eigenvalue distribution”",
            f"then inputs without any structure do as well: white noise within {MARGINAL} decades "
            "of pink noise",
            f"apart by up to {max(white):.2f}",
            [x <= MARGINAL for x in white],
        ),
        Claim(
            "“the scale alignment, which is what the clipping norm relies on, remains accurate "
            "throughout (Figs. 3, 7)”",
            "scale of synthetic within a factor of 2 of the oracle's after training",
            f"× {min(scales):.2g} to × {max(scales):.2g}",
            list(map(_within_factor_2, scales)),
        ),
    ]


def _within_factor_2(ratio: float) -> bool:
    return 0.5 <= ratio <= 2


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.log(values).mean()))


def cells(comparisons: Comparisons) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: one row per model, state and source."""
    rows = [
        [
            *place,
            spread(comparison.shape),
            f"× {_geometric_mean(comparison.scale):.2g}",
            f"× {_geometric_mean(comparison.largest):.2g}",
        ]
        for place, comparison in comparisons.items()
    ]
    return ["model", "weights", "source", "shape", "scale", "largest"], rows


def plot(results: Results, file: Path) -> None:
    """Draw one column per model, before training (top) and after it (bottom).

    Lines are geometric means over the seeds, bands their range.
    """
    models = [model for model in MODELS if any(setting.run.model == model for setting in results)]
    figure, panels = new_figure(2, len(models), 3.7 * len(models), 7)
    for column, model in enumerate(models):
        chosen = [
            list(looks.values()) for setting, looks in results.items() if setting.run.model == model
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
