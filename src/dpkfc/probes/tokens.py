"""Structural token noise (Algorithm 4): sequences with the structure of text, but without a text.

They have the special tokens, lengths and padding of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dpkfc.probes.arguments import check_distinct_ids, check_integer, check_number
from dpkfc.probes.probe import Inputs, Probes
from dpkfc.probes.zipf import zipf

Frequencies = Literal["zipf", "uniform"]


@dataclass(frozen=True)
class Tokens:
    """Random token sequences [length]: CLS, payload, SEP over a random active length ℓ, then PAD.

    ℓ is uniform in [min_length, length]. It counts CLS and SEP, and there is always room for one
    more token.

    Args:
        vocabulary: the number of token ids.
        length: the length of every sequence, including padding.
        min_length: the smallest ℓ.
        frequencies: how payload tokens are drawn: by Zipf's law ``p ∝ 1/(rank + 2.7)^exponent``, or
            uniformly, as in the paper.
        exponent: of Zipf's law.
        order: ids from the most to the least frequent; only these are drawn. By default the ranks
            are the order of the ids, which is roughly right for byte-pair vocabularies.
        cls, sep, pad: ids of the special tokens, if there are any.
        special: further ids that a payload never contains.
        classes: the number of classes of the model, which is compared with its output.
        ids, mask: names of the ids and of the attention mask in the inputs, a dict as Hugging Face
            models take it. With mask=None the inputs are the plain id tensor, for models called as
            model(ids). Padding then needs a `pad` id; without it every sequence has full length.
        extra: names of further inputs that are all zeros, such as "token_type_ids".
        count: sequences per refresh; 0 is about 2048 tokens, and at least 8 sequences.

    >>> import torch
    >>> tokens = Tokens(vocabulary=1000, length=6, cls=1, sep=2, pad=0)
    >>> drawn = tokens.draw(3, torch.Generator().manual_seed(0)).inputs
    >>> drawn["input_ids"][:, 0].tolist(), sorted(drawn)
    ([1, 1, 1], ['attention_mask', 'input_ids'])
    >>> (drawn["input_ids"] == 0).equal(drawn["attention_mask"] == 0)
    True
    """

    vocabulary: int
    length: int
    _: KW_ONLY
    min_length: int = 1
    frequencies: Frequencies = "zipf"
    exponent: float = 1.0
    order: Sequence[int] | None = None
    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    special: Sequence[int] = ()
    classes: int | None = None
    ids: str = "input_ids"
    mask: str | None = "attention_mask"
    extra: tuple[str, ...] = ()
    count: int = 0

    name = "token noise"
    public = True

    def __post_init__(self) -> None:
        check_integer("Tokens: vocabulary", self.vocabulary, 1)
        check_integer("Tokens: length", self.length, 1)
        check_integer("Tokens: min_length", self.min_length, 1)
        check_number("Tokens: exponent", self.exponent, least=0)
        if self.classes is not None:
            check_integer("Tokens: classes", self.classes, 1)
        if self.frequencies not in ("zipf", "uniform"):
            raise ValueError(f"Tokens: frequencies={self.frequencies!r}: give 'zipf' or 'uniform'")
        for argument in ("cls", "sep", "pad"):
            value = getattr(self, argument)
            if value is None:
                continue
            if check_integer(f"Tokens: {argument}", value, 0) >= self.vocabulary:
                raise ValueError(
                    f"Tokens: {argument}={value}: give an id below vocabulary={self.vocabulary}"
                )
        special = check_distinct_ids("Tokens: special", self.special, self.vocabulary)
        object.__setattr__(self, "special", special)
        if self.order is not None:
            order = check_distinct_ids("Tokens: order", self.order, self.vocabulary)
            object.__setattr__(self, "order", order)
        if not len(self._payload_ids()):
            raise ValueError(
                f"Tokens: vocabulary={self.vocabulary} holds nothing but special ids: name fewer "
                "in cls, sep, pad and special, or more in order"
            )
        if self._shortest() > self.length:
            raise ValueError(
                f"Tokens: length={self.length} is shorter than {self._shortest()}, which "
                f"min_length={self.min_length} or room for one token besides cls and sep requires: "
                "raise length"
            )
        count = check_integer("Tokens: count", self.count or max(8, 2048 // self.length), 1)
        object.__setattr__(self, "count", count)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        length: int,
        *,
        min_length: int = 1,
        frequencies: Frequencies = "zipf",
        exponent: float = 1.0,
        classes: int | None = None,
        count: int = 0,
    ) -> Tokens:
        """The vocabulary and special ids of a Hugging Face tokenizer.

        BOS and EOS replace CLS and SEP where a tokenizer has no such tokens.

        **Guarantee.** The tokenizer must be public: one that was fitted to the private text would
        leak it.
        """
        has_length = hasattr(tokenizer, "__len__")
        size = len(tokenizer) if has_length else getattr(tokenizer, "vocab_size", None)
        if not isinstance(size, int):
            raise TypeError(
                f"Tokens.from_tokenizer: tokenizer={type(tokenizer).__name__} has neither a length "
                "nor a vocab_size: pass a Hugging Face tokenizer, or Tokens(vocabulary, length)"
            )

        def first_id(*names: str) -> int | None:
            ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
            return next((token_id for token_id in ids if token_id is not None), None)

        return cls(
            size,
            length,
            min_length=min_length,
            frequencies=frequencies,
            exponent=exponent,
            cls=first_id("cls", "bos"),
            sep=first_id("sep", "eos"),
            pad=first_id("pad"),
            special=tuple(sorted(set(getattr(tokenizer, "all_special_ids", ())))),
            classes=classes,
            count=count,
        )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` sequences."""
        check_integer("Tokens.draw: count", count, 1)
        payload_ids = self._payload_ids()
        exponent = self.exponent if self.frequencies == "zipf" else 0.0
        frequencies = zipf(len(payload_ids), exponent)
        ranks = torch.multinomial(
            frequencies, count * self.length, replacement=True, generator=generator
        )
        ids = payload_ids[ranks].view(count, self.length)
        lengths = torch.randint(self._shortest(), self.length + 1, (count, 1), generator=generator)
        if self.mask is None and self.pad is None:
            lengths = torch.full_like(lengths, self.length)
        if self.cls is not None:
            ids[:, 0] = self.cls
        if self.sep is not None:
            ids.scatter_(1, lengths - 1, self.sep)
        active = torch.arange(self.length) < lengths
        ids = torch.where(active, ids, self.pad or 0)
        inputs: Inputs = ids
        if self.mask is not None:
            inputs = {self.ids: ids, self.mask: active.long()}
            inputs |= {name: torch.zeros_like(ids) for name in self.extra}
        return Probes(inputs, active=active)

    def _payload_ids(self) -> Tensor:
        """The ids that a payload may contain, the most frequent first."""
        special = [i for i in (self.cls, self.sep, self.pad, *self.special) if i is not None]
        allowed = torch.ones(self.vocabulary, dtype=torch.bool)
        allowed[special] = False
        if self.order is None:
            ids = torch.arange(self.vocabulary)
        else:
            ids = torch.tensor(cast("tuple[int]", self.order))
        return ids.long()[allowed[ids.long()]]

    def _shortest(self) -> int:
        return max(self.min_length, 1 + (self.cls is not None) + (self.sep is not None))
