"""The model of a run: one that trains well privately, a pretrained one, or the user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.app.models import backbone
from dpkfc.app.models.mlp import mlp
from dpkfc.app.models.user_model import is_user_model, user_model
from dpkfc.app.readers.records import Kind
from dpkfc.app.suggestions import did_you_mean
from dpkfc.features import Scattering, standardised
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probe, call
from dpkfc.probes.tokens import Tokens
from dpkfc.probes.transformed import TransformedProbe

NAMES = ("linear", "mlp", "cnn", "scattering")
HIDDEN = 64
TRIAL_PROBES = 8  # with which a new model is tried
PROBES = 2048  # for the statistics of thousands of scattering features
SMALLEST_SIDE = 16  # of images for which scattering is the default
MOST_FEATURES = 2**14  # for which scattering is the default


@dataclass(frozen=True)
class Built:
    """A model, the features that are computed from its inputs, and probes with these features."""

    name: str
    model: nn.Module
    features: Callable[[Any], Tensor] | None
    probe: Probe
    code: str | None = None  # digest of the file of the user's own model


def default_model(kind: Kind, shape: tuple[int, ...]) -> str:
    """Scattering for images that are large enough, else a small CNN; linear for everything else."""
    if kind != "images":
        return "linear"
    unsuitable = min(shape[1:]) < SMALLEST_SIDE or scattering_features(shape) > MOST_FEATURES
    return "cnn" if unsuitable or importlib.util.find_spec("kymatio") is None else "scattering"


def scattering_features(shape: tuple[int, ...]) -> int:
    """The number of features of `Scattering` per image.

    >>> scattering_features((1, 28, 28))
    3969
    """
    return shape[0] * 81 * (shape[1] // 4) * (shape[2] // 4)


def build(
    name: str,
    kind: Kind,
    shape: tuple[int, ...],
    classes: int,
    probe: Probe,
    code: str | None = None,
) -> Built:
    """Build the model, and try it: its output must have one finite number per class.

    Args:
        name: one of `NAMES`, a pretrained model (see `backbone`), or FILE.py:function.
        code: the digest that the file of the user's own model must have. It is compared before
            anything in the file runs.
    """
    if name in ("cnn", "scattering") and kind != "images":
        raise ValueError(f"--model {name} is for images, not for {kind} data: choose linear or mlp")
    if name == "scattering":
        return _scattering(shape, classes, probe)
    if name == "linear":
        return Built(name, _linear(_size(shape), classes), None, probe)
    if name == "mlp":
        return Built(name, mlp([_size(shape), HIDDEN, classes]), None, probe)
    if name == "cnn":
        return Built(name, _checked(_cnn(shape, classes), name, shape, classes, probe), None, probe)
    if pretrained := backbone.parse(name):
        return _pretrained(name, *pretrained, kind, shape, classes, probe)
    if not is_user_model(name):
        raise ValueError(
            f"--model {name}{did_you_mean(name, NAMES)}: choose one of {', '.join(NAMES)}, or give "
            "frozen:PATH, lora:PATH or full:PATH of a pretrained model, or FILE.py:function"
        )
    model, digest = user_model(name, code, shape, classes)
    return Built(name, _checked(model, name, shape, classes, probe), None, probe, digest)


def _scattering(shape: tuple[int, ...], classes: int, probe: Probe) -> Built:
    if min(shape[1:]) < 8:
        raise ValueError(
            f"--model scattering needs images of at least 8 x 8, not {shape[1:]}: choose cnn"
        )
    assert isinstance(probe, PinkNoise)
    features: Callable[[Any], Tensor] = standardised(Scattering(shape), probe, PROBES)  # type: ignore[arg-type]
    model = _linear(scattering_features(shape), classes)
    probes = TransformedProbe(replace(probe, count=PROBES), features)
    return Built("scattering", model, features, probes)


def _pretrained(
    name: str, mode: str, path: str, kind: Kind, shape: tuple[int, ...], classes: int, probe: Probe
) -> Built:
    if kind == "tabular":
        raise ValueError(
            f"--model {name} is for images and texts, not for tabular data: choose linear or mlp"
        )
    if kind == "text" and not isinstance(probe, Tokens):
        raise ValueError(
            f"--model {name} reads token ids, but the texts are hashed words: load with "
            f"tokenizer={path!r}"
        )
    encoder: backbone.Encoder = (
        backbone.text_encoder(path, probe.pad or 0)
        if isinstance(probe, Tokens)
        else backbone.image_encoder(path)
    )
    whole = backbone.classifier(encoder, classes, mode)
    _checked(whole, name, shape, classes, probe, torch.long if kind == "text" else torch.float32)
    if mode != "frozen":
        return Built(name, whole, None, probe)
    features: Callable[[Any], Tensor] = backbone.features(encoder)
    return Built(name, _linear(encoder.width, classes), features, TransformedProbe(probe, features))


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _linear(inputs: int, classes: int) -> nn.Sequential:
    """A linear model, initialised at zero: no class is preferred."""
    layer = nn.Linear(inputs, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Two convolutions with GroupNorm, and a linear layer over 4 x 4 positions."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, classes),
    )


def _checked(
    model: nn.Module,
    name: str,
    shape: tuple[int, ...],
    classes: int,
    probe: Probe,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model, after a trial on zeros and on probes."""
    training = model.training
    probes = probe.draw(min(TRIAL_PROBES, probe.count), torch.Generator().manual_seed(0)).inputs
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape, dtype=dtype))
            probe_output = call(model, probes)
    except Exception as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(
            f"--model {name} does not take inputs of shape {shape}: {reason}"
        ) from problem
    model.train(training)
    actual = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    if actual != (classes,):
        raise ValueError(
            f"--model {name} gives {actual} for each record, but there are {classes} classes: the "
            "output must have one number per class"
        )
    if not probe_output.isfinite().all(1).any():
        raise ValueError(
            f"--model {name} gives numbers that are not finite for each of {len(probe_output)} "
            "probes, at its initial weights: nothing can be learned. Look for weights without a "
            "value, or a division by zero"
        )
    return model
