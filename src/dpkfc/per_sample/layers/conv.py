"""Convolutions: ``y_t = W patch_t + b`` over output positions t, in 1, 2 or 3 dimensions.

The squared norms come from the cheapest of three computations, chosen per layer by counting:

- Many positions, small weights: per-sample gradients by one call of the ordinary weight-gradient
  kernel. With the batch folded into the groups, ``[1, B·C, ...] * [1, B·O, ...]`` with B·G groups,
  the kernel keeps the samples apart and costs little more than the ordinary, summed gradient. It
  covers stride, dilation, groups and depthwise convolutions.
- About as many positions as output channels, or very few input channels: per-sample gradients by
  matrix products over patches, for a few samples at a time.
- Few positions, large weights: Gram matrices. ``patch_t · patch_s`` is a sum over the places of the
  kernel of inner products of single pixels, so no patch is formed. The clipped sum is then what
  ordinary training computes: the weight gradient of the layer, from δ scaled by the weights.

Zero padding is left to the kernels; padding of any other mode is applied to the input first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.base import (
    IDENTITY_MAP,
    GradsByName,
    KroneckerForm,
    LayerAdapter,
    LayerCall,
    LinearMap,
    PerSampleGrad,
)
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.outer import OuterProductGrad, bias_ones, squared_norms_from_grams
from dpkfc.per_sample.registry import register_layer
from dpkfc.per_sample.rounding import (
    add_sum_error,
    add_up,
    at_least_float32,
    keep_rows,
    recompute_if_doubtful,
    slices,
    squared_norm,
    squared_norm_of_all,
    summation_depth,
)
from dpkfc.per_sample.workspace import Workspace, scratch

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
FORMED_MEMORY = 5  # formed gradients may take this many times the memory of (a, δ)
FEW_CHANNELS = 4  # up to this, a matrix product over patches is faster than the grouped kernel
FEW_POSITIONS = 1.5  # the same up to this many positions per output channel
KERNEL_BLOCK = 2048  # positions that one call of the weight-gradient kernel adds up
PATCH_BLOCK = 2**18  # entries of the patches that are formed at a time: they stay in the cache
# Measured costs, in multiplications of a matrix product that forms gradients:
GRAM_COST = 3  # one of a Gram matrix, beside the weight-gradient kernel that adds up afterwards
GRAM_ADDITION = 4  # one addition of two Gram matrices, in multiplications of a Gram matrix


def pad_input(module: Conv, x: Tensor) -> Tensor:
    """The input with the layer's padding applied, so that what remains is a valid convolution."""
    amounts = module._reversed_padding_repeated_twice  # what nn.Conv itself passes to F.pad
    if not any(amounts):
        return x
    mode = module.padding_mode if module.padding_mode != "zeros" else "constant"
    return F.pad(x, amounts, mode=mode)


def _kernel_padding(module: Conv) -> tuple[int, ...] | None:
    """Zeros on either side of each dimension; None if the kernels cannot pad as the layer does."""
    amounts = module._reversed_padding_repeated_twice[::-1]
    before, after = amounts[1::2], amounts[::2]
    return tuple(before) if module.padding_mode == "zeros" and before == after else None


def patches(module: Conv, padded: Tensor) -> Tensor:
    """im2col: [B, C, *space] to [B, T, C·kernel], the rows that the kernel multiplies."""
    windows, space = _windows(module, padded), len(module.kernel_size)
    rows = windows.permute(0, *range(2, 2 + space), 1, *range(2 + space, 2 + 2 * space))
    return rows.reshape(len(padded), math.prod(rows.shape[1 : 1 + space]), -1)


def _columns(module: Conv, padded: Tensor, workspace: Workspace) -> Tensor:
    """The patches as [B, C·kernel, T]: a faster copy, by whole rows of the input."""
    windows, space = _windows(module, padded.contiguous()), len(module.kernel_size)
    columns = windows.permute(0, 1, *range(2 + space, 2 + 2 * space), *range(2, 2 + space))
    out = workspace(tuple(columns.shape), padded).copy_(columns)
    workspace.release()
    return out.flatten(1, 1 + space).flatten(2)


def _windows(module: Conv, padded: Tensor) -> Tensor:
    """[B, C, *positions, *kernel], a view."""
    view = padded
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for dim, (kernel, stride, dilation) in enumerate(sizes):
        reach = dilation * (kernel - 1) + 1
        view = view.unfold(2 + dim, reach, stride)[..., ::dilation]
    return view


