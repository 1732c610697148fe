"""What the diagnostic figures share: the private task, sources of geometry, models, training.

The private task is MNIST. The geometry comes from the private images themselves (the oracle), from
public images, or from noise; three more sources are controls (see `ABOUT`). Scale and brightness
of the inputs matter, so everything is measured twice: on inputs standardised as in the paper's
code, and on pixels in [0, 1].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import mlp, paper_cnn, tiny_vit
from dpkfc.app.readers.cifar import cifar10
from dpkfc.app.readers.idx import CLASSES, SIDE, idx_images
from dpkfc.app.readers.records import on_device
from dpkfc.geometry.base import Geometry
from dpkfc.planning.plan import Plan
from dpkfc.probes.probe import Probe
from experiments.common.figures import OnStep

# Names of the sources, as the recorded results have them.
ORACLE = "oracle"
OTHERS = "other private images"
UNLABELLED = "private images, random labels"
MATCHED = "matched public"  # FashionMNIST
MISMATCHED = "mismatched public"  # CIFAR-10
SYNTHETIC = "synthetic"  # pink noise
BRIGHT = "synthetic, bright"  # pink noise about as bright as the images
WHITE = "white noise"
COMPARED = (OTHERS, UNLABELLED, MATCHED, MISMATCHED, SYNTHETIC, BRIGHT, WHITE)
STANDARDISED = "standardised inputs"
PIXELS = "pixels in [0, 1]"
INPUTS = {STANDARDISED: "", PIXELS: "-pixels"}  # and the ending of file names about them
ABOUT = (
    "Private task: MNIST. Matched public: FashionMNIST; mismatched public: CIFAR-10, grey, at 28 x "
    "28; synthetic: pink noise with power 1/f² and mean 0; bright: pink noise about as bright as "
    "pixels are (mean 0.3, standard deviation 0.3 on the scale of pixels); white noise: a flat "
    "spectrum. Images have their own labels, noise has uniform ones. Controls: other private "
    "images with their labels show what the sample alone accounts for, private images with random "
    "labels what the labels do, and white noise what does not depend on the inputs' spectrum.",
    "Inputs are scaled in two ways. *Standardised*: (x - 0.1307) / 0.3081 for MNIST and "
    "FashionMNIST, (x - 0.5) / 0.5 for CIFAR-10, as in the paper's code, and noise of standard "
    "deviation 1, as in its text. (The first are statistics of the private records, for which no "
    "budget pays.) *Pixels in [0, 1]*: images as they are, noise of standard deviation 0.5.",
)
STYLES: dict[str, dict[str, Any]] = {  # Okabe and Ito's colours, safe for colour blindness
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
# Learning rates at which a short run of DP-KFC learns.
RATES = {"MLP": 0.1, "CNN": 0.08, "ViT": 0.3}
BLOCKS = (1, 2)
# Layers with Kronecker factors: from their names in the model to readable ones.
LAYERS: dict[str, dict[str, str]] = {
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
MEAN = 0.1307  # of MNIST's pixels
STD = 0.3081
PUBLIC = 10_000  # public images per source
LUMINANCE = (0.299, 0.587, 0.114)

Observation = TypeVar("Observation")


@dataclass(frozen=True)
class TrainingRun:
    """A private training run, and the steps (`looks`) after which its weights are examined."""

    model: str
    seed: int
    lr: float
    looks: tuple[int, ...]  # 0 is at the initial weights; the last one is the end of the run
    method: str = "DP-KFC"  # or "DP-SGD"
    epsilon: float = 1.0
    batch_size: int = 256
    clip: float = 1.0
    momentum: float = 0.9


@dataclass(frozen=True)
class DiagnosticTask:
    """The private records, the test set, and the sources by name."""

    records: TensorDataset
    test: TensorDataset
    sources: Mapping[str, Probe]


def load(data_dir: Path | None) -> dict[str, DiagnosticTask]:
    """Load MNIST and all sources, once per scaling of the inputs.

    Raises:
        FileNotFoundError: A data set is missing; the message says what to fetch.
        ValueError: A file is broken.
    """
    records, test = idx_images("mnist", data_dir)
    fashion, _ = idx_images("fashion-mnist", data_dir)
    natural, classes = cifar10(data_dir)[0][:PUBLIC]
    cifar = (grey_images(natural), classes)

    def scaled(images: Tensor, mean: float = MEAN, std: float = STD) -> Tensor:
        return (images - mean) / std

    scaled_records, scaled_test, scaled_fashion = (
        (scaled(data.tensors[0]), data.tensors[1]) for data in (records, test, fashion)
    )
    scaled_cifar = (scaled(cifar[0], 0.5, 0.5), classes)
    scaled_bright = ((0.3 - MEAN) / STD, 0.3 / STD)
    return {
        STANDARDISED: DiagnosticTask(
            TensorDataset(*scaled_records),
            TensorDataset(*scaled_test),
            _private_sources(*scaled_records)
            | _other_sources(scaled_fashion, scaled_cifar, 1.0, scaled_bright),
        ),
        PIXELS: DiagnosticTask(
            records,
            test,
            _private_sources(*records.tensors)
            | _other_sources(fashion.tensors, cifar, 0.5, (0.3, 0.3)),
        ),
    }


def _private_sources(images: Tensor, labels: Tensor) -> dict[str, Probe]:
    """Give the first half of the private images to the oracle, the second to its controls.

    Not every other image: two groups of writers alternate in MNIST.
    """
    half = len(images) // 2
    return {
        ORACLE: oracle(images[:half], labels[:half]),
        OTHERS: oracle(images[half:], labels[half:]),
        UNLABELLED: oracle(images[half:]),
    }


def oracle(images: Tensor, labels: Tensor | None = None) -> dpkfc.probes.Oracle:
    """Return private images as a source, with their labels if given, without the usual warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Oracle builds the geometry", UserWarning)
        return (
            dpkfc.probes.Oracle(images)
            if labels is None
            else dpkfc.probes.Oracle((images, labels), labels=True)
        )


