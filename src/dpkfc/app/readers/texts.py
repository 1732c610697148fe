"""Text as hashed words: no vocabulary, no document frequencies, nothing that is fitted on private records.

Each word adds ±1 to one of `features` counters, which a fixed hash chooses (the hashing trick, Weinberger et al., 2009;
the sign makes collisions cancel on average). Repeated words count ``1 + ln n``, and every record has length
``√features``: the mean square of a feature is 1, as with inputs that were standardised, which is what the recipe's
noise length supposes. With rows of length 1 steps would be √features times too small, and little would be learned.
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
from dpkfc.app.readers.records import Read, Records, mark, numbered
from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probe
from dpkfc.probes.tabular import Tabular

FEATURES = 2**12
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Encoding:
    """How texts become inputs, each on its own, and probes that look like these."""

    encode: Callable[[Sequence[str]], Tensor]
    probe: Probe


def words(features: int = FEATURES) -> Encoding:
    """Hashed words."""
    return Encoding(partial(hashed, features=features), text_probe(features))


def hashed(texts: Sequence[str], features: int = FEATURES) -> Tensor:
    """Rows [N, features] of length √features, or 0 for a text without a word.

    >>> rows = hashed(["the cat saw the dog", "The dog saw the cat!", ""], features=64)
    >>> bool((rows[0] == rows[1]).all()), round(float(rows[0].norm()), 5), float(rows[2].norm())
    (True, 8.0, 0.0)
    """
    if features < 2:
        raise PrivacyError(f"text features={features}: give at least 2, a few thousand as a rule")
    rows = np.zeros((len(texts), features), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word, count in Counter(WORD.findall(text.lower())).items():
            place, sign = _place(word, features)
            row[place] += sign * (1 + math.log(count))
        if length := float(np.linalg.norm(row)):
            row *= math.sqrt(features) / length
    return torch.from_numpy(rows)


def tokens(path: str) -> Encoding:
    """Token ids [N, T] of a pretrained model, whose tokenizer is a published file."""
    from dpkfc.app.models.backbone import tokenizer

    return Encoding(*tokenizer(path))


@lru_cache(maxsize=2**18)
def _place(word: str, features: int) -> tuple[int, int]:
    number = int.from_bytes(
        blake2b(word.encode(errors="replace"), digest_size=8, person=b"dpkfc text").digest(), "big"
    )
    return (number >> 1) % features, 1 if number & 1 else -1


def text_probe(features: int) -> Probe:
    """Rows of length about √features with no direction preferred: a hash leaves nothing to expect of any feature."""
    return Tabular(features)


def read_text_folders(
    parts: dict[str, dict[str, list[Path]]], names: tuple[str, ...], encoding: Encoding
) -> Read:
    """Files of each class, for "train" and perhaps "test": see `data.folders`."""
    found = {part: _read_files(files, names, encoding) for part, files in parts.items()}
    return Read("text", names, found["train"], found.get("test"), encoding.probe)


def read_corpus(name: str, data_dir: Path | None, encoding: Encoding) -> Read:
    """Texts that go by a name: see `data.corpora`."""
    found = corpus(name, data_dir)
    train, test = (
        Records(encoding.encode(part.texts), part.labels, [b""] * len(part))
        for part in (found.train, found.test)
    )
    return Read("text", found.names, train, test, encoding.probe)


def hashed_corpus(name: str, data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """The same as hashed words, and no more of it than its tensors."""
    read = read_corpus(name, data_dir, words())
    assert read.test is not None
    return TensorDataset(read.train.x, read.train.y), TensorDataset(read.test.x, read.test.y)


def _read_files(
    classes: dict[str, list[Path]], names: tuple[str, ...], encoding: Encoding
) -> Records:
    pairs = [(label, file) for label, files in classes.items() for file in files]
    contents = [file.read_bytes() for _, file in pairs]
    labels = [label for label, _ in pairs]
    return Records(
        encoding.encode([content.decode("utf-8", errors="replace") for content in contents]),
        numbered(labels, names, [str(file) for _, file in pairs]),
        [mark(label.encode(), content) for label, content in zip(labels, contents, strict=True)],
    )
