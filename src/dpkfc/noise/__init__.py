"""Gaussian noise for a run: independent, or correlated over steps by a matrix factorization.

The classes here are recipes: ``factorize(workload, n, separation)`` makes the strategy matrix C for
a run of n steps. The notation is explained in `dpkfc.noise.factorization`.
"""

from dpkfc.noise.auto import Auto
from dpkfc.noise.banded import Banded
from dpkfc.noise.independent import Independent
from dpkfc.noise.toeplitz import (
    BandedSquareRoot,
    BandedToeplitz,
    BufferedToeplitz,
    InverseSquareRoot,
    LambdaCGD,
    OutputPerturbation,
)
from dpkfc.noise.workload import Workload

__all__ = [
    "Auto",
    "Banded",
    "BandedSquareRoot",
    "BandedToeplitz",
    "BufferedToeplitz",
    "Independent",
    "InverseSquareRoot",
    "LambdaCGD",
    "OutputPerturbation",
    "Workload",
]
