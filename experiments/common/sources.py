"""What the paper's diagnostic figures share: the private task, the sources of geometry, the models and their training.

The private task is MNIST. A geometry is known from the private images themselves (the oracle), from public images, or
from noise; three more sources are controls (see `ABOUT`). Scale and brightness of the inputs decide much, so all is
measured twice: on inputs standardised as in the paper's code, and on pixels in [0, 1].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from experiments.common.figures import OnStep
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import mlp, paper_cnn, tiny_vit
from dpkfc.app.readers.cifar import cifar10
from dpkfc.app.readers.idx import CLASSES, SIDE, idx_images
from dpkfc.app.readers.records import on_device
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry
from dpkfc.planning.plan import Plan
from dpkfc.probes.probe import Probe

ORACLE, OTHERS, UNLABELLED = "oracle", "other private images", "private images, random labels"
MATCHED, MISMATCHED = "matched public", "mismatched public"  # FashionMNIST, CIFAR-10
SYNTHETIC, BRIGHT, WHITE = (
    "synthetic",
    "synthetic, bright",
    "white noise",
)  # pink noise, pink noise, and what it says
LOOKED_AT = (OTHERS, UNLABELLED, MATCHED, MISMATCHED, SYNTHETIC, BRIGHT, WHITE)
STANDARDISED, PIXELS = "standardised inputs", "pixels in [0, 1]"
INPUTS = {STANDARDISED: "", PIXELS: "-pixels"}  # and how files about them end
ABOUT = (
    "Private task: MNIST. Matched public: FashionMNIST; mismatched public: CIFAR-10, grey, at 28 x 28; synthetic: pink "
    "noise with power 1/f² and mean 0; bright: pink noise about as bright as pixels are (mean 0.3, standard deviation "
    "0.3 on the scale of pixels); white noise: a flat spectrum. Images have their own labels, noise has uniform ones. "
    "Controls: other private images with their labels show what the sample alone accounts for, private images with "
    "random labels what the labels do, and white noise what does not depend on the inputs' spectrum.",
    "Inputs are scaled in two ways. *Standardised*: (x - 0.1307) / 0.3081 for MNIST and FashionMNIST, (x - 0.5) / 0.5 "
    "for CIFAR-10, as in the paper's code, and noise of standard deviation 1, as in its text. (The first are "
    "statistics of the private records, for which no budget pays.) *Pixels in [0, 1]*: images as they are, noise of "
    "standard deviation 0.5.",
)
STYLES: dict[str, dict[str, Any]] = {  # Okabe and Ito's colours: told apart by all eyes
    ORACLE: {"color": "black", "linestyle": "--", "linewidth": 1.8, "zorder": 5},
    OTHERS: {"color": "0.45", "linestyle": ":", "linewidth": 1.6},
    UNLABELLED: {"color": "0.45", "linestyle": "-.", "linewidth": 1.2},
    MATCHED: {"color": "#0072B2", "linewidth": 1.5},
    MISMATCHED: {"color": "#AA4499", "linewidth": 1.5},
    SYNTHETIC: {"color": "#E69F00", "linewidth": 2.0},
    BRIGHT: {"color": "#D55E00", "linestyle": (0, (5, 1.5)), "linewidth": 1.2},
    WHITE: {"color": "#009E73", "linestyle": (0, (1, 1)), "linewidth": 1.5},
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: mlp([SIDE * SIDE, 256, 128, CLASSES]),
    "CNN": paper_cnn,
    "ViT": lambda: tiny_vit(
        image=SIDE, patch=7, channels=1, classes=CLASSES, width=64, depth=2, heads=4
    ),
}
RATES = {
    "MLP": 0.1,
    "CNN": 0.08,
    "ViT": 0.3,
}  # learning rates of DP-KFC at which a short run learns
BLOCKS = (1, 2)
LAYERS: dict[
    str, dict[str, str]
] = {  # those with Kronecker factors: what the model calls them, and what they are
    "MLP": {"1": "fc1", "3": "fc2", "5": "fc3"},
    "CNN": {name: name for name in ("conv1", "conv2", "fc1", "fc2")},
    "ViT": {"0.project": "patches"}
    | {
        f"{b}.attention.{part}": f"{part} {b}"
        for b in BLOCKS
        for part in ("query", "key", "value", "out")
    }
    | {
        f"{b}.mlp.{place}": f"mlp {b} {end}"
        for b in BLOCKS
        for place, end in ((0, "in"), (2, "out"))
    }
    | {"5": "head"},
}
SEEDS = (0, 1, 2)
DELTA = 1e-5
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels
PUBLIC = 10_000  # public images that there are
LUMINANCE = (0.299, 0.587, 0.114)

Found = TypeVar("Found")


@dataclass(frozen=True)
class Run:
    """A private training run, and the steps after which one looks at its weights."""

    model: str
    seed: int
    lr: float
    looks: tuple[int, ...]  # 0: at the initial weights; the last: at the end
    method: str = "DP-KFC"  # or "DP-SGD"
    epsilon: float = 1.0
    batch_size: int = 256
    clip: float = 1.0
    momentum: float = 0.9


@dataclass(frozen=True)
class Task:
    """The private records, the test set, and the sources by name."""

    records: TensorDataset
    test: TensorDataset
    sources: Mapping[str, Probe]


def load(data_dir: Path | None) -> dict[str, Task]:
    """MNIST with all sources, by the scaling of the inputs.

    Data that is missing or broken is a `PrivacyError` that says what to fetch.
    """
    try:
        (records, test), (fashion, _) = (
            idx_images(name, data_dir) for name in ("mnist", "fashion-mnist")
        )
        natural, classes = cifar10(data_dir)[0][:PUBLIC]
    except (OSError, ValueError) as error:
        raise PrivacyError(str(error)) from error
    cifar = grey_images(natural), classes

    def scaled(images: Tensor, mean: float = MEAN, std: float = STD) -> Tensor:
        return (images - mean) / std

    mnist, tests, dressed = (
        (scaled(data.tensors[0]), data.tensors[1]) for data in (records, test, fashion)
    )
    return {
        STANDARDISED: Task(
            TensorDataset(*mnist),
            TensorDataset(*tests),
            _private(*mnist)
            | _others(
                dressed, (scaled(cifar[0], 0.5, 0.5), classes), 1.0, ((0.3 - MEAN) / STD, 0.3 / STD)
            ),
        ),
        PIXELS: Task(
            records,
            test,
            _private(*records.tensors) | _others(fashion.tensors, cifar, 0.5, (0.3, 0.3)),
        ),
    }


def _private(images: Tensor, labels: Tensor) -> dict[str, Probe]:
    """The first half for the oracle. (Not every other image: those are of two groups of writers in turn.)"""
    half = len(images) // 2
    return {
        ORACLE: oracle(images[:half], labels[:half]),
        OTHERS: oracle(images[half:], labels[half:]),
        UNLABELLED: oracle(images[half:]),
    }


def oracle(images: Tensor, labels: Tensor | None = None) -> dpkfc.probes.Oracle:
    """Private images as a source, with their labels if there are any. That it is not private is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Oracle builds the geometry", UserWarning)
        return (
            dpkfc.probes.Oracle(images)
            if labels is None
            else dpkfc.probes.Oracle((images, labels), labels=True)
        )


