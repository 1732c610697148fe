"""The model for a source of data: one of a few that train well privately, a pretrained one, or the user's own."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.app.models import backbone
from dpkfc.app.models.mlp import mlp
from dpkfc.app.readers.records import Kind
from dpkfc.errors import PrivacyError
from dpkfc.features import Scattering, standardised
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probe, call
from dpkfc.probes.tokens import Tokens
from dpkfc.probes.transformed import TransformedProbe

NAMES = ("linear", "mlp", "cnn", "scattering")
HIDDEN = 64
FEW = 8  # probes that a model is tried on
PROBES = 2048  # that thousands of scattering features are known by
SMALLEST, WIDEST = (
    16,
    2**14,
)  # the side of images, and the features, for which scattering is the default


@dataclass(frozen=True)
class Built:
    """A model, what is computed from every input before it reaches the model, and probes that took the same way."""

    name: str
    model: nn.Module
    features: Callable[[Any], Tensor] | None
    probe: Probe
    code: str | None = None  # digest of the file of the user's own model


def default_model(kind: Kind, shape: tuple[int, ...]) -> str:
    """Scattering features for images that are large enough, else a small CNN; a linear model for all else."""
    if kind != "images":
        return "linear"
    small = min(shape[1:]) < SMALLEST or scattered(shape) > WIDEST
    return "cnn" if small or importlib.util.find_spec("kymatio") is None else "scattering"


def scattered(shape: tuple[int, ...]) -> int:
    """How many features `Scattering` makes of an image.

    >>> scattered((1, 28, 28))
    3969
    """
    return shape[0] * 81 * (shape[1] // 4) * (shape[2] // 4)


def is_own(name: str) -> bool:
    """Whether the model is a function in a file of the user's, written as FILE.py:function.

    >>> is_own("net.py:network"), is_own("cnn"), is_own("frozen:models/net.py:network")
    (True, False, False)
    """
    return backbone.parse(name) is None and name.rpartition(":")[0].endswith(".py")


def build(
    name: str,
    kind: Kind,
    shape: tuple[int, ...],
    classes: int,
    probe: Probe,
    code: str | None = None,
) -> Built:
    """The model, tried on zeros and on probes: its output must be one finite number for each class.

    Args:
        code: the digest that the file of the user's own model must have. It is compared before anything in the file
            is run, and what is run is what was compared.
    """
    if name in ("cnn", "scattering") and kind != "images":
        raise PrivacyError(
            f"--model {name} is for images, not for {kind} data: choose linear or mlp"
        )
    if name == "scattering":
        if min(shape[1:]) < 8:
            raise PrivacyError(
                f"--model scattering needs images of at least 8 x 8, not {shape[1:]}: choose cnn"
            )
        assert isinstance(probe, PinkNoise)
        features: Callable[[Any], Tensor] = standardised(Scattering(shape), probe, PROBES)  # type: ignore[arg-type]
        return Built(
            name,
            _linear(scattered(shape), classes),
            features,
            TransformedProbe(replace(probe, count=PROBES), features),
        )
    if name == "linear":
        return Built(name, _linear(_size(shape), classes), None, probe)
    if name == "mlp":
        return Built(name, mlp([_size(shape), HIDDEN, classes]), None, probe)
    if name == "cnn":
        return Built(name, _checked(_cnn(shape, classes), name, shape, classes, probe), None, probe)
    if pretrained := backbone.parse(name):
        return _pretrained(name, *pretrained, kind, shape, classes, probe)
    function, digest = _own(name, code)
    model = _checked(_call(function, name, shape, classes), name, shape, classes, probe)
    return Built(name, model, None, probe, digest)


def _pretrained(
    name: str, way: str, path: str, kind: Kind, shape: tuple[int, ...], classes: int, probe: Probe
) -> Built:
    if kind == "tabular":
        raise PrivacyError(
            f"--model {name} is for images and texts, not for tabular data: choose linear or mlp"
        )
    if kind == "text" and not isinstance(probe, Tokens):
        raise PrivacyError(
            f"--model {name} reads token ids, but the texts are hashed words: load with tokenizer={path!r}"
        )
    encoder: backbone.Encoder = (
        backbone.text_encoder(path, probe.pad or 0)
        if isinstance(probe, Tokens)
        else backbone.image_encoder(path)
    )
    whole = backbone.classifier(encoder, classes, way)
    _checked(whole, name, shape, classes, probe, torch.long if kind == "text" else torch.float32)
    if way != "frozen":
        return Built(name, whole, None, probe)
    features: Callable[[Any], Tensor] = backbone.features(encoder)
    return Built(name, _linear(encoder.width, classes), features, TransformedProbe(probe, features))


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _linear(inputs: int, classes: int) -> nn.Sequential:
    """It begins at zero, so that no class is preferred."""
    layer = nn.Linear(inputs, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Two convolutions, normalised by groups, and a linear layer over 4 x 4 places."""
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


