"""Per-sample gradients as they are, one tensor per sample and parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.per_sample.base import IDENTITY_MAP, LinearMap
from dpkfc.per_sample.rounding import (
    BLOCK,
    add_sum_error,
    add_up,
    at_least_float32,
    keep_rows,
    slices,
    squared_norm_of_all,
    summation_depth,
)

MAPPED_BLOCK = 2**18  # entries that are mapped at a time


@dataclass
class DenseGrad:
    """[B, *shape] for each parameter."""

    grads: list[Tensor]
    preconditioned: bool = False

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        grads = self.per_sample()
        if self.preconditioned or preconditioner is IDENTITY_MAP:
            return squared_norm_of_all(grads)
        additions = summation_depth(len(grads[0]))
        if sum(preconditioner.work):
            additions += summation_depth(grads[0].shape[1])
            additions += summation_depth(grads[0][0, 0].numel())
        # a few samples at a time, so that mapped gradients stay in the cache
        block = max(1, MAPPED_BLOCK // sum(g[0].numel() for g in grads))
        pieces = [[g[rows] for g in grads] for rows in slices(len(grads[0]), block)]
        mapped = torch.cat([squared_norm_of_all(preconditioner.apply(piece)) for piece in pieces])
        return add_sum_error(mapped, squared_norm_of_all(grads), preconditioner.gain, additions)

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        grads = self.per_sample()
        return add_up(
            [torch.tensordot(weights[i].to(x.dtype), x[i], dims=1) for x in grads]
            for i in slices(len(weights), BLOCK)
        )

    def per_sample(self) -> list[Tensor]:
        return [at_least_float32(g) for g in self.grads]

    def sum_of_squares(self) -> list[Tensor]:
        return [g.square().sum(0) for g in self.per_sample()]

    def masked(self, keep: Tensor) -> DenseGrad:
        return DenseGrad([keep_rows(g, keep) for g in self.grads], self.preconditioned)
