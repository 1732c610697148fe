"""Per-sample gradients of embeddings: a few rows of the weight, and the rest zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.per_sample.base import LinearMap
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.rounding import (
    BLOCK,
    add_sum_error,
    add_up,
    at_least_float32,
    keep_rows,
    recompute_if_doubtful,
    slices,
    squared_norm,
    summation_depth,
)


@dataclass
class RowSparseGrad:
    """``g_i = Σ_t e(id_it) v_itᵀ`` with ids [B, T], values [B, T, q], and `num_rows` rows in all.

    Within a sample no two nonzero values have the same id (`merged` ensures this), so that what is
    measured is what is added up. If positions with the same id were added to the sum one by one,
    values that cancel could remove the rest of the sum by rounding, although their gradient is
    zero.
    """

    ids: Tensor
    values: Tensor
    num_rows: int

    preconditioned = False

    @staticmethod
    def merged(ids: Tensor, values: Tensor, num_rows: int) -> RowSparseGrad:
        """Of the positions of a sample with the same id, the first takes the sum of all."""
        flat = at_least_float32(values).flatten(0, 1)
        first = _first_of_same(ids).flatten()
        # positions that are not the first receive nothing
        merged = torch.zeros_like(flat).index_add_(0, first, flat)
        return RowSparseGrad(ids, merged.view(*ids.shape, -1), num_rows)

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        mapped = preconditioner.rows(self.ids.flatten(), self.values.flatten(0, 1))
        return squared_norm(mapped.view_as(self.values))

    def magnitudes(self) -> Tensor:
        """``(Σ_t ‖v_t‖)²``"""
        norms = squared_norm(self.values.flatten(0, 1)).sqrt()
        return norms.view_as(self.ids).sum(1).square()

    def sum_of_squares(self) -> list[Tensor]:
        total = self.values.new_zeros(self.num_rows, self.values.shape[2])
        return [total.index_add_(0, self.ids.flatten(), self.values.flatten(0, 1).square())]

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        def block_sum(i: slice) -> Tensor:
            zeros = self.values.new_zeros(self.num_rows, self.values.shape[2])
            return self.select(i).add_weighted_(zeros, weights[i])

        return add_up([block_sum(i)] for i in slices(len(weights), BLOCK))

    def add_weighted_(self, total: Tensor, weights: Tensor) -> Tensor:
        """Add ``Σ_i w_i g_i`` to `total`, in place."""
        scaled = self.values * weights.to(self.values.dtype).view(-1, 1, 1)
        return total.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1))

    def per_sample(self) -> list[Tensor]:
        out = self.values.new_zeros(len(self.values), self.num_rows, self.values.shape[2])
        return [out.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.values), self.values)]

    def select(self, i: Tensor | slice) -> RowSparseGrad:
        return RowSparseGrad(self.ids[i], self.values[i], self.num_rows)

    def masked(self, keep: Tensor) -> RowSparseGrad:
        return RowSparseGrad(self.ids, keep_rows(self.values, keep), self.num_rows)

    @staticmethod
    def concat(grads: list[RowSparseGrad]) -> RowSparseGrad:
        if len(grads) == 1:
            return grads[0]
        ids = torch.cat([g.ids for g in grads], 1)
        values = torch.cat([g.values for g in grads], 1)
        return RowSparseGrad.merged(ids, values, grads[0].num_rows)


def _first_of_same(ids: Tensor) -> Tensor:
    """For every position, the first one of its sample with the same id, counted over all samples.

    Sorted stably, equal ids follow each other in the order of their positions. The number of
    different ids is never asked for: on an accelerator the host would wait for it.

    >>> _first_of_same(torch.tensor([[7, 3, 7], [7, 5, 5]]))
    tensor([[0, 1, 0],
            [3, 4, 4]])
    """
    in_order, place = ids.sort(dim=1, stable=True)
    starts = torch.ones_like(in_order, dtype=torch.bool)
    starts[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    # the place of the last start so far
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    start = torch.where(starts, index, 0).cummax(dim=1).values
    first = torch.empty_like(place).scatter_(1, place, place.gather(1, start))
    return first + torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]


@dataclass
class TiedEmbeddingGrad:
    """An embedding whose weight is also a linear head (GPT-2, BERT).

    With the embedding's gradient ``E = Σ_t e(id_t) δ_tᵀ`` and the head's ``H = Σ_s λ_s ρ_sᵀ``, the
    cross term is ``⟨E, H⟩ = Σ_{t,s} λ_s[id_t] (δ_t · ρ_s)``: a gather and a Gram matrix, never a
    [vocabulary, features] array.
    """

    head: OuterProductGrad
    rows: RowSparseGrad

    preconditioned = False

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        positions = self.head.left.shape[1] + self.rows.ids.shape[1]
        terms = positions + summation_depth(self.head.left.shape[2])
        terms += summation_depth(self.head.right.shape[2])
        norms, magnitudes, largest = self._norms(preconditioner)
        norms = recompute_if_doubtful(
            norms,
            magnitudes,
            largest,
            terms,
            2 * positions**2 * (self.head.left.shape[2] + self.head.right.shape[2] + 1),
            lambda i: self._exact_norms(i, preconditioner),
        )
        additions = self.head.additions + self.rows.ids.shape[1]
        return add_sum_error(norms, magnitudes, 1.0, additions)

    def _norms(self, preconditioner: LinearMap) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms, their mapped magnitudes, and the largest squared norm of a factor."""
        head = self.head.squared_norms_without_sum_error(preconditioner)
        rows = self.rows.squared_norms(preconditioner)
        magnitude = self.head.magnitudes().sqrt() + self.rows.magnitudes().sqrt()
        largest = torch.stack([size.amax(1) for size in self.head.squared_factor_norms()]).amax(0)
        norms = head + rows + 2 * self._cross_term(preconditioner)
        return norms, (preconditioner.gain * magnitude).square(), largest

    def _exact_norms(self, i: Tensor, preconditioner: LinearMap) -> Tensor:
        return self.select(i).double()._norms(preconditioner)[0]

    def _cross_term(self, preconditioner: LinearMap) -> Tensor:
        """``⟨U E, U H⟩ = ⟨U² E, H⟩``: the map of a tied weight scales its entries."""
        left, right = at_least_float32(self.head.left), at_least_float32(self.head.right)
        ids, values = self.rows.ids, at_least_float32(self.rows.values)
        flat = ids.flatten()
        mapped = preconditioner.rows(flat, preconditioner.rows(flat, values.flatten(0, 1)))
        gathered = left.gather(2, ids.unsqueeze(1).expand(-1, left.shape[1], -1))
        products = torch.bmm(right, mapped.view_as(values).transpose(1, 2))
        return products.mul_(gathered).sum((1, 2))

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """Head and rows of a few samples together, so that what cancels is gone before more is
        added.
        """
        return add_up(
            self.select(i)._block_sum(weights[i]) for i in slices(len(weights), self.head.block)
        )

    def _block_sum(self, weights: Tensor) -> list[Tensor]:
        (total,) = self.head.weighted_sum(weights)
        return [self.rows.add_weighted_(total, weights)]

    def per_sample(self) -> list[Tensor]:
        return [self.head.per_sample()[0] + self.rows.per_sample()[0]]

    def sum_of_squares(self) -> list[Tensor]:
        shape = self.rows.num_rows, self.rows.values.shape[2]
        total = torch.zeros(*shape, device=self.rows.ids.device)
        for i in range(len(self.rows.ids)):
            total += self.select(slice(i, i + 1)).per_sample()[0][0].square()
        return [total]

    def select(self, i: Tensor | slice) -> TiedEmbeddingGrad:
        return TiedEmbeddingGrad(self.head.select(i), self.rows.select(i))

    def double(self) -> TiedEmbeddingGrad:
        rows = RowSparseGrad(self.rows.ids, self.rows.values.double(), self.rows.num_rows)
        return TiedEmbeddingGrad(self.head.double(), rows)

    def masked(self, keep: Tensor) -> TiedEmbeddingGrad:
        return TiedEmbeddingGrad(self.head.masked(keep), self.rows.masked(keep))
