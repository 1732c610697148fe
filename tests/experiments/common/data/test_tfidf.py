"""TF-IDF of public words equals scikit-learn's and maps each text independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.data.tfidf import fitted

WORDS = ["film", "good", "bad", "music", "plot", "naïve", "the", "of", "x2"]
TEXTS = st.lists(
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=3, max_size=12
)


@settings(max_examples=30, deadline=None)
@given(public=TEXTS, private=TEXTS)
def test_it_equals_scikit_learn(public: list[str], private: list[str]) -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    public = [*public, " ".join(WORDS)]
    ours = fitted(public, len(WORDS))
    oracle = text.TfidfVectorizer(sublinear_tf=True, vocabulary=list(ours.words)).fit(public)
    np.testing.assert_allclose(
        ours(private).numpy(), oracle.transform(private).toarray(), atol=1e-6
    )


def test_the_most_frequent_words_come_first() -> None:
    public = ["The plot, the plot: THE end", "an end of the music", "I am"]
    assert fitted(public, 4).words == ("the", "end", "plot", "am")  # a single letter is not a word


def test_a_text_is_mapped_independently() -> None:
    encode = fitted(["good film", "bad film", "bad music"], 4)
    texts = ["good good film", "nothing known", "", "bad"]
    together = encode(texts)
    assert torch.equal(together, torch.cat([encode([text]) for text in texts]))
    torch.testing.assert_close(together.norm(dim=1), torch.tensor([1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(("size", "message"), [(0, "at least 1"), (5, "only 2 different ones")])
def test_wrong_sizes(size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(["good film"], size)
