"""One training run, described by all that it depends on: `Setting` in, `Result` out."""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from experiments.common.data.changes import CHANGES
from experiments.common.data.featured import FEATURED
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import mlp, paper_cnn, tiny_vit
from dpkfc.app.readers.idx import Scaling
from dpkfc.app.readers.records import on_device
from dpkfc.app.readers.sources import NAMED
from dpkfc.planning.choose_noise import Noise
from dpkfc.probes.probe import Probe

DATASETS = NAMED | FEATURED
Data = tuple[TensorDataset, TensorDataset]  # for training, for testing
Load = Callable[[str, Scaling], Data]  # by the name of the data set
COURSE = 2000  # records on which accuracy is measured on the way

# The whitening of the paper as it was measured: activations only, all ranks, absolute stability, probes every 50 steps.
# What the accuracy depends on is named, so that it is part of a setting's key.
PAPER: dict[str, Any] = {
    "probe": {"alpha": 2.0, "std": 0.5},
    "every": 50,
    "probes": 512,
    "factors": "A",
    "approx": "expand",
    "rank": None,
    "power": 1.0,
    "stability": 1e-3,
    "damping": 0.0,
    "post": 0.0,
}

MODELS: dict[
    str, Callable[[tuple[int, ...], int], nn.Module]
] = {  # by the shape of a record and the number of classes
    "cnn": lambda shape, classes: paper_cnn((shape[0], shape[1], shape[2]), classes),
    "mlp": lambda shape, classes: mlp([math.prod(shape), 256, 128, classes]),
    "vit": lambda shape, classes: tiny_vit(
        shape[1], 4, shape[0], classes, width=64, depth=2, heads=4
    ),
    "linear": lambda shape, classes: mlp([math.prod(shape), classes]),
}

