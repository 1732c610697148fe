"""Data sets by name, as fixed public features: NAME/FEATURES, such as imdb/tfidf-5000 or cifar-100/efficientnet.

    tfidf-N         of the N most frequent words of SST-2, sentences from film reviews (tfidf-ag-N: of AG News)
    minilm          a frozen sentence encoder
    efficientnet    a frozen network trained on ImageNet

and, for the geometry, noise that took the same way: tokens/minilm (structural token noise) and pink/efficientnet. What
takes long to compute is kept in $DPKFC_CACHE, or DATA/features.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from experiments.common.data.backbone_features import cached
from torch import Tensor
from torch.utils.data import TensorDataset

from dpkfc.app.readers.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from dpkfc.app.readers.corpora import CLASSES, corpus
from dpkfc.app.readers.directory import data_directory
from dpkfc.probes.pink import PinkNoise
from experiments.common.data import backbone_features, tfidf

Pair = tuple[TensorDataset, TensorDataset]
Named = tuple[tuple[str, ...], Callable[[Path | None], Pair]]
VOCABULARIES = {
    "tfidf-2000": ("sst-2", 2000),
    "tfidf-5000": ("sst-2", 5000),
    "tfidf-10000": ("sst-2", 10_000),
    "tfidf-ag-2000": ("ag-news", 2000),
    "tfidf-ag-10000": ("ag-news", 10_000),
}
PROXIES = ("ag-news", "sst-2")  # texts that serve as public ones
PUBLIC = 10_000  # of a proxy, features are computed of so many records: the geometry needs no more
PHOTOGRAPHS = 4000  # of CIFAR-10
NOISE = 2048
TITLE = 32  # tokens that a title has at most, about


def features_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """$DPKFC_CACHE, or the folder `features` beside the data."""
    chosen = os.environ.get("DPKFC_CACHE")
    return Path(chosen) if chosen else data_directory(data_dir) / "features"


def words(name: str, vocabulary: str, data_dir: Path | None) -> Pair:
    """TF-IDF of texts, by the words of other texts."""
    return _by_text(name, _vocabulary(vocabulary, data_dir), data_dir)


def sentences(name: str, data_dir: Path | None) -> Pair:
    """Embedded texts."""

    def embed(texts: list[str]) -> Tensor:
        return cached(
            "minilm", texts, backbone_features.sentence_features, features_folder(data_dir)
        )

    return _by_text(name, embed, data_dir)


def _by_text(name: str, encode: Callable[[list[str]], Tensor], data_dir: Path | None) -> Pair:
    found, limit = corpus(name, data_dir), PUBLIC if name in PROXIES else None
    train, test = (
        TensorDataset(encode(part.texts[:limit]), part.labels[:limit])
        for part in (found.train, found.test)
    )
    return train, test


@lru_cache(maxsize=2)
def _vocabulary(name: str, data_dir: Path | None) -> tfidf.TfIdf:
    source, size = VOCABULARIES[name]
    return tfidf.fitted(corpus(source, data_dir).train.texts, size)


def pictures(load: Callable[[Path | None], Pair], limit: int | None, data_dir: Path | None) -> Pair:
    """Features of images, or of the first few."""
    parts = (tuple(tensor[:limit] for tensor in part.tensors) for part in load(data_dir))
    train, test = (TensorDataset(_seen(images, data_dir), labels) for images, labels in parts)
    return train, test


def _seen(images: Tensor, data_dir: Path | None) -> Tensor:
    name = f"efficientnet-{backbone_features.SIDE}"
    return cached(name, images, backbone_features.image_features, features_folder(data_dir))


def token_noise(data_dir: Path | None) -> Pair:
    """Titles without a word."""
    return _unlabelled(
        backbone_features.token_noise_features(NOISE, TITLE, torch.Generator().manual_seed(0))
    )


def pink_noise(data_dir: Path | None) -> Pair:
    """Photographs without a photograph: colours that go together, brightness in [0, 1]."""
    noise = PinkNoise((3, 32, 32), std=0.25, mean=0.5, limits=(0, 1), channel_correlation=0.9)
    images = noise.draw(NOISE, torch.Generator().manual_seed(0)).inputs
    assert isinstance(images, Tensor)
    return _unlabelled(_seen(images, data_dir))


def _unlabelled(rows: Tensor) -> Pair:
    data = TensorDataset(rows, torch.zeros(len(rows), dtype=torch.long))
    return data, data


FEATURED: dict[str, Named] = {
    **{
        f"{name}/{vocabulary}": (classes, partial(words, name, vocabulary))
        for name, classes in CLASSES.items()
        for vocabulary in VOCABULARIES
    },
    **{
        f"{name}/minilm": (CLASSES[name], partial(sentences, name))
        for name in ("stackoverflow", "ag-news", "sst-2")
    },
    "tokens/minilm": ((), token_noise),
    "cifar-100/efficientnet": (CIFAR100, partial(pictures, cifar100, None)),
    "cifar-10/efficientnet": (CIFAR10, partial(pictures, cifar10, PHOTOGRAPHS)),
    "pink/efficientnet": ((), pink_noise),
}
