"""Structural token noise (Algorithm 4): sequences with the anchors, lengths and padding of text, without a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.arguments import distinct_ids, real, whole
from dpkfc.probes.probe import Inputs, Probes
from dpkfc.probes.zipf import zipf

Frequencies = Literal["zipf", "uniform"]


@dataclass(frozen=True)
class Tokens:
    """Random token sequences [length]: CLS, payload, SEP over a random active length ℓ, then PAD.

    ℓ is uniform in [min_length, length], counts CLS and SEP, and always leaves room for one token beside them.
    The payload is drawn from the vocabulary without CLS, SEP, PAD and `special`: by Zipf's law
    ``p ∝ 1/(rank + 2.7)^exponent``, or uniformly as in the paper. Ranks are the order of the ids (byte-pair
    vocabularies are roughly so), or `order`: ids from the most to the least frequent, the only ones then drawn.

    The inputs are a dict of the ids, the mask and zeros for each name in `extra` (say "token_type_ids"), as Hugging
    Face models take them. With mask=None they are the plain id tensor, for models called as model(ids); padding
    then needs a `pad` id, and without one every sequence has full length.

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
    count: int = 0  # 0: about 2048 tokens a refresh, and at least 8 sequences

    name = "token noise"
    public = True

    def __post_init__(self) -> None:
        whole("Tokens: vocabulary", self.vocabulary, 1)
        whole("Tokens: length", self.length, 1)
        whole("Tokens: min_length", self.min_length, 1)
        real("Tokens: exponent", self.exponent, least=0)
        if self.classes is not None:
            whole("Tokens: classes", self.classes, 1)
        if self.frequencies not in ("zipf", "uniform"):
            raise PrivacyError(
                f"Tokens: frequencies={self.frequencies!r}: give 'zipf' or 'uniform'"
            )
        for where in ("cls", "sep", "pad"):
            value = getattr(self, where)
            if value is not None and whole(f"Tokens: {where}", value, 0) >= self.vocabulary:
                raise PrivacyError(
                    f"Tokens: {where}={value}: give an id below vocabulary={self.vocabulary}"
                )
        object.__setattr__(
            self, "special", distinct_ids("Tokens: special", self.special, self.vocabulary)
        )
        if self.order is not None:
            object.__setattr__(
                self, "order", distinct_ids("Tokens: order", self.order, self.vocabulary)
            )
        if not len(self._payload()):
            raise PrivacyError(
                f"Tokens: vocabulary={self.vocabulary} holds nothing but special ids: "
                "name fewer in cls, sep, pad and special, or more in order"
            )
        if self._shortest() > self.length:
            raise PrivacyError(
                f"Tokens: length={self.length} is shorter than {self._shortest()}, which min_length={self.min_length} "
                "or room for one token beside cls and sep asks for: raise length"
            )
        object.__setattr__(
            self, "count", whole("Tokens: count", self.count or max(8, 2048 // self.length), 1)
        )

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
        """The vocabulary and special ids of a Hugging Face tokenizer; BOS and EOS stand in for CLS and SEP.

        A tokenizer is a published file: one fitted on the private text would leak it.
        """
        size = (
            len(tokenizer)
            if hasattr(tokenizer, "__len__")
            else getattr(tokenizer, "vocab_size", None)
        )
        if not isinstance(size, int):
            raise PrivacyError(
                f"Tokens.from_tokenizer: tokenizer={type(tokenizer).__name__} has neither a length nor a vocab_size: "
                "pass a Hugging Face tokenizer, or Tokens(vocabulary, length)"
            )

        def first(*names: str) -> int | None:
            found = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
            return next((value for value in found if value is not None), None)

        return cls(
            size,
            length,
            min_length=min_length,
            frequencies=frequencies,
            exponent=exponent,
            cls=first("cls", "bos"),
            sep=first("sep", "eos"),
            pad=first("pad"),
            special=tuple(sorted(set(getattr(tokenizer, "all_special_ids", ())))),
            classes=classes,
            count=count,
        )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        whole("Tokens.draw: count", count, 1)
        payload = self._payload()
        often = zipf(len(payload), self.exponent if self.frequencies == "zipf" else 0.0)
        drawn = torch.multinomial(often, count * self.length, replacement=True, generator=generator)
        ids = payload[drawn].view(count, self.length)
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

    def _payload(self) -> Tensor:
        """The ids a payload may hold, the most frequent first."""
        kept = torch.ones(self.vocabulary, dtype=torch.bool)
        kept[
            [value for value in (self.cls, self.sep, self.pad, *self.special) if value is not None]
        ] = False
        ids = (
            torch.arange(self.vocabulary)
            if self.order is None
            else torch.tensor(cast("tuple[int]", self.order))
        )
        return ids.long()[kept[ids.long()]]

    def _shortest(self) -> int:
        return max(self.min_length, 1 + (self.cls is not None) + (self.sep is not None))
