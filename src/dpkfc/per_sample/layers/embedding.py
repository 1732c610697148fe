"""Embeddings: row ``id_t`` of the weight receives δ_t, so a gradient is a sparse set of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkfc.geometry.identity import LinearMap
from dpkfc.per_sample.layers.linear import Slots, as_positions
from dpkfc.per_sample.record import (
    ROWS,
    OuterProductGrad,
    Use,
    add_up,
    at_least_float32,
    blocks,
    deep,
    keep_rows,
    squared_size,
    trusted,
    with_slack,
)


@dataclass
class RowSparseGrad:
    """``g_i = Σ_t e(id_it) v_itᵀ`` with ids [B, T], values [B, T, q] and `count` rows in all.

    Within a sample no two values that are not zero have the same id (`merged` sees to it): what is measured is what is
    added up. Were positions with the same id added to the sum one by one, values that cancel could swallow the rest of
    it by rounding, and yet have a gradient of norm zero.
    """

    ids: Tensor
    values: Tensor
    count: int

    mapped = False

    @staticmethod
    def merged(ids: Tensor, values: Tensor, count: int) -> RowSparseGrad:
        """Positions of a sample with the same id fall on the same row: the first of them takes the sum of all."""
        offsets = torch.arange(len(ids), device=ids.device).unsqueeze(1) * count
        keys, row = torch.unique(ids + offsets, return_inverse=True)
        row, flat = row.flatten(), at_least_float32(values).flatten(0, 1)
        sums = flat.new_zeros(len(keys), flat.shape[1]).index_add_(0, row, flat)
        places = torch.arange(len(row), device=row.device)
        first = torch.full((len(keys),), len(row), device=row.device).scatter_reduce_(
            0, row, places, "amin"
        )
        return RowSparseGrad(
            ids, torch.zeros_like(flat).index_copy_(0, first, sums).view(*ids.shape, -1), count
        )

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        return squared_size(
            preconditioner.rows(self.ids.flatten(), self.values.flatten(0, 1)).view_as(self.values)
        )

    def products(self) -> Tensor:
        """``(Σ_t ‖v_t‖)²``"""
        return squared_size(self.values.flatten(0, 1)).sqrt().view_as(self.ids).sum(1).square()

    def squares(self) -> list[Tensor]:
        total = self.values.new_zeros(self.count, self.values.shape[2])
        return [total.index_add_(0, self.ids.flatten(), self.values.flatten(0, 1).square())]

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        def of(i: slice) -> Tensor:
            zeros = self.values.new_zeros(self.count, self.values.shape[2])
            return self.picked(i).add_weighted_(zeros, weights[i])

        return add_up([of(i)] for i in blocks(len(weights), ROWS))

    def add_weighted_(self, total: Tensor, weights: Tensor) -> Tensor:
        """Add ``Σ_i w_i g_i`` to `total`, in place."""
        values = (self.values * weights.to(self.values.dtype).view(-1, 1, 1)).flatten(0, 1)
        return total.index_add_(0, self.ids.flatten(), values)

    def per_sample(self) -> list[Tensor]:
        out = self.values.new_zeros(len(self.values), self.count, self.values.shape[2])
        return [out.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.values), self.values)]

    def picked(self, i: Tensor | slice) -> RowSparseGrad:
        return RowSparseGrad(self.ids[i], self.values[i], self.count)

    def masked(self, keep: Tensor) -> RowSparseGrad:
        return RowSparseGrad(self.ids, keep_rows(self.values, keep), self.count)

    @staticmethod
    def cat(rows: list[RowSparseGrad]) -> RowSparseGrad:
        if len(rows) == 1:
            return rows[0]
        return RowSparseGrad.merged(
            torch.cat([r.ids for r in rows], 1),
            torch.cat([r.values for r in rows], 1),
            rows[0].count,
        )


@dataclass
class TiedEmbeddingGrad:
    """An embedding whose weight is also a linear head (GPT-2, BERT).

    With the embedding's gradient ``E = Σ_t e(id_t) δ_tᵀ`` and the head's ``H = Σ_s λ_s ρ_sᵀ``, the cross term
    is ``⟨E, H⟩ = Σ_{t,s} λ_s[id_t] (δ_t · ρ_s)``: a gather and a Gram matrix, never a [vocabulary, features] array.
    """

    head: OuterProductGrad
    rows: RowSparseGrad

    mapped = False

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        positions = self.head.left.shape[1] + self.rows.ids.shape[1]
        terms = positions + deep(self.head.left.shape[2]) + deep(self.head.right.shape[2])
        norms, products, largest = self._norms(preconditioner)
        norms = trusted(
            norms,
            products,
            largest,
            terms,
            lambda i: self._picked(i).double()._norms(preconditioner)[0],
        )
        return with_slack(norms, products, 1.0, self.head._additions + self.rows.ids.shape[1])

    def _norms(self, preconditioner: LinearMap) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms; the square of the length, mapped, of all that is added; the largest square of a factor."""
        of_head, of_rows = (
            self.head.measured(preconditioner),
            self.rows.squared_norms(preconditioner),
        )
        products = (
            preconditioner.gain * (self.head.products().sqrt() + self.rows.products().sqrt())
        ).square()
        largest = torch.stack([size.amax(1) for size in self.head._sizes()]).amax(0)
        return of_head + of_rows + 2 * self._cross(preconditioner), products, largest

    def _cross(self, preconditioner: LinearMap) -> Tensor:
        """``⟨U E, U H⟩ = ⟨U² E, H⟩``: the map of a tied weight scales its entries."""
        left, right = at_least_float32(self.head.left), at_least_float32(self.head.right)
        ids, values = self.rows.ids, at_least_float32(self.rows.values)
        flat = ids.flatten()
        values = preconditioner.rows(flat, preconditioner.rows(flat, values.flatten(0, 1))).view_as(
            values
        )
        picked = left.gather(2, ids.unsqueeze(1).expand(-1, left.shape[1], -1))
        return torch.bmm(right, values.transpose(1, 2)).mul_(picked).sum((1, 2))

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """Of a few samples at a time head and rows together, so that what cancels is gone before others are added."""
        return add_up(
            self._picked(i)._sum(weights[i]) for i in blocks(len(weights), self.head._block)
        )

    def _sum(self, weights: Tensor) -> list[Tensor]:
        (total,) = self.head.weighted_sum(weights)
        return [self.rows.add_weighted_(total, weights)]

    def per_sample(self) -> list[Tensor]:
        return [self.head.per_sample()[0] + self.rows.per_sample()[0]]

    def squares(self) -> list[Tensor]:
        total = torch.zeros(self.rows.count, self.rows.values.shape[2], device=self.rows.ids.device)
        for i in range(len(self.rows.ids)):
            total += self._picked(slice(i, i + 1)).per_sample()[0][0].square()
        return [total]

    def _picked(self, i: Tensor | slice) -> TiedEmbeddingGrad:
        return TiedEmbeddingGrad(self.head._picked(i), self.rows.picked(i))

    def double(self) -> TiedEmbeddingGrad:
        return TiedEmbeddingGrad(
            self.head.double(),
            RowSparseGrad(self.rows.ids, self.rows.values.double(), self.rows.count),
        )

    def masked(self, keep: Tensor) -> TiedEmbeddingGrad:
        return TiedEmbeddingGrad(self.head.masked(keep), self.rows.masked(keep))


def embedding(use: Use) -> Slots:
    """nn.Embedding; positions holding `padding_idx` receive no gradient, as in PyTorch."""
    module = use.module
    assert isinstance(module, nn.Embedding)
    ids, values = use.a.reshape(use.batch, -1), as_positions(use.delta, use.batch)
    if module.padding_idx is not None:
        padding = (ids == module.padding_idx).unsqueeze(2)
        values = torch.where(
            padding, torch.zeros((), dtype=values.dtype, device=values.device), values
        )
    return [(("weight",), RowSparseGrad.merged(ids, values, module.num_embeddings))]
