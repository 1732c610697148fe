"""Differentially private training for PyTorch, with the geometry put right before the noise.

>>> import dpkfc
>>> plan = dpkfc.Plan.make(records=10_000, batch_size=100, epochs=2, clip=1.0, epsilon=3.0, delta=1e-6)
>>> plan.steps
200
"""

from dpkfc import diagnostics, losses, optim
from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.selection import BestOf
from dpkfc.clipping import Automatic
from dpkfc.errors import PrivacyError
from dpkfc.fix import fix
from dpkfc.geometry.diagonal import Diagonal
from dpkfc.geometry.identity import Identity
from dpkfc.geometry.kfc import KFC
from dpkfc.geometry.probes.pink import PinkNoise
from dpkfc.geometry.probes.public import Hybrid, Oracle, PublicData
from dpkfc.geometry.probes.tabular import Tabular
from dpkfc.geometry.probes.through import Through
from dpkfc.geometry.probes.tokens import Tokens
from dpkfc.losses import mean_over_records
from dpkfc.noise.banded import Banded
from dpkfc.noise.choose import Auto
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
from dpkfc.plan import Plan
from dpkfc.presets import Recipe, recipe
from dpkfc.private import make_private
from dpkfc.run import Private
from dpkfc.tuning import tune, tune_privately

__version__ = "0.1.0"
__all__ = [
    "KFC",
    "Auto",
    "Automatic",
    "Banded",
    "BandedSquareRoot",
    "BandedToeplitz",
    "BestOf",
    "BufferedToeplitz",
    "Diagonal",
    "Hybrid",
    "Identity",
    "Independent",
    "InverseSquareRoot",
    "LambdaCGD",
    "Ledger",
    "Oracle",
    "OutputPerturbation",
    "PinkNoise",
    "Plan",
    "PrivacyError",
    "Private",
    "PublicData",
    "Recipe",
    "Tabular",
    "Through",
    "Tokens",
    "Workload",
    "diagnostics",
    "fix",
    "losses",
    "make_private",
    "mean_over_records",
    "optim",
    "recipe",
    "tune",
    "tune_privately",
]
