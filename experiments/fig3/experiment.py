"""Figures 3, 8 and 9: how well public and synthetic factors agree with the oracle's: `dpkfc reproduce fig3`.

Cosine ``Tr(C*ᵀ Ĉ) / (‖C*‖ ‖Ĉ‖)`` (direction) and relative error ``‖C* - Ĉ‖ / ‖C*‖`` (scale) of A, of G and of the
layer's ``A ⊗ G``, measured at the weights that private training passes through: on the paper's CNN layer by layer, on
a transformer by groups of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

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
from dpkfc.diagnostics import factor_alignment
from dpkfc.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES, LOOKS = 512, (0, 10, 30, 60, 100, 150, 200)
QUICK_IMAGES, QUICK_LOOKS = 64, (0, 3)
MEASURES = (
    "cosine of A",
    "cosine of G",
    "cosine of A ⊗ G",
    "error of A",
    "error of G",
    "error of A ⊗ G",
)
COS_A, COS_G, COS_F, ERR_A, ERR_G, ERR_F = range(6)
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {  # what is averaged: on the CNN single layers
    "CNN": {layer: (layer,) for layer in LAYERS["CNN"].values()},
    "ViT": {
        "attention": tuple(
            x for x in LAYERS["ViT"].values() if x.split()[0] in ("query", "key", "value", "out")
        ),
        "MLP blocks": tuple(x for x in LAYERS["ViT"].values() if x.startswith("mlp")),
        "embedding and head": ("patches", "head"),
    },
}
PROXIES = (MATCHED, MISMATCHED)
RIVALS = (*PROXIES, SYNTHETIC)
NEAR = 0.1  # cosines that are called comparable
TITLE = "Factors from public and synthetic inputs beside the oracle's, through training (Figures 3, 8 and 9)"
REMARK = (
    "Cosine: direction, 1 is best. Error: ‖C* - Ĉ‖ / ‖C*‖, which a factor of wrong scale makes large; an estimate of "
    "zero would have error 1. Of a group of layers the mean is shown."
)


@dataclass(frozen=True)
class Setting:
    """One model, one seed."""

    run: Run
    inputs: str
    images: int  # of each source
    sources: tuple[str, ...] = LOOKED_AT


Found = Mapping[Setting, Any]


def run(order: ReproduceOptions) -> None:
    """Print the tables; write alignment.json, alignment.md and pictures: Figure 3, 8 (-factors) and 9 (-vit)."""
    out, quick, console = order.out, order.quick, order.console
    tasks = load(order.data_dir)
    images, looks = (QUICK_IMAGES, QUICK_LOOKS) if quick else (IMAGES, LOOKS)
    settings = [
        Setting(Run(model, seed, RATES[model], looks), inputs, images)
        for inputs in list(INPUTS)[: 1 if quick else None]
        for model in GROUPS
        for seed in order.seeds(SEEDS)
    ]
    every = evaluate(
        settings,
        lambda setting, on_step: measure(setting, tasks[setting.inputs], on_step, order.device),
        out / "alignment.json",
        console,
    )
    found = by_inputs(every)
    claims = {name: check(part) for name, part in found.items()}
    for name, part in found.items():
        console.print(text_table(f"At the start → at the end: {name}", *cells(part), left=3))
    console.print(claim_table(claims))
    command = order.command("fig3")
    rest = [line for name, part in found.items() for line in section(name, part)]
    write_page(
        out / "alignment.md", TITLE, command, [*ABOUT, about_runs(every), REMARK], claims, rest
    )
    if can_draw(console):
        for name, part in found.items():
            plot_ends(part, out / f"alignment{INPUTS[name]}.png")
            plot_factors(part, out / f"alignment-factors{INPUTS[name]}.png")
            plot_groups(part, out / f"alignment-vit{INPUTS[name]}.png")


def measure(setting: Setting, task: Task, on_step: OnStep, device: str = "cpu") -> dict[str, Any]:
    """The six measures of every source and layer, at every look."""
    sources = {name: task.sources[name] for name in setting.sources}
    names = LAYERS[setting.run.model]

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        found = factor_alignment(
            model, task.sources[ORACLE], sources, probes=setting.images, seed=setting.run.seed
        )
        return {
            "accuracy": accuracy(model, *task.test.tensors),
            "alignment": {
                source: {
                    names[one.layer]: [round(x, 4) for x in (*one.cosine, *one.error)]
                    for one in layers
                }
                for source, layers in found.sources.items()
            },
        }

    geometry = dpkfc.KFC(task.sources[SYNTHETIC], seed=setting.run.seed)
    return through_training(
        setting.run, fresh(setting.run, device), task.records, geometry, look, on_step
    )


def series(found: Found, model: str, group: str, source: str, measure: int) -> list[list[float]]:
    """For each seed the measure at every look: the mean over the layers of the group."""
    layers = GROUPS[model][group]
    return [
        [
            fmean(look["alignment"][source][layer][measure] for layer in layers)
            for look in looks.values()
        ]
        for setting, looks in found.items()
        if setting.run.model == model
    ]


def path(found: Found, model: str, group: str, source: str, measure: int) -> list[float]:
    """The mean over the seeds at every look."""
    return [
        fmean(values) for values in zip(*series(found, model, group, source, measure), strict=True)
    ]


def check(found: Found) -> list[Claim]:
    return [
        *check_early(found),
        *check_deep(found),
        *check_factors(found),
        *check_transformer(found),
    ]


def check_early(found: Found) -> list[Claim]:
    conv1, conv2 = (path(found, "CNN", layer, SYNTHETIC, COS_F) for layer in ("conv1", "conv2"))
    public = {name: path(found, "CNN", "conv1", name, COS_F) for name in PROXIES}
    apart = [abs(x - y) for x, y in zip(conv1, public[MATCHED], strict=True)]
    stagnates = fmean(public[MISMATCHED])
    return [
        Claim(
            "“in early layers, Synthetic DP-KFC maintains cosine similarity above 0.8 with the oracle”",
            "CNN, A ⊗ G of conv1 and conv2: above 0.8 at every look",
            f"conv1 {extent(conv1)}, conv2 {extent(conv2)}",
            [x > 0.8 for x in (*conv1, *conv2)],
        ),
        Claim(
            "“comparable to matched public data”",
            f"conv1: cosine within {NEAR} of that of matched public data at every look",
            f"matched {extent(public[MATCHED])}; apart by up to {max(apart):.2f}",
            [x <= NEAR for x in apart],
        ),
        Claim(
            "“while mismatched data stagnates around 0.6”",
            "conv1: mean cosine of mismatched public data over the run from 0.5 to 0.7",
            f"mean {stagnates:.2f}, {extent(public[MISMATCHED])}",
            [0.5 <= stagnates <= 0.7],
        ),
        lower_error(
            found,
            "conv1",
            "“Scale error of Synthetic DP-KFC remains lower than public proxies throughout”",
        ),
    ]


def check_deep(found: Found) -> list[Claim]:
    ends = {
        (layer, name): path(found, "CNN", layer, name, COS_F)[-1]
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
            found,
            "fc2",
            "“Synthetic DP-KFC achieves superior scale stability with lower error magnitude than public proxies”",
        ),
    ]


def lower_error(found: Found, layer: str, paper: str) -> Claim:
    """Is the error of synthetic inputs the lowest, at every look?"""
    errors = {name: path(found, "CNN", layer, name, ERR_F) for name in RIVALS}
    lowest = [
        mine < min(others)
        for mine, *others in zip(errors[SYNTHETIC], *(errors[x] for x in PROXIES), strict=True)
    ]
    return Claim(
        paper,
        f"CNN, error of A ⊗ G of {layer}: lower than that of both public sources at every look",
        ", ".join(f"{x} {extent(errors[x])}" for x in RIVALS),
        lowest,
    )


def check_factors(found: Found) -> list[Claim]:
    def every(source: str, measure: int) -> list[float]:
        return [
            value for layer in GROUPS["CNN"] for value in path(found, "CNN", layer, source, measure)
        ]

    wild, calm = every(MISMATCHED, ERR_A), every(SYNTHETIC, ERR_A)
    backward = {name: every(name, COS_G) for name in (SYNTHETIC, MATCHED)}
    scale = every(SYNTHETIC, ERR_G)
    return [
        Claim(
            "Mismatched public data: activation “Frobenius errors spiking by orders of magnitude”",
            "CNN, error of A: 10 or more in some layer at some look",
            extent(wild),
            [max(wild) >= 10],
        ),
        Claim(
            "“the Pink Noise estimator remains remarkably stable (error < 0.5)”",
            "CNN, error of A: below 0.5 in every layer at every look",
            extent(calm),
            [x < 0.5 for x in calm],
        ),
        Claim(
            "“Pink Noise matches the directional alignment of the semantically related FashionMNIST proxy (> 0.8 "
            "Cosine Sim)”",
            "CNN, cosine of G: above 0.8 in every layer at every look",
            f"synthetic {extent(backward[SYNTHETIC])}, matched {extent(backward[MATCHED])}",
            [x > 0.8 for x in backward[SYNTHETIC]],
        ),
        Claim(
            "“the eigenvalue magnitudes are intrinsic architectural properties recoverable via synthetic probing”",
            "CNN, error of G: below 1, that of an estimate of zero, in every layer at every look",
            extent(scale),
            [x < 1 for x in scale],
        ),
    ]


def check_transformer(found: Found) -> list[Claim]:
    groups = list(GROUPS["ViT"])

    def mean(group: str, source: str, measure: int) -> float:
        return fmean(path(found, "ViT", group, source, measure))

    def shown(measure: int) -> str:
        return "; ".join(
            f"{group}: " + ", ".join(f"{x} {mean(group, x, measure):.2f}" for x in RIVALS)
            for group in groups
        )

    ordered = [
        mean(group, MATCHED, COS_F) > mean(group, SYNTHETIC, COS_F) > mean(group, MISMATCHED, COS_F)
        for group in groups
    ]
    worst = [
        mean(g, MISMATCHED, ERR_F) > max(mean(g, x, ERR_F) for x in (MATCHED, SYNTHETIC))
        for g in groups
    ]
    close = [mean(g, MATCHED, ERR_F) <= 1.1 * mean(g, SYNTHETIC, ERR_F) for g in groups]
    of_a, of_g = (
        {x: fmean(mean(g, x, one) for g in groups) for x in RIVALS} for one in (COS_A, COS_G)
    )
    gaps = [max(one.values()) - min(one.values()) for one in (of_a, of_g)]
    *inner, outer = ([mean(g, x, ERR_F) for x in RIVALS] for g in groups)
    elevated = [error > max(others) for error, *others in zip(outer, *inner, strict=True)]
    return [
        Claim(
            "Transformer: “FashionMNIST achieves the highest directional alignment, Synthetic DP-KFC provides a robust "
            "intermediate, and domain-mismatched CIFAR-10 performs worst”",
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
            "Transformer: FashionMNIST “achieves comparable or slightly lower Frobenius error than synthetic noise”",
            "error of A ⊗ G, mean over the run: at most 1.1 times that of synthetic in each group",
            "the same figures",
            close,
        ),
        Claim(
            "Transformer: cosine of G “is similar across all three sources (~ 0.4-0.5)”",
            f"mean over groups and run: from 0.35 to 0.55, and within {NEAR} of each other",
            ", ".join(f"{name} {value:.2f}" for name, value in of_g.items()),
            [min(of_g.values()) >= 0.35 and max(of_g.values()) <= 0.55 and gaps[1] <= NEAR],
        ),
        Claim(
            "Transformer: the cosine of A “exhibits the largest gap between sources”",
            "mean over groups and run: largest less smallest of the three sources, for A beside G",
            f"A {gaps[0]:.2f}, G {gaps[1]:.2f}",
            [gaps[0] > gaps[1]],
        ),
        Claim(
            "Transformer: “The Embedding/Head group shows elevated Frobenius error for all methods”",
            "error of A ⊗ G, mean over the run: above the other groups for each source",
            "the same figures",
            elevated,
        ),
    ]


def extent(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def cells(found: Found) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: every measure at the start and at the end, mean over the seeds."""
    rows = []
    for model, groups in GROUPS.items():
        for group in groups:
            for source in LOOKED_AT:
                ways = [
                    path(found, model, group, source, number) for number in range(len(MEASURES))
                ]
                rows.append(
                    [model, group, source, *(f"{way[0]:.2f} → {way[-1]:.2f}" for way in ways)]
                )
    return ["model", "layers", "source", *MEASURES], rows


