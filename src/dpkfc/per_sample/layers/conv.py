"""Convolutions: ``y_t = W patch_t + b`` over output positions t, in 1, 2 or 3 dimensions.

The per-sample gradients come from one call of the ordinary weight-gradient kernel: with the batch folded
into the groups, ``[1, B·C, ...] * [1, B·O, ...]`` with B·G groups, the kernel keeps the samples apart and
costs what the ordinary, summed gradient costs. It covers stride, dilation, groups and depthwise alike;
padding of any mode is applied to the input first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.geometry.identity import LinearMap
from dpkfc.per_sample.layers.linear import Slots
from dpkfc.per_sample.record import (
    DenseGrad,
    OuterProductGrad,
    PerSampleGrad,
    Use,
    add_up,
    at_least_float32,
    keep_rows,
    squared_size,
    sum_of_squares,
    with_slack,
)

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ROOM = 4  # formed gradients may take this many times the memory of (a, δ)
FEW_CHANNELS = 4  # up to this, a matrix product over patches beats the grouped kernel


def pad_input(module: Conv, x: Tensor) -> Tensor:
    """The input with the layer's padding made explicit, so that what remains is a valid convolution."""
    amounts = module._reversed_padding_repeated_twice  # what nn.Conv itself passes to F.pad
    if not any(amounts):
        return x
    mode = module.padding_mode if module.padding_mode != "zeros" else "constant"
    return F.pad(x, amounts, mode=mode)


def patches(module: Conv, padded: Tensor) -> Tensor:
    """[B, C, *space] to [B, T, C·kernel], the rows that the kernel multiplies (im2col, any dimension)."""
    windows, space = _windows(module, padded), len(module.kernel_size)
    rows = windows.permute(0, *range(2, 2 + space), 1, *range(2 + space, 2 + 2 * space))
    return rows.reshape(len(padded), math.prod(rows.shape[1 : 1 + space]), -1)


def _columns(module: Conv, padded: Tensor) -> Tensor:
    """The same as [B, C·kernel, T]: with many positions the quicker copy, since whole rows of the input are moved."""
    windows, space = _windows(module, padded.contiguous()), len(module.kernel_size)
    columns = windows.permute(0, 1, *range(2 + space, 2 + 2 * space), *range(2, 2 + space))
    return columns.flatten(1, 1 + space).flatten(2)


def _windows(module: Conv, padded: Tensor) -> Tensor:
    """[B, C, *positions, *kernel], a view."""
    view = padded
    for dim, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        reach = dilation * (kernel - 1) + 1
        view = view.unfold(2 + dim, reach, stride)[..., ::dilation]
    return view


def _weight_gradient(
    module: Conv, padded: Tensor, delta: Tensor, weight: Tensor, groups: int
) -> Tensor:
    space = len(module.kernel_size)
    used = [
        d * (k - 1) + s * (n - 1) + 1
        for d, k, s, n in zip(
            module.dilation, module.kernel_size, module.stride, delta.shape[2:], strict=True
        )
    ]
    for dim, size in enumerate(used):  # rows past the last stride take no part
        padded = padded.narrow(2 + dim, 0, size)
    grads = torch.ops.aten.convolution_backward(
        delta,
        padded,
        weight,
        None,
        list(module.stride),
        [0] * space,
        list(module.dilation),
        False,
        [0] * space,
        groups,
        [False, True, False],
    )
    assert isinstance(grads[1], Tensor)
    return grads[1]


