"""Convolutions: ``y_t = W patch_t + b`` over output positions t, in 1, 2 or 3 dimensions.

Per-sample gradients come from one call of the ordinary weight-gradient kernel. With the batch
folded into the groups, ``[1, B·C, ...] * [1, B·O, ...]`` with B·G groups, the kernel keeps the
samples apart and costs what the ordinary, summed gradient costs. It covers stride, dilation, groups
and depthwise convolutions; padding of any mode is applied to the input first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.base import (
    GradsByName,
    KroneckerForm,
    LayerAdapter,
    LayerCall,
    LinearMap,
    PerSampleGrad,
)
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.outer import OuterProductGrad, bias_ones
from dpkfc.per_sample.registry import register_layer
from dpkfc.per_sample.rounding import (
    add_sum_error,
    add_up,
    at_least_float32,
    keep_rows,
    squared_norm,
    squared_norm_of_all,
)

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
FORMED_MEMORY = 4  # formed gradients may take this many times the memory of (a, δ)
FEW_CHANNELS = 4  # up to this, a matrix product over patches is faster than the grouped kernel


def pad_input(module: Conv, x: Tensor) -> Tensor:
    """The input with the layer's padding applied, so that what remains is a valid convolution."""
    amounts = module._reversed_padding_repeated_twice  # what nn.Conv itself passes to F.pad
    if not any(amounts):
        return x
    mode = module.padding_mode if module.padding_mode != "zeros" else "constant"
    return F.pad(x, amounts, mode=mode)


def patches(module: Conv, padded: Tensor) -> Tensor:
    """im2col: [B, C, *space] to [B, T, C·kernel], the rows that the kernel multiplies."""
    windows, space = _windows(module, padded), len(module.kernel_size)
    rows = windows.permute(0, *range(2, 2 + space), 1, *range(2 + space, 2 + 2 * space))
    return rows.reshape(len(padded), math.prod(rows.shape[1 : 1 + space]), -1)


def _columns(module: Conv, padded: Tensor) -> Tensor:
    """The patches as [B, C·kernel, T]: the faster copy with many positions, by whole input rows."""
    windows, space = _windows(module, padded.contiguous()), len(module.kernel_size)
    columns = windows.permute(0, 1, *range(2 + space, 2 + 2 * space), *range(2, 2 + space))
    return columns.flatten(1, 1 + space).flatten(2)


def _windows(module: Conv, padded: Tensor) -> Tensor:
    """[B, C, *positions, *kernel], a view."""
    view = padded
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for dim, (kernel, stride, dilation) in enumerate(sizes):
        reach = dilation * (kernel - 1) + 1
        view = view.unfold(2 + dim, reach, stride)[..., ::dilation]
    return view


