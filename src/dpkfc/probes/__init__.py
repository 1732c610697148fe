"""Probes: model inputs from which a geometry is computed.

They are synthetic or public. Only `Oracle` reads private records, and its runs are not private.
"""

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