@dataclass
class ConvGrad:
    """Weight (and, with `ones`, bias) of one convolution: padded input [B, C, ...], backprop [B, O, ...]."""

    module: Conv
    padded: Tensor
    delta: Tensor
    ones: bool

    mapped = False

    def _split(self) -> Iterator[ConvGrad]:
        """A few samples at a time: their formed gradients take at most `ROOM` times what they come from."""
        inputs = self.padded.numel() + self.delta.numel()
        block = max(1, ROOM * inputs // self.module.weight.numel())
        for x, delta in zip(self.padded.split(block), self.delta.split(block), strict=True):
            yield ConvGrad(self.module, x, delta, self.ones)

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        norms = torch.cat(
            [sum_of_squares(preconditioner.apply(piece.per_sample())) for piece in self._split()]
        )
        # an entry of the input is in at most as many patches as the kernel has positions
        patches_size = squared_size(self.padded) * math.prod(self.module.kernel_size)
        additions = self.delta[0, 0].numel() + len(self.delta)
        return with_slack(
            norms, squared_size(self.delta) * patches_size, preconditioner.gain, additions
        )

    def squares(self) -> list[Tensor]:
        return add_up(DenseGrad(piece.per_sample()).squares() for piece in self._split())

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """Of the gradients as they were measured: one kernel for all would add up positions of different samples."""
        parts = torch.split(weights, [len(piece.padded) for piece in self._split()])
        return add_up(
            DenseGrad(piece.per_sample()).weighted_sum(part)
            for piece, part in zip(self._split(), parts, strict=True)
        )

    def per_sample(self) -> list[Tensor]:
        padded, delta = at_least_float32(self.padded), at_least_float32(self.delta)
        batch, shape = len(padded), self.module.weight.shape
        if self.module.groups == 1 and padded.shape[1] <= FEW_CHANNELS:
            by_position = delta.flatten(2).transpose(1, 2)
            weight = (
                torch.bmm(_columns(self.module, padded), by_position)
                .transpose(1, 2)
                .reshape(batch, *shape)
            )
        else:
            stacked = torch.empty(
                batch * shape[0], *shape[1:], dtype=delta.dtype, device=delta.device
            )
            weight = _weight_gradient(
                self.module,
                padded.flatten(0, 1).unsqueeze(0),
                delta.flatten(0, 1).unsqueeze(0),
                stacked,
                batch * self.module.groups,
            ).view(batch, *shape)
        return [weight, delta.flatten(2).sum(2)] if self.ones else [weight]

    def masked(self, keep: Tensor) -> ConvGrad:
        return ConvGrad(
            self.module, keep_rows(self.padded, keep), keep_rows(self.delta, keep), self.ones
        )


def conv(use: Use) -> Slots:
    """nn.Conv1d, nn.Conv2d, nn.Conv3d."""
    module, x, delta, wanted, batch = use.module, use.a, use.delta, use.wanted, use.batch
    assert isinstance(module, Conv)
    joint = use.joint and wanted == {"weight", "bias"}
    slots: Slots = []
    if "weight" in wanted:
        name: tuple[str, ...] = ("weight", "bias") if joint else ("weight",)
        slots.append(
            (
                name,
                _weight_form(module, pad_input(module, x), delta, joint, batch, use.map_of(name)),
            )
        )
    if "bias" in wanted and not joint:
        slots.append(
            (
                ("bias",),
                DenseGrad(
                    [
                        at_least_float32(delta)
                        .flatten(2)
                        .sum(2)
                        .view(batch, -1, delta.shape[1])
                        .sum(1)
                    ]
                ),
            )
        )
    return slots


def _weight_form(
    module: Conv, padded: Tensor, delta: Tensor, ones: bool, batch: int, preconditioner: LinearMap
) -> PerSampleGrad:
    """Few positions and many channels: Gram matrices over patches. Otherwise: form the gradients."""
    positions, (out, *inner) = delta[0, 0].numel(), module.weight.shape
    into = math.prod(inner)
    form = ConvGrad(module, padded, delta, ones)
    if len(padded) != batch:  # several images a sample: their gradients add
        return DenseGrad([g.view(batch, -1, *g.shape[1:]).sum(1) for g in form.per_sample()])
    if module.groups == 1 and positions * (out + into) < out * into:
        left, right = delta.flatten(2).transpose(1, 2), patches(module, padded)
        last = (
            torch.ones(left.shape[:2], dtype=at_least_float32(left).dtype, device=left.device)
            if ones
            else None
        )
        outer = OuterProductGrad(left, right, last)
        if sum(preconditioner.work) and positions == 1:
            outer = outer.map_first(preconditioner)
        return _Flattened(outer, module.weight.shape)
    if batch * module.weight.numel() <= ROOM * (padded.numel() + delta.numel()):
        return DenseGrad(form.per_sample())
    return form


@dataclass
class _Flattened:
    """A convolution seen as a linear layer over its patches; the weight keeps its own shape."""

    outer: OuterProductGrad
    shape: torch.Size

    @property
    def mapped(self) -> bool:
        return self.outer.mapped

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        return self.outer.squared_norms(preconditioner)

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        weight, *bias = self.outer.weighted_sum(weights)
        return [weight.view(self.shape), *bias]

    def per_sample(self) -> list[Tensor]:
        weight, *bias = self.outer.per_sample()
        return [weight.view(-1, *self.shape), *bias]

    def squares(self) -> list[Tensor]:
        weight, *bias = self.outer.squares()
        return [weight.view(self.shape), *bias]

    def masked(self, keep: Tensor) -> _Flattened:
        return _Flattened(self.outer.masked(keep), self.shape)