def _own(name: str, code: str | None) -> tuple[Callable[..., Any], str]:
    """The function in the user's file, and the digest of the file.

    The file is read once. Python's own import would read it again, or run a .pyc beside it instead.
    """
    path, _, function = name.rpartition(":")
    if not is_own(name):
        raise PrivacyError(
            f"--model {name}: choose one of {', '.join(NAMES)}, or give frozen:PATH, lora:PATH or full:PATH of a "
            "pretrained model, or FILE.py:function"
        )
    file = Path(path)
    if not file.is_file():
        raise PrivacyError(f"--model {name}: there is no file {file}")
    source = file.read_bytes()
    digest = sha256(source).hexdigest()
    if code is not None and digest != code:
        raise PrivacyError(
            f"the file of the model {name} has changed since the run, and was not run: restore {file} as it was"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as problem:
        raise PrivacyError(
            f"--model {name}: {file} fails with {type(problem).__name__}: {problem}"
        ) from problem
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise PrivacyError(
            f"--model {name}: {file} has no function {function!r}; it has {', '.join(known) or 'none'}"
        )
    return found, digest


def _call(
    function: Callable[..., Any], name: str, shape: tuple[int, ...], classes: int
) -> nn.Module:
    wanted = _wanted(function)
    if wanted not in (0, 2):
        raise PrivacyError(
            f"--model {name}: the function takes {wanted} arguments: write it as f(shape, classes) or f()"
        )
    try:
        model = function(shape, classes) if wanted else function()
    except (Exception, SystemExit) as problem:
        raise PrivacyError(
            f"--model {name} fails with {type(problem).__name__}: {problem}"
        ) from problem
    if not isinstance(model, nn.Module):
        raise PrivacyError(
            f"--model {name} returned {type(model).__name__}: it must return a torch.nn.Module"
        )
    return model


def _wanted(function: Callable[..., Any]) -> int:
    """How many arguments it must be given; 2 also if it takes any number, or two with values of their own.

    >>> _wanted(lambda shape, classes, hidden=3: None), _wanted(lambda *given: None), _wanted(lambda hidden=3: None)
    (2, 2, 0)
    """
    parameters = inspect.signature(function).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return 2 if not required and (any_number or len(parameters) == 2) else len(required)


def _checked(
    model: nn.Module,
    name: str,
    shape: tuple[int, ...],
    classes: int,
    probe: Probe,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    training = model.training
    few = probe.draw(min(FEW, probe.count), torch.Generator().manual_seed(0)).inputs
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape, dtype=dtype))
            of_probes = call(model, few)
    except Exception as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise PrivacyError(
            f"--model {name} does not take inputs of shape {shape}: {first}"
        ) from problem
    model.train(training)
    found = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    if found != (classes,):
        raise PrivacyError(
            f"--model {name} gives {found} for each record, but there are {classes} classes: give that many"
        )
    if not of_probes.isfinite().all(1).any():
        raise PrivacyError(
            f"--model {name} gives numbers that are not finite for each of {len(of_probes)} probes, at the weights "
            "it begins with: nothing can be learned. Look for weights without a value, or a division by zero"
        )
    return model
