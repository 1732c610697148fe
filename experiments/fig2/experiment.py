"""Eigenvalues of ``A ⊗ G`` from private, public and synthetic inputs.

Two numbers describe the distance of a spectrum λ̂ from that of the oracle, λ*. With
``g_k = log10(λ̂_k / λ*_k)`` at ranks k that are evenly spread on a logarithmic axis,

    scale = 10^mean(g)              the common factor of all eigenvalues
    shape = mean |g - mean(g)|      the remaining distance of the curves, in decades

over the ranks with ``λ*_k ≥ 1e-6 λ*_1``. The shape is 0 where spectra are proportional, which is
what Theorem F.2 predicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

import dpkfc
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.diagnostics import kronecker_spectrum
from dpkfc.planning.plan import Plan
from experiments.common.figures import (
    Claim,
    OnStep,
    about_runs,
    along,
    by_inputs,
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
    COMPARED,
    INPUTS,
    LAYERS,
    MATCHED,
    MISMATCHED,
    ORACLE,
    RATES,
    SEEDS,
    STYLES,
    SYNTHETIC,
    WHITE,
    DiagnosticTask,
    TrainingRun,
    initial_model,
    load,
    observe_training,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = 1024
POINTS = 48
STEPS = 200
QUICK_IMAGES = 64
QUICK_STEPS = 3
DECADES = 6.0  # eigenvalues below 1e-6 of the largest are not compared
ROUNDING = 12.0  # eigenvalues below 1e-12 of the largest are rounding errors
SHOWN = 9.0  # decades in a picture
CLOSE = 0.3  # decades: a factor of 2
MARGINAL = 0.1  # decades: a factor of 1.26
EXAMPLES = {"MLP": "fc2", "CNN": "conv2", "ViT": "query 1"}  # the layers of Figure 2
STATES = ("initial", "trained")
REMARK = (
    "Shape: mean distance of log10 eigenvalues from those of the oracle, in decades, after "
    "removing the scale; scale: the common factor that was removed. Ranks are evenly spread on a "
    "logarithmic axis, and eigenvalues below 1e-6 of the largest are not compared."
)
TITLE = "Eigenvalues of A ⊗ G from private, public and synthetic inputs (Figures 2 and 6)"

Logs = Sequence[float]  # log10 of eigenvalues, decreasing
# Shapes and scales, one per seed, by model, state, layer and source.
Shapes = dict[tuple[str, str, str, str], tuple[list[float], list[float]]]


@dataclass(frozen=True)
class SpectrumSetting:
    """One model, one seed: `images` per source, `points` ranks per layer."""

    run: TrainingRun
    inputs: str
    images: int
    points: int
    sources: tuple[str, ...] = (ORACLE, *COMPARED)


def reproduce(options: ReproduceOptions) -> None:
    """Print the tables; write spectra.json, spectra.md and pictures.

    spectra.png is Figure 2, spectra-layers.png is Figure 6.
    """
    out = options.out
    console = options.console
    tasks = load(options.data_dir)
    images, steps = (QUICK_IMAGES, QUICK_STEPS) if options.quick else (IMAGES, STEPS)
    settings = [
        SpectrumSetting(TrainingRun(model, seed, rate, (0, steps)), inputs, images, POINTS)
        for inputs in list(INPUTS)[: 1 if options.quick else None]
        for model, rate in RATES.items()
        for seed in options.seeds(SEEDS)
    ]
    results = evaluate(
        settings,
        lambda setting, on_step: measure(setting, tasks[setting.inputs], on_step, options.device),
        out / "spectra.json",
        console,
    )
    grouped = by_inputs(results)
    shapes = {name: compare(part) for name, part in grouped.items()}
    claims = {name: check(part) for name, part in shapes.items()}
    for name in grouped:
        console.print(
            text_table(f"Shape distance from the oracle, decades: {name}", *means_of(shapes[name]))
        )
    console.print(claim_table(claims))
    write_page(
        out / "spectra.md",
        TITLE,
        options.command("fig2"),
        [*ABOUT, about_runs(results), REMARK],
        claims,
        [line for name in grouped for line in tables(name, shapes[name])],
    )
    if can_draw(console):
        for name in grouped:
            plot_examples(grouped[name], out / f"spectra{INPUTS[name]}.png")
            plot_layers(grouped[name], out / f"spectra-layers{INPUTS[name]}.png")


def measure(
    setting: SpectrumSetting, task: DiagnosticTask, on_step: OnStep, device: str = "cpu"
) -> dict[str, Any]:
    """Measure the spectrum of every source and layer, at the initial weights and after training."""
    sources = {name: task.sources[name] for name in setting.sources}
    names = LAYERS[setting.run.model]

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        spectra = kronecker_spectrum(
            model, sources, points=setting.points, probes=setting.images, seed=setting.run.seed
        )
        return {
            "accuracy": accuracy(model, *task.test.tensors),
            "ranks": {names[layer.layer]: layer.ranks for layer in spectra.sources[ORACLE]},
            "logs": {
                source: {names[layer.layer]: logarithms(layer.values) for layer in layers}
                for source, layers in spectra.sources.items()
            },
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return observe_training(
        setting.run, initial_model(setting.run, device), task.records, geometry, look, on_step
    )


def logarithms(values: Sequence[float]) -> list[float]:
    """Return log10 of decreasing eigenvalues, at least 1e-12 of the largest."""
    if not values[0] > 0:
        raise ValueError(
            "all eigenvalues of a layer are zero: no signal passes it. Lower the learning rate"
        )
    floor = values[0] * 10**-ROUNDING
    return [round(math.log10(max(value, floor)), 3) for value in values]


def distance(oracle_logs: Logs, source_logs: Logs, decades: float = DECADES) -> tuple[float, float]:
    """Return the shape, in decades, and the scale (see the module)."""
    reference = np.asarray(oracle_logs)
    other = np.asarray(source_logs)
    counted = reference >= reference[0] - decades
    gaps = np.maximum(other, other[0] - decades)[counted] - reference[counted]
    return float(np.abs(gaps - gaps.mean()).mean()), float(10 ** gaps.mean())


def compare(results: Mapping[SpectrumSetting, Any]) -> Shapes:
    """Return the shape and the scale of every source relative to the oracle."""
    shapes: Shapes = {}
    for setting, looks in results.items():
        for state, look in zip(STATES, looks.values(), strict=True):
            for source in (name for name in setting.sources if name != ORACLE):
                for layer, logs in look["logs"][source].items():
                    shape, scale = distance(look["logs"][ORACLE][layer], logs)
                    key = (setting.run.model, state, layer, source)
                    seed_shapes, seed_scales = shapes.setdefault(key, ([], []))
                    seed_shapes.append(shape)
                    seed_scales.append(scale)
    return shapes


def mean_shapes(shapes: Shapes, source: str) -> dict[tuple[str, str], list[float]]:
    """Return the mean over the layers for each seed, by model and state."""
    chosen: dict[tuple[str, str], list[list[float]]] = {}
    for (model, state, _, name), (values, _) in shapes.items():
        if name == source:
            chosen.setdefault((model, state), []).append(values)
    return {
        key: [fmean(seed_values) for seed_values in zip(*layers, strict=True)]
        for key, layers in chosen.items()
    }


def check(shapes: Shapes) -> list[Claim]:
    """Check the statements of the paper about Figures 2 and 6."""
    means = {
        name: {key: fmean(seeds) for key, seeds in mean_shapes(shapes, name).items()}
        for name in COMPARED
    }
    places = list(means[SYNTHETIC])
    shown = {name: along(places, list(values.values())) for name, values in means.items()}

    def closer(source: str, other: str) -> list[bool]:
        return [means[source][place] < means[other][place] for place in places]

    behind = [means[SYNTHETIC][place] - means[MATCHED][place] for place in places]
    white = [means[WHITE][place] - means[SYNTHETIC][place] for place in places]
    scales = [
        scale
        for key, (_, seeds) in shapes.items()
        if key[1] == "trained" and key[3] == SYNTHETIC
        for scale in seeds
    ]
    return [
        Claim(
            "“Domain-matched public data … aligns closely with the private oracle … "
            "Domain-mismatched data … shows larger deviation”",
            "matched is closer in shape than mismatched, for every architecture before and after "
            "training",
            f"matched: {shown[MATCHED]}; mismatched: {shown[MISMATCHED]}",
            closer(MATCHED, MISMATCHED),
        ),
        Claim(
            "“Synthetic DP-KFC … captures the eigenvalue decay across architecture types”",
            f"shape of synthetic within {CLOSE} decades (a factor of 2) of the oracle's, on "
            "average over the layers",
            shown[SYNTHETIC],
            [means[SYNTHETIC][place] <= CLOSE for place in places],
        ),
        Claim(
            "“recovers the eigenvalue decay …, matching public data baselines”",
            "synthetic is closer in shape than the farther of the two public sources",
            "by the figures above",
            [
                any(pair)
                for pair in zip(
                    closer(SYNTHETIC, MATCHED), closer(SYNTHETIC, MISMATCHED), strict=True
                )
            ],
        ),
        Claim(
            "“Domain-matched public data (FashionMNIST) provides marginal improvement over "
            "synthetic noise”",
            f"matched is closer than synthetic, by at most {MARGINAL} decades",
            f"it is closer by {min(behind):.2f} to {max(behind):.2f}",
            [0 <= gap <= MARGINAL for gap in behind],
        ),
        Claim(
            "“network structure, not training data, primarily determines the eigenvalue "
            "distribution”",
            f"then inputs without any structure do as well: white noise within {MARGINAL} decades "
            "of pink noise",
            f"white is farther by {min(white):.2f} to {max(white):.2f}",
            [abs(gap) <= MARGINAL for gap in white],
        ),
        Claim(
            "“the scale alignment, which is what the clipping norm relies on, remains accurate "
            "throughout”",
            "scale of synthetic within a factor of 2 of the oracle's in every layer after training",
            f"layers and seeds, from × {min(scales):.2g} to × {max(scales):.2g}",
            [0.5 <= scale <= 2 for scale in scales],
        ),
    ]


def means_of(shapes: Shapes) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: shapes by model and state, averaged over the layers."""
    columns = {name: mean_shapes(shapes, name) for name in COMPARED}
    rows = [
        [name, *(spread(values) for values in means.values())] for name, means in columns.items()
    ]
    return ["source", *(f"{model}, {state}" for model, state in columns[SYNTHETIC])], rows


