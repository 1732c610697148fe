"""Data sets by name as fixed public features: NAME/FEATURES, such as imdb/tfidf-5000.

    tfidf-N         TF-IDF of the N most frequent words of SST-2, sentences from film reviews
    tfidf-ag-N      TF-IDF of the N most frequent words of AG News
    minilm          a frozen sentence encoder
    efficientnet    a frozen network trained on ImageNet

For the geometry there is noise that was mapped by the same features: tokens/minilm (structural
token noise) and pink/efficientnet. Features that take long to compute are kept in $DPKFC_CACHE,
or in DATA/features.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpkfc.app.readers.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from dpkfc.app.readers.corpora import CLASSES, corpus
from dpkfc.app.readers.directory import data_directory
from dpkfc.probes.pink import PinkNoise
from experiments.common.data import backbone_features, tfidf
from experiments.common.data.backbone_features import cached

Pair = tuple[TensorDataset, TensorDataset]
Named = tuple[tuple[str, ...], Callable[[Path | None], Pair]]
VOCABULARIES = {
    "tfidf-2000": ("sst-2", 2000),
    "tfidf-5000": ("sst-2", 5000),
    "tfidf-10000": ("sst-2", 10_000),
    "tfidf-ag-2000": ("ag-news", 2000),
    "tfidf-ag-10000": ("ag-news", 10_000),
}
PROXIES = ("ag-news", "sst-2")  # texts that serve as public data
PUBLIC = 10_000  # records of a proxy whose features are computed: enough for the geometry
PHOTOGRAPHS = 4000  # images of CIFAR-10 whose features are computed
NOISE = 2048  # noise inputs whose features are computed
TITLE = 32  # about the largest number of tokens in a title


def features_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return $DPKFC_CACHE, or the folder `features` beside the data."""
    cache = os.environ.get("DPKFC_CACHE")
    return Path(cache) if cache else data_directory(data_dir) / "features"


def words(name: str, vocabulary: str, data_dir: Path | None) -> Pair:
    """Return the TF-IDF of texts, with the vocabulary of other texts."""
    return _by_text(name, _vocabulary(vocabulary, data_dir), data_dir)


def sentences(name: str, data_dir: Path | None) -> Pair:
    """Return the embeddings of texts."""

    def embed(texts: list[str]) -> Tensor:
        return cached(
            "minilm", texts, backbone_features.sentence_features, features_folder(data_dir)
        )

    return _by_text(name, embed, data_dir)


def _by_text(name: str, encode: Callable[[list[str]], Tensor], data_dir: Path | None) -> Pair:
    texts = corpus(name, data_dir)
    limit = PUBLIC if name in PROXIES else None
    train, test = (
        TensorDataset(encode(part.texts[:limit]), part.labels[:limit])
        for part in (texts.train, texts.test)
    )
    return train, test


@lru_cache(maxsize=2)
def _vocabulary(name: str, data_dir: Path | None) -> tfidf.TfIdf:
    source, size = VOCABULARIES[name]
    return tfidf.fitted(corpus(source, data_dir).train.texts, size)


def pictures(load: Callable[[Path | None], Pair], limit: int | None, data_dir: Path | None) -> Pair:
    """Return the features of images, or of the first `limit`."""
    parts = (tuple(tensor[:limit] for tensor in part.tensors) for part in load(data_dir))
    train, test = (
        TensorDataset(_image_features(images, data_dir), labels) for images, labels in parts
    )
    return train, test


def _image_features(images: Tensor, data_dir: Path | None) -> Tensor:
    name = f"efficientnet-{backbone_features.SIDE}"
    return cached(name, images, backbone_features.image_features, features_folder(data_dir))


def token_noise(data_dir: Path | None) -> Pair:
    """Return the features of structural token noise of a title's length."""
    return _unlabelled(
        backbone_features.token_noise_features(NOISE, TITLE, torch.Generator().manual_seed(0))
    )


def pink_noise(data_dir: Path | None) -> Pair:
    """Return the features of pink noise with correlated channels and pixels in [0, 1]."""
    noise = PinkNoise((3, 32, 32), std=0.25, mean=0.5, limits=(0, 1), channel_correlation=0.9)
    images = noise.draw(NOISE, torch.Generator().manual_seed(0)).inputs
    assert isinstance(images, Tensor)
    return _unlabelled(_image_features(images, data_dir))


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
