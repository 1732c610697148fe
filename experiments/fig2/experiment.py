"""Figures 2 and 6: eigenvalues of ``A ⊗ G`` from private, public and synthetic inputs: `dpkfc reproduce fig2`.

How far a spectrum λ̂ is from that of the oracle, λ*, is told in two numbers. With ``g_k = log10(λ̂_k / λ*_k)`` at ranks k
that are evenly spread on a logarithmic axis, as in the picture,

    scale = 10^mean(g)              by how much all eigenvalues are larger
    shape = mean |g - mean(g)|      how far the curves are apart once that is taken out, in decades

over the ranks with ``λ*_k ≥ 1e-6 λ*_1``. The shape is 0 where spectra are proportional, as Theorem F.2 has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
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
from experiments.common.setting import accuracy
from experiments.common.sources import (
    ABOUT,
    INPUTS,
    LAYERS,
    LOOKED_AT,
    MATCHED,
    MISMATCHED,
    ORACLE,
    RATES,
    SEEDS,
    STYLES,
    SYNTHETIC,
    WHITE,
    Run,
    Task,
    fresh,
    load,
    through_training,
)
from torch import nn

import dpkfc
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.diagnostics import kronecker_spectrum
from dpkfc.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES, POINTS, STEPS = 1024, 48, 200
QUICK_IMAGES, QUICK_STEPS = 64, 3
DECADES = 6.0  # eigenvalues below 1e-6 of the largest do not count
ROUNDING = 12.0  # and below 1e-12 of it are rounding
SHOWN = 9.0  # decades in a picture
CLOSE, MARGINAL = 0.3, 0.1  # decades: a factor of 2, a factor of 1.26
EXAMPLES = {"MLP": "fc2", "CNN": "conv2", "ViT": "query 1"}  # the layers of Figure 2
STATES = ("initial", "trained")
REMARK = (
    "Shape: mean distance of log10 eigenvalues from those of the oracle, in decades, with the scale taken out; scale: "
    "the factor that was taken out. Ranks are evenly spread on a logarithmic axis, and eigenvalues below 1e-6 of the "
    "largest do not count."
)
TITLE = "Eigenvalues of A ⊗ G from private, public and synthetic inputs (Figures 2 and 6)"

Logs = Sequence[float]  # log10 of eigenvalues, decreasing
Shapes = dict[
    tuple[str, str, str, str], tuple[list[float], list[float]]
]  # by model, state, layer, source: of each seed


@dataclass(frozen=True)
class Setting:
    """One model, one seed."""

    run: Run
    inputs: str
    images: int  # of each source
    points: int  # ranks of each layer
    sources: tuple[str, ...] = (ORACLE, *LOOKED_AT)


def run(order: ReproduceOptions) -> None:
    """Print the tables; write spectra.json, spectra.md, spectra.png (Figure 2) and spectra-layers.png (Figure 6)."""
    out, quick, console = order.out, order.quick, order.console
    tasks = load(order.data_dir)
    images, steps = (QUICK_IMAGES, QUICK_STEPS) if quick else (IMAGES, STEPS)
    settings = [
        Setting(Run(model, seed, rate, (0, steps)), inputs, images, POINTS)
        for inputs in list(INPUTS)[: 1 if quick else None]
        for model, rate in RATES.items()
        for seed in order.seeds(SEEDS)
    ]
    every = evaluate(
        settings,
        lambda setting, on_step: measure(setting, tasks[setting.inputs], on_step, order.device),
        out / "spectra.json",
        console,
    )
    found = by_inputs(every)
    shapes = {name: compare(part) for name, part in found.items()}
    claims = {name: check(part) for name, part in shapes.items()}
    for name in found:
        console.print(
            text_table(f"Shape distance from the oracle, decades: {name}", *means_of(shapes[name]))
        )
    console.print(claim_table(claims))
    command = order.command("fig2")
    rest = [line for name in found for line in tables(name, shapes[name])]
    write_page(
        out / "spectra.md", TITLE, command, [*ABOUT, about_runs(every), REMARK], claims, rest
    )
    if can_draw(console):
        for name in found:
            plot_examples(found[name], out / f"spectra{INPUTS[name]}.png")
            plot_layers(found[name], out / f"spectra-layers{INPUTS[name]}.png")


def measure(setting: Setting, task: Task, on_step: OnStep, device: str = "cpu") -> dict[str, Any]:
    """The spectra of every source and layer at the initial weights and after training."""
    sources = {name: task.sources[name] for name in setting.sources}
    names = LAYERS[setting.run.model]

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        spectra = kronecker_spectrum(
            model, sources, points=setting.points, probes=setting.images, seed=setting.run.seed
        )
        return {
            "accuracy": accuracy(model, *task.test.tensors),
            "ranks": {names[one.layer]: one.ranks for one in spectra.sources[ORACLE]},
            "logs": {
                source: {names[one.layer]: logarithms(one.values) for one in layers}
                for source, layers in spectra.sources.items()
            },
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return through_training(
        setting.run, fresh(setting.run, device), task.records, geometry, look, on_step
    )


def logarithms(values: Sequence[float]) -> list[float]:
    """Of eigenvalues in decreasing order; what is next to zero counts as 1e-12 of the largest."""
    if not values[0] > 0:
        raise dpkfc.PrivacyError(
            "all eigenvalues of a layer are zero: no signal passes it. Lower the learning rate"
        )
    floor = values[0] * 10**-ROUNDING
    return [round(math.log10(max(value, floor)), 3) for value in values]


def distance(wanted: Logs, found: Logs, decades: float = DECADES) -> tuple[float, float]:
    """Shape, in decades, and scale (see the module)."""
    reference, other = np.asarray(wanted), np.asarray(found)
    counted = reference >= reference[0] - decades
    gaps = np.maximum(other, other[0] - decades)[counted] - reference[counted]
    return float(np.abs(gaps - gaps.mean()).mean()), float(10 ** gaps.mean())


def compare(found: Mapping[Setting, Any]) -> Shapes:
    """Shape and scale of every source beside the oracle."""
    shapes: Shapes = {}
    for setting, looks in found.items():
        for state, look in zip(STATES, looks.values(), strict=True):
            for source in (name for name in setting.sources if name != ORACLE):
                for layer, logs in look["logs"][source].items():
                    both = shapes.setdefault((setting.run.model, state, layer, source), ([], []))
                    for values, value in zip(
                        both, distance(look["logs"][ORACLE][layer], logs), strict=True
                    ):
                        values.append(value)
    return shapes


def mean_shapes(shapes: Shapes, source: str) -> dict[tuple[str, str], list[float]]:
    """By model and state: the mean over the layers, for each seed."""
    chosen: dict[tuple[str, str], list[list[float]]] = {}
    for (model, state, _, name), (values, _) in shapes.items():
        if name == source:
            chosen.setdefault((model, state), []).append(values)
    return {
        key: [fmean(of_seed) for of_seed in zip(*layers, strict=True)]
        for key, layers in chosen.items()
    }


def check(shapes: Shapes) -> list[Claim]:
    means = {
        name: {key: fmean(seeds) for key, seeds in mean_shapes(shapes, name).items()}
        for name in LOOKED_AT
    }
    places = list(means[SYNTHETIC])
    shown = {name: along(places, list(found.values())) for name, found in means.items()}

    def closer(one: str, other: str) -> list[bool]:
        return [means[one][place] < means[other][place] for place in places]

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
            "“Domain-matched public data … aligns closely with the private oracle … Domain-mismatched data … shows "
            "larger deviation”",
            "matched is closer in shape than mismatched, for every architecture before and after training",
            f"matched: {shown[MATCHED]}; mismatched: {shown[MISMATCHED]}",
            closer(MATCHED, MISMATCHED),
        ),
        Claim(
            "“Synthetic DP-KFC … captures the eigenvalue decay across architecture types”",
            f"shape of synthetic within {CLOSE} decades (a factor of 2) of the oracle's, on average over the layers",
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
            "“Domain-matched public data (FashionMNIST) provides marginal improvement over synthetic noise”",
            f"matched is closer than synthetic, by at most {MARGINAL} decades",
            f"it is closer by {min(behind):.2f} to {max(behind):.2f}",
            [0 <= gap <= MARGINAL for gap in behind],
        ),
        Claim(
            "“network structure, not training data, primarily determines the eigenvalue distribution”",
            f"then inputs without any structure do as well: white noise within {MARGINAL} decades of pink noise",
            f"white is farther by {min(white):.2f} to {max(white):.2f}",
            [abs(gap) <= MARGINAL for gap in white],
        ),
        Claim(
            "“the scale alignment, which is what the clipping norm relies on, remains accurate throughout”",
            "scale of synthetic within a factor of 2 of the oracle's in every layer after training",
            f"layers and seeds, from × {min(scales):.2g} to × {max(scales):.2g}",
            [0.5 <= scale <= 2 for scale in scales],
        ),
    ]


def means_of(shapes: Shapes) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: shapes by model and state, mean over the layers."""
    columns = {name: mean_shapes(shapes, name) for name in LOOKED_AT}
    rows = [
        [name, *(spread(values) for values in found.values())] for name, found in columns.items()
    ]
    return ["source", *(f"{model}, {state}" for model, state in columns[SYNTHETIC])], rows


