"""Where the inputs of a geometry come from: synthetic, public, or (`Oracle` only) private."""

from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.public import Hybrid, Oracle, PublicData
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.tokens import Tokens
from dpkfc.probes.transformed import TransformedProbe

__all__ = [
    "Hybrid",
    "Oracle",
    "PinkNoise",
    "PublicData",
    "Tabular",
    "Tokens",
    "TransformedProbe",
]