def section(inputs: str, found: Found) -> list[str]:
    return [
        f"## {inputs.capitalize()}",
        f"![A ⊗ G of the first and the last layer of the CNN, {inputs}](alignment{INPUTS[inputs]}.png)",
        f"![A and G of every layer of the CNN, {inputs}](alignment-factors{INPUTS[inputs]}.png)",
        f"![A ⊗ G of the transformer by groups of layers, {inputs}](alignment-vit{INPUTS[inputs]}.png)",
        "At the start → at the end of training, mean over the seeds:",
        markdown_table(*cells(found), left=3),
    ]


def plot_ends(found: Found, file: Path) -> None:
    """Figure 3: the first convolution above, the deepest layer below."""
    _plot(found, "CNN", ("conv1", "fc2"), (COS_F, ERR_F), file)


def plot_factors(found: Found, file: Path) -> None:
    """Figure 8: A and G apart, a row a layer."""
    _plot(found, "CNN", tuple(GROUPS["CNN"]), (COS_A, COS_G, ERR_A, ERR_G), file)


def plot_groups(found: Found, file: Path) -> None:
    """Figure 9: the transformer, a row a group of layers."""
    _plot(found, "ViT", tuple(GROUPS["ViT"]), (COS_F, ERR_F), file)


def _plot(
    found: Found, model: str, groups: Sequence[str], measures: Sequence[int], file: Path
) -> None:
    """A row a group, a column a measure, a line a source with the spread over the seeds."""
    figure, panels = new_figure(
        len(groups), len(measures), 4.6 * len(measures), 1.2 + 2.5 * len(groups)
    )
    looks = next(setting.run.looks for setting in found if setting.run.model == model)
    for row, group in zip(panels, groups, strict=True):
        for panel, number in zip(row, measures, strict=True):
            for source in LOOKED_AT:
                _line(panel, looks, series(found, model, group, source, number), source)
            panel.set_title(f"{model}, {group}: {MEASURES[number]}", fontsize=10)
            if number < ERR_A:
                panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.02)
            else:
                plain_ticks(panel)
    for panel in panels[-1]:
        panel.set_xlabel("private steps")
    finish(figure, panels[0][0], file)


def _line(panel: Axes, looks: Sequence[int], lines: Sequence[Sequence[float]], source: str) -> None:
    """The mean over the seeds, and one standard deviation about it as a band."""
    columns, style = list(zip(*lines, strict=True)), STYLES[source]
    middle = [fmean(values) for values in columns]
    panel.plot(looks, middle, label=source, **style)
    if len(lines) > 1:
        low, high = (
            [fmean(values) + sign * stdev(values) for values in columns] for sign in (-1, 1)
        )
        panel.fill_between(looks, low, high, color=style["color"], alpha=0.15, linewidth=0)
