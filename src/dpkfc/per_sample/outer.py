"""Per-sample gradients of layers that are a matrix product over shared positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.per_sample.base import IDENTITY_MAP, LinearMap, PerSampleGrad
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.rounding import (
    BLOCK,
    LARGE,
    add_sum_error,
    add_up,
    at_least_float32,
    branches_are_cheap,
    keep_rows,
    recompute_if_doubtful,
    slices,
    squared_norm,
    squared_norm_of_all,
    summation_depth,
    underflow_bound,
)
from dpkfc.per_sample.workspace import Workspace, scratch

LARGE_PRODUCT = 2_000_000  # multiplications from which single matrix products beat a batched one
SHORT = 8  # positions up to which Gram matrices cost next to nothing
FORMED_MEMORY = 1.5  # formed gradients may take this many times the memory of (a, δ)


@dataclass
class OuterProductGrad:
    """``g_i = Σ_t left_it right_itᵀ`` with T positions: linear layers and convolutions.

    left is [B, T, p] (δ), right is [B, T, q] (a), and the parameter is [p, q], or [q, p] if
    `transposed`, as in Hugging Face's Conv1D. `bias_input` ([B, T], ones) is one more coordinate of
    `right`: its column ``Σ_t bias_input_t left_t`` is the gradient of the bias.

    The squared norm is ``Σ_{t,s} (left_t · left_s)(right_t · right_s)``: T²(p+q) multiplications by
    two Gram matrices, or T·p·q by forming g_i for a few samples at a time. The cheaper one is used.
    """

    left: Tensor
    right: Tensor
    bias_input: Tensor | None = None
    transposed: bool = False
    preconditioned: bool = False

    def precondition(
        self, preconditioner: LinearMap, workspaces: tuple[Workspace, Workspace] | None = None
    ) -> OuterProductGrad:
        """The mapped gradients: ``U_G left_t`` and ``U_A right_t``."""
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        mapped = preconditioner.map_factors(left, right, self.bias_input, workspaces)
        return OuterProductGrad(*mapped, self.transposed, preconditioned=True)

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        preconditioner = IDENTITY_MAP if self.preconditioned else preconditioner
        if self.left.shape[1] == 1:
            return self._norms_of_one_position(preconditioner)
        norms = self.squared_norms_without_sum_error(preconditioner)
        return add_sum_error(norms, self.magnitudes(), preconditioner.gain, self.additions)

    def squared_norms_without_sum_error(self, preconditioner: LinearMap) -> Tensor:
        """Squared norms without the room for rounding in the sum."""
        batch, length, p = self.left.shape
        q = self.right.shape[2]
        left_work, right_work = preconditioner.work
        by_gram = length * length * (p + q) + length * (left_work + right_work)
        by_forming = length * p * q + q * left_work + p * right_work
        if not preconditioner.factored or by_forming < by_gram:
            block = max(1, batch * length * (p + q) // (p * q))
            return torch.cat(
                [
                    squared_norm_of_all(preconditioner.apply(piece.per_sample()))
                    for piece in self._split(block)
                ]
            )
        with scratch() as workspaces:
            identity = preconditioner is IDENTITY_MAP
            mapped = self if identity else self.precondition(preconditioner, workspaces)
            terms = length + summation_depth(p) + summation_depth(q)
            return recompute_if_doubtful(
                *_gram_squared_norms(mapped),
                terms,
                length * length * (p + q + 1),
                lambda i: _gram_squared_norms(mapped.select(i).double())[0],
            )

    def _norms_of_one_position(self, preconditioner: LinearMap) -> Tensor:
        """One position: ``‖left‖² ‖right‖²``."""
        norms, largest = self._one_position(preconditioner)
        # the limit is for factors as they are, before entries are scaled
        scale = 1.0 if preconditioner.factored else max(1.0, preconditioner.gain)
        if not branches_are_cheap(norms):
            products = self.left.shape[2] + self.right.shape[2] + 1
            norms = norms + underflow_bound(largest, products) * scale**2
        else:
            extreme = (largest > LARGE / scale**2).nonzero().flatten()
            if len(extreme):
                exact = self.select(extreme).double()._one_position(preconditioner)[0]
                norms[extreme] = exact.to(norms.dtype)
        if preconditioner is IDENTITY_MAP or not preconditioner.factored:
            return norms
        return add_sum_error(norms, norms, preconditioner.condition, self.additions)

    def _one_position(self, preconditioner: LinearMap) -> tuple[Tensor, Tensor]:
        """The squared norms, and the largest squared norm of a factor."""
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        bias_input = self.bias_input
        if preconditioner.factored:
            left, right, bias_input = preconditioner.map_factors(left, right, bias_input)
        mapped = OuterProductGrad(left, right, bias_input)
        left_norms, right_norms = (size[:, 0] for size in mapped.squared_factor_norms())
        if preconditioner.factored:
            norms = left_norms * right_norms
        else:  # a scale per entry enlarges rounding errors no more than the entries themselves
            bias = None if bias_input is None else bias_input[:, 0]
            norms = preconditioner.outer_squared_norms(left[:, 0], right[:, 0], bias)
        return norms, torch.maximum(left_norms, right_norms)

    def squared_factor_norms(self) -> tuple[Tensor, Tensor]:
        """``‖left_t‖²`` and ``‖right_t‖²``, [B, T] each."""
        left, right = (squared_norm(x.flatten(0, 1)) for x in (self.left, self.right))
        if self.bias_input is not None:
            right = right + squared_norm(self.bias_input.reshape(-1, 1))
        return left.view(self.left.shape[:2]), right.view(self.left.shape[:2])

    def magnitudes(self) -> Tensor:
        """``(Σ_t ‖left_t‖ ‖right_t‖)²``, which rounding errors are relative to.

        Counted position by position, so that positions with zero input add nothing.
        """
        left, right = self.squared_factor_norms()
        return (left * right).sqrt().sum(1).square()

    @property
    def block(self) -> int:
        """Samples whose products are added up at a time: `BLOCK` positions, or one sample."""
        return min(len(self.left), max(1, BLOCK // self.left.shape[1]))

    @property
    def additions(self) -> int:
        """Length of the longest chain of additions in `weighted_sum`."""
        return self.block * self.left.shape[1] + len(self.left) // self.block

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        total = None
        pieces = self._split(self.block)
        for piece, part in zip(pieces, weights.split(self.block), strict=True):
            total = piece._add_weighted_(total, part)
        assert total is not None
        return total

    def _add_weighted_(self, total: list[Tensor] | None, weights: Tensor) -> list[Tensor]:
        """Add ``Σ_i w_i g_i`` to `total` in place.

        The smaller factor is multiplied by the weights.
        """
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        scale = weights.to(left.dtype).view(-1, 1, 1)
        if left.shape[2] <= right.shape[2]:
            left, bias_input = left * scale, self.bias_input
        else:
            right = right * scale
            bias_input = None if self.bias_input is None else self.bias_input * scale[:, 0]
        first, second = (right, left) if self.transposed else (left, right)
        factors = [(first.flatten(0, 1).T, second.flatten(0, 1))]
        if bias_input is not None:
            factors.append((left.flatten(0, 1).T, bias_input.to(left.dtype).reshape(-1)))
        if total is None:
            return [one @ other for one, other in factors]
        total[0].addmm_(*factors[0])
        for bias, (one, other) in zip(total[1:], factors[1:], strict=True):
            bias.addmv_(one, other)
        return total

    def per_sample(self, workspace: Workspace | None = None) -> list[Tensor]:
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        first, second = (right, left) if self.transposed else (left, right)
        shape = (len(left), first.shape[2], second.shape[2])
        weight = (workspace or Workspace())(shape, like=left)
        torch.bmm(first.transpose(1, 2), second, out=weight)
        if self.bias_input is None:
            return [weight]
        bias = torch.bmm(self.bias_input.to(left.dtype).unsqueeze(1), left).squeeze(1)
        return [weight, bias]

    def sum_of_squares(self) -> list[Tensor]:
        if self.left.shape[1] == 1:
            bias_input = None if self.bias_input is None else self.bias_input.square()
            left, right = at_least_float32(self.left), at_least_float32(self.right)
            squared = OuterProductGrad(left.square(), right.square(), bias_input, self.transposed)
            return squared.weighted_sum(torch.ones(len(self.left), device=self.left.device))
        return add_up(DenseGrad(piece.per_sample()).sum_of_squares() for piece in self._split(1))

    def _split(self, block: int) -> Iterator[OuterProductGrad]:
        return map(self.select, slices(len(self.left), block))

    def select(self, rows: slice | Tensor) -> OuterProductGrad:
        """The gradients of some samples."""
        bias_input = None if self.bias_input is None else self.bias_input[rows]
        return OuterProductGrad(self.left[rows], self.right[rows], bias_input, self.transposed)

    def double(self) -> OuterProductGrad:
        bias_input = None if self.bias_input is None else self.bias_input.double()
        return OuterProductGrad(
            self.left.double(), self.right.double(), bias_input, self.transposed
        )

    def masked(self, keep: Tensor) -> OuterProductGrad:
        return OuterProductGrad(
            keep_rows(self.left, keep),
            keep_rows(self.right, keep),
            None if self.bias_input is None else keep_rows(self.bias_input, keep),
            self.transposed,
            self.preconditioned,
        )

    @staticmethod
    def concat(grads: list[OuterProductGrad]) -> OuterProductGrad:
        """Several uses of one weight: their positions side by side."""
        bias_inputs = [g.bias_input for g in grads if g.bias_input is not None]
        return OuterProductGrad(
            torch.cat([g.left for g in grads], 1),
            torch.cat([g.right for g in grads], 1),
            torch.cat(bias_inputs, 1) if bias_inputs else None,
            grads[0].transposed,
            grads[0].preconditioned,
        )


def outer_product_grad(
    left: Tensor,
    right: Tensor,
    workspace: Workspace,
    preconditioner: LinearMap,
    bias: bool,
    transposed: bool = False,
) -> PerSampleGrad:
    """``Σ_t left_t right_tᵀ`` in the form that costs least.

    An `OuterProductGrad`, or a `DenseGrad` where forming the gradients is cheaper and takes little
    more memory than (a, δ). Formed gradients cost T·p·q once and make the weighted sum almost free;
    Gram matrices cost T²(p+q), and T·p·q again for the sum. The map is applied first where it has
    fewer vectors to map than the gradient has rows (p) and the mapped factors need not be kept
    beside (a, δ): with one position, or with formed gradients.
    """
    length, p, q = left.shape[1], left.shape[2], right.shape[2]
    grad = OuterProductGrad(left, right, bias_ones(left) if bias else None, transposed)
    formed = length >= SHORT and p * q <= FORMED_MEMORY * length * (p + q)
    if sum(preconditioner.work) and formed and length < p:
        with scratch() as workspaces:
            mapped = grad.precondition(preconditioner, workspaces)
            return DenseGrad(mapped.per_sample(workspace), preconditioned=True)
    if sum(preconditioner.work) and length == 1:
        return grad.precondition(preconditioner)
    return DenseGrad(grad.per_sample(workspace)) if formed else grad


def bias_ones(left: Tensor) -> Tensor:
    """The input of the bias: 1 at every position."""
    return torch.ones(left.shape[:2], dtype=at_least_float32(left).dtype, device=left.device)


def _gram(x: Tensor) -> Tensor:
    """``x_t · x_s`` for all positions of each sample: [B, T, d] to [B, T, T]."""
    batch, length, features = x.shape
    if x.device.type != "cpu" or length * length * features < LARGE_PRODUCT:
        return torch.bmm(x, x.transpose(1, 2))
    # the batched CPU kernel is a third slower on large transposed factors
    out = x.new_empty(batch, length, length)
    for one, into in zip(x.unbind(0), out.unbind(0), strict=True):
        torch.mm(one, one.T, out=into)
    return out


def _gram_squared_norms(grad: OuterProductGrad) -> tuple[Tensor, Tensor, Tensor]:
    """``Σ_{t,s} (left_t · left_s)(right_t · right_s)``; magnitudes; largest squared factor."""
    products = _gram(at_least_float32(grad.right))
    if grad.bias_input is not None:
        products.addcmul_(grad.bias_input.unsqueeze(1), grad.bias_input.unsqueeze(2))
    return squared_norms_from_grams(products, _gram(at_least_float32(grad.left)))


def squared_norms_from_grams(right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms, magnitudes and the largest squared factor, from Gram matrices [B, T, T].

    `right` is overwritten.
    """
    diagonals = [part.diagonal(dim1=1, dim2=2).amax(1) for part in (right, left)]
    largest = torch.stack(diagonals).amax(0)
    products = right.mul_(left)
    magnitudes = products.diagonal(dim1=1, dim2=2).sqrt().sum(1).square()
    return products.sum((1, 2)), magnitudes, largest