def tables(inputs: str, shapes: Shapes) -> list[str]:
    """The summary, the pictures, and every layer."""
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
            [model, layer, *(_cell(*shapes[model, state, layer, name]) for name in LOOKED_AT)]
            for model, layer in keys
        ]
        parts += [
            f"Every layer, {state}: shape (scale)",
            markdown_table(["model", "layer", *LOOKED_AT], cells, left=2),
        ]
    return parts


def _cell(shape: list[float], scale: list[float]) -> str:
    middle = 10 ** fmean(map(math.log10, scale))
    return f"{fmean(shape):.2f} (× {middle:.2g})"


def plot_examples(found: Mapping[Setting, Any], file: Path) -> None:
    """Figure 2: a layer of each architecture; before training above, after it below."""
    figure, panels = new_figure(len(STATES), len(EXAMPLES), 3.7 * len(EXAMPLES), 7)
    for column, (model, layer) in enumerate(EXAMPLES.items()):
        for row, state in enumerate(STATES):
            _curves(panels[row][column], found, model, layer, row)
            panels[row][column].set_title(f"{model}, {layer}, {state}", fontsize=10)
        panels[1][column].set_xlabel("rank")
    for line in panels:
        line[0].set_ylabel("eigenvalue of A ⊗ G")
    finish(figure, panels[0][0], file)


