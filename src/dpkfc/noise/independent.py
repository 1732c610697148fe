"""Independent Gaussian noise: the mechanism of DP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpkfc.noise.rng import add_normal_


@dataclass(frozen=True)
class Independent:
    """Every step adds fresh ``N(0, scale² I)`` to the sum: the identity factorization."""

    name = "independent Gaussian"

    def add_(self, sums: list[Tensor], key: bytes, scale: float) -> None:
        add_normal_(sums, key, scale)
