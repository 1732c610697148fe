"""Diagonal maps: AdaDPS, and the parameters that have no Kronecker form.

A norm layer, an embedding or a bare parameter has no factors A and G. Left as it is beside layers whose
gradients are whitened, it would drown: all of them share one clip and one noise. `Scaled` multiplies its
gradient by one number, or entry by entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass
class Scaled:
    """``g -> s ⊙ g`` with s a number, or one tensor for each parameter of the slot."""

    scale: float | list[Tensor]
    transposed: bool = False  # the weight is [in, out]

    work = (0, 0)

    @cached_property
    def gain(self) -> float:
        return self.scale if isinstance(self.scale, float) else max(float(s.max()) for s in self.scale)

    @property
    def factored(self) -> bool:
        return isinstance(self.scale, float)

    def factors(self, left: Tensor, right: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(self.scale, float)
        return left * self.scale, right, last

    def single(self, left: Tensor, right: Tensor, last: Tensor | None) -> Tensor:
        """``Σ_op s_op² left_o² right_p²``: one matrix product for all samples."""
        assert not isinstance(self.scale, float)
        weight, *bias = (s.to(left).square() for s in self.scale)
        matrix = weight.T if self.transposed else weight.flatten(1)
        squares = left.square()
        norms = ((squares @ matrix) * right.square()).sum(1)
        if last is not None:
            norms = norms + (squares @ bias[0]) * last.square()
        return norms

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values * (self.scale if isinstance(self.scale, float) else self.scale[0].to(values)[ids])

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(self.scale, float):
            return [g * self.scale for g in grads]
        return [
            (g.reshape(-1, s.numel()) * s.to(g).flatten()).view_as(g) for g, s in zip(grads, self.scale, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "transposed": self.transposed}
