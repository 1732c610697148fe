"""Independent Gaussian noise: the mechanism of DP-SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpkfc.noise.factorization import IDENTITY, Factorization
from dpkfc.noise.workload import Workload


@dataclass(frozen=True)
class Independent:
    """Every step adds fresh ``N(0, scale² I)`` to the sum: the identity factorization, C = I.

    >>> Independent().factorize(Workload.sgd(momentum=0.9), n=2, separation=1).materialize(2)
    array([[1., 0.],
           [0., 1.]])
    """

    workload: ClassVar[Workload | None] = None

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """C = I, for any workload."""
        return IDENTITY
