"""Norm layers: ``y = w ⊙ x̂ + b`` with the normalised input x̂.

``g_w = Σ δ ⊙ x̂``, ``g_b = Σ δ``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.base import GradsByName, LayerAdapter, LayerCall, PerSampleGrad
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.registry import register_layer
from dpkfc.per_sample.rounding import at_least_float32


def _over_features(call: LayerCall) -> GradsByName:
    """LayerNorm and RMSNorm: the weight has the shape of the trailing dimensions."""
    module, batch = call.module, call.batch_size
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm) and call.activations is not None
    shape = list(module.normalized_shape)
    x = at_least_float32(call.activations)
    delta = at_least_float32(call.backprops).reshape(batch, -1, *shape)
    if isinstance(module, nn.RMSNorm):
        normalised = F.rms_norm(x, shape, None, module.eps)
    else:
        normalised = F.layer_norm(x, shape, None, None, module.eps)
    return _grads(call, normalised.reshape(batch, -1, *shape), delta, lambda t: t.sum(1))


def _over_channels(call: LayerCall) -> GradsByName:
    """GroupNorm and InstanceNorm: one weight per channel, channels in dimension 1."""
    module, batch = call.module, call.batch_size
    assert call.activations is not None
    x, delta = at_least_float32(call.activations), at_least_float32(call.backprops)
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else x.shape[1]
    normalised = F.group_norm(x, groups, None, None, module.eps)  # type: ignore[arg-type]

    def per_channel(t: Tensor) -> Tensor:
        return t.reshape(batch, -1, t.shape[1], t[0, 0].numel()).sum((1, 3))

    return _grads(call, normalised, delta, per_channel)


def _grads(
    call: LayerCall, normalised: Tensor, delta: Tensor, reduce: Callable[[Tensor], Tensor]
) -> GradsByName:
    grads: dict[tuple[str, ...], PerSampleGrad] = {}
    if "weight" in call.params:
        grads["weight",] = DenseGrad([reduce(normalised.mul_(delta))])
    if "bias" in call.params:
        grads["bias",] = DenseGrad([reduce(delta)])
    return grads


_OVER_FEATURES: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
_OVER_CHANNELS: tuple[type[nn.Module], ...] = (
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
for _kind in _OVER_FEATURES:
    register_layer(_kind, LayerAdapter(_over_features))
for _kind in _OVER_CHANNELS:
    register_layer(_kind, LayerAdapter(_over_channels))
