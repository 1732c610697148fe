"""The geometry of DP-SGD: none. It also states the interface that every geometry has.

A geometry is a linear map ``g -> U g`` applied to each per-sample gradient before clipping. It is built
without the private data, so a step that clips and noises U g is exactly as private as one that clips and
noises g: for a fixed map P independent of the batch, ``Σ clip(P g_i)`` has sensitivity C (Proposition 5.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Map(Protocol):
    """The map of one slot: one parameter, or the weight and bias of one layer."""

    def factors(self, left: Tensor, right: Tensor, ones: bool) -> tuple[Tensor, Tensor, bool]:
        """Map the factors of the gradient ``Σ_t left_t right_tᵀ`` ([B, groups, T, features] each).

        With `ones`, `right` is followed by an implicit coordinate 1, whose column is the bias gradient.
        """

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """Map the rows `ids` ([U]) of a gradient that is zero elsewhere; `values` is [U, features]."""

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Map gradients of the slot's parameters; any dimensions in front of theirs are batch."""


class Geometry(Protocol):
    """What the pipeline needs of a geometry."""

    name: str
    public: bool  # False if built from the private records: the run then reports epsilon = inf

    def map_of(self, parameters: tuple[str, ...]) -> Map:
        """The map for the slot with these parameter names."""


class _Unchanged:
    def factors(self, left: Tensor, right: Tensor, ones: bool) -> tuple[Tensor, Tensor, bool]:
        return left, right, ones

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return list(grads)


UNCHANGED = _Unchanged()


class Identity:
    """No map: the gradients of DP-SGD."""

    name = "identity (DP-SGD)"
    public = True

    def map_of(self, parameters: tuple[str, ...]) -> Map:
        return UNCHANGED
