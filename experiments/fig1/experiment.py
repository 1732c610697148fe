"""Figure 1: signal to noise of a private step, layer by layer, with and without DP-KFC: `dpkfc reproduce fig1`.

A CNN and a transformer are trained privately on CIFAR-10, once by DP-SGD and once by DP-KFC. At the start, in the
middle and at the end of each run the expected clipped gradient of every layer is compared with the noise of one step,
``‖E[w U_l g_l]‖ / (σ C √d_l / B)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from experiments.common.figures import (
    Claim,
    OnStep,
    along,
    can_draw,
    claim_table,
    evaluate,
    plain_ticks,
    spread,
    text_table,
    write_page,
)
from experiments.common.options import ReproduceOptions
from experiments.common.setting import accuracy
from experiments.common.sources import (
    BRIGHT,
    LAYERS,
    SEEDS,
    STYLES,
    SYNTHETIC,
    Run,
    oracle,
    through_training,
)
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import paper_cnn, tiny_vit
from dpkfc.app.readers.cifar import SIDE, cifar10
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.diagnostics.passes import Examples, watched
from dpkfc.diagnostics.step import Step, step_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry
from dpkfc.planning.plan import Plan

IMAGES, LOOKS = 2048, (0, 100, 200)
QUICK_IMAGES, QUICK_LOOKS = 256, (0, 2, 4)
EPSILON, CLASSES = 3.0, 10
SGD, KFC, PROXY, HALF = (
    "DP-SGD",
    "DP-KFC, synthetic",
    "DP-KFC, oracle",
    "DP-KFC, synthetic, A alone",
)
METHODS = (SGD, KFC, PROXY, HALF)
LINES: dict[str, dict[str, Any]] = {
    SGD: {"color": "#0072B2", "marker": "o"},
    KFC: {"color": STYLES[SYNTHETIC]["color"], "marker": "s"},
    PROXY: {"color": "black", "marker": "", "linestyle": "--"},
    HALF: {"color": STYLES[BRIGHT]["color"], "marker": "^", "linestyle": ":"},
}
RATES = {("CNN", SGD): 0.3, ("CNN", "DP-KFC"): 0.08, ("ViT", SGD): 0.5, ("ViT", "DP-KFC"): 0.3}
OTHER_LAYERS = {"0.position": "position", "3": "norm"} | {
    f"{b}.norm{k}": f"norm {b}.{k}" for b in (1, 2) for k in (1, 2)
}
LEAST = 1e-4  # a signal that the records do not show counts as this
ALIKE = 1.5  # a factor between signals to noise that is called matching
WHEN = ("at the start", "in the middle", "at the end")
TITLE = "Signal to noise of a private step, layer by layer (Figure 1)"
REMARK = (
    "The paper shows CIFAR-100, a simple CNN and CrossViT-240; here CIFAR-10 stands in for CIFAR-100, a transformer of "
    "two blocks with width 64 for CrossViT-240. Signal: the norm of a layer's part of the expected clipped gradient, "
    "without what the sample of records adds to it; noise: that of one step, σ C √d / B. C is the median norm under "
    "each geometry, the same rule for all. DP-SGD is measured in a run of DP-SGD, all geometries of DP-KFC in a run of "
    "DP-KFC with synthetic probes. DP-KFC maps by A and G, as Algorithm 1 does, and once by A alone, as this library "
    "does by default. The oracle's geometry, from the private images themselves, is the data-dependent one."
)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN": lambda: paper_cnn((3, SIDE, SIDE), CLASSES),
    "ViT": lambda: tiny_vit(
        image=SIDE, patch=8, channels=3, classes=CLASSES, width=64, depth=2, heads=4
    ),
}


@dataclass(frozen=True)
class Setting:
    """One model, one method of training, one seed."""

    run: Run
    images: int  # that the signal is the mean over
    geometries: tuple[str, ...]  # what is measured at the weights of the run
    clip: Literal["median"] = "median"


Found = Mapping[Setting, Any]
Profile = dict[str, list[float]]  # by layer: signal to noise, of each seed


def run(order: ReproduceOptions) -> None:
    """Print the tables; write layer-snr.json, layer-snr.md and layer-snr.png."""
    out, quick, console = order.out, order.quick, order.console
    records, test = load(order.data_dir)
    images, looks = (QUICK_IMAGES, QUICK_LOOKS) if quick else (IMAGES, LOOKS)
    settings = [
        Setting(
            Run(model, seed, rate, looks, method, EPSILON),
            images,
            (SGD,) if method == SGD else METHODS[1:],
        )
        for (model, method), rate in RATES.items()
        for seed in order.seeds(SEEDS)
    ]
    found = evaluate(
        settings,
        lambda setting, on_step: measure(setting, records, test, on_step, order.device),
        out / "layer-snr.json",
        console,
    )
    claims = {"measured": check(found)}
    console.print(text_table("Signal to noise", *cells(found), left=3))
    console.print(claim_table(claims))
    rest = ["![signal to noise by layer](layer-snr.png)", markdown_table(*cells(found), left=3)]
    command = order.command("fig1")
    write_page(out / "layer-snr.md", TITLE, command, [REMARK, about(found)], claims, rest)
    if can_draw(console):
        plot(found, out / "layer-snr.png")


def load(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """CIFAR-10 with pixels in [-1, 1]."""
    try:
        train, test = cifar10(data_dir)
    except (OSError, ValueError) as error:
        raise PrivacyError(str(error)) from error
    for data in (train, test):
        data.tensors[0].mul_(2).sub_(1)
    return train, test


def measure(
    setting: Setting,
    records: TensorDataset,
    test: TensorDataset,
    on_step: OnStep,
    device: str = "cpu",
) -> dict[str, Any]:
    """Signal to noise of every layer at every look, under the geometries that belong to the method of the run."""
    seed = setting.run.seed
    private = oracle(*records.tensors)
    pink = dpkfc.probes.PinkNoise(
        shape=(3, SIDE, SIDE), classes=CLASSES, std=0.5, channel_correlation=0.9
    )
    geometries: dict[str, Geometry] = {
        SGD: dpkfc.Identity(),
        KFC: dpkfc.KFC(pink, factors="AG", seed=seed),
        PROXY: dpkfc.KFC(private, factors="AG", seed=seed),
        HALF: dpkfc.KFC(pink, factors="A", seed=seed),
    }
    names = LAYERS[setting.run.model] | OTHER_LAYERS

    def look(model: nn.Module, plan: Plan) -> dict[str, Any]:
        examples = Examples(private, "cross_entropy", count=setting.images, seed=seed)
        ratios = {}
        for name in setting.geometries:
            with watched(model) as (copied, capture):
                step = step_of(copied, capture, examples, geometries[name], setting.clip)
            ratios[name] = {
                names[layer]: float(f"{signal_to_noise(step, layer, plan):.4g}")
                for layer in step.clipped
            }
        return {"accuracy": accuracy(model, *test.tensors), "ratios": ratios}

    torch.manual_seed(seed)
    model = MODELS[setting.run.model]().to(device)
    trained = geometries[SGD if setting.run.method == SGD else KFC]
    return through_training(setting.run, model, records, trained, look, on_step)


def signal_to_noise(step: Step, layer: str, plan: Plan) -> float:
    """The norm of the expected clipped gradient x of a layer, over that of the noise of one step.

    The norm of a mean over n records is larger than that of the expectation, by what the records differ. Without it:
    ``(‖Σ x_i‖² - Σ ‖x_i‖²) / (n (n - 1))`` is an unbiased estimate of ``‖E x‖²``.
    """
    count, size = len(step.norms), step.clipped[layer].numel()
    total = float(step.clipped[layer].double().norm()) * count
    own = float((step.weights.double().square() * step.squares[layer].double()).sum())
    signal = math.sqrt(max(total**2 - own, 0.0) / (count * (count - 1)))
    noise = plan.noise_multiplier * step.clip * math.sqrt(size) / plan.batch_size
    return max(signal / noise, LEAST)


def profile(found: Found, model: str, look: int, method: str) -> Profile:
    """The layers at the look of that number: DP-SGD in its own runs, the geometries of DP-KFC in those of DP-KFC."""
    trained = SGD if method == SGD else "DP-KFC"
    runs = [
        looks
        for setting, looks in found.items()
        if (setting.run.model, setting.run.method) == (model, trained)
    ]
    ratios = [list(looks.values())[look]["ratios"][method] for looks in runs]
    return {layer: [one[layer] for one in ratios] for layer in ratios[0]}


def check(found: Found) -> list[Claim]:
    places = [(model, look) for model in MODELS for look in range(len(WHEN))]
    means = {
        (place, method): {
            layer: fmean(values) for layer, values in profile(found, *place, method).items()
        }
        for place in places
        for method in METHODS
    }
    uneven = {
        method: [
            max(means[place, method].values()) / min(means[place, method].values())
            for place in places
        ]
        for method in METHODS
    }
    higher, gains, apart = [], [], []
    for place in places:
        sgd, kfc, proxy = (means[place, method] for method in (SGD, KFC, PROXY))
        higher.append(sum(kfc[layer] > sgd[layer] for layer in sgd) / len(sgd))
        gains.append(math.exp(fmean(math.log(kfc[layer] / sgd[layer]) for layer in sgd)))
        apart.append(
            max(max(kfc[layer] / proxy[layer], proxy[layer] / kfc[layer]) for layer in kfc)
        )
    shown = partial(along, places)
    return [
        Claim(
            "“Standard DP-SGD … suffers from signal collapse”",
            "its best layer has more than ten times the signal to noise of its worst, for both models at every look",
            f"best over worst: {shown(uneven[SGD], '.3g')}",
            [x > 10 for x in uneven[SGD]],
        ),
        Claim(
            "“DP-KFC reaches an optimal SNR profile across both local convolution and global attention "
            "architectures”: is it even?",
            "best over worst layer is smaller than with DP-SGD, at every look",
            f"{shown(uneven[KFC], '.3g')}; by A alone: {shown(uneven[HALF], '.3g')}",
            [x < y for x, y in zip(uneven[KFC], uneven[SGD], strict=True)],
        ),
        Claim(
            "the same: is it higher?",
            "signal to noise is higher than with DP-SGD in more than half of the layers, at every look",
            f"part of the layers: {shown(higher, '.0%')}; gain, geometric mean over the layers: {shown(gains, '.2f')}",
            [part > 0.5 for part in higher],
        ),
        Claim(
            "“matching the geometry of data-dependent proxies … without accessing external data”",
            f"synthetic within a factor of {ALIKE} of the oracle's geometry in every layer, at every look",
            f"largest factor: {shown(apart, '.2f')}",
            [x <= ALIKE for x in apart],
        ),
    ]


def about(found: Found) -> str:
    setting = next(iter(found))
    reached: dict[str, list[float]] = {}
    for one, looks in found.items():
        reached.setdefault(f"{one.run.model}, {one.run.method}", []).append(
            100 * list(looks.values())[-1]["accuracy"]
        )
    return (
        f"{setting.images} records; {len({one.run.seed for one in found})} seeds (± one standard deviation); "
        f"{setting.run.looks[-1]} steps at epsilon = {setting.run.epsilon:g}, batch {setting.run.batch_size}, seen "
        f"after {', '.join(map(str, setting.run.looks))}. Test accuracy at the end: "
        + "; ".join(f"{name}: {spread(values, '.1f')} %" for name, values in reached.items())
        + "."
    )


def cells(found: Found) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row a layer and geometry, a column a look."""
    rows = []
    for model in MODELS:
        looks = [
            [profile(found, model, number, method) for number in range(len(WHEN))]
            for method in METHODS
        ]
        for layer in looks[0][0]:
            for method, profiles in zip(METHODS, looks, strict=True):
                rows.append(
                    [model, layer, method, *(spread(one[layer], ".3f") for one in profiles)]
                )
    return ["model", "layer", "geometry", *WHEN], rows


def plot(found: Found, file: Path) -> None:
    """A row a model, a column a look; error bars are the standard deviation over the seeds."""
    figure, panels = new_figure(len(MODELS), len(WHEN), 14, 8.5)
    for row, model in zip(panels, MODELS, strict=True):
        for look, panel in enumerate(row):
            for method in METHODS:
                layers = profile(found, model, look, method)
                bars = [stdev(values) if len(values) > 1 else 0.0 for values in layers.values()]
                panel.errorbar(
                    range(len(layers)),
                    [fmean(values) for values in layers.values()],
                    bars,
                    label=method,
                    markersize=4.5,
                    linewidth=1.5,
                    capsize=2,
                    **LINES[method],
                )
            panel.axhline(1, color="0.35", linestyle=":", linewidth=1, zorder=0)
            plain_ticks(panel)
            panel.set_title(f"{model}, {WHEN[look]}", fontsize=10)
            panel.set_xticks(range(len(layers)), list(layers), rotation=60, ha="right", fontsize=8)
        row[0].set_ylabel("signal / noise of one step")
    finish(figure, panels[0][0], file)
