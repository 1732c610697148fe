"""TF-IDF whose words and document frequencies come from *public* texts: no private record has a say in them.

A vocabulary that is fitted on private reviews tells which words they use, and how often, outside of any epsilon. Here
it is fitted on other texts of the same language; a private text is then mapped on its own:

    x_w = (1 + ln n_w) (1 + ln((1 + D) / (1 + d_w))),    then scaled to length 1

with n_w the count of the word w in the text, and d_w of D public texts that have it.
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

from dpkfc.errors import PrivacyError

WORD = re.compile(r"\w\w+")


@dataclass(frozen=True)
class TfIdf:
    """The words, in order of the features, and the weight of each: see the module."""

    words: tuple[str, ...]
    idf: tuple[float, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Rows [N, words] of length 1, or 0 for a text without a known word."""
        rows = np.zeros((len(texts), len(self.words)), dtype=np.float32)
        places, weights = self.places, np.array(self.idf)
        for row, text in zip(rows, texts, strict=True):
            counts = Counter(
                place for word in _words(text) if (place := places.get(word)) is not None
            )
            if counts:
                found = np.fromiter(counts, dtype=np.int64)
                values = (1 + np.log(np.fromiter(counts.values(), dtype=np.float64))) * weights[
                    found
                ]
                row[found] = values / np.linalg.norm(values)
        return torch.from_numpy(rows)


def fitted(public: Sequence[str], size: int) -> TfIdf:
    """The `size` words that public texts use most, the most frequent first (of equals, in alphabetical order).

    >>> fitted(["a good film", "a bad film", "good film, good music"], size=2).words
    ('film', 'good')
    """
    if size < 1:
        raise PrivacyError(f"TF-IDF of {size} words: give at least 1, a few thousand as a rule")
    uses: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for text in public:
        found = Counter(_words(text))
        uses.update(found)
        documents.update(found.keys())
    words = sorted(uses, key=lambda word: (-uses[word], word))[:size]
    if len(words) < size:
        raise PrivacyError(
            f"TF-IDF of {size} words: the public texts have only {len(words)} different ones"
        )
    idf = (1 + math.log((1 + len(public)) / (1 + documents[word])) for word in words)
    return TfIdf(tuple(words), tuple(idf))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
