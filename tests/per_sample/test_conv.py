"""Every way to compute the gradients of a convolution gives the same, for all its options.

Which way a layer takes depends on its sizes. Here each is taken for each option.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkfc.geometry.factors import LowRankRoot
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.per_sample.base import IDENTITY_MAP, HookedModule, LayerCall
from dpkfc.per_sample.capture import per_sample_grads
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.layers import conv
from dpkfc.per_sample.layers.conv import ConvGrad, PatchOuterGrad
from dpkfc.per_sample.registry import adapter_for

BATCH = 5
KINDS: dict[int, type[conv.Conv]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPACE = {1: (9,), 2: (7, 6), 3: (4, 3, 5)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "no_bias": {"kernel_size": 2, "bias": False},
    "padding": {"kernel_size": 3, "padding": 1},
    "padding_wider_than_the_kernel": {"kernel_size": 2, "padding": 1, "stride": 4},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "stride_past_the_end": {"kernel_size": 2, "stride": 3},
    "dilation": {"kernel_size": 2, "dilation": 3, "padding": 2},
    "same": {"kernel_size": 2, "padding": "same"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
}


def call_of(module: conv.Conv, x: Tensor) -> LayerCall:
    """The call of a layer whose δ differs between samples."""
    adapter, built_in = adapter_for(module)
    params = dict(module.named_parameters())
    hooked = HookedModule("layer", module, "layer", params, adapter, built_in)
    out = module(x).detach()
    weights = torch.linspace(1, 2, out.numel(), dtype=x.dtype).view_as(out)
    return LayerCall(hooked, params, len(x), x, out.cos() * weights)


def grad_of(call: LayerCall, gram: bool) -> ConvGrad:
    module, x = call.module, call.activations
    assert isinstance(module, conv.Conv) and x is not None
    padding = conv._kernel_padding(module)
    inputs = conv.pad_input(module, x) if padding is None else x
    zero = (0,) * len(module.kernel_size)
    bias = module.bias is not None
    return ConvGrad(module, inputs, padding or zero, call.backprops, bias, gram)


def reference(call: LayerCall) -> list[Tensor]:
    """One autograd pass per sample, [B, *shape] for each parameter."""
    assert call.activations is not None
    params = list(call.params.values())
    each = [
        torch.autograd.grad((call.module(x[None]) * delta).sum(), params)
        for x, delta in zip(call.activations, call.backprops, strict=True)
    ]
    return [torch.stack(parts) for parts in zip(*each, strict=True)]


@pytest.fixture(params=[(dims, name) for dims in KINDS for name in OPTIONS], ids=str)
def call(request: pytest.FixtureRequest) -> LayerCall:
    dims, name = request.param
    torch.manual_seed(0)
    module = KINDS[dims](6, 7, **OPTIONS[name]).double()
    return call_of(module, torch.randn(BATCH, 6, *SPACE[dims]).double())


@pytest.mark.parametrize("few_positions", [0.0, float("inf")], ids=["grouped_kernel", "patches"])
def test_formed_gradients(
    call: LayerCall, few_positions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv, "FEW_POSITIONS", few_positions)
    monkeypatch.setattr(conv, "PATCH_BLOCK", 2000)  # several blocks
    torch.testing.assert_close(grad_of(call, gram=False).per_sample(), reference(call))


@pytest.mark.parametrize("gram", [False, True])
def test_squared_norms(call: LayerCall, gram: bool) -> None:
    want = sum(g.flatten(1).square().sum(1) for g in reference(call))
    torch.testing.assert_close(grad_of(call, gram).squared_norms(IDENTITY_MAP), want)


@pytest.mark.parametrize("gram", [False, True])
def test_squared_norms_of_mapped_gradients(call: LayerCall, gram: bool) -> None:
    module = call.module
    assert isinstance(module, conv.Conv)
    out, inputs = len(module.weight), module.weight[0].numel()
    bias = int(module.bias is not None)
    vectors = torch.linalg.qr(torch.randn(inputs + bias, 2).double()).Q
    root = LowRankRoot(0.7, vectors, torch.tensor([0.4, -0.3]).double(), bool(bias))
    preconditioner = KroneckerMap(None, root, inputs, out)
    matrix = 0.7 * torch.eye(inputs + bias) + (vectors * root.weights) @ vectors.T
    whole = torch.cat([g.reshape(BATCH, out, -1) for g in reference(call)], 2) @ matrix
    want = whole.flatten(1).square().sum(1)
    torch.testing.assert_close(grad_of(call, gram).squared_norms(preconditioner), want)


@pytest.mark.parametrize("kernel_block", [1, 50, 10**6], ids=["one", "few", "all"])
def test_weighted_sum(call: LayerCall, kernel_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the kernel per sample, for a few, and for all."""
    monkeypatch.setattr(conv, "KERNEL_BLOCK", kernel_block)
    weights = torch.rand(BATCH).double()
    want = [torch.tensordot(weights, g, 1) for g in reference(call)]
    torch.testing.assert_close(grad_of(call, gram=True).weighted_sum(weights), want)


def test_the_form_follows_the_sizes() -> None:
    """So that the cases of other tests are known to reach each form."""

    def form(module: conv.Conv, *space: int) -> Any:
        made = call_of(module, torch.randn(64, module.in_channels, *space))
        (grad,) = per_sample_grads(made).values()
        return grad

    resnet = form(nn.Conv2d(16, 16, 3, padding=1, bias=False), 32, 32)
    assert isinstance(resnet, DenseGrad)
    wide = form(nn.Conv2d(64, 64, 3, padding=1), 8, 8)
    assert isinstance(wide, ConvGrad) and wide.gram
    long_kernel = form(nn.Conv1d(4, 64, 99, groups=2), 128)
    assert isinstance(long_kernel, ConvGrad) and not long_kernel.gram
    assert isinstance(form(nn.Conv2d(24, 32, 3), 3, 3), PatchOuterGrad)


def test_few_positions_and_a_large_weight_are_added_up_by_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    call = call_of(nn.Conv2d(8, 48, 3, padding=1).double(), torch.randn(3, 8, 4, 4).double())
    grad, weights = grad_of(call, gram=True), torch.rand(3).double()
    monkeypatch.setattr(ConvGrad, "_weighted_sum_by_kernel", None)
    want = [torch.tensordot(weights, g, 1) for g in reference(call)]
    torch.testing.assert_close(grad.weighted_sum(weights), want)
