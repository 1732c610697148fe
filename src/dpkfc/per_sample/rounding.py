"""Norms that hold in floating point: a computed norm is never smaller than what is released.

Clipping is only as good as the norm it divides by. Two things could make a computed norm too small:
cancellation in the norm itself (`recompute_if_doubtful`), and rounding in the sum that is released
(`add_sum_error`). Both bounds are added to the norm, up to the relative error `clipping.MARGIN` for
which the noise is scaled up anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkfc.clipping import MARGIN

BLOCK = 512  # products that are added up at a time, unless one record has more
DOUBTFUL = 0.02  # recompute a squared norm in float64 if its error may exceed this fraction of it
# float32 products of the CPU, and settings with which they are computed in fewer digits
CPU_PRODUCTS: list[Any] = [
    getattr(torch.backends.mkldnn, name)
    for name in ("matmul", "conv")
    if hasattr(torch.backends.mkldnn, name)
]
LOW_PRECISION = ("tf32", "bf16")
LARGE = 1e10  # above this squared factor, the square of the other one may underflow in float32


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disables autograd, autocast, and float32 products that are computed in TF32 or bfloat16."""
    stack = contextlib.ExitStack()
    if device.type == "cuda":
        stack.enter_context(_without_tf32())
    elif any(backend.fp32_precision in LOW_PRECISION for backend in CPU_PRODUCTS):
        # torch.set_float32_matmul_precision("medium"), on processors with bfloat16 products
        stack.enter_context(_without_bfloat16())
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    backends: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


@contextlib.contextmanager
def _without_bfloat16() -> Iterator[None]:
    changed = [(each, each.fp32_precision) for each in CPU_PRODUCTS]
    try:
        for backend, _ in changed:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, before in changed:
            backend.fp32_precision = before


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_rows(x: Tensor, keep: Tensor) -> Tensor:
    """Zero the samples that are not kept. Unlike a product, this also removes NaN."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(keep.view(-1, *[1] * (x.dim() - 1)), x, zero)


def squared_norm(x: Tensor) -> Tensor:
    """Squared norm of each sample's entries, in float32 or better.

    Summed by blocks: the kernel adds one entry after another, and a plain sum of ten million equal
    entries comes out 1 % too small.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)  # of a scalar parameter
    while x.shape[1] > BLOCK:
        whole = x.shape[1] // BLOCK * BLOCK
        blocks = torch.linalg.vector_norm(x[:, :whole].unflatten(1, (-1, BLOCK)), dim=2, dtype=wide)
        x = torch.cat([blocks, x[:, whole:].to(wide)], 1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=wide)
    return norms.square()


def squared_norm_of_all(grads: Sequence[Tensor]) -> Tensor:
    """Squared norm of each sample over several tensors."""
    first, *others = (squared_norm(g) for g in grads)
    return sum(others, start=first)


def summation_depth(size: int) -> int:
    """Longest chain of additions in a dot product of `size` terms, added by blocks."""
    return min(size, BLOCK) + size // BLOCK


def branches_are_cheap(x: Tensor) -> bool:
    """Whether a branch on a computed value is cheap: on a CPU.

    On an accelerator the host would have to wait for the device. There a step has no such branch.
    """
    return x.device.type == "cpu"


def underflow_bound(largest: Tensor, products: int) -> Tensor:
    """How much of a squared norm may be missing because squares of small numbers underflow.

    Args:
        largest: the largest squared norm of a factor.
        products: number of products that the squared norm is added up from. In each, a factor that
            is too small by up to `tiny` is multiplied by at most `largest`.
    """
    return (largest + 1) * (2 * products * torch.finfo(torch.float32).tiny)


def recompute_if_doubtful(
    squared_norms: Tensor,
    magnitudes: Tensor,
    largest: Tensor,
    terms: int,
    products: int,
    recompute: Callable[[Tensor], Tensor],
) -> Tensor:
    """Squared norms that are not too small in spite of cancellation.

    A squared norm added up from products of either sign has an error relative to the products, not
    to itself: at most ``terms · eps · (Σ_t ‖left_t‖ ‖right_t‖)²``. A record whose products cancel
    could be measured with a norm that is far too small, and exceed the clip.

    Args:
        squared_norms: as computed.
        magnitudes: ``(Σ_t ‖left_t‖ ‖right_t‖)²``.
        largest: the largest squared norm of a factor. Above `LARGE` the other factor may matter
            although its square underflows.
        terms: length of the longest chain of additions.
        products: number of products, see `underflow_bound`.
        recompute: the squared norms of the samples with the given indices, in float64. It is called
            where the error may exceed the fraction `DOUBTFUL`; elsewhere the error is added.

    On an accelerator the error is added everywhere, because looking for doubtful records would wait
    for the device. The bound holds there too. A record whose products cancel, or whose factors are
    extreme, may then be clipped to less than R.
    """
    error = terms * torch.finfo(squared_norms.dtype).eps / 2 * magnitudes
    # MARGIN of a squared norm is MARGIN / 2 of the norm, for which the noise has room
    bounded = squared_norms + (error - MARGIN * squared_norms).clamp(min=0)
    if not branches_are_cheap(bounded):
        return bounded.clamp(min=0) + underflow_bound(largest, products)
    doubtful = ((error > DOUBTFUL * squared_norms) | (largest > LARGE)).nonzero().flatten()
    if len(doubtful):
        bounded[doubtful] = recompute(doubtful).clamp(min=0).to(bounded.dtype)
    return bounded


def add_sum_error(
    squared_norms: Tensor, magnitudes: Tensor, growth: float, additions: int
) -> Tensor:
    """``(‖U g‖ + n eps growth Σ_t ‖left_t‖ ‖right_t‖)²``: room for rounding in the released sum.

    The sum adds products left_t right_tᵀ in floating point, n = `additions` in one chain. In any
    order of addition, its error is at most n·eps times the norms of what it adds, and a record's
    share of that is ``Σ_t ‖left_t‖ ‖right_t‖``, whose square is `magnitudes`. This is usually at
    most a thousandth of the norm; for a record whose products cancel it can exceed the norm.

    If the sum is mapped after it was added up, the map enlarges that error by up to ‖U‖ while it
    may shrink the gradient itself: `growth` is ‖U‖ if the products are unmapped and ``‖U‖ ‖U⁻¹‖``
    if they are mapped. What is mapped first is released as it was measured, and its error does not
    grow.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    eps = additions * torch.finfo(squared_norms.dtype).eps / 2
    return (norms + (eps * growth * magnitudes.sqrt() - MARGIN / 2 * norms).clamp(min=0)).square()


def slices(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size`.

    >>> list(slices(5, 3))
    [slice(0, 3, None), slice(3, 6, None)]
    """
    return (slice(begin, begin + size) for begin in range(0, count, size))


def add_up(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """Sums of tensors that arrive in lists; keeps one list at a time."""
    total: list[Tensor] = []
    for part in parts:
        total = [t.add_(x) for t, x in zip(total, part, strict=True)] if total else part
    return total
