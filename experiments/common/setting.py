"""One private training run: `train` maps a `StudySetting` to a `StudyResult`."""

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
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import mlp, paper_cnn, tiny_vit
from dpkfc.app.readers.idx import Scaling
from dpkfc.app.readers.records import on_device
from dpkfc.app.readers.sources import NAMED
from dpkfc.app.workflow.evaluation import accuracy
from dpkfc.planning.choose_noise import Noise
from dpkfc.probes.probe import Probe
from experiments.common.data.changes import CHANGES
from experiments.common.data.featured import FEATURED

DATASETS = NAMED | FEATURED
Data = tuple[TensorDataset, TensorDataset]  # training records, test records
Load = Callable[[str, Scaling], Data]  # loads a data set by its name
COURSE = 2000  # records on which accuracy is measured during training

# Scalings that need no statistic of the data. FashionMNIST is centred because that helps plain
# DP-SGD by a point; DP-KFC is indifferent.
SCALING: dict[str, Scaling] = {"mnist": "unit", "fashion-mnist": "centred"}
# Pink noise about as bright as pixels are, on either scale.
BRIGHT = {
    "unit": {"alpha": 2.0, "std": 0.3, "mean": 0.3},
    "centred": {"alpha": 2.0, "std": 0.6, "mean": -0.4},
}

# The paper's whitening as its code does it: activations only, all ranks, absolute stability,
# probes every 50 steps. Arguments that influence accuracy are written out, because they are then
# part of a setting's key.
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
ADADPS: dict[str, Any] = {
    "kind": "Diagonal",
    "probe": BRIGHT["unit"],
    "every": 50,
    "probes": 512,
    "damping": 0.1,
    "stability": 0.0,
    "power": 1.0,
}

# Each model is built from the shape of a record and the number of classes.
MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": lambda shape, classes: paper_cnn((shape[0], shape[1], shape[2]), classes),
    "mlp": lambda shape, classes: mlp([math.prod(shape), 256, 128, classes]),
    "vit": lambda shape, classes: tiny_vit(
        shape[1], 4, shape[0], classes, width=64, depth=2, heads=4
    ),
    "linear": lambda shape, classes: mlp([math.prod(shape), classes]),
}

# Each schedule maps the completed fraction of the run to a factor of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


@dataclass(frozen=True)
class StudySetting:
    """Everything a run depends on besides the data.

    Args:
        dataset: A name in `DATASETS`.
        arm: The method that the run belongs to.
        lr: The learning rate.
        geometry: The arguments of `KFC`, or of `Diagonal` (AdaDPS) with "kind": "Diagonal"; None
            is DP-SGD. Its "probe" holds the arguments of `PinkNoise`, or one of {"public": data
            set}, {"pool": noise mapped by the same features}, {"sparse": arguments of
            `Tabular.sparse`} and {"oracle": "records"}, the private records themselves.
        ema: The decay of the averaged copy of the weights; 0 for none. It is post-processing and
            costs no budget.
        scaling: The range of pixels.
        validation: The number of training records held out at the end; 0 trains on all records
            and measures accuracy on the test set.
        noise: The name of a noise and its arguments; None is independent noise.
        optimizer: The name of an optimizer (Adam, AdamW, DPAdamBC, or DiSK around SGD) and its
            arguments; None is SGD.
        model: A name in `MODELS`; None is the paper's CNN.
        change: A name in `CHANGES`, applied to every image; None leaves images as they are.
        course: How often accuracy is measured during training; None is never.
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
    ema: float = 0.99
    scaling: Scaling = "unit"
    seed: int = 0
    validation: int = 5000
    noise: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    model: str | None = None
    change: str | None = None
    course: int | None = None

    @property
    def key(self) -> str:
        """A hash of the contents, the key of recorded results."""
        # These fields were added later: left out where None, so that older keys stay valid.
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
class StudyResult:
    """Accuracies of a run, on its held-out records or, without any, on the test set.

    Args:
        last: The accuracy of the last weights.
        average: The accuracy of the averaged weights, if they were kept.
        epsilon: The privacy of this run alone.
        course: Accuracies during training on the first `COURSE` records, of the averaged weights
            if they were kept.
    """

    last: float
    average: float | None
    epsilon: float
    noise_multiplier: float
    steps: int
    seconds: float
    course: tuple[float, ...] | None = None


def train(
    setting: StudySetting,
    load: Load,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    device: str = "cpu",
) -> StudyResult:
    """Train with a plain PyTorch loop; `on_step(done, total)` is called after every step."""
    records, measured = split(
        changed(load(setting.dataset, setting.scaling), setting.change), setting.validation
    )
    shape = tuple(records.tensors[0].shape[1:])
    classes = len(DATASETS[setting.dataset][0])
    torch.manual_seed(setting.seed)
    model = MODELS[setting.model or "cnn"](shape, classes).to(device)
    if len(shape) == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(setting, model)

    def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=setting.label_smoothing)

    run = dpkfc.make_private(
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
    steps = run.plan.steps
    factor = SCHEDULES[setting.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / steps))
    weights = list(model.parameters())
    average = [w.detach().clone() for w in weights]
    looks = setting.course or 0
    look_at = {round(steps * look / looks) for look in range(1, 1 + looks)}
    course = []
    started = time.perf_counter()
    for images, labels in run.loader:
        loss_of(model, images, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if setting.ema:
            # The plain mean at first, so that the initial weights are forgotten.
            share = max(1 - setting.ema, 1 / run.steps)
            with at_iterate(optimizer):
                for mean, w in zip(average, weights, strict=True):
                    mean.lerp_(w.detach(), share)
        if run.steps in look_at:
            with at_iterate(optimizer), swapped(weights, average if setting.ema else weights):
                course.append(accuracy(model, *(part[:COURSE] for part in measured.tensors)))
        on_step(run.steps, steps)
    seconds = time.perf_counter() - started
    run.detach()
    with at_iterate(optimizer):
        last = accuracy(model, *measured.tensors)
    averaged = None
    if setting.ema:
        with swapped(weights, average):
            averaged = accuracy(model, *measured.tensors)
    return StudyResult(
        last=last,
        average=averaged,
        epsilon=run.epsilon(),
        noise_multiplier=run.plan.noise_multiplier,
        steps=run.steps,
        seconds=seconds,
        course=tuple(course) if setting.course else None,
    )


@contextmanager
def swapped(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Replace the weights by other values within the context."""
    originals = [w.detach().clone() for w in weights]
    with torch.no_grad():
        torch._foreach_copy_(list(weights), list(values))
        yield
        torch._foreach_copy_(list(weights), originals)


