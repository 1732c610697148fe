"""TF-IDF whose words and document frequencies come from *public* texts only.

A vocabulary fitted on private texts reveals which words they use, and how often, and no epsilon
covers that. Here it is fitted on other texts of the same language; each private text is then
mapped independently:

    x_w = (1 + ln n_w) (1 + ln((1 + D) / (1 + d_w))),    then scaled to length 1

where n_w is the count of the word w in the text, and d_w of the D public texts contain it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

WORD = re.compile(r"\w\w+")


@dataclass(frozen=True)
class TfIdf:
    """The words in the order of the features, and their weights (see the module)."""

    words: tuple[str, ...]
    idf: tuple[float, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return rows [N, words] of length 1, or 0 for a text without a known word."""
        rows = np.zeros((len(texts), len(self.words)), dtype=np.float32)
        places = self.places
        weights = np.array(self.idf)
        for row, text in zip(rows, texts, strict=True):
            counts = Counter(
                place for word in _words(text) if (place := places.get(word)) is not None
            )
            if counts:
                columns = np.fromiter(counts, dtype=np.int64)
                frequencies = np.fromiter(counts.values(), dtype=np.float64)
                values = (1 + np.log(frequencies)) * weights[columns]
                row[columns] = values / np.linalg.norm(values)
        return torch.from_numpy(rows)


def fitted(public: Sequence[str], size: int) -> TfIdf:
    """Fit TF-IDF on the `size` most frequent words of public texts; ties in alphabetical order.

    >>> fitted(["a good film", "a bad film", "good film, good music"], size=2).words
    ('film', 'good')
    """
    if size < 1:
        raise ValueError(f"TF-IDF of {size} words: give at least 1, typically a few thousand")
    uses: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for text in public:
        counts = Counter(_words(text))
        uses.update(counts)
        documents.update(counts.keys())
    words = sorted(uses, key=lambda word: (-uses[word], word))[:size]
    if len(words) < size:
        raise ValueError(
            f"TF-IDF of {size} words: the public texts have only {len(words)} different ones: "
            "give a smaller size or more texts"
        )
    idf = (1 + math.log((1 + len(public)) / (1 + documents[word])) for word in words)
    return TfIdf(tuple(words), tuple(idf))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
