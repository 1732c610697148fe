"""Optimizers that know the noise they see. All of it is post-processing of private gradients, and free."""

from dpkfc.optim.adambc import DPAdamBC
from dpkfc.optim.disk import DiSK

__all__ = ["DPAdamBC", "DiSK"]
