"""Text as hashed words: no vocabulary or document frequencies, nothing fitted on private records.

Each word adds ±1 to one of `features` counters that a fixed hash chooses (the hashing trick,
Weinberger et al., 2009; the sign makes collisions cancel on average). n repetitions of a word count
``1 + ln n``. Every record has norm ``√features``: the mean square of a feature is 1, as for
standardised inputs, which is what the recipe's noise length assumes. With rows of norm 1, steps
would be √features times too small, and little would be learned.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpkfc.app.readers.corpora import corpus
from dpkfc.app.readers.records import ParsedSource, Records, class_numbers, content_digest
from dpkfc.probes.probe import Probe
from dpkfc.probes.tabular import Tabular

FEATURES = 2**12
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Encoding:
    """A function that turns each text into an input, and probes that resemble the inputs."""

    encode: Callable[[Sequence[str]], Tensor]
    probe: Probe


def words(features: int = FEATURES) -> Encoding:
    """Hashed words."""
    return Encoding(partial(hashed, features=features), text_probe(features))


def hashed(texts: Sequence[str], features: int = FEATURES) -> Tensor:
    """Rows [N, features] of norm √features, or 0 for a text without words.

    >>> rows = hashed(["the cat saw the dog", "The dog saw the cat!", ""], features=64)
    >>> bool((rows[0] == rows[1]).all()), round(float(rows[0].norm()), 5), float(rows[2].norm())
    (True, 8.0, 0.0)
    """
    if features < 2:
        raise ValueError(f"text features={features}: give at least 2; a few thousand are usual")
    rows = np.zeros((len(texts), features), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word, count in Counter(WORD.findall(text.lower())).items():
            index, sign = _hash(word, features)
            row[index] += sign * (1 + math.log(count))
        if norm := float(np.linalg.norm(row)):
            row *= math.sqrt(features) / norm
    return torch.from_numpy(rows)


def tokens(path: str) -> Encoding:
    """Token ids [N, T] of a pretrained model. Its tokenizer is a public file."""
    from dpkfc.app.models.backbone import text_tokenizer

    return Encoding(*text_tokenizer(path))


@lru_cache(maxsize=2**18)
def _hash(word: str, features: int) -> tuple[int, int]:
    """The feature of a word, and its sign."""
    number = int.from_bytes(
        blake2b(word.encode(errors="replace"), digest_size=8, person=b"dpkfc text").digest(), "big"
    )
    return (number >> 1) % features, 1 if number & 1 else -1


def text_probe(features: int) -> Probe:
    """Rows of norm about √features without a preferred direction: a hash has none."""
    return Tabular(features)


def read_text_folders(
    parts: dict[str, dict[str, list[Path]]], names: tuple[str, ...], encoding: Encoding
) -> ParsedSource:
    """Read the files of each class in "train" and perhaps "test", from `folders.class_folders`."""
    records = {part: _read_files(files, names, encoding) for part, files in parts.items()}
    return ParsedSource("text", names, records["train"], records.get("test"), encoding.probe)


def read_corpus(name: str, data_dir: Path | None, encoding: Encoding) -> ParsedSource:
    """Read a corpus that is known by name: see `corpora`."""
    source = corpus(name, data_dir)
    train, test = (
        Records(encoding.encode(part.texts), part.labels, [b""] * len(part))
        for part in (source.train, source.test)
    )
    return ParsedSource("text", source.names, train, test, encoding.probe)


def hashed_corpus(name: str, data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Hashed words and labels of a corpus, for training and testing."""
    source = read_corpus(name, data_dir, words())
    assert source.test is not None
    train = TensorDataset(source.train.x, source.train.y)
    return train, TensorDataset(source.test.x, source.test.y)


def _read_files(
    classes: dict[str, list[Path]], names: tuple[str, ...], encoding: Encoding
) -> Records:
    pairs = [(label, file) for label, files in classes.items() for file in files]
    contents = [file.read_bytes() for _, file in pairs]
    labels = [label for label, _ in pairs]
    return Records(
        encoding.encode([content.decode("utf-8", errors="replace") for content in contents]),
        class_numbers(labels, names, [str(file) for _, file in pairs]),
        [
            content_digest(label.encode(), content)
            for label, content in zip(labels, contents, strict=True)
        ],
    )