def plot_layers(found: Mapping[Setting, Any], file: Path) -> None:
    """Figure 6: every layer after training."""
    layers = [(model, layer) for model in LAYERS for layer in LAYERS[model].values()]
    columns = min(7, len(layers))
    figure, panels = new_figure(-(-len(layers) // columns), columns, 17, 8)
    flat = [panel for row in panels for panel in row]
    for panel, (model, layer) in zip(flat, layers, strict=True):
        _curves(panel, found, model, layer, 1)
        panel.set_title(f"{model}, {layer}", fontsize=10)
        panel.tick_params(labelsize=8)
    for row in panels:
        row[0].set_ylabel("eigenvalue of A ⊗ G")
    for panel in panels[-1]:
        panel.set_xlabel("rank")
    finish(figure, flat[0], file, columns=8)


def _curves(panel: Axes, found: Mapping[Setting, Any], model: str, layer: str, state: int) -> None:
    """A line a source."""
    chosen = [
        list(looks.values())[state]
        for setting, looks in found.items()
        if setting.run.model == model
    ]
    for source in (ORACLE, *LOOKED_AT):
        logs = [look["logs"][source][layer] for look in chosen]
        draw_range(panel, chosen[0]["ranks"][layer], logs, source, STYLES[source])
    largest = max(one[layer][0] for look in chosen for one in look["logs"].values())
    panel.set_ylim(bottom=max(panel.get_ylim()[0], 10 ** (largest - SHOWN)))