@dataclass
class ConvGrad:
    """Weight and, if `bias`, bias gradient from the input [B, C, ...] and δ [B, O, ...].

    Args:
        module: the layer.
        inputs: its input, padded unless the kernels do it.
        padding: the zeros that the kernels still have to add on either side of each dimension.
        backprops: δ.
        bias: the bias is trained together with the weight.
        gram: norms by Gram matrices; otherwise by forming the gradients of a few samples at a time.
    """

    module: Conv
    inputs: Tensor
    padding: tuple[int, ...]
    backprops: Tensor
    bias: bool
    gram: bool = False

    preconditioned = False

    @property
    def positions(self) -> int:
        """T."""
        return self.backprops[0, 0].numel()

    @property
    def block(self) -> int:
        """Samples that are added up at a time: `KERNEL_BLOCK` positions, or one sample."""
        return min(len(self.backprops), max(1, KERNEL_BLOCK // self.positions))

    @property
    def additions(self) -> int:
        """Longest chain of additions in `weighted_sum`, and in the gradients that were measured."""
        measured = self.positions
        return measured + self.block * self.positions + len(self.backprops) // self.block

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        if self.gram and preconditioner is IDENTITY_MAP:
            norms, magnitudes = self._norms_by_gram_of_pixels()
        else:
            by_gram = self._norms_by_gram_of_patches
            norms = (by_gram if self.gram else self._norms_by_forming)(preconditioner)
            magnitudes = self._magnitudes()
        return add_sum_error(norms, magnitudes, preconditioner.gain, self.additions)

    def _magnitudes(self) -> Tensor:
        """An upper bound on ``(Σ_t ‖δ_t‖ ‖patch_t‖)²``, which rounding errors are relative to.

        By Cauchy and Schwarz; an input entry is in at most as many patches as the kernel has
        places.
        """
        patch_norms = squared_norm(self.inputs) * math.prod(self.module.kernel_size)
        if self.bias:
            patch_norms = patch_norms + self.positions
        return squared_norm(self.backprops) * patch_norms

    def _norms_by_forming(self, preconditioner: LinearMap) -> Tensor:
        return torch.cat(
            [
                squared_norm_of_all(preconditioner.apply(piece.per_sample()))
                for piece in self._split()
            ]
        )

    def _norms_by_gram_of_pixels(self) -> tuple[Tensor, Tensor]:
        """Squared norms and ``(Σ_t ‖δ_t‖ ‖patch_t‖)²``."""
        terms = self.positions + summation_depth(self.backprops.shape[1])
        terms += summation_depth(self.inputs.shape[1]) + math.prod(self.module.kernel_size)
        patch = self.inputs.shape[1] * math.prod(self.module.kernel_size)
        norms, magnitudes, largest = self._gram_squared_norms()
        norms = recompute_if_doubtful(
            norms,
            magnitudes,
            largest,
            terms,
            self.positions**2 * (self.backprops.shape[1] + patch + 1),
            lambda i: self.select(i).double()._gram_squared_norms()[0],
        )
        return norms, magnitudes

    def _gram_squared_norms(self) -> tuple[Tensor, Tensor, Tensor]:
        delta = at_least_float32(self.backprops).flatten(2)
        products = self._patch_products()
        if self.bias:
            products += 1
        return squared_norms_from_grams(products, torch.bmm(delta.transpose(1, 2), delta))

    def _patch_products(self) -> Tensor:
        """``patch_t · patch_s``, [B, T, T]: sums of products of pixels, one per kernel place."""
        module, pixels = self.module, at_least_float32(self.inputs).flatten(2)
        size, positions = self.inputs.shape[2:], self.backprops.shape[2:]
        gram = torch.bmm(pixels.transpose(1, 2), pixels).view(-1, *size, *size)
        products = gram.new_zeros(len(gram), *positions, *positions)
        for place in itertools.product(*map(range, module.kernel_size)):
            # the output positions at which this place of the kernel lies inside the input
            outputs, pixels_read = [], []
            for dim, offset in enumerate(place):
                stride = module.stride[dim]
                first = offset * module.dilation[dim] - self.padding[dim]
                begin = max(0, -(first // stride))
                end = min(positions[dim], (size[dim] - 1 - first) // stride + 1)
                end = max(begin, end)
                outputs.append(slice(begin, end))
                low = first + begin * stride
                pixels_read.append(
                    slice(low, max(low, low + (end - begin - 1) * stride + 1), stride)
                )
            if all(part.stop > part.start for part in outputs):
                products[:, *outputs, *outputs] += gram[:, *pixels_read, *pixels_read]
        return products.flatten(1, len(positions)).flatten(2)

    def _norms_by_gram_of_patches(self, preconditioner: LinearMap) -> Tensor:
        """For a few samples at a time: their mapped patches take memory."""
        per_sample = self.positions * self.module.weight[0].numel()
        return torch.cat(
            [
                self.select(rows)._outer().squared_norms_without_sum_error(preconditioner)
                for rows in slices(len(self.inputs), max(1, 4 * PATCH_BLOCK // per_sample))
            ]
        )

    def sum_of_squares(self) -> list[Tensor]:
        return add_up(DenseGrad(piece.per_sample()).sum_of_squares() for piece in self._split())

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        return add_up(
            self.select(rows)._weighted_sum_of_block(weights[rows])
            for rows in slices(len(weights), self.block)
        )

    def _weighted_sum_of_block(self, weights: Tensor) -> list[Tensor]:
        """What ordinary training computes, from δ_i scaled by the weight of sample i.

        The kernel rearranges the weight at every call. With few positions for a large weight, that
        costs more than patches. On accelerators it may use Winograd's or Fourier's transform, whose
        rounding errors `add_sum_error` does not cover.
        """
        on_cpu = self.backprops.device.type == "cpu"
        few = len(weights) * self.positions <= self.module.out_channels
        if self.module.groups == 1 and (few or not on_cpu):
            weight, *bias = self._outer().weighted_sum(weights)
            return [weight.view(self.module.weight.shape), *bias]
        if not on_cpu:
            return DenseGrad(self.per_sample()).weighted_sum(weights)
        return self._weighted_sum_by_kernel(weights)

    def _weighted_sum_by_kernel(self, weights: Tensor) -> list[Tensor]:
        inputs, delta = at_least_float32(self.inputs), at_least_float32(self.backprops)
        delta = delta * weights.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1))
        like = delta.new_empty(self.module.weight.shape)
        weight = self._weight_gradient(inputs, delta, like, self.module.groups)
        return [weight, delta.flatten(2).sum(2).sum(0)] if self.bias else [weight]

    def _outer(self) -> OuterProductGrad:
        """The same as outer products of δ_t and patches."""
        left = self.backprops.flatten(2).transpose(1, 2)
        right = patches(self.module, F.pad(self.inputs, self._padding_of_both_sides()))
        return OuterProductGrad(left, right, bias_ones(left) if self.bias else None)

    def per_sample(self, workspace: Workspace | None = None) -> list[Tensor]:
        few_channels = self.inputs.shape[1] <= FEW_CHANNELS
        few_positions = self.positions <= FEW_POSITIONS * self.module.out_channels
        if self.module.groups == 1 and (few_channels or few_positions):
            weight = self._by_patches(workspace or Workspace())
        else:
            weight = self._by_grouped_kernel()
        if not self.bias:
            return [weight]
        return [weight, at_least_float32(self.backprops).flatten(2).sum(2)]

    def _by_grouped_kernel(self) -> Tensor:
        inputs, delta = at_least_float32(self.inputs), at_least_float32(self.backprops)
        batch, (out, *inner) = len(inputs), self.module.weight.shape
        return self._weight_gradient(
            inputs.flatten(0, 1).unsqueeze(0),
            delta.flatten(0, 1).unsqueeze(0),
            delta.new_empty(batch * out, *inner),
            batch * self.module.groups,
        ).view(batch, out, *inner)

    def _by_patches(self, workspace: Workspace) -> Tensor:
        batch, (out, *inner) = len(self.inputs), self.module.weight.shape
        inputs, delta = at_least_float32(self.inputs), at_least_float32(self.backprops).flatten(2)
        weight = workspace((batch, out, math.prod(inner)), delta)
        block = max(1, PATCH_BLOCK // (self.positions * math.prod(inner)))
        with scratch() as (buffer, _):
            for rows in slices(batch, block):
                padded = F.pad(inputs[rows], self._padding_of_both_sides())
                columns = _columns(self.module, padded, buffer)
                torch.bmm(delta[rows], columns.transpose(1, 2), out=weight[rows])
        return weight.view(batch, out, *inner)

    def _padding_of_both_sides(self) -> list[int]:
        """The padding that is left to the kernels, for `F.pad`."""
        return [amount for amount in reversed(self.padding) for _ in range(2)]

    def _weight_gradient(
        self, inputs: Tensor, delta: Tensor, weight: Tensor, groups: int
    ) -> Tensor:
        """The weight gradient of a convolution, added over the first dimension of its input."""
        grads = torch.ops.aten.convolution_backward(
            delta,
            inputs,
            weight,
            None,
            list(self.module.stride),
            list(self.padding),
            list(self.module.dilation),
            False,
            [0] * len(self.padding),
            groups,
            [False, True, False],
        )
        assert isinstance(grads[1], Tensor)
        return grads[1]

    def _split(self) -> Iterator[ConvGrad]:
        """A few samples at a time, within the memory limit for formed gradients."""
        inputs = self.inputs.numel() + self.backprops.numel()
        block = max(1, FORMED_MEMORY * inputs // self.module.weight.numel())
        return map(self.select, slices(len(self.inputs), block))

    def select(self, rows: slice | Tensor) -> ConvGrad:
        """The gradients of some samples."""
        inputs, delta = self.inputs[rows], self.backprops[rows]
        return ConvGrad(self.module, inputs, self.padding, delta, self.bias, self.gram)

    def double(self) -> ConvGrad:
        inputs, delta = self.inputs.double(), self.backprops.double()
        return ConvGrad(self.module, inputs, self.padding, delta, self.bias, self.gram)

    def masked(self, keep: Tensor) -> ConvGrad:
        inputs, delta = keep_rows(self.inputs, keep), keep_rows(self.backprops, keep)
        return ConvGrad(self.module, inputs, self.padding, delta, self.bias, self.gram)


@dataclass
class PatchOuterGrad:
    """A convolution at one position is a linear layer; the weight keeps its own shape."""

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
        grads[names] = _weight_grad(call, module, call.activations, names)
    if "bias" in call.params and not joint:
        sums = at_least_float32(delta).flatten(2).sum(2)
        grads["bias",] = DenseGrad([sums.view(call.batch_size, -1, delta.shape[1]).sum(1)])
    return grads


def _weight_grad(call: LayerCall, module: Conv, x: Tensor, names: tuple[str, ...]) -> PerSampleGrad:
    """The gradients in the form that costs least."""
    delta, batch, bias = call.backprops, call.batch_size, "bias" in names
    preconditioner = call.preconditioner(*names)
    padding = _kernel_padding(module)
    inputs = pad_input(module, x) if padding is None else x
    grad = ConvGrad(module, inputs, padding or (0,) * len(module.kernel_size), delta, bias)
    if len(x) != batch:  # several images per sample: their gradients add up
        return DenseGrad([g.view(batch, -1, *g.shape[1:]).sum(1) for g in grad.per_sample()])
    if module.groups == 1 and grad.positions == 1:
        left, right = delta.flatten(2).transpose(1, 2), patches(module, pad_input(module, x))
        outer = OuterProductGrad(left, right, bias_ones(left) if bias else None)
        if sum(preconditioner.work):
            outer = outer.precondition(preconditioner)
        return PatchOuterGrad(outer, module.weight.shape)
    grad.gram = _gram_is_cheaper(module, inputs.shape[2:], grad.positions, preconditioner)
    formed_memory = batch * module.weight.numel()
    if not grad.gram and formed_memory <= FORMED_MEMORY * (inputs.numel() + delta.numel()):
        return DenseGrad(grad.per_sample(call.workspace))
    return grad


def _gram_is_cheaper(
    module: Conv, size: Sequence[int], positions: int, preconditioner: LinearMap
) -> bool:
    """Compare the multiplications of Gram matrices with those of forming the gradients."""
    (out, *inner), channels = module.weight.shape, module.in_channels
    inputs, places = math.prod(inner), math.prod(module.kernel_size)
    if module.groups > 1 or not preconditioner.factored:
        return False
    if preconditioner is not IDENTITY_MAP:
        return positions * (out + inputs) < out * inputs
    of_pixels = math.prod(size) ** 2 * channels
    of_positions = positions**2 * (out + GRAM_ADDITION * places)
    return GRAM_COST * (of_pixels + of_positions) < positions * out * inputs


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
