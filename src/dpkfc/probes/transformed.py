"""Probes for a model that reads features instead of signals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dpkfc.probes.probe import Inputs, Probe, Probes, tensors
from dpkfc.probes.public import Hybrid


@dataclass(frozen=True, eq=False)
class TransformedProbe:
    """The probes of `source` after the transform that turns records into the model's inputs.

    A fixed transform (scattering coefficients, a frozen public backbone) is often applied to all
    records once, before training. The probes must then pass through the same transform.

    Args:
        source: a single probe.
        transform: maps a batch of the source's inputs to a batch of the model's inputs. It must not
            have been fitted to private records.

    >>> import torch
    >>> from dpkfc.probes.pink import PinkNoise
    >>> flat = TransformedProbe(PinkNoise((1, 8, 8)), lambda images: images.flatten(1))
    >>> flat.draw(4, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([4, 64])
    """

    source: Probe
    transform: Callable[[Inputs], Inputs]

    def __post_init__(self) -> None:
        if isinstance(self.source, Hybrid) or not hasattr(self.source, "draw"):
            raise TypeError(
                f"TransformedProbe: source={type(self.source).__name__}: give a single probe, such "
                "as PinkNoise; for a Hybrid, transform each of its sources"
            )
        if not callable(self.transform):
            raise TypeError(
                f"TransformedProbe: transform={type(self.transform).__name__}: give a function of "
                "a batch"
            )

    @property
    def name(self) -> str:
        return f"{self.source.name}, transformed"

    @property
    def public(self) -> bool:
        return self.source.public

    @property
    def count(self) -> int:
        return self.source.count

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` transformed probes."""
        probes = self.source.draw(count, generator)
        with torch.no_grad():
            inputs = self.transform(probes.inputs)
        lengths = [len(tensor) for tensor in tensors(inputs)]
        if any(length != count for length in lengths):
            raise ValueError(
                f"TransformedProbe: transform returned {lengths} records for {count} probes: it "
                "must return one per probe"
            )
        return replace(probes, inputs=inputs)