def tables(inputs: str, shapes: Shapes) -> list[str]:
    """Return the summary, the pictures, and a table of every layer."""
    parts = [
        f"## {inputs.capitalize()}",
        f"![a layer of each architecture, {inputs}](spectra{INPUTS[inputs]}.png)",
        "Shape distance from the oracle, mean over the layers (decades):",
        markdown_table(*means_of(shapes)),
        f"![all layers after training, {inputs}](spectra-layers{INPUTS[inputs]}.png)",
    ]
    for state in STATES:
        keys = dict.fromkeys((model, layer) for model, when, layer, _ in shapes if when == state)
        cells = [
            [model, layer, *(_cell(*shapes[model, state, layer, name]) for name in COMPARED)]
            for model, layer in keys
        ]
        parts += [
            f"Every layer, {state}: shape (scale)",
            markdown_table(["model", "layer", *COMPARED], cells, left=2),
        ]
    return parts


def _cell(shape: list[float], scale: list[float]) -> str:
    geometric_mean = 10 ** fmean(map(math.log10, scale))
    return f"{fmean(shape):.2f} (× {geometric_mean:.2g})"


def plot_examples(results: Mapping[SpectrumSetting, Any], file: Path) -> None:
    """Draw Figure 2: one layer per architecture, before training (top) and after it (bottom)."""
    figure, panels = new_figure(len(STATES), len(EXAMPLES), 3.7 * len(EXAMPLES), 7)
    for column, (model, layer) in enumerate(EXAMPLES.items()):
        for row, state in enumerate(STATES):
            _curves(panels[row][column], results, model, layer, row)
            panels[row][column].set_title(f"{model}, {layer}, {state}", fontsize=10)
        panels[1][column].set_xlabel("rank")
    for line in panels:
        line[0].set_ylabel("eigenvalue of A ⊗ G")
    finish(figure, panels[0][0], file)


