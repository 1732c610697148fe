"""Agreement of public and synthetic Kronecker factors with those of the oracle.

The cosine ``Tr(C*ᵀ Ĉ) / (‖C*‖ ‖Ĉ‖)`` (direction) and the relative error ``‖C* - Ĉ‖ / ‖C*‖``
(scale) of A, of G and of the layer's ``A ⊗ G`` are measured along private training: on the paper's
CNN layer by layer, on a transformer by groups of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from torch import nn

import dpkfc
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.diagnostics import factor_alignment
from dpkfc.planning.plan import Plan
from experiments.common.figures import (
    Claim,
    OnStep,
    about_runs,
    by_inputs,
    can_draw,
    claim_table,
    evaluate,
    plain_ticks,
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
    DiagnosticTask,
    TrainingRun,
    initial_model,
    load,
    observe_training,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = 512
LOOKS = (0, 10, 30, 60, 100, 150, 200)
QUICK_IMAGES = 64
QUICK_LOOKS = (0, 3)
MEASURES = (
    "cosine of A",
    "cosine of G",
    "cosine of A ⊗ G",
    "error of A",
    "error of G",
    "error of A ⊗ G",
)
COS_A, COS_G, COS_F, ERR_A, ERR_G, ERR_F = range(6)
# Groups of layers that are averaged; on the CNN a group is a single layer.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "CNN": {layer: (layer,) for layer in LAYERS["CNN"].values()},
    "ViT": {
        "attention": tuple(
            layer
            for layer in LAYERS["ViT"].values()
            if layer.split()[0] in ("query", "key", "value", "out")
        ),
        "MLP blocks": tuple(layer for layer in LAYERS["ViT"].values() if layer.startswith("mlp")),
        "embedding and head": ("patches", "head"),
    },
}
PROXIES = (MATCHED, MISMATCHED)
RIVALS = (*PROXIES, SYNTHETIC)
NEAR = 0.1  # cosines within this distance are comparable
TITLE = (
    "Factors from public and synthetic inputs beside the oracle's, through training "
    "(Figures 3, 8 and 9)"
)
REMARK = (
    "Cosine: direction, 1 is best. Error: ‖C* - Ĉ‖ / ‖C*‖, which is large for a factor of wrong "
    "scale; an estimate of zero would have error 1. For a group of layers the mean is shown."
)


@dataclass(frozen=True)
class AlignmentSetting:
    """One model, one seed, with `images` per source."""

    run: TrainingRun
    inputs: str
    images: int
    sources: tuple[str, ...] = COMPARED


Results = Mapping[AlignmentSetting, Any]


def reproduce(options: ReproduceOptions) -> None:
    """Print the tables; write alignment.json, alignment.md and pictures.

    alignment.png is Figure 3, alignment-factors.png is Figure 8, alignment-vit.png is Figure 9.
    """
    out = options.out
    console = options.console
    tasks = load(options.data_dir)
    images, looks = (QUICK_IMAGES, QUICK_LOOKS) if options.quick else (IMAGES, LOOKS)
    settings = [
        AlignmentSetting(TrainingRun(model, seed, RATES[model], looks), inputs, images)
        for inputs in list(INPUTS)[: 1 if options.quick else None]
        for model in GROUPS
        for seed in options.seeds(SEEDS)
    ]
    results = evaluate(
        settings,
        lambda setting, on_step: measure(setting, tasks[setting.inputs], on_step, options.device),
        out / "alignment.json",
        console,
    )
    grouped = by_inputs(results)
    claims = {name: check(part) for name, part in grouped.items()}
    for name, part in grouped.items():
        console.print(text_table(f"At the start → at the end: {name}", *cells(part), left=3))
    console.print(claim_table(claims))
    write_page(
        out / "alignment.md",
        TITLE,
        options.command("fig3"),
        [*ABOUT, about_runs(results), REMARK],
        claims,
        [line for name, part in grouped.items() for line in section(name, part)],
    )
    if can_draw(console):
        for name, part in grouped.items():
            plot_ends(part, out / f"alignment{INPUTS[name]}.png")
            plot_factors(part, out / f"alignment-factors{INPUTS[name]}.png")
            plot_groups(part, out / f"alignment-vit{INPUTS[name]}.png")


def measure(
    setting: AlignmentSetting, task: DiagnosticTask, on_step: OnStep, device: str = "cpu"
) -> dict[str, Any]:
    """Measure the six quantities of every source and layer, at every look."""
    sources = {name: task.sources[name] for name in setting.sources}
    names = LAYERS[setting.run.model]

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        alignment = factor_alignment(
            model, task.sources[ORACLE], sources, probes=setting.images, seed=setting.run.seed
        )
        return {
            "accuracy": accuracy(model, *task.test.tensors),
            "alignment": {
                source: {
                    names[layer.layer]: [round(x, 4) for x in (*layer.cosine, *layer.error)]
                    for layer in layers
                }
                for source, layers in alignment.sources.items()
            },
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return observe_training(
        setting.run, initial_model(setting.run, device), task.records, geometry, look, on_step
    )


def series(
    results: Results, model: str, group: str, source: str, measure: int
) -> list[list[float]]:
    """Return the measure at every look, averaged over the layers of a group, for each seed."""
    layers = GROUPS[model][group]
    return [
        [
            fmean(look["alignment"][source][layer][measure] for layer in layers)
            for look in looks.values()
        ]
        for setting, looks in results.items()
        if setting.run.model == model
    ]


def mean_series(results: Results, model: str, group: str, source: str, measure: int) -> list[float]:
    """Return the mean over the seeds at every look."""
    return [
        fmean(values)
        for values in zip(*series(results, model, group, source, measure), strict=True)
    ]


def check(results: Results) -> list[Claim]:
    """Check the statements of the paper about Figures 3, 8 and 9."""
    return [
        *check_early(results),
        *check_deep(results),
        *check_factors(results),
        *check_transformer(results),
    ]


def check_early(results: Results) -> list[Claim]:
    conv1, conv2 = (
        mean_series(results, "CNN", layer, SYNTHETIC, COS_F) for layer in ("conv1", "conv2")
    )
    public = {name: mean_series(results, "CNN", "conv1", name, COS_F) for name in PROXIES}
    gaps = [abs(x - y) for x, y in zip(conv1, public[MATCHED], strict=True)]
    mismatched = fmean(public[MISMATCHED])
    return [
        Claim(
            "“in early layers, Synthetic DP-KFC maintains cosine similarity above 0.8 with the "
            "oracle”",
            "CNN, A ⊗ G of conv1 and conv2: above 0.8 at every look",
            f"conv1 {extent(conv1)}, conv2 {extent(conv2)}",
            [x > 0.8 for x in (*conv1, *conv2)],
        ),
        Claim(
            "“comparable to matched public data”",
            f"conv1: cosine within {NEAR} of that of matched public data at every look",
            f"matched {extent(public[MATCHED])}; apart by up to {max(gaps):.2f}",
            [gap <= NEAR for gap in gaps],
        ),
        Claim(
            "“while mismatched data stagnates around 0.6”",
            "conv1: mean cosine of mismatched public data over the run from 0.5 to 0.7",
            f"mean {mismatched:.2f}, {extent(public[MISMATCHED])}",
            [0.5 <= mismatched <= 0.7],
        ),
        lower_error(
            results,
            "conv1",
            "“Scale error of Synthetic DP-KFC remains lower than public proxies throughout”",
        ),
    ]


def check_deep(results: Results) -> list[Claim]:
    ends = {
        (layer, name): mean_series(results, "CNN", layer, name, COS_F)[-1]
        for layer in ("fc1", "fc2")
        for name in RIVALS
    }
    shown = "; ".join(
        f"{layer}: " + ", ".join(f"{name} {ends[layer, name]:.2f}" for name in RIVALS)
        for layer in ("fc1", "fc2")
    )
    return [
        Claim(
            "“In deeper layers, directional alignment degrades across all methods (< 0.6)”",
            "CNN, A ⊗ G of fc1 and fc2: below 0.6 for all three sources at the end of the run",
            shown,
            [cosine < 0.6 for cosine in ends.values()],
        ),
        lower_error(
            results,
            "fc2",
            "“Synthetic DP-KFC achieves superior scale stability with lower error magnitude than "
            "public proxies”",
        ),
    ]


def lower_error(results: Results, layer: str, paper: str) -> Claim:
    """Check that the error of synthetic inputs is the lowest at every look."""
    errors = {name: mean_series(results, "CNN", layer, name, ERR_F) for name in RIVALS}
    lowest = [
        synthetic < min(public)
        for synthetic, *public in zip(
            errors[SYNTHETIC], *(errors[name] for name in PROXIES), strict=True
        )
    ]
    return Claim(
        paper,
        f"CNN, error of A ⊗ G of {layer}: lower than that of both public sources at every look",
        ", ".join(f"{name} {extent(errors[name])}" for name in RIVALS),
        lowest,
    )


def check_factors(results: Results) -> list[Claim]:
    def every(source: str, measure: int) -> list[float]:
        return [
            value
            for layer in GROUPS["CNN"]
            for value in mean_series(results, "CNN", layer, source, measure)
        ]

    mismatched_a = every(MISMATCHED, ERR_A)
    synthetic_a = every(SYNTHETIC, ERR_A)
    synthetic_g = every(SYNTHETIC, ERR_G)
    cosines_g = {name: every(name, COS_G) for name in (SYNTHETIC, MATCHED)}
    return [
        Claim(
            "Mismatched public data: activation “Frobenius errors spiking by orders of magnitude”",
            "CNN, error of A: 10 or more in some layer at some look",
            extent(mismatched_a),
            [max(mismatched_a) >= 10],
        ),
        Claim(
            "“the Pink Noise estimator remains remarkably stable (error < 0.5)”",
            "CNN, error of A: below 0.5 in every layer at every look",
            extent(synthetic_a),
            [x < 0.5 for x in synthetic_a],
        ),
        Claim(
            "“Pink Noise matches the directional alignment of the semantically related "
            "FashionMNIST proxy (> 0.8 Cosine Sim)”",
            "CNN, cosine of G: above 0.8 in every layer at every look",
            f"synthetic {extent(cosines_g[SYNTHETIC])}, matched {extent(cosines_g[MATCHED])}",
            [x > 0.8 for x in cosines_g[SYNTHETIC]],
        ),
        Claim(
            "“the eigenvalue magnitudes are intrinsic architectural properties recoverable via "
            "synthetic probing”",
            "CNN, error of G: below 1, that of an estimate of zero, in every layer at every look",
            extent(synthetic_g),
            [x < 1 for x in synthetic_g],
        ),
    ]


def check_transformer(results: Results) -> list[Claim]:
    groups = list(GROUPS["ViT"])

    def mean(group: str, source: str, measure: int) -> float:
        return fmean(mean_series(results, "ViT", group, source, measure))

    def shown(measure: int) -> str:
        return "; ".join(
            f"{group}: " + ", ".join(f"{name} {mean(group, name, measure):.2f}" for name in RIVALS)
            for group in groups
        )

    ordered = [
        mean(group, MATCHED, COS_F) > mean(group, SYNTHETIC, COS_F) > mean(group, MISMATCHED, COS_F)
        for group in groups
    ]
    errors = {group: {name: mean(group, name, ERR_F) for name in RIVALS} for group in groups}
    worst = [
        of_group[MISMATCHED] > max(of_group[MATCHED], of_group[SYNTHETIC])
        for of_group in errors.values()
    ]
    close = [of_group[MATCHED] <= 1.1 * of_group[SYNTHETIC] for of_group in errors.values()]
    cosines_a, cosines_g = (
        {name: fmean(mean(group, name, measure) for group in groups) for name in RIVALS}
        for measure in (COS_A, COS_G)
    )
    gap_a, gap_g = (
        max(cosines.values()) - min(cosines.values()) for cosines in (cosines_a, cosines_g)
    )
    *inner, outer = errors.values()
    elevated = [outer[name] > max(of_group[name] for of_group in inner) for name in RIVALS]
    return [
        Claim(
            "Transformer: “FashionMNIST achieves the highest directional alignment, Synthetic "
            "DP-KFC provides a robust intermediate, and domain-mismatched CIFAR-10 performs worst”",
            "cosine of A ⊗ G, mean over the run: in this order in each group of layers",
            shown(COS_F),
            ordered,
        ),
        Claim(
            "Transformer: CIFAR-10 “performs worst on both metrics across all layer groups”",
            "error of A ⊗ G, mean over the run: largest in each group",
            shown(ERR_F),
            worst,
        ),
        Claim(
            "Transformer: FashionMNIST “achieves comparable or slightly lower Frobenius error "
            "than synthetic noise”",
            "error of A ⊗ G, mean over the run: at most 1.1 times that of synthetic in each group",
            "the same figures",
            close,
        ),
        Claim(
            "Transformer: cosine of G “is similar across all three sources (~ 0.4-0.5)”",
            f"mean over groups and run: from 0.35 to 0.55, and within {NEAR} of each other",
            ", ".join(f"{name} {value:.2f}" for name, value in cosines_g.items()),
            [min(cosines_g.values()) >= 0.35 and max(cosines_g.values()) <= 0.55 and gap_g <= NEAR],
        ),
        Claim(
            "Transformer: the cosine of A “exhibits the largest gap between sources”",
            "mean over groups and run: largest minus smallest of the three sources, for A and G",
            f"A {gap_a:.2f}, G {gap_g:.2f}",
            [gap_a > gap_g],
        ),
        Claim(
            "Transformer: “The Embedding/Head group shows elevated Frobenius error for all "
            "methods”",
            "error of A ⊗ G, mean over the run: above the other groups for each source",
            "the same figures",
            elevated,
        ),
    ]


def extent(values: Sequence[float]) -> str:
    """Format the smallest and the largest value."""
    return f"{min(values):.2g} to {max(values):.2g}"


def cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: every measure at the start and the end, averaged over seeds."""
    rows = []
    for model, groups in GROUPS.items():
        for group in groups:
            for source in COMPARED:
                courses = [
                    mean_series(results, model, group, source, number)
                    for number in range(len(MEASURES))
                ]
                changes = [f"{course[0]:.2f} → {course[-1]:.2f}" for course in courses]
                rows.append([model, group, source, *changes])
    return ["model", "layers", "source", *MEASURES], rows


