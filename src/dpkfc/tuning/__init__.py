"""Hyperparameter tuning: free on public data, at a price in epsilon on private data."""

from dpkfc.accounting.selection import BestOf
from dpkfc.tuning.search import Tuned, tune, tune_privately

__all__ = ["BestOf", "Tuned", "tune", "tune_privately"]