def split(data: Data, validation: int) -> Data:
    """Return the records to train on and those to measure accuracy on.

    The latter are the last `validation` training records, or the test set if that is 0.
    """
    records, test = data
    if not validation:
        return records, test
    if not 0 < validation < len(records):
        raise ValueError(f"validation={validation}: the training set has {len(records)} records")
    images, labels = records.tensors
    rest = len(records) - validation
    return TensorDataset(images[:rest], labels[:rest]), TensorDataset(images[rest:], labels[rest:])


def scaled(data: Data, scaling: Scaling) -> Data:
    """Return the data with pixels in [0, 1], as they are ("unit"), or in [-1, 1] ("centred")."""
    if scaling == "unit":
        return data
    (x, y), (test_x, test_y) = (part.tensors for part in data)
    return TensorDataset(2 * x - 1, y), TensorDataset(2 * test_x - 1, test_y)


def changed(data: Data, change: str | None) -> Data:
    """Apply the same public change to every image."""
    if change is None:
        return data
    (x, y), (test_x, test_y) = (part.tensors for part in data)
    return TensorDataset(CHANGES[change](x), y), TensorDataset(CHANGES[change](test_x), test_y)


def optimizer_of(setting: StudySetting, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(setting.optimizer or {"name": "SGD"})
    name = options.pop("name")
    if name in ("SGD", "DiSK"):
        sgd = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)
        return sgd if name == "SGD" else dpkfc.optim.DiSK(sgd, **options)
    optimizer_class: Callable[..., torch.optim.Optimizer] = getattr(
        dpkfc.optim if name == "DPAdamBC" else torch.optim, name
    )
    return optimizer_class(model.parameters(), lr=setting.lr, **options)


def at_iterate(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Evaluate the model at its iterate: DiSK computes gradients at a point ahead of it."""
    return optimizer.iterate() if isinstance(optimizer, dpkfc.optim.DiSK) else nullcontext()


def geometry_of(
    setting: StudySetting, records: TensorDataset, load: Load
) -> dpkfc.KFC | dpkfc.Diagonal | None:
    if setting.geometry is None:
        return None
    options = dict(setting.geometry)
    probe = probe_of(options.pop("probe"), setting, records, load)
    if options.pop("kind", "KFC") == "Diagonal":
        return dpkfc.Diagonal(source=probe, seed=setting.seed, **options)
    return dpkfc.KFC(probe=probe, seed=setting.seed, **options)


def probe_of(
    source: Mapping[str, Any], setting: StudySetting, records: TensorDataset, load: Load
) -> Probe:
    shape = tuple(records.tensors[0].shape[1:])
    if "public" in source or "pool" in source:
        images, labels = load(source.get("public") or source["pool"], setting.scaling)[0].tensors
        return dpkfc.probes.PublicData(TensorDataset(fitted(images, shape), labels))
    if "sparse" in source:
        return dpkfc.probes.Tabular.sparse(shape[0], **source["sparse"])
    if "oracle" in source:
        with warnings.catch_warnings():
            # Intended here: the run reports an infinite epsilon.
            warnings.filterwarnings("ignore", message="Oracle builds")
            return dpkfc.probes.Oracle(records)
    return dpkfc.probes.PinkNoise(shape=shape, classes=len(DATASETS[setting.dataset][0]), **source)


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert images [N, C, H, W] to the channels and the size of `shape`, by means and resizing.

    Features, which have no such shape, must match already.
    """
    if len(shape) != 3:
        if tuple(images.shape[1:]) != shape:
            raise ValueError(
                f"features of shape {tuple(images.shape[1:])} are no probes for records of {shape}"
                ": choose a source with the same features"
            )
        return images
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images


def noise_of(setting: StudySetting) -> Noise | None:
    if setting.noise is None:
        return None
    options = dict(setting.noise)
    noise_class: Callable[..., Noise] = getattr(dpkfc.noise, options.pop("name"))
    return noise_class(**options)
