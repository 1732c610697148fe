"""The probe of a model that declares what it reads. No record is looked at."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpkfc.errors import PrivacyError
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probe
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.tokens import Tokens

SHAPELESS = (nn.Flatten, nn.Identity, nn.Dropout)  # a row of features passes through them as it is


def infer_probe(model: nn.Module) -> Probe:
    """From the first of these that the model has:

    - `model.input_shape`: (features,) for `Tabular`, (channels, *grid) for `PinkNoise`;
    - a Hugging Face `model.config` with `vocab_size`, or with `image_size` and `num_channels`;
    - a first layer, in order of registration, that is `nn.Linear` or `nn.Embedding`.

    >>> infer_probe(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))).features
    784
    """
    shape = getattr(model, "input_shape", None)
    if shape is not None:
        return _from_shape(shape)
    return (
        _from_config(getattr(model, "config", None)) or _from_first_layer(model) or _refuse(model)
    )


def _from_shape(shape: Any) -> Probe:
    if not isinstance(shape, tuple | list) or not 1 <= len(shape) <= 4:
        raise PrivacyError(
            f"model.input_shape={shape!r}: give (features,) or (channels, *grid) with a 1-, 2- or 3-D grid, without "
            "the batch, or pass probe="
        )
    return Tabular(shape[0]) if len(shape) == 1 else PinkNoise(tuple(shape))


def _from_config(config: Any) -> Probe | None:
    vocabulary = getattr(config, "vocab_size", None)
    image, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(vocabulary, int) and image is None:
        positions = getattr(config, "max_position_embeddings", None) or getattr(
            config, "n_positions", None
        )
        pad, cls, sep = (_token(config, name, vocabulary) for name in ("pad", "bos", "eos"))
        return Tokens(vocabulary, min(128, positions or 128), pad=pad, cls=cls, sep=sep)
    if vocabulary is None and image is not None and isinstance(channels, int):
        return PinkNoise(
            (channels, *(image if isinstance(image, tuple | list) else (image, image)))
        )
    return None


def _token(config: Any, name: str, vocabulary: int) -> int | None:
    """An id of the configuration; the first where it lists several, none where it is out of range."""
    found = getattr(config, f"{name}_token_id", None)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, int) and 0 <= found < vocabulary else None


def _from_first_layer(model: nn.Module) -> Probe | None:
    leaves = (module for module in model.modules() if not any(module.children()))
    first = next((leaf for leaf in leaves if not isinstance(leaf, SHAPELESS)), None)
    if type(first) is nn.Linear:
        return Tabular(first.in_features)
    if type(first) is nn.Embedding:
        return Tokens(first.num_embeddings, 32, pad=first.padding_idx, mask=None)
    return None


def _refuse(model: nn.Module) -> Probe:
    raise PrivacyError(
        f"probe: {type(model).__name__} does not say what it reads, and private records must not tell. Pass "
        "probe=dpkfc.probes.PinkNoise(shape=(channels, height, width)), dpkfc.probes.Tokens(vocabulary, length) or "
        "dpkfc.probes.Tabular(features), or set model.input_shape = (channels, height, width)"
    )
