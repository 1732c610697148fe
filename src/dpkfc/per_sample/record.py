"""The shared forms of a per-sample gradient, and how they combine.

One backward pass leaves, for every captured parameter, an activation a and a backprop δ. Each layer puts
them into one of a few forms that know three things without autograd:

* `squared_norms(map)`: ``‖U g_i‖²`` for every sample i of the batch, in the metric of the geometry;
* `weighted_sum(w)`: ``Σ_i w_i g_i``, unmapped: ``Σ w_i U g_i = U Σ w_i g_i``, so the map is applied once;
* `per_sample()`: the g_i themselves, for whatever has no shortcut.

Where mapping the factors first is cheaper, a form is `mapped`: it holds U g_i, and the map is not applied again.

`OuterProductGrad` and `DenseGrad` are here; `conv.Patches` and `embedding.Rows` beside their layers. Sums of squares
are taken in float32 or better, whatever the model computes in.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpkfc.clipping import MARGIN
from dpkfc.geometry.identity import IDENTITY_MAP, LinearMap

LARGE_PRODUCT = 2_000_000  # multiplications from which a matrix product stands for itself
SHORT = 8  # positions up to which Gram matrices cost next to nothing
ROOM = 1.5  # formed gradients may take this many times the memory of (a, δ)
ROWS = 512  # products that are added up at a time, unless one record has more
DOUBT = 0.02  # the part of a squared norm that its rounding error may be
LARGE = 1e10  # squared factors above it: the other one may be so small that its square is lost


class Workspace:
    """Memory that a layer forms its gradients in, kept from step to step: fresh pages cost as much as the product."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self.taken = False

    def __call__(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor, valid until `taken` is reset; a second one meanwhile is fresh memory."""
        size = math.prod(shape)
        if self.taken:
            return like.new_empty(shape)
        if self._memory.numel() < size or (self._memory.dtype, self._memory.device) != (
            like.dtype,
            like.device,
        ):
            self._memory = like.new_empty(size)
        self.taken = True
        return self._memory[:size].view(shape)


class _Scratch(threading.local):
    """Memory for factors that are mapped only to take their norms or to form a gradient."""

    def __init__(self) -> None:
        self.workspaces = Workspace(), Workspace()


_scratch = _Scratch()


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Workspace, Workspace]]:
    try:
        yield _scratch.workspaces
    finally:
        for workspace in _scratch.workspaces:
            workspace.taken = False


@dataclass
class Use:
    """One use of a layer: input a and backprop δ of `batch` samples, and which of its parameters are wanted."""

    module: nn.Module
    a: Tensor
    delta: Tensor
    wanted: set[str]
    joint: bool  # weight and bias form one slot; not where a tied weight has other uses
    batch: int
    workspace: Workspace = field(default_factory=Workspace)
    map_of: Callable[[tuple[str, ...]], LinearMap] = lambda names: IDENTITY_MAP


class PerSampleGrad(Protocol):
    """The gradients of one slot (one parameter, or weight and bias of one layer), one per sample."""

    @property
    def mapped(self) -> bool:
        """Are these U g already, rather than g?"""
        ...

    def squared_norms(self, preconditioner: LinearMap) -> Tensor: ...
    def weighted_sum(self, weights: Tensor) -> list[Tensor]: ...
    def per_sample(self) -> list[Tensor]: ...
    def squares(self) -> list[Tensor]:
        """``Σ_i g_i²``, entry by entry."""
        ...

    def masked(self, keep: Tensor) -> PerSampleGrad:
        """The same with every entry of the samples not kept set to zero (NaN included)."""
        ...


def held(form: Any) -> Iterator[Tensor]:
    """Every tensor that a form keeps."""
    for value in vars(form).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from value
        elif is_dataclass(value):
            yield from held(value)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No autograd, no autocast of the caller's, no TF32: norms are not to be computed in half precision, or nearly."""
    stack = contextlib.ExitStack()
    if device.type == "cuda":
        stack.enter_context(_full_precision())
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    places: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_rows(x: Tensor, keep: Tensor) -> Tensor:
    """Zero the samples that are not kept; unlike a product, this also removes NaN."""
    return torch.where(
        keep.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device)
    )


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Squared norm per sample over all tensors of a slot."""
    return torch.stack([squared_size(g) for g in grads]).sum(0)


def deep(size: int) -> int:
    """Additions one upon another in a product of vectors: matrix kernels add up blocks of fewer than `ROWS` entries."""
    return min(size, ROWS) + size // ROWS


def trusted(
    norms: Tensor, products: Tensor, largest: Tensor, terms: int, again: Callable[[Tensor], Tensor]
) -> Tensor:
    """Squared norms that are not too small.

    A squared norm that is added up from products of either sign, `terms` of them one upon another, has an error
    relative to the products, not to itself: at most ``terms eps (Σ_t ‖left_t‖ ‖right_t‖)²``. A record made so that they
    cancel could pass for one of small norm, and exceed the clip. The error is added, but for what the noise has room
    for (`MARGIN`); where it would be more than a fiftieth of the norm, it is computed `again`, in float64. So it is
    where a factor is so large that the other one may matter although its square is less than any
    float32.
    """
    error = terms * torch.finfo(norms.dtype).eps / 2 * products
    doubtful = ((error > DOUBT * norms) | (largest > LARGE)).nonzero().flatten()
    norms = norms + (error - MARGIN * norms).clamp(
        min=0
    )  # squared: half as much of the norm itself
    if len(doubtful):
        norms[doubtful] = again(doubtful).clamp(min=0).to(norms.dtype)
    return norms


def with_slack(norms: Tensor, products: Tensor, growth: float, additions: int) -> Tensor:
    """Squared norms with room for the rounding of the weighted sum: ``(‖U g‖ + n eps growth Σ_t ‖left_t‖ ‖right_t‖)²``.

    The sum adds products left_t right_tᵀ in floating point, n at a time. In whatever order a kernel adds them, its
    error is at most n eps times the lengths of what it adds, and a record's part of that is ``Σ_t ‖left_t‖ ‖right_t‖``,
    the square of which is the second argument. Commonly n eps of it is a thousandth of the norm or less; for a record
    whose products cancel it can be all of it, and much more. It is added, but for what the noise has room for
    (`MARGIN`).

    If the sum is mapped after it was added up, the map enlarges that error by up to ‖U‖, while it may shrink the
    gradient itself: `growth` is ‖U‖ if the products are unmapped, and ``‖U‖ ‖U⁻¹‖`` if they are mapped. What is
    mapped first is released as it was measured, and its error does not grow.
    """
    lengths, eps = norms.clamp(min=0).sqrt(), additions * torch.finfo(norms.dtype).eps / 2
    return (lengths + (eps * growth * products.sqrt() - MARGIN / 2 * lengths).clamp(min=0)).square()


def blocks(count: int, size: int) -> Iterator[slice]:
    """
    >>> list(blocks(5, 3))
    [slice(0, 3, None), slice(3, 6, None)]
    """
    return (slice(begin, begin + size) for begin in range(0, count, size))


def add_up(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """Sums of tensors that arrive in lists, keeping one list at a time."""
    total: list[Tensor] = []
    for part in parts:
        total = [t.add_(x) for t, x in zip(total, part, strict=True)] if total else part
    return total


def squared_size(x: Tensor) -> Tensor:
    """Squared norm of each sample's entries, in float32 or better.

    By blocks: the kernel adds entry upon entry, and ten million equal ones would come out a hundredth too short.
    """
    wide, x = torch.promote_types(x.dtype, torch.float32), x.flatten(1)
    while x.shape[1] > ROWS:
        whole = x.shape[1] // ROWS * ROWS
        blocks = torch.linalg.vector_norm(x[:, :whole].unflatten(1, (-1, ROWS)), dim=2, dtype=wide)
        x = torch.cat([blocks, x[:, whole:].to(wide)], 1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=wide)
    return norms.square()


def gram(x: Tensor) -> Tensor:
    """``x_t · x_s`` for all positions of each sample: [B, T, d] to [B, T, T]."""
    batch, length, features = x.shape
    if x.device.type != "cpu" or length * length * features < LARGE_PRODUCT:
        return torch.bmm(x, x.transpose(1, 2))
    out = x.new_empty(
        batch, length, length
    )  # the batched kernel is a third slower on large transposed factors
    for one, into in zip(x.unbind(0), out.unbind(0), strict=True):
        torch.mm(one, one.T, out=into)
    return out


def _gram_norms(outer: OuterProductGrad) -> tuple[Tensor, Tensor, Tensor]:
    """``Σ_{t,s} (left_t · left_s)(right_t · right_s)`` per sample; `OuterProductGrad.products`; the largest square of a factor."""
    products, of_left = gram(at_least_float32(outer.right)), gram(at_least_float32(outer.left))
    if outer.last is not None:
        products.addcmul_(outer.last.unsqueeze(1), outer.last.unsqueeze(2))
    largest = torch.stack(
        [part.diagonal(dim1=1, dim2=2).amax(1) for part in (products, of_left)]
    ).amax(0)
    products.mul_(of_left)
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sqrt().sum(1).square(), largest


@dataclass
class DenseGrad:
    """Per-sample gradients as they are: [B, *shape] for each parameter of the slot."""

    grads: list[Tensor]
    mapped: bool = False

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        grads = self.per_sample()
        if self.mapped or preconditioner is IDENTITY_MAP:
            return sum_of_squares(grads)
        additions = min(len(grads[0]), ROWS) + len(grads[0]) // ROWS
        if sum(preconditioner.work):
            additions += deep(grads[0].shape[1]) + deep(grads[0][0, 0].numel())
        return with_slack(
            sum_of_squares(preconditioner.apply(grads)),
            sum_of_squares(grads),
            preconditioner.gain,
            additions,
        )

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        grads = self.per_sample()
        return add_up(
            [torch.tensordot(weights[i].to(x.dtype), x[i], dims=1) for x in grads]
            for i in blocks(len(weights), ROWS)
        )

    def per_sample(self) -> list[Tensor]:
        return [at_least_float32(g) for g in self.grads]

    def squares(self) -> list[Tensor]:
        return [g.square().sum(0) for g in self.per_sample()]

    def masked(self, keep: Tensor) -> DenseGrad:
        return DenseGrad([keep_rows(g, keep) for g in self.grads], self.mapped)


@dataclass
class OuterProductGrad:
    """``g_i = Σ_t left_it right_itᵀ``: every layer that is a matrix product over shared positions t.

    left is [B, T, p], right [B, T, q], and the parameter [p, q] (or [q, p] if `transposed`, as in Hugging
    Face's Conv1D). `last` ([B, T]), if any, is one more coordinate behind `right`: its column Σ_t last_t left_t is
    the gradient of the bias, whose input is 1.

    The squared norm is ``Σ_{t,s} (left_t · left_s)(right_t · right_s)``: T²(p+q) products through two Gram
    matrices, or T·p·q by forming g_i a few samples at a time; the cheaper one is taken.
    """

    left: Tensor
    right: Tensor
    last: Tensor | None = None
    transposed: bool = False
    mapped: bool = False

    def map_first(
        self, preconditioner: LinearMap, workspaces: tuple[Workspace, Workspace] | None = None
    ) -> OuterProductGrad:
        """The same gradients mapped: ``U_G left_t`` and ``U_A right_t``."""
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        return OuterProductGrad(
            *preconditioner.factors(left, right, self.last, workspaces),
            self.transposed,
            mapped=True,
        )

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        preconditioner = IDENTITY_MAP if self.mapped else preconditioner
        if self.left.shape[1] == 1:
            return self._norms_of_one(preconditioner)
        return with_slack(
            self.measured(preconditioner), self.products(), preconditioner.gain, self._additions
        )

    def measured(self, preconditioner: LinearMap) -> Tensor:
        """Squared norms, whatever becomes of the gradients in the sum."""
        batch, length, p = self.left.shape
        q = self.right.shape[2]
        of_left, of_right = preconditioner.work
        by_gram = length * length * (p + q) + length * (of_left + of_right)
        by_forming = length * p * q + q * of_left + p * of_right
        if not preconditioner.factored or by_forming < by_gram:
            block = max(1, batch * length * (p + q) // (p * q))
            return torch.cat(
                [
                    sum_of_squares(preconditioner.apply(piece.per_sample()))
                    for piece in self._split(block)
                ]
            )
        with scratch() as workspaces:
            mapped = (
                self
                if preconditioner is IDENTITY_MAP
                else self.map_first(preconditioner, workspaces)
            )
            terms = length + deep(p) + deep(q)
            return trusted(
                *_gram_norms(mapped), terms, lambda i: _gram_norms(mapped._picked(i).double())[0]
            )

    def _norms_of_one(self, preconditioner: LinearMap) -> Tensor:
        """One position: ``‖left‖² ‖right‖²``."""
        norms, largest = self._one(preconditioner)
        scale = (
            1.0 if preconditioner.factored else max(1.0, preconditioner.gain)
        )  # of entries, which squares do not know yet
        extreme = (largest > LARGE / scale**2).nonzero().flatten()
        if len(extreme):
            norms[extreme] = self._picked(extreme).double()._one(preconditioner)[0].to(norms.dtype)
        if preconditioner is IDENTITY_MAP or not preconditioner.factored:
            return norms
        return with_slack(norms, norms, preconditioner.condition, self._additions)

    def _one(self, preconditioner: LinearMap) -> tuple[Tensor, Tensor]:
        """The squared norms, and the largest square of a factor."""
        left, right, last = at_least_float32(self.left), at_least_float32(self.right), self.last
        if preconditioner.factored:
            left, right, last = preconditioner.factors(left, right, last)
        of_left, of_right = (size[:, 0] for size in OuterProductGrad(left, right, last)._sizes())
        if preconditioner.factored:
            norms = of_left * of_right
        else:  # a scale for every entry: it enlarges rounding errors no more than the entries themselves
            norms = preconditioner.single(
                left[:, 0], right[:, 0], None if last is None else last[:, 0]
            )
        return norms, torch.maximum(of_left, of_right)

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """``‖left_t‖²`` and ``‖right_t‖²``."""
        left, right = (squared_size(x.flatten(0, 1)) for x in (self.left, self.right))
        if self.last is not None:
            right = right + squared_size(self.last.reshape(-1, 1))
        return left.view(self.left.shape[:2]), right.view(self.left.shape[:2])

    def products(self) -> Tensor:
        """``(Σ_t ‖left_t‖ ‖right_t‖)²``: what rounding is relative to. Positions with zero input add nothing."""
        left, right = self._sizes()
        return (left * right).sqrt().sum(1).square()

    @property
    def _block(self) -> int:
        """Samples whose products are added up at a time: `ROWS` positions together, or one sample."""
        return min(len(self.left), max(1, ROWS // self.left.shape[1]))

    @property
    def _additions(self) -> int:
        """One upon another: the products of a block, then the sums of all blocks."""
        return self._block * self.left.shape[1] + len(self.left) // self._block

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        block, total = self._block, None
        for piece, part in zip(self._split(block), weights.split(block), strict=True):
            total = piece._sum(part, total)
        assert total is not None
        return total

    def _sum(self, weights: Tensor, before: list[Tensor] | None) -> list[Tensor]:
        """Added to what was there `before`, in place."""
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        scale = weights.to(left.dtype).view(-1, 1, 1)
        if left.shape[2] <= right.shape[2]:
            left, coefficients = left * scale, self.last
        else:
            right = right * scale
            coefficients = None if self.last is None else self.last * scale[:, 0]
        first, second = (right, left) if self.transposed else (left, right)
        factors = [(first.flatten(0, 1).T, second.flatten(0, 1))]
        if coefficients is not None:
            factors.append((left.flatten(0, 1).T, coefficients.to(left.dtype).reshape(-1)))
        if before is None:
            return [one @ other for one, other in factors]
        before[0].addmm_(*factors[0])
        for bias, (one, other) in zip(before[1:], factors[1:], strict=True):
            bias.addmv_(one, other)
        return before

    def per_sample(self, workspace: Workspace | None = None) -> list[Tensor]:
        left, right = at_least_float32(self.left), at_least_float32(self.right)
        first, second = (right, left) if self.transposed else (left, right)
        weight = (workspace or Workspace())((len(left), first.shape[2], second.shape[2]), like=left)
        torch.bmm(first.transpose(1, 2), second, out=weight)
        if self.last is None:
            return [weight]
        return [weight, torch.bmm(self.last.to(left.dtype).unsqueeze(1), left).squeeze(1)]

    def squares(self) -> list[Tensor]:
        if self.left.shape[1] == 1:
            last = None if self.last is None else self.last.square()
            ones = torch.ones(len(self.left), device=self.left.device)
            left, right = at_least_float32(self.left), at_least_float32(self.right)
            return OuterProductGrad(
                left.square(), right.square(), last, self.transposed
            ).weighted_sum(ones)
        return add_up(DenseGrad(piece.per_sample()).squares() for piece in self._split(1))

    def _split(self, block: int) -> Iterator[OuterProductGrad]:
        return map(self._picked, blocks(len(self.left), block))

    def _picked(self, rows: slice | Tensor) -> OuterProductGrad:
        last = None if self.last is None else self.last[rows]
        return OuterProductGrad(self.left[rows], self.right[rows], last, self.transposed)

    def double(self) -> OuterProductGrad:
        last = None if self.last is None else self.last.double()
        return OuterProductGrad(self.left.double(), self.right.double(), last, self.transposed)

    def masked(self, keep: Tensor) -> OuterProductGrad:
        last = None if self.last is None else keep_rows(self.last, keep)
        return OuterProductGrad(
            keep_rows(self.left, keep),
            keep_rows(self.right, keep),
            last,
            self.transposed,
            self.mapped,
        )

    @staticmethod
    def cat(outers: list[OuterProductGrad]) -> OuterProductGrad:
        """Several uses of one weight: their positions side by side."""
        left, right = (
            torch.cat([o.left for o in outers], 1),
            torch.cat([o.right for o in outers], 1),
        )
        lasts = [o.last for o in outers if o.last is not None]
        return OuterProductGrad(
            left,
            right,
            torch.cat(lasts, 1) if lasts else None,
            outers[0].transposed,
            outers[0].mapped,
        )


def matrix(
    left: Tensor,
    right: Tensor,
    workspace: Workspace,
    preconditioner: LinearMap,
    bias: bool,
    transposed: bool = False,
) -> PerSampleGrad:
    """`OuterProductGrad`, or `DenseGrad` where it is cheaper to form the gradients and they take little more memory than (a, δ).

    Formed gradients cost T·p·q once and make the weighted sum almost free; Gram matrices cost T²(p+q), and
    T·p·q again for the sum. The map comes first where it has fewer vectors to map than p, the rows of the gradient, and
    mapped factors need not be kept beside (a, δ): one position, or formed gradients.
    """
    length, p, q = left.shape[1], left.shape[2], right.shape[2]
    last = (
        torch.ones(left.shape[:2], dtype=at_least_float32(left).dtype, device=left.device)
        if bias
        else None
    )
    outer = OuterProductGrad(left, right, last, transposed)
    formed = length >= SHORT and p * q <= ROOM * length * (p + q)
    if sum(preconditioner.work) and formed and length < p:
        with scratch() as workspaces:
            return DenseGrad(
                outer.map_first(preconditioner, workspaces).per_sample(workspace), mapped=True
            )
    if sum(preconditioner.work) and length == 1:
        return outer.map_first(preconditioner)
    return DenseGrad(outer.per_sample(workspace)) if formed else outer


def join(forms: list[PerSampleGrad], preconditioner: LinearMap = IDENTITY_MAP) -> PerSampleGrad:
    """One form for a parameter that was used several times, cross terms included.

    The per-sample gradient of a parameter is the sum over its uses; ``‖g + h‖² ≠ ‖g‖² + ‖h‖²``. Uses of the
    same layer join along the shared positions, an embedding and the head tied to it through the products
    of their rows, and anything else by forming the gradients.
    """
    from dpkfc.per_sample.layers.embedding import RowSparseGrad, TiedEmbeddingGrad

    if len(forms) == 1:
        return forms[0]
    outers = [form for form in forms if isinstance(form, OuterProductGrad)]
    rows = [form for form in forms if isinstance(form, RowSparseGrad)]
    orientations = {outer.transposed for outer in outers}
    if (
        len(outers) == len(forms)
        and len(orientations) == 1
        and len({form.mapped for form in forms}) == 1
    ):
        return OuterProductGrad.cat(outers)
    if any(form.mapped for form in forms):  # one position in one use, several in another
        mapped = [
            form.per_sample() if form.mapped else preconditioner.apply(form.per_sample())
            for form in forms
        ]
        return DenseGrad(
            [torch.stack(parts).sum(0) for parts in zip(*mapped, strict=True)], mapped=True
        )
    if len(rows) == len(forms):
        return RowSparseGrad.cat(rows)
    if len(outers) + len(rows) == len(forms) and orientations == {False}:
        return TiedEmbeddingGrad(OuterProductGrad.cat(outers), RowSparseGrad.cat(rows))
    grads = [form.per_sample() for form in forms]
    return DenseGrad([torch.stack(parts).sum(0) for parts in zip(*grads, strict=True)])
