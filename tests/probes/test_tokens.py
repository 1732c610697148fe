"""Token noise has the structure of Algorithm 4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dpkfc.probes.tokens import Tokens


def drawn(tokens: Tokens, count: int, seed: int = 0) -> torch.Tensor:
    inputs = tokens.draw(count, torch.Generator().manual_seed(seed)).inputs
    found = inputs[tokens.ids] if isinstance(inputs, dict) else inputs
    assert isinstance(found, torch.Tensor)
    return found


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(3, 20),
    least=st.integers(1, 20),
    anchors=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    special=st.sets(st.integers(0, 19), max_size=6),
    uniform=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_sequences_are_anchored_padded_and_masked(
    length: int,
    least: int,
    anchors: tuple[bool, bool, bool],
    special: set[int],
    uniform: bool,
    seed: int,
) -> None:
    cls, sep, pad = (
        value if there else None for value, there in zip((17, 4, 9), anchors, strict=True)
    )
    least = min(least, length)
    tokens = Tokens(
        20, length, min_length=least, cls=cls, sep=sep, pad=pad, special=tuple(special),
        frequencies="uniform" if uniform else "zipf",
    )  # fmt: skip
    probes = tokens.draw(9, torch.Generator().manual_seed(seed))
    assert isinstance(probes.inputs, dict) and set(probes.inputs) == {"input_ids", "attention_mask"}
    ids, mask = probes.inputs["input_ids"], probes.inputs["attention_mask"]
    assert ids.shape == mask.shape == (9, length) and ids.dtype == mask.dtype == torch.long
    assert probes.active is not None and probes.active.equal(mask == 1) and probes.targets is None
    forbidden = special | {value for value in (cls, sep, pad) if value is not None}
    for row, seen in zip(ids.tolist(), mask.tolist(), strict=True):
        active = sum(seen)
        assert seen == [1] * active + [0] * (length - active)
        assert max(least, 1 + (cls is not None) + (sep is not None)) <= active <= length
        assert row[active:] == [0 if pad is None else pad] * (length - active)
        payload = row[:active]
        if cls is not None:
            assert payload.pop(0) == cls
        if sep is not None:
            assert payload.pop() == sep
        assert payload and not set(payload) & forbidden and set(payload) <= set(range(20))


def test_lengths_are_uniform() -> None:
    probes = Tokens(100, 10, min_length=4, pad=0).draw(7000, torch.Generator().manual_seed(0))
    counts = torch.bincount(probes.active.sum(1), minlength=11)
    assert counts[:4].sum() == 0
    assert chisquare(counts[4:].numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("frequencies", "exponent"), [("zipf", 1.0), ("zipf", 1.7), ("uniform", 1.0)]
)
def test_frequencies_follow_the_law(frequencies: str, exponent: float) -> None:
    """Ids 0, 3 and 5 are special, so the ranks 1, 2, 3 are the ids 1, 2, 4."""
    tokens = Tokens(
        30, 32, min_length=32, pad=0, special=(3, 5), frequencies=frequencies, exponent=exponent
    )
    counts = np.bincount(drawn(tokens, 2000).ravel().numpy(), minlength=30)
    payload = [i for i in range(30) if i not in (0, 3, 5)]
    assert counts.sum() == counts[payload].sum() == 64_000
    weight = np.array(
        [1 / (rank + 2.7) ** exponent if frequencies == "zipf" else 1.0 for rank in range(1, 28)]
    )
    assert chisquare(counts[payload], 64_000 * weight / weight.sum()).pvalue > 1e-3


def test_the_order_of_frequency_can_be_given() -> None:
    tokens = Tokens(50, 64, min_length=64, pad=40, order=[7, 40, 3, 20], exponent=2.0)
    counts = np.bincount(drawn(tokens, 500).ravel().numpy(), minlength=50)
    assert counts[7] > counts[3] > counts[20] > 0 and counts[[7, 3, 20]].sum() == counts.sum()
    assert drawn(replace(tokens, order=torch.tensor([7, 3])), 5).unique().tolist() == [3, 7]


def test_models_without_a_mask_get_plain_ids() -> None:
    padded = Tokens(50, 12, pad=0, mask=None).draw(200, torch.Generator().manual_seed(0))
    assert isinstance(padded.inputs, torch.Tensor) and padded.inputs.shape == (200, 12)
    assert (
        padded.active is not None
        and (padded.inputs != 0).equal(padded.active)
        and not padded.active.all()
    )
    full = Tokens(50, 12, mask=None, sep=3).draw(200, torch.Generator().manual_seed(0))
    assert full.active is not None and full.active.all() and (full.inputs[:, -1] == 3).all()


def test_input_names_are_the_models_own() -> None:
    inputs = (
        Tokens(50, 12, ids="tokens", mask="keep", extra=("token_type_ids",))
        .draw(2, torch.Generator())
        .inputs
    )
    assert list(inputs) == ["tokens", "keep", "token_type_ids"]
    assert inputs["token_type_ids"].shape == (2, 12) and not inputs["token_type_ids"].any()


def test_the_default_count_is_about_two_thousand_tokens() -> None:
    assert [Tokens(50, length).count for length in (16, 128, 1024)] == [128, 16, 8]
    assert Tokens(50, 16, count=3).count == 3


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(45))]


def test_a_tokenizer_tells_its_special_ids(vocabulary: list[str]) -> None:
    tokenizer = _tokenizer(
        vocabulary, pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]"
    )
    tokens = Tokens.from_tokenizer(
        tokenizer, 16, min_length=8, frequencies="uniform", classes=4, count=5
    )
    assert (tokens.vocabulary, tokens.length, tokens.min_length) == (50, 16, 8)
    assert (tokens.cls, tokens.sep, tokens.pad, tokens.classes, tokens.count) == (2, 3, 0, 4, 5)
    ids = drawn(tokens, 300)
    assert tokenizer.decode(ids[0]).startswith("[CLS] word")
    assert not ((ids == 1) | (ids == 4)).any()  # neither [UNK] nor [MASK] is ever payload
    assert set(range(5, 50)) <= set(ids.ravel().tolist())


def test_a_tokenizer_without_cls_gives_bos_and_eos_and_its_added_tokens(
    vocabulary: list[str],
) -> None:
    tokenizer = _tokenizer([f"word{i}" for i in range(45)], bos="<s>", eos="</s>")
    tokens = Tokens.from_tokenizer(tokenizer, 16)
    assert tokens.vocabulary == 47
    assert (
        {tokens.cls, tokens.sep} == {45, 46}
        and tokens.cls == tokenizer.bos_token_id
        and tokens.pad is None
    )


def _tokenizer(words: list[str], **names: str) -> object:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token=words[1]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        **{f"{name}_token": token for name, token in names.items()},
    )


def test_what_is_not_a_tokenizer_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"tokenizer=object has neither a length nor a vocab_size: pass a Hugging",
    ):
        Tokens.from_tokenizer(object(), 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 0}, r"vocabulary=0: give a whole number, 1 or more"),
        ({"length": 0}, r"length=0: give a whole number"),
        ({"min_length": 0}, r"min_length=0: give"),
        ({"min_length": 9}, r"length=8 is shorter than 9, which min_length=9"),
        (
            {"length": 2, "cls": 1, "sep": 2},
            r"length=2 is shorter than 3.*besides cls and sep.*raise length",
        ),
        ({"exponent": -0.5}, r"exponent=-0.5: give a finite number of at least 0"),
        ({"frequencies": "text"}, r"frequencies='text': give 'zipf' or 'uniform'"),
        ({"cls": 50}, r"cls=50: give an id below vocabulary=50"),
        ({"pad": -1}, r"pad=-1: give a whole number, 0 or more"),
        ({"special": (3, 50)}, r"special holds 50: give different whole numbers from 0 to 49"),
        ({"order": (3, 3)}, r"order names an id twice"),
        ({"order": (3,), "special": (3,)}, r"holds nothing but special ids: name fewer"),
        ({"classes": 0}, r"classes=0"),
        ({"count": -1}, r"Tokens: count=-1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens(**{"vocabulary": 50, "length": 8, **arguments})  # type: ignore[arg-type]
