"""Optimizers that use the known variance of the noise.

They post-process private gradients, so they cost no privacy.
"""

from dpkfc.optim.adambc import DPAdamBC
from dpkfc.optim.disk import DiSK

__all__ = ["DPAdamBC", "DiSK"]