SCHEDULES: dict[
    str, Callable[[float], float]
] = {  # factor of the learning rate, by the part of the run that is done
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


@dataclass(frozen=True)
class Setting:
    """All that a run depends on besides the data.

    `geometry` holds KFC's arguments, or with "kind": "Diagonal" those of AdaDPS; None is DP-SGD. Its `probe` holds the
    arguments of `PinkNoise`, or {"public": the name of a data set}, {"pool": the name of noise that took the way of the
    features}, {"sparse": the arguments of `Tabular.sparse`}, or {"oracle": "records"} for the private records
    themselves. `noise` holds the name of the noise and its arguments; None is independent. `optimizer` holds the name
    of the optimizer (Adam, AdamW, DPAdamBC, or DiSK around SGD) and its arguments; None is SGD. `model` is one of
    `MODELS`; None is the paper's CNN. `change` is one of `CHANGES`, made to every image of the data set; None is none.
    `course` is how often accuracy is measured on the way; None is never.
    """

    dataset: str
    arm: str
    lr: float
    geometry: Mapping[str, Any] | None = None
    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: float = 5
    batch_size: int = 256
    clip: float = 1.0
    momentum: float = 0.9
    label_smoothing: float = 0.0
    schedule: str = "constant"
    ema: float = 0.99  # decay of the averaged copy of the iterates; 0 for none. Post-processing, so it is free
    scaling: Scaling = "unit"
    seed: int = 0
    validation: int = (
        5000  # training records held out at the end; 0 trains on all and measures on the test set
    )
    noise: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    model: str | None = None
    change: str | None = None
    course: int | None = None

    @property
    def key(self) -> str:
        """A hash of the contents."""
        added = ("noise", "optimizer", "model", "change", "course")
        contents = {k: v for k, v in asdict(self).items() if k not in added or v is not None}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        parts = [f"lr {self.lr:g}", f"clip {self.clip:g}"]
        parts += [f"smoothing {self.label_smoothing:g}"] if self.label_smoothing else []
        parts += [self.schedule] if self.schedule != "constant" else []
        parts += [f"{k} {v}" for k, v in (self.optimizer or {}).items() if k != "name"]
        return ", ".join(
            parts + [f"{k} {v}" for k, v in (self.geometry or {}).items() if PAPER.get(k) != v]
        )


@dataclass(frozen=True)
class Result:
    """Accuracies on the held-out records (if the setting has any) or the test set."""

    last: float  # of the last iterate
    average: float | None  # of the averaged iterates
    epsilon: float  # of this run alone
    noise_multiplier: float
    steps: int
    seconds: float
    course: tuple[float, ...] | None = (
        None  # of the averaged iterates if there are, on the first `COURSE` records
    )


def train(
    setting: Setting,
    load: Load,
    on_step: Callable[[int, int], None] = lambda done, of: None,
    device: str = "cpu",
) -> Result:
    """A plain PyTorch loop; `on_step(done, of)` is called after every step."""
    records, measured = split(
        changed(load(setting.dataset, setting.scaling), setting.change), setting.validation
    )
    shape, classes = tuple(records.tensors[0].shape[1:]), len(DATASETS[setting.dataset][0])
    torch.manual_seed(setting.seed)
    model = MODELS[setting.model or "cnn"](shape, classes).to(device)
    if len(shape) == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(setting, model)

    def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=setting.label_smoothing)

    private = dpkfc.make_private(
        model,
        optimizer,
        on_device(records, device),
        epsilon=setting.epsilon,
        delta=setting.delta,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        clip=setting.clip,
        geometry=geometry_of(setting, records, load),
        noise=noise_of(setting),
        seed=setting.seed,
        loss=lambda model, batch: loss_of(model, *batch),
    )
    steps, factor = private.plan.steps, SCHEDULES[setting.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / steps))
    weights = list(model.parameters())
    average = [w.detach().clone() for w in weights]
    stops = {
        round(steps * part / (setting.course or 1)) for part in range(1, 1 + (setting.course or 0))
    }
    course = []
    begun = time.perf_counter()
    for images, labels in private.loader:
        loss_of(model, images, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if setting.ema:
            pull = max(
                1 - setting.ema, 1 / private.steps
            )  # the plain mean at first, so the start is forgotten
            with at_iterate(optimizer):
                for mean, w in zip(average, weights, strict=True):
                    mean.lerp_(w.detach(), pull)
        if private.steps in stops:
            with at_iterate(optimizer), holding(weights, average if setting.ema else weights):
                course.append(accuracy(model, *(part[:COURSE] for part in measured.tensors)))
        on_step(private.steps, steps)
    seconds = time.perf_counter() - begun
    private.detach()
    with at_iterate(optimizer):
        last, averaged = accuracy(model, *measured.tensors), None
    if setting.ema:
        with holding(weights, average):
            averaged = accuracy(model, *measured.tensors)
    spent = (private.epsilon(), private.plan.noise_multiplier, private.steps, seconds)
    return Result(last, averaged, *spent, tuple(course) if setting.course else None)


@contextmanager
def holding(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Other values in the weights for a while."""
    own = [w.detach().clone() for w in weights]
    with torch.no_grad():
        torch._foreach_copy_(list(weights), list(values))
        yield
        torch._foreach_copy_(list(weights), own)


def split(data: Data, validation: int) -> Data:
    """What is trained on and what accuracy is measured on: held-out training records, or the test set if none are."""
    records, test = data
    if not validation:
        return records, test
    if not 0 < validation < len(records):
        raise ValueError(f"validation={validation}: the training set has {len(records)} records")
    images, labels = records.tensors
    rest = len(records) - validation
    return TensorDataset(images[:rest], labels[:rest]), TensorDataset(images[rest:], labels[rest:])


def scaled(data: Data, scaling: Scaling) -> Data:
    """Pixels as they are, in [0, 1], or "centred": in [-1, 1]."""
    if scaling == "unit":
        return data
    (x, y), (other_x, other_y) = (part.tensors for part in data)
    return TensorDataset(2 * x - 1, y), TensorDataset(2 * other_x - 1, other_y)


def changed(data: Data, change: str | None) -> Data:
    """Every image changed in the same way, which no record tells."""
    if change is None:
        return data
    (x, y), (other_x, other_y) = (part.tensors for part in data)
    return TensorDataset(CHANGES[change](x), y), TensorDataset(CHANGES[change](other_x), other_y)


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(setting.optimizer or {"name": "SGD"})
    name = options.pop("name")
    if name in ("SGD", "DiSK"):
        sgd = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)
        return sgd if name == "SGD" else dpkfc.optim.DiSK(sgd, **options)
    make: Callable[..., torch.optim.Optimizer] = getattr(
        dpkfc.optim if name == "DPAdamBC" else torch.optim, name
    )
    return make(model.parameters(), lr=setting.lr, **options)


def at_iterate(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Where the model is to be looked at: DiSK stands ahead of its iterate."""
    return optimizer.iterate() if isinstance(optimizer, dpkfc.optim.DiSK) else nullcontext()


def geometry_of(
    setting: Setting, records: TensorDataset, load: Load
) -> dpkfc.KFC | dpkfc.Diagonal | None:
    if setting.geometry is None:
        return None
    options = dict(setting.geometry)
    probe = probe_of(options.pop("probe"), setting, records, load)
    if options.pop("kind", "KFC") == "Diagonal":
        return dpkfc.Diagonal(source=probe, seed=setting.seed, **options)
    return dpkfc.KFC(probe=probe, seed=setting.seed, **options)


def probe_of(
    source: Mapping[str, Any], setting: Setting, records: TensorDataset, load: Load
) -> Probe:
    shape = tuple(records.tensors[0].shape[1:])
    if "public" in source or "pool" in source:
        images, labels = load(source.get("public") or source["pool"], setting.scaling)[0].tensors
        return dpkfc.probes.PublicData(TensorDataset(fitted(images, shape), labels))
    if "sparse" in source:
        return dpkfc.probes.Tabular.sparse(shape[0], **source["sparse"])
    if "oracle" in source:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Oracle builds"
            )  # on purpose, and told by the epsilon
            return dpkfc.probes.Oracle(records)
    return dpkfc.probes.PinkNoise(shape=shape, classes=len(DATASETS[setting.dataset][0]), **source)


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images [N, C, H, W] brought to another shape: grey or coloured, stretched. Features must have it already."""
    if len(shape) != 3:
        if tuple(images.shape[1:]) != shape:
            raise ValueError(
                f"features of shape {tuple(images.shape[1:])} are no probes for records of {shape}"
            )
        return images
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images


def noise_of(setting: Setting) -> Noise | None:
    if setting.noise is None:
        return None
    options = dict(setting.noise)
    recipe: Callable[..., Noise] = getattr(dpkfc.noise, options.pop("name"))
    return recipe(**options)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    device, parts = next(model.parameters()).device, zip(x.split(1000), y.split(1000), strict=True)
    return sum(
        int((model(part.to(device)).argmax(1).cpu() == labels).sum()) for part, labels in parts
    ) / len(y)
