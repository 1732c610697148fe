"""Kronecker factors: second moments of probe vectors, their damping, and their inverse roots.

A factor is ``A = (1/N) Σ x xᵀ`` over probe vectors x. Its root is ``U = (A + μ I)^(-p/2)`` with ``μ
= π tr(A)/d + γ``: π damps relative to the mean eigenvalue, γ is an absolute floor, and p = 1 is the
paper's inverse square root (Algorithm 1, lines 10 to 17). A root is stored in one of two ways:

* `FullRoot`: the d x d matrix; d multiplications per mapped entry.
* `LowRankRoot`: ``U = c I + V diag(w) Vᵀ`` with r columns; 2r multiplications per mapped entry. If
  there are fewer probe vectors than d it is exact, with ``c = μ^(-p/2)``. If it is cut at a smaller
  rank, the other directions share the mean of their eigenvalues: ``c = (λ̄ + μ)^(-p/2)``.

Any map that does not depend on the private records keeps the guarantee: an approximation here can
only cost utility.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# of the subspace iteration
OVERSAMPLE = 16
SWEEPS = 3
NEGLIGIBLE = 1e-9  # eigenvalues below this share of the largest are zero


class Moment:
    """``Σ x xᵀ`` of vectors that arrive in pieces, one sum per group.

    Up to d vectors are kept as they are: their Gram matrix has the same eigenvalues at less cost.
    With more vectors the products are added up, so memory never exceeds d².
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [groups, n, d]
        self.matrix: Tensor | None = None  # [groups, d, d]
        self.vectors = 0  # per group, so far
        self.dtype: torch.dtype | None = None  # None before the first vector

    def add(self, rows: Tensor) -> None:
        """Add vectors: [groups, n, d]."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        self.vectors += rows.shape[1]
        self.dtype = rows.dtype
        if self.rows is not None:
            rows = torch.cat([self.rows, rows], 1)
            self.rows = None
        if self.matrix is None and keeps_rows(rows.shape[1], len(rows), rows.shape[2]):
            self.rows = rows
        else:
            total = torch.bmm(rows.transpose(1, 2), rows)
            self.matrix = total if self.matrix is None else self.matrix.add_(total)

    def take_part(self, before: int, total: int, empty: Tensor) -> Tensor:
        """What one rank holds of the moment of all ranks: the parts add up to its content.

        Rows are put in their places, with zeros in the places of other ranks, so that addition only
        joins them. This moment is empty afterwards.

        Args:
            before: vectors of the ranks before this one.
            total: vectors of all ranks.
            empty: [groups, 0, d], of the dtype and on the device of the result.
        """
        groups, _, size = empty.shape
        rows, matrix, stop = self.rows, self.matrix, before + self.vectors
        self.rows, self.matrix, self.vectors = None, None, 0
        if keeps_rows(total, groups, size):
            places = empty.new_zeros(groups, total, size)
            if rows is not None:
                places[:, before:stop] = rows
            return places
        if matrix is not None:
            return matrix
        if rows is not None:
            return torch.bmm(rows.transpose(1, 2), rows)
        return empty.new_zeros(groups, size, size)

    def replace(self, content: Tensor, vectors: int) -> None:
        """Hold the sum of the parts, of so many vectors, from now on."""
        kept = keeps_rows(vectors, len(content), content.shape[2])
        self.rows, self.matrix = (content, None) if kept else (None, content)
        self.vectors, self.dtype = vectors, content.dtype

    def finite(self) -> bool:
        held = self.rows if self.rows is not None else self.matrix
        return held is None or bool(torch.isfinite(held).all())

    def dense(self, count: int) -> Tensor:
        """``(1/count) Σ x xᵀ``, [groups, d, d]."""
        if self.rows is not None:
            return torch.bmm(self.rows.transpose(1, 2), self.rows) / count
        assert self.matrix is not None
        return self.matrix / count

    def spectrum(self, count: int, rank: int | None, generator: torch.Generator) -> Spectrum:
        """Eigenvalues and eigenvectors of ``(1/count) Σ x xᵀ``: all, or the largest `rank`."""
        if self.rows is not None:
            return _from_rows(self.rows[0], count, rank, generator)
        matrix = self.dense(count)
        size = matrix.shape[2]
        trace = matrix.diagonal(dim1=1, dim2=2).sum(1).double()
        if len(matrix) == 1 and rank is not None and _iterate(rank, size):
            values, vectors = _largest(matrix[0], rank, generator)
            return Spectrum(values[None], vectors[None], trace, size)
        values, vectors = torch.linalg.eigh(matrix.double())
        values, vectors = values.clamp(min=0).flip(1), vectors.flip(2)
        if rank is not None and rank < size and len(matrix) == 1:
            return Spectrum(
                values[:, :rank], vectors[:, :, :rank], trace, size, tail=values[:, rank:]
            )
        return Spectrum(values, vectors, trace, size, tail=values[:, size:])


@dataclass
class Spectrum:
    """The r largest eigenvalues of a factor, in decreasing order, with their eigenvectors."""

    values: Tensor  # [groups, r]
    vectors: Tensor  # [groups, size, r]
    trace: Tensor  # [groups], of the whole factor
    size: int
    tail: Tensor | None = None  # [groups, size - r], the other eigenvalues, if known

    def rest(self) -> Tensor:
        """The mean of the eigenvalues that are not in `values`, per group."""
        missing = self.size - self.values.shape[1]
        return (self.trace - self.values.sum(1)).clamp(min=0) / max(missing, 1)

    def damping(self, relative: float, absolute: float) -> Tensor:
        """``μ = π tr/d + γ`` per group."""
        return relative * self.trace / self.size + absolute

    def root(
        self, power: float, relative: float, absolute: float, like: Tensor, bias: bool
    ) -> Root | None:
        """``(A + μ I)^(-power/2)``; None (no map) if the factor is zero: the probes say nothing."""
        return self._function(
            lambda x, mu: (x + mu) ** (-power / 2), relative, absolute, like, bias
        )

    def trace_keeping_root(
        self, power: float, relative: float, absolute: float, like: Tensor, bias: bool
    ) -> Root | None:
        """``s (A + μ I)^(-power/2)`` with s such that ``tr(A U²) = tr(A)``.

        The mapped probes keep their energy.
        """
        mu, missing = self.damping(relative, absolute), self.size - self.values.shape[1]
        if not bool((self.trace > 0).all()):
            return None
        kept = (self.values * (self.values + mu[:, None]) ** -power).sum(1)
        kept = kept + missing * self.rest() * (self.rest() + mu) ** -power
        scale = (self.trace / kept).sqrt()[:, None]
        return self._function(
            lambda x, mu: scale * (x + mu) ** (-power / 2), relative, absolute, like, bias
        )

    def _function(
        self, function: Any, relative: float, absolute: float, like: Tensor, bias: bool
    ) -> Root | None:
        mu = self.damping(relative, absolute)
        if not bool((self.trace > 0).all()):
            return None
        values = function(self.values, mu[:, None])
        rank = self.values.shape[1]
        if rank == self.size:
            full = torch.bmm(self.vectors * values[:, None], self.vectors.transpose(1, 2))
            return FullRoot(
                _symmetric(full).to(like), bias, float(values.max()), float(values.min())
            )
        base = float(function(self.rest()[:, None], mu[:, None]))
        if 2 * rank >= self.size:
            vectors = self.vectors[0]
            full = base * torch.eye(self.size, dtype=vectors.dtype, device=vectors.device)
            full = full + (vectors * (values[0] - base)) @ vectors.T
            sizes = max(float(values.max()), base), min(float(values.min()), base)
            return FullRoot(_symmetric(full[None]).to(like), bias, *sizes)
        return LowRankRoot(
            base, self.vectors[0].to(like).contiguous(), (values[0] - base).to(like), bias
        )


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.transpose(1, 2)) / 2


def keeps_rows(vectors: int, groups: int, size: int) -> bool:
    """True if vectors are kept as they are: they take less room than the sum of their products."""
    return groups == 1 and vectors < size


def spectrum_work(vectors: int, groups: int, size: int, rank: int | None) -> float:
    """About how many multiplications `Moment.spectrum` and a root take."""
    side = vectors if keeps_rows(vectors, groups, size) else size
    columns = side if rank is None else min(rank, side)
    if rank is not None and groups == 1 and _iterate(rank, side):
        eigenvectors = 2.0 * (SWEEPS + 2) * side * side * (rank + OVERSAMPLE)
    else:
        eigenvectors = 10.0 * side**3
    gram = side * side * size if side < size else 0
    return groups * (eigenvectors + gram + size * columns * (size if rank is None else side))


def _iterate(rank: int, size: int) -> bool:
    """True if subspace iteration is cheaper than computing all eigenvectors."""
    return 4 * (rank + OVERSAMPLE) < size


def _from_rows(rows: Tensor, count: int, rank: int | None, generator: torch.Generator) -> Spectrum:
    """The exact spectrum from n < d vectors by their n x n Gram matrix.

    ``X Xᵀ w = λ w`` implies ``A (Xᵀ w) = λ (Xᵀ w)``.
    """
    if rank is not None and _iterate(rank, len(rows)):
        values, vectors = _largest(rows @ rows.T / count, rank, generator)
        columns = rows.T.double() @ vectors
        columns = columns / columns.norm(dim=0).clamp(min=torch.finfo(columns.dtype).tiny)
        trace = rows.double().square().sum()[None] / count
        return Spectrum(values[None], columns[None], trace, rows.shape[1])
    rows = rows.double()
    gram = rows @ rows.T / count
    trace = gram.diagonal().sum()[None]
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    keep = int((values > NEGLIGIBLE * values[0].clamp(min=0)).sum())
    keep = max(min(keep, rank or keep), 1)
    tail = torch.cat([values[keep:].clamp(min=0), values.new_zeros(rows.shape[1] - len(rows))])
    values, vectors = values[:keep].clamp(min=0), vectors[:, :keep]
    columns = rows.T @ vectors
    columns = columns / columns.norm(dim=0).clamp(min=torch.finfo(columns.dtype).tiny)
    return Spectrum(values[None], columns[None], trace, rows.shape[1], tail=tail[None])


def _largest(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a symmetric matrix and their vectors, by subspace iteration."""
    start = torch.randn(len(matrix), rank + OVERSAMPLE, generator=generator)
    basis = torch.linalg.qr(matrix @ start.to(matrix)).Q
    for _ in range(SWEEPS):
        basis = torch.linalg.qr(matrix @ basis).Q
    small = basis.T @ (matrix @ basis)
    values, vectors = torch.linalg.eigh(_symmetric(small.double()[None])[0])
    return values.flip(0)[:rank].clamp(min=0), (basis.double() @ vectors).flip(1)[:, :rank]