def plot_layers(results: Mapping[SpectrumSetting, Any], file: Path) -> None:
    """Draw Figure 6: every layer after training."""
    layers = [(model, layer) for model in LAYERS for layer in LAYERS[model].values()]
    columns = min(7, len(layers))
    figure, panels = new_figure(-(-len(layers) // columns), columns, 17, 8)
    flat = [panel for row in panels for panel in row]
    for panel, (model, layer) in zip(flat, layers, strict=True):
        _curves(panel, results, model, layer, 1)
        panel.set_title(f"{model}, {layer}", fontsize=10)
        panel.tick_params(labelsize=8)
    for row in panels:
        row[0].set_ylabel("eigenvalue of A ⊗ G")
    for panel in panels[-1]:
        panel.set_xlabel("rank")
    finish(figure, flat[0], file, columns=8)


def _curves(
    panel: Axes, results: Mapping[SpectrumSetting, Any], model: str, layer: str, state: int
) -> None:
    """Draw one line per source."""
    chosen = [
        list(looks.values())[state]
        for setting, looks in results.items()
        if setting.run.model == model
    ]
    for source in (ORACLE, *COMPARED):
        lines = [look["logs"][source][layer] for look in chosen]
        draw_range(panel, chosen[0]["ranks"][layer], lines, source, STYLES[source])
    largest = max(logs[layer][0] for look in chosen for logs in look["logs"].values())
    panel.set_ylim(bottom=max(panel.get_ylim()[0], 10 ** (largest - SHOWN)))
