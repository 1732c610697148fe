"""The signal-to-noise ratio of a private step by layer, with and without DP-KFC.

A CNN and a transformer are trained privately on CIFAR-10, once by DP-SGD and once by DP-KFC. At the
start, in the middle and at the end of each run, the expected clipped gradient of every layer is
compared with the noise of one step, ``‖E[w U_l g_l]‖ / (σ R √d_l / B)`` with clip norm R.
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
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import paper_cnn, tiny_vit
from dpkfc.app.readers.cifar import SIDE, cifar10
from dpkfc.app.reports.figures import finish, new_figure
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.diagnostics.passes import Examples, captured_copy
from dpkfc.diagnostics.step import Step, step_of
from dpkfc.geometry.base import Geometry
from dpkfc.planning.plan import Plan
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
from experiments.common.sources import (
    BRIGHT,
    LAYERS,
    SEEDS,
    STYLES,
    SYNTHETIC,
    TrainingRun,
    observe_training,
    oracle,
)

IMAGES = 2048
LOOKS = (0, 100, 200)
QUICK_IMAGES = 256
QUICK_LOOKS = (0, 2, 4)
EPSILON = 3.0
CLASSES = 10
# Names of the geometries, as the recorded results have them.
SGD = "DP-SGD"
KFC = "DP-KFC, synthetic"
PROXY = "DP-KFC, oracle"
HALF = "DP-KFC, synthetic, A alone"
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
LEAST = 1e-4  # lower bound of a ratio, for layers whose signal the records do not show
MATCHING = 1.5  # the factor within which two signal-to-noise ratios match
WHEN = ("at the start", "in the middle", "at the end")
TITLE = "Signal to noise of a private step, layer by layer (Figure 1)"
REMARK = (
    "The paper shows CIFAR-100, a simple CNN and CrossViT-240; here CIFAR-10 replaces CIFAR-100, "
    "and a transformer of two blocks with width 64 replaces CrossViT-240. Signal: the norm of a "
    "layer's part of the expected clipped gradient, without the contribution of the finite sample "
    "of records; noise: that of one step, σ R √d / B. The clip norm R is the median gradient norm "
    "under each geometry, the same rule for all. DP-SGD is measured in a run of DP-SGD, all "
    "geometries of DP-KFC in a run of DP-KFC with synthetic probes. DP-KFC maps by A and G, as "
    "Algorithm 1 does, and once by A alone, the default of this library. The oracle's geometry, "
    "from the private images themselves, is the data-dependent one."
)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN": lambda: paper_cnn((3, SIDE, SIDE), CLASSES),
    "ViT": lambda: tiny_vit(
        image=SIDE, patch=8, channels=3, classes=CLASSES, width=64, depth=2, heads=4
    ),
}


@dataclass(frozen=True)
class SnrSetting:
    """One model, one method of training, one seed.

    Args:
        run: The training run.
        images: The number of images over which the signal is averaged.
        geometries: The geometries that are measured at the weights of the run.
        clip: The rule for the clip norm.
    """

    run: TrainingRun
    images: int
    geometries: tuple[str, ...]
    clip: Literal["median"] = "median"


Results = Mapping[SnrSetting, Any]
Profile = dict[str, list[float]]  # signal-to-noise ratios, by layer and then by seed


def reproduce(options: ReproduceOptions) -> None:
    """Print the tables; write layer-snr.json, layer-snr.md and layer-snr.png."""
    out = options.out
    console = options.console
    records, test = load(options.data_dir)
    images, looks = (QUICK_IMAGES, QUICK_LOOKS) if options.quick else (IMAGES, LOOKS)
    settings = [
        SnrSetting(
            TrainingRun(model, seed, rate, looks, method, EPSILON),
            images,
            (SGD,) if method == SGD else METHODS[1:],
        )
        for (model, method), rate in RATES.items()
        for seed in options.seeds(SEEDS)
    ]
    results = evaluate(
        settings,
        lambda setting, on_step: measure(setting, records, test, on_step, options.device),
        out / "layer-snr.json",
        console,
    )
    claims = {"measured": check(results)}
    console.print(text_table("Signal to noise", *cells(results), left=3))
    console.print(claim_table(claims))
    rest = ["![signal to noise by layer](layer-snr.png)", markdown_table(*cells(results), left=3)]
    command = options.command("fig1")
    write_page(out / "layer-snr.md", TITLE, command, [REMARK, about(results)], claims, rest)
    if can_draw(console):
        plot(results, out / "layer-snr.png")


def load(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Load CIFAR-10 with pixels in [-1, 1]."""
    train, test = cifar10(data_dir)
    for data in (train, test):
        data.tensors[0].mul_(2).sub_(1)
    return train, test