def _weight_gradient(
    module: Conv, padded: Tensor, delta: Tensor, weight: Tensor, groups: int
) -> Tensor:
    space = len(module.kernel_size)
    sizes = zip(module.dilation, module.kernel_size, module.stride, delta.shape[2:], strict=True)
    used = [d * (k - 1) + s * (n - 1) + 1 for d, k, s, n in sizes]
    # inputs behind the last stride are not used
    for dim, size in enumerate(used):
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
    """Weight and, if `bias`, bias gradient from padded input [B, C, ...] and δ [B, O, ...]."""

    module: Conv
    padded: Tensor
    backprops: Tensor
    bias: bool

    preconditioned = False

    def _split(self) -> Iterator[ConvGrad]:
        """A few samples at a time, within the memory limit for formed gradients."""
        inputs = self.padded.numel() + self.backprops.numel()
        block = max(1, FORMED_MEMORY * inputs // self.module.weight.numel())
        for x, delta in zip(self.padded.split(block), self.backprops.split(block), strict=True):
            yield ConvGrad(self.module, x, delta, self.bias)

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        norms = torch.cat(
            [
                squared_norm_of_all(preconditioner.apply(piece.per_sample()))
                for piece in self._split()
            ]
        )
        # an input entry is in at most as many patches as the kernel has positions
        patch_norms = squared_norm(self.padded) * math.prod(self.module.kernel_size)
        magnitudes = squared_norm(self.backprops) * patch_norms
        additions = self.backprops[0, 0].numel() + len(self.backprops)
        return add_sum_error(norms, magnitudes, preconditioner.gain, additions)

    def sum_of_squares(self) -> list[Tensor]:
        return add_up(DenseGrad(piece.per_sample()).sum_of_squares() for piece in self._split())

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """The sum of the gradients as they were measured.

        One kernel call for all samples would add positions of different samples in another order.
        """
        parts = torch.split(weights, [len(piece.padded) for piece in self._split()])
        return add_up(
            DenseGrad(piece.per_sample()).weighted_sum(part)
            for piece, part in zip(self._split(), parts, strict=True)
        )

    def per_sample(self) -> list[Tensor]:
        padded, delta = at_least_float32(self.padded), at_least_float32(self.backprops)
        batch, shape = len(padded), self.module.weight.shape
        if self.module.groups == 1 and padded.shape[1] <= FEW_CHANNELS:
            by_position = delta.flatten(2).transpose(1, 2)
            product = torch.bmm(_columns(self.module, padded), by_position)
            weight = product.transpose(1, 2).reshape(batch, *shape)
        else:
            weight = _weight_gradient(
                self.module,
                padded.flatten(0, 1).unsqueeze(0),
                delta.flatten(0, 1).unsqueeze(0),
                delta.new_empty(batch * shape[0], *shape[1:]),
                batch * self.module.groups,
            ).view(batch, *shape)
        return [weight, delta.flatten(2).sum(2)] if self.bias else [weight]

    def masked(self, keep: Tensor) -> ConvGrad:
        padded, backprops = keep_rows(self.padded, keep), keep_rows(self.backprops, keep)
        return ConvGrad(self.module, padded, backprops, self.bias)


@dataclass
class PatchOuterGrad:
    """A convolution as a linear layer over its patches; the weight keeps its own shape."""

    outer: OuterProductGrad
    shape: torch.Size

    @property
    def preconditioned(self) -> bool:
        return self.outer.preconditioned

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        return self.outer.squared_norms(preconditioner)

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        weight, *bias = self.outer.weighted_sum(weights)
        return [weight.view(self.shape), *bias]

    def per_sample(self) -> list[Tensor]:
        weight, *bias = self.outer.per_sample()
        return [weight.view(-1, *self.shape), *bias]

    def sum_of_squares(self) -> list[Tensor]:
        weight, *bias = self.outer.sum_of_squares()
        return [weight.view(self.shape), *bias]

    def masked(self, keep: Tensor) -> PatchOuterGrad:
        return PatchOuterGrad(self.outer.masked(keep), self.shape)


def _per_sample_grads(call: LayerCall) -> GradsByName:
    module, delta = call.module, call.backprops
    assert isinstance(module, Conv) and call.activations is not None
    joint = not call.shared and call.params.keys() == {"weight", "bias"}
    grads: dict[tuple[str, ...], PerSampleGrad] = {}
    if "weight" in call.params:
        names = ("weight", "bias") if joint else ("weight",)
        padded, preconditioner = pad_input(module, call.activations), call.preconditioner(*names)
        grads[names] = _weight_grad(module, padded, delta, joint, call.batch_size, preconditioner)
    if "bias" in call.params and not joint:
        sums = at_least_float32(delta).flatten(2).sum(2)
        grads["bias",] = DenseGrad([sums.view(call.batch_size, -1, delta.shape[1]).sum(1)])
    return grads


def _weight_grad(
    module: Conv, padded: Tensor, delta: Tensor, bias: bool, batch: int, preconditioner: LinearMap
) -> PerSampleGrad:
    """Gram matrices over patches with few positions and many channels.

    Otherwise formed gradients.
    """
    positions, (out, *inner) = delta[0, 0].numel(), module.weight.shape
    inputs = math.prod(inner)
    grad = ConvGrad(module, padded, delta, bias)
    if len(padded) != batch:  # several images per sample: their gradients add up
        return DenseGrad([g.view(batch, -1, *g.shape[1:]).sum(1) for g in grad.per_sample()])
    if module.groups == 1 and positions * (out + inputs) < out * inputs:
        left, right = delta.flatten(2).transpose(1, 2), patches(module, padded)
        outer = OuterProductGrad(left, right, bias_ones(left) if bias else None)
        if sum(preconditioner.work) and positions == 1:
            outer = outer.precondition(preconditioner)
        return PatchOuterGrad(outer, module.weight.shape)
    if batch * module.weight.numel() <= FORMED_MEMORY * (padded.numel() + delta.numel()):
        return DenseGrad(grad.per_sample())
    return grad


def _kronecker_shape(module: nn.Module) -> tuple[int, int, int]:
    assert isinstance(module, Conv)
    out, *inner = module.weight.shape
    return module.groups, math.prod(inner), out // module.groups


def _kronecker_vectors(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Patches and backprops per position and group."""
    module, batch = call.module, call.batch_size
    assert isinstance(module, Conv) and call.activations is not None
    groups, inputs, outputs = _kronecker_shape(module)
    a = patches(module, pad_input(module, call.activations))
    delta = call.backprops.flatten(2).transpose(1, 2)
    return a.reshape(batch, -1, groups, inputs), delta.reshape(batch, -1, groups, outputs)


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(
        _kind,
        LayerAdapter(
            _per_sample_grads, kronecker=KroneckerForm(_kronecker_shape, _kronecker_vectors)
        ),
    )
