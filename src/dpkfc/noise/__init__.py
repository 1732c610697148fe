"""Gaussian noise for a run: independent, or correlated over steps by a factorization of the workload."""

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
