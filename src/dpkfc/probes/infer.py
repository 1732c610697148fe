"""Infer the probe of a model that declares its inputs. No record is read."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probe
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.tokens import Tokens
from dpkfc.sharding import class_of

SHAPELESS = (nn.Flatten, nn.Identity, nn.Dropout)  # these do not change a row of features


def infer_probe(model: nn.Module) -> Probe:
    """The probe that fits the inputs of `model`.

    It is inferred from the first of these that the model has:

    - `model.input_shape`: (features,) for `Tabular`, (channels, *grid) for `PinkNoise`;
    - a Hugging Face `model.config` with `vocab_size`, or with `image_size` and `num_channels`;
    - a first layer, in order of registration, that is `nn.Linear` or `nn.Embedding`.

    Raises:
        ValueError: the model has none of them.

    >>> infer_probe(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))).features
    784
    """
    shape = getattr(model, "input_shape", None)
    if shape is not None:
        return _from_shape(shape)
    probe = _from_config(getattr(model, "config", None)) or _from_first_layer(model)
    if probe is None:
        raise ValueError(
            f"probe: {type(model).__name__} does not declare the shape of its inputs, and private "
            "records must not be read for it. Pass "
            "probe=dpkfc.probes.PinkNoise(shape=(channels, height, width)), "
            "dpkfc.probes.Tokens(vocabulary, length) or dpkfc.probes.Tabular(features), or set "
            "model.input_shape = (channels, height, width)"
        )
    return probe


def _from_shape(shape: Any) -> Probe:
    if not isinstance(shape, tuple | list) or not 1 <= len(shape) <= 4:
        raise ValueError(
            f"model.input_shape={shape!r}: give (features,) or (channels, *grid) with a 1-, 2- or "
            "3-D grid, without the batch, or pass probe="
        )
    return Tabular(shape[0]) if len(shape) == 1 else PinkNoise(tuple(shape))


def _from_config(config: Any) -> Probe | None:
    vocabulary = getattr(config, "vocab_size", None)
    image_size = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", None)
    if isinstance(vocabulary, int) and image_size is None:
        positions = getattr(config, "max_position_embeddings", None) or getattr(
            config, "n_positions", None
        )
        pad, cls, sep = (_token_id(config, name, vocabulary) for name in ("pad", "bos", "eos"))
        return Tokens(vocabulary, min(128, positions or 128), pad=pad, cls=cls, sep=sep)
    if vocabulary is None and image_size is not None and isinstance(channels, int):
        is_pair = isinstance(image_size, tuple | list)
        grid = image_size if is_pair else (image_size, image_size)
        return PinkNoise((channels, *grid))
    return None


def _token_id(config: Any, name: str, vocabulary: int) -> int | None:
    """An id of the configuration: the first if it lists several, None if it is out of range."""
    token_id = getattr(config, f"{name}_token_id", None)
    if isinstance(token_id, tuple | list) and token_id:
        token_id = token_id[0]
    return token_id if isinstance(token_id, int) and 0 <= token_id < vocabulary else None


def _from_first_layer(model: nn.Module) -> Probe | None:
    leaves = (module for module in model.modules() if not any(module.children()))
    first = next((leaf for leaf in leaves if not isinstance(leaf, SHAPELESS)), None)
    if isinstance(first, nn.Linear) and class_of(first) is nn.Linear:
        return Tabular(first.in_features)
    if isinstance(first, nn.Embedding) and class_of(first) is nn.Embedding:
        return Tokens(first.num_embeddings, 32, pad=first.padding_idx, mask=None)
    return None