def measure(
    setting: SnrSetting,
    records: TensorDataset,
    test: TensorDataset,
    on_step: OnStep,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure the ratio of every layer at every look, under each geometry of the setting."""
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
            with captured_copy(model) as (copied, capture):
                step = step_of(copied, capture, examples, geometries[name], setting.clip)
            ratios[name] = {
                names[layer]: float(f"{signal_to_noise(step, layer, plan):.4g}")
                for layer in step.clipped
            }
        return {"accuracy": accuracy(model, *test.tensors), "ratios": ratios}

    torch.manual_seed(seed)
    model = MODELS[setting.run.model]().to(device)
    trained = geometries[SGD if setting.run.method == SGD else KFC]
    return observe_training(setting.run, model, records, trained, look, on_step)


def signal_to_noise(step: Step, layer: str, plan: Plan) -> float:
    """Return the norm of a layer's expected clipped gradient x over that of the noise of one step.

    The norm of a mean over n records overestimates that of the expectation. The estimate
    ``(‖Σ x_i‖² - Σ ‖x_i‖²) / (n (n - 1))`` of ``‖E x‖²`` is unbiased.
    """
    count = len(step.norms)
    size = step.clipped[layer].numel()
    total = float(step.clipped[layer].double().norm()) * count
    own = float((step.weights.double().square() * step.squares[layer].double()).sum())
    signal = math.sqrt(max(total**2 - own, 0.0) / (count * (count - 1)))
    noise = plan.noise_multiplier * step.clip * math.sqrt(size) / plan.batch_size
    return max(signal / noise, LEAST)


def profile(results: Results, model: str, look: int, method: str) -> Profile:
    """Return the ratios of all layers at a look.

    DP-SGD is measured in its own runs, the geometries of DP-KFC in those of DP-KFC.
    """
    trained = SGD if method == SGD else "DP-KFC"
    runs = [
        looks
        for setting, looks in results.items()
        if (setting.run.model, setting.run.method) == (model, trained)
    ]
    ratios = [list(looks.values())[look]["ratios"][method] for looks in runs]
    return {layer: [seed_ratios[layer] for seed_ratios in ratios] for layer in ratios[0]}


def check(results: Results) -> list[Claim]:
    """Check the statements of the paper about Figure 1."""
    places = [(model, look) for model in MODELS for look in range(len(WHEN))]
    means = {
        (place, method): {
            layer: fmean(values) for layer, values in profile(results, *place, method).items()
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
    higher = []
    gains = []
    distances = []
    for place in places:
        sgd, kfc, proxy = (means[place, method] for method in (SGD, KFC, PROXY))
        higher.append(sum(kfc[layer] > sgd[layer] for layer in sgd) / len(sgd))
        gains.append(math.exp(fmean(math.log(kfc[layer] / sgd[layer]) for layer in sgd)))
        distances.append(
            max(max(kfc[layer] / proxy[layer], proxy[layer] / kfc[layer]) for layer in kfc)
        )
    shown = partial(along, places)
    return [
        Claim(
            "“Standard DP-SGD … suffers from signal collapse”",
            "its best layer has more than ten times the signal to noise of its worst, for both "
            "models at every look",
            f"best over worst: {shown(uneven[SGD], '.3g')}",
            [x > 10 for x in uneven[SGD]],
        ),
        Claim(
            "“DP-KFC reaches an optimal SNR profile across both local convolution and global "
            "attention architectures”: is it even?",
            "best over worst layer is smaller than with DP-SGD, at every look",
            f"{shown(uneven[KFC], '.3g')}; by A alone: {shown(uneven[HALF], '.3g')}",
            [x < y for x, y in zip(uneven[KFC], uneven[SGD], strict=True)],
        ),
        Claim(
            "the same: is it higher?",
            "signal to noise is higher than with DP-SGD in more than half of the layers, at every "
            "look",
            f"share of the layers: {shown(higher, '.0%')}; gain, geometric mean over the layers: "
            f"{shown(gains, '.2f')}",
            [share > 0.5 for share in higher],
        ),
        Claim(
            "“matching the geometry of data-dependent proxies … without accessing external data”",
            f"synthetic within a factor of {MATCHING} of the oracle's geometry in every layer, at "
            "every look",
            f"largest factor: {shown(distances, '.2f')}",
            [x <= MATCHING for x in distances],
        ),
    ]


def about(results: Results) -> str:
    """Describe the runs and the accuracy that they reached."""
    first = next(iter(results))
    accuracies: dict[str, list[float]] = {}
    for setting, looks in results.items():
        accuracies.setdefault(f"{setting.run.model}, {setting.run.method}", []).append(
            100 * list(looks.values())[-1]["accuracy"]
        )
    ends = "; ".join(f"{name}: {spread(values, '.1f')} %" for name, values in accuracies.items())
    seeds = {setting.run.seed for setting in results}
    return (
        f"{first.images} records; {len(seeds)} seeds (± one standard deviation); "
        f"{first.run.looks[-1]} steps at epsilon = {first.run.epsilon:g}, batch "
        f"{first.run.batch_size}, measured after {', '.join(map(str, first.run.looks))}. Test "
        f"accuracy at the end: {ends}."
    )


def cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: one row per layer and geometry, one column per look."""
    rows = []
    for model in MODELS:
        looks = [
            [profile(results, model, number, method) for number in range(len(WHEN))]
            for method in METHODS
        ]
        for layer in looks[0][0]:
            for method, profiles in zip(METHODS, looks, strict=True):
                ratios = [spread(by_layer[layer], ".3f") for by_layer in profiles]
                rows.append([model, layer, method, *ratios])
    return ["model", "layer", "geometry", *WHEN], rows


def plot(results: Results, file: Path) -> None:
    """Draw one row per model and one column per look; error bars are standard deviations."""
    figure, panels = new_figure(len(MODELS), len(WHEN), 14, 8.5)
    for row, model in zip(panels, MODELS, strict=True):
        for look, panel in enumerate(row):
            for method in METHODS:
                layers = profile(results, model, look, method)
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