@dataclass
class FullRoot:
    """One symmetric matrix per group, [groups, d, d].

    With `bias`, the last coordinate is the bias's.
    """

    matrix: Tensor
    bias: bool
    largest: float  # eigenvalue
    smallest: float

    @property
    def size(self) -> int:
        return self.matrix.shape[2]

    @property
    def rank(self) -> int:
        return self.size

    @property
    def work(self) -> int:
        """Multiplications to map one vector."""
        return self.size * self.size

    @property
    def memory(self) -> int:
        """Bytes held."""
        return self.matrix.nbytes

    def right(
        self, x: Tensor, bias_input: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``(x, bias_input) U`` for vectors x [..., groups, n, d] and their bias coordinate, if
        any.
        """
        u = self.matrix.to(x.dtype)
        if not self.bias:
            return _times(x, u, out), bias_input
        assert bias_input is not None
        out = _times(x, u[:, :-1, :-1], out)
        out.addcmul_(bias_input.unsqueeze(-1), u[:, None, -1, :-1])
        return out, _times(x, u[:, :-1, -1:]).squeeze(-1) + bias_input * u[:, None, -1, -1]

    def left(self, x: Tensor) -> Tensor:
        """``U x`` for columns x [..., groups, d, n]."""
        return _times(x.transpose(-1, -2), self.matrix.to(x.dtype)).transpose(-1, -2)

    def state(self) -> dict[str, Any]:
        return {
            "matrix": self.matrix,
            "bias": self.bias,
            "largest": self.largest,
            "smallest": self.smallest,
        }


def _times(x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """[..., groups, n, d] times [groups, d, e], without copying the matrices for every batch."""
    if len(matrices) == 1:
        flat = None if out is None else out.view(-1, matrices.shape[2])
        return torch.mm(x.reshape(-1, x.shape[-1]), matrices[0], out=flat).view(
            *x.shape[:-1], matrices.shape[2]
        )
    return torch.einsum("...gnd,gde->...gne", x, matrices)


@dataclass
class LowRankRoot:
    """``c I + V diag(w) Vᵀ`` for one group.

    V is [d, r]; with `bias`, its last row is the bias's.
    """

    base: float
    vectors: Tensor
    weights: Tensor
    bias: bool

    @property
    def size(self) -> int:
        return self.vectors.shape[0]

    @property
    def rank(self) -> int:
        return self.vectors.shape[1]

    @property
    def work(self) -> int:
        """Multiplications to map one vector."""
        return 2 * self.size * self.rank

    @property
    def memory(self) -> int:
        """Bytes held, with the copies that the products read."""
        storages = (part.untyped_storage() for part in (self.vectors, self.weights, *self._parts))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @cached_property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return max(self.base, float((self.base + self.weights).max()))

    @cached_property
    def smallest(self) -> float:
        """The smallest eigenvalue."""
        return min(self.base, float((self.base + self.weights).min()))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V without its last row, that row, and the same of ``(V diag(w))ᵀ``, in the layout of the
        products.
        """
        end = self.size - int(self.bias)
        scaled = self.vectors * self.weights
        return (
            self.vectors[:end].contiguous(),
            self.vectors[end:].flatten(),
            scaled[:end].T.contiguous(),
            scaled[end:].flatten().clone(),  # a view would keep all of `scaled`
        )

    def right(
        self, x: Tensor, bias_input: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``(x, bias_input) U`` for vectors x [..., d] and their bias coordinate [...], if any."""
        vectors, bottom, scaled, scaled_bottom = (part.to(x.dtype) for part in self._parts)
        flat = x.reshape(-1, x.shape[-1])
        inside = flat @ vectors
        if bias_input is not None and self.bias:
            inside.addr_(bias_input.reshape(-1), bottom)
            bias_input = (
                (bias_input.reshape(-1) * self.base)
                .addmv_(inside, scaled_bottom)
                .view_as(bias_input)
            )
        flat_out = None if out is None else out.view(flat.shape)
        return torch.mm(inside, scaled, out=flat_out).add_(flat, alpha=self.base).view(
            x.shape
        ), bias_input

    def left(self, x: Tensor) -> Tensor:
        """``U x`` for columns x [..., d, n]."""
        vectors, _, scaled, _ = (part.to(x.dtype) for part in self._parts)
        return torch.matmul(scaled.T, torch.matmul(vectors.T, x)).add_(x, alpha=self.base)

    def state(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "vectors": self.vectors,
            "weights": self.weights,
            "bias": self.bias,
        }


Root = FullRoot | LowRankRoot


def root_from(state: dict[str, Any] | None) -> Root | None:
    """A root from its `state()`."""
    if state is None:
        return None
    return FullRoot(**state) if "matrix" in state else LowRankRoot(**state)


def condition(values: Tensor) -> float:
    """The ratio of the largest to the smallest of some positive numbers."""
    low = float(values.min())
    return float(values.max()) / low if low > 0 else math.inf