def _other_sources(
    matched: tuple[Tensor, ...],
    mismatched: tuple[Tensor, ...],
    std: float,
    bright: tuple[float, float],
) -> dict[str, Probe]:
    """Return public images, and noise of standard deviation `std`.

    `bright` is the mean and the standard deviation of bright noise.
    """
    noise: dict[str, Any] = {"shape": (1, SIDE, SIDE), "classes": CLASSES}
    return {
        MATCHED: dpkfc.probes.PublicData(tuple(part[:PUBLIC] for part in matched), labels=True),
        MISMATCHED: dpkfc.probes.PublicData(mismatched, labels=True),
        SYNTHETIC: dpkfc.probes.PinkNoise(**noise, std=std),
        BRIGHT: dpkfc.probes.PinkNoise(**noise, mean=bright[0], std=bright[1]),
        WHITE: dpkfc.probes.PinkNoise(**noise, alpha=0.0, std=std),
    }


def grey_images(images: Tensor) -> Tensor:
    """Convert colour images [n, 3, h, w] to [n, 1, 28, 28]: their luminance, resized."""
    weights = torch.tensor(LUMINANCE).view(1, 3, 1, 1)
    grey = (images * weights).sum(1, keepdim=True)
    return F.interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)


def initial_model(run: TrainingRun, device: str = "cpu") -> nn.Module:
    """Return the model of a run at its initial weights."""
    torch.manual_seed(run.seed)
    return MODELS[run.model]().to(device)


def observe_training(
    training: TrainingRun,
    model: nn.Module,
    records: TensorDataset,
    geometry: Geometry,
    look: Callable[[nn.Module, Plan], Observation],
    on_step: OnStep = lambda done, total: None,
) -> dict[str, Observation]:
    """Train privately by SGD and return what `look` observes after each step in `training.looks`.

    The result is keyed by the number of the step, as a string.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    run = dpkfc.make_private(
        model,
        optimizer,
        on_device(records, next(model.parameters()).device),
        epsilon=training.epsilon,
        delta=DELTA,
        steps=max(training.looks),
        batch_size=training.batch_size,
        clip=training.clip,
        geometry=geometry,
        seed=training.seed,
        loss=dpkfc.losses.cross_entropy,
    )
    observations = {"0": look(model, run.plan)} if 0 in training.looks else {}
    for images, labels in run.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(run.steps, run.plan.steps)
        if run.steps in training.looks:
            observations[str(run.steps)] = look(model, run.plan)
    run.detach()
    return observations
