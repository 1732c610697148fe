"""The built-in layers. Each module registers its adapters when it is imported."""

from dpkfc.per_sample.layers import conv, embedding, experts, linear, norm, recurrent
from dpkfc.per_sample.registry import mark_built_in

mark_built_in()

__all__ = ["conv", "embedding", "experts", "linear", "norm", "recurrent"]