def _others(
    matched: tuple[Tensor, ...],
    mismatched: tuple[Tensor, ...],
    std: float,
    bright: tuple[float, float],
) -> dict[str, Probe]:
    """Public images, and noise of standard deviation `std`; for bright noise mean and standard deviation are given."""
    noise: dict[str, Any] = {"shape": (1, SIDE, SIDE), "classes": CLASSES}
    return {
        MATCHED: dpkfc.probes.PublicData(tuple(part[:PUBLIC] for part in matched), labels=True),
        MISMATCHED: dpkfc.probes.PublicData(mismatched, labels=True),
        SYNTHETIC: dpkfc.probes.PinkNoise(**noise, std=std),
        BRIGHT: dpkfc.probes.PinkNoise(**noise, mean=bright[0], std=bright[1]),
        WHITE: dpkfc.probes.PinkNoise(**noise, alpha=0.0, std=std),
    }


def grey_images(images: Tensor) -> Tensor:
    """Colour images [n, 3, h, w] as [n, 1, 28, 28]: their luminance, resized."""
    weights = torch.tensor(LUMINANCE).view(1, 3, 1, 1)
    grey = (images * weights).sum(1, keepdim=True)
    return F.interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)


def fresh(run: Run, device: str = "cpu") -> nn.Module:
    """The model of a run at its initial weights."""
    torch.manual_seed(run.seed)
    return MODELS[run.model]().to(device)


def through_training(
    run: Run,
    model: nn.Module,
    records: TensorDataset,
    geometry: Geometry,
    look: Callable[[nn.Module, Plan], Found],
    on_step: OnStep = lambda done, of: None,
) -> dict[str, Found]:
    """What `look` finds after each of the steps `run.looks` of private training by SGD, by the number of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    private = dpkfc.make_private(
        model,
        optimizer,
        on_device(records, next(model.parameters()).device),
        epsilon=run.epsilon,
        delta=DELTA,
        steps=max(run.looks),
        batch_size=run.batch_size,
        clip=run.clip,
        geometry=geometry,
        seed=run.seed,
        loss=dpkfc.losses.cross_entropy,
    )
    found = {"0": look(model, private.plan)} if 0 in run.looks else {}
    for images, labels in private.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(private.steps, private.plan.steps)
        if private.steps in run.looks:
            found[str(private.steps)] = look(model, private.plan)
    private.detach()
    return found
