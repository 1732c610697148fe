"""Embeddings: row ``id_t`` of the weight receives δ_t, so a gradient is a sparse set of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkfc.capture.linear import Slots, as_positions
from dpkfc.capture.record import Outer, Use, at_least_float32, keep_rows, with_slack, without_cancellation
from dpkfc.geometry.identity import Map


@dataclass
class Rows:
    """``g_i = Σ_t e(id_it) δ_itᵀ`` with ids [B, T], values [B, T, q] and `count` rows in all."""

    ids: Tensor
    values: Tensor
    count: int

    mapped = False

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sample, row and value: positions of a sample with the same id fall on the same row, so they are added."""
        offsets = torch.arange(len(self.ids), device=self.ids.device).unsqueeze(1) * self.count
        keys, inverse = torch.unique(self.ids + offsets, return_inverse=True)
        values = at_least_float32(self.values).flatten(0, 1)
        rows = values.new_zeros(len(keys), values.shape[1]).index_add_(0, inverse.flatten(), values)
        return keys // self.count, keys % self.count, rows

    def squared_norms(self, metric: Map) -> Tensor:
        samples, ids, rows = self._merged()
        rows = metric.rows(ids, rows)
        return rows.new_zeros(len(self.ids)).index_add_(0, samples, rows.square().sum(1))

    def squares(self) -> list[Tensor]:
        _, ids, rows = self._merged()
        return [rows.new_zeros(self.count, rows.shape[1]).index_add_(0, ids, rows.square())]

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        values = at_least_float32(self.values)
        return [self.add_weighted_(values.new_zeros(self.count, values.shape[2]), weights)]

    def add_weighted_(self, total: Tensor, weights: Tensor) -> Tensor:
        """Add ``Σ_i w_i g_i`` to `total`, in place."""
        values = at_least_float32(self.values)
        values = (values * weights.to(values.dtype).view(-1, 1, 1)).flatten(0, 1)
        return total.index_add_(0, self.ids.flatten(), values)

    def per_sample(self) -> list[Tensor]:
        values = at_least_float32(self.values)
        out = values.new_zeros(len(values), self.count, values.shape[2])
        return [out.scatter_add_(1, self.ids.unsqueeze(2).expand_as(values), values)]

    def masked(self, keep: Tensor) -> Rows:
        return Rows(self.ids, keep_rows(self.values, keep), self.count)

    @staticmethod
    def cat(rows: list[Rows]) -> Rows:
        return Rows(torch.cat([r.ids for r in rows], 1), torch.cat([r.values for r in rows], 1), rows[0].count)


@dataclass
class TiedHead:
    """An embedding whose weight is also a linear head (GPT-2, BERT).

    With the embedding's gradient ``E = Σ_t e(id_t) δ_tᵀ`` and the head's ``H = Σ_s λ_s ρ_sᵀ``, the cross term
    is ``⟨E, H⟩ = Σ_{t,s} λ_s[id_t] (δ_t · ρ_s)``: a gather and a Gram matrix, never a [vocabulary, features] array.
    """

    head: Outer
    rows: Rows

    mapped = False

    def squared_norms(self, metric: Map) -> Tensor:
        parts = self.head.squared_norms(metric) + self.rows.squared_norms(metric)
        return without_cancellation(parts + 2 * self._cross(metric), parts, lambda i: self._exactly(i, metric))

    def _cross(self, metric: Map) -> Tensor:
        """``⟨U E, U H⟩ = ⟨U² E, H⟩``: the map of a tied weight scales its entries."""
        left, right = at_least_float32(self.head.left), at_least_float32(self.head.right)
        ids, values = self.rows.ids, at_least_float32(self.rows.values)
        flat = ids.flatten()
        values = metric.rows(flat, metric.rows(flat, values.flatten(0, 1))).view_as(values)
        picked = left.gather(2, ids.unsqueeze(1).expand(-1, left.shape[1], -1))
        return torch.bmm(right, values.transpose(1, 2)).mul_(picked).sum((1, 2))

    def _exactly(self, i: Tensor, metric: Map) -> Tensor:
        head = Outer(self.head.left[i].double(), self.head.right[i].double())
        rows = Rows(self.rows.ids[i], self.rows.values[i].double(), self.rows.count)
        norms = head.squared_norms(metric) + rows.squared_norms(metric) + 2 * TiedHead(head, rows)._cross(metric)
        return with_slack(norms.float(), head.products().float(), metric.gain)

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        (total,) = self.head.weighted_sum(weights)
        return [self.rows.add_weighted_(total, weights)]

    def per_sample(self) -> list[Tensor]:
        return [self.head.per_sample()[0] + self.rows.per_sample()[0]]

    def squares(self) -> list[Tensor]:
        total = torch.zeros(self.rows.count, self.rows.values.shape[2], device=self.rows.ids.device)
        for i in range(len(self.rows.ids)):
            total += self._one(i).per_sample()[0][0].square()
        return [total]

    def _one(self, i: int) -> TiedHead:
        one, head, rows = slice(i, i + 1), self.head, self.rows
        return TiedHead(Outer(head.left[one], head.right[one]), Rows(rows.ids[one], rows.values[one], rows.count))

    def masked(self, keep: Tensor) -> TiedHead:
        return TiedHead(self.head.masked(keep), self.rows.masked(keep))


def embedding(use: Use) -> Slots:
    """nn.Embedding; positions holding `padding_idx` receive no gradient, as in PyTorch."""
    module = use.module
    assert isinstance(module, nn.Embedding)
    ids, values = use.a.reshape(use.batch, -1), as_positions(use.delta, use.batch)
    if module.padding_idx is not None:
        padding = (ids == module.padding_idx).unsqueeze(2)
        values = torch.where(padding, torch.zeros((), dtype=values.dtype, device=values.device), values)
    return [(("weight",), Rows(ids, values, module.num_embeddings))]