def section(inputs: str, results: Results) -> list[str]:
    """Return the pictures and the table of one scaling of the inputs."""
    ending = f"{INPUTS[inputs]}.png"
    return [
        f"## {inputs.capitalize()}",
        f"![A ⊗ G of the first and the last layer of the CNN, {inputs}](alignment{ending})",
        f"![A and G of every layer of the CNN, {inputs}](alignment-factors{ending})",
        f"![A ⊗ G of the transformer by groups of layers, {inputs}](alignment-vit{ending})",
        "At the start → at the end of training, mean over the seeds:",
        markdown_table(*cells(results), left=3),
    ]


def plot_ends(results: Results, file: Path) -> None:
    """Draw Figure 3: the first convolution (top) and the deepest layer (bottom)."""
    _plot(results, "CNN", ("conv1", "fc2"), (COS_F, ERR_F), file)


def plot_factors(results: Results, file: Path) -> None:
    """Draw Figure 8: A and G separately, one row per layer."""
    _plot(results, "CNN", tuple(GROUPS["CNN"]), (COS_A, COS_G, ERR_A, ERR_G), file)


def plot_groups(results: Results, file: Path) -> None:
    """Draw Figure 9: the transformer, one row per group of layers."""
    _plot(results, "ViT", tuple(GROUPS["ViT"]), (COS_F, ERR_F), file)


def _plot(
    results: Results, model: str, groups: Sequence[str], measures: Sequence[int], file: Path
) -> None:
    """Draw one row per group, one column per measure, and one line per source."""
    figure, panels = new_figure(
        len(groups), len(measures), 4.6 * len(measures), 1.2 + 2.5 * len(groups)
    )
    looks = next(setting.run.looks for setting in results if setting.run.model == model)
    for row, group in zip(panels, groups, strict=True):
        for panel, number in zip(row, measures, strict=True):
            for source in COMPARED:
                _line(panel, looks, series(results, model, group, source, number), source)
            panel.set_title(f"{model}, {group}: {MEASURES[number]}", fontsize=10)
            if number < ERR_A:
                panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.02)
            else:
                plain_ticks(panel)
    for panel in panels[-1]:
        panel.set_xlabel("private steps")
    finish(figure, panels[0][0], file)


def _line(panel: Axes, looks: Sequence[int], lines: Sequence[Sequence[float]], source: str) -> None:
    """Draw the mean over the seeds, and a band of one standard deviation around it."""
    by_look = list(zip(*lines, strict=True))
    style = STYLES[source]
    panel.plot(looks, [fmean(values) for values in by_look], label=source, **style)
    if len(lines) > 1:
        low, high = (
            [fmean(values) + sign * stdev(values) for values in by_look] for sign in (-1, 1)
        )
        panel.fill_between(looks, low, high, color=style["color"], alpha=0.15, linewidth=0)
