"""Norm layers: ``y = w ⊙ x̂ + b`` with x̂ the normalised input, so ``g_w = Σ δ ⊙ x̂`` and ``g_b = Σ δ``."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.layers.linear import Slots
from dpkfc.per_sample.record import DenseGrad, Use, at_least_float32


def over_features(use: Use) -> Slots:
    """LayerNorm and RMSNorm: the weight has the shape of the trailing dimensions."""
    module, batch = use.module, use.batch
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = list(module.normalized_shape)
    x, delta = at_least_float32(use.a), at_least_float32(use.delta).reshape(batch, -1, *shape)
    if isinstance(module, nn.RMSNorm):
        normalised = F.rms_norm(x, shape, None, module.eps)
    else:
        normalised = F.layer_norm(x, shape, None, None, module.eps)
    return _slots(normalised.reshape(batch, -1, *shape), delta, use.wanted, lambda t: t.sum(1))


def over_channels(use: Use) -> Slots:
    """GroupNorm and InstanceNorm: one weight a channel, channels in dimension 1."""
    module, batch = use.module, use.batch
    assert isinstance(
        module, nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    )
    x, delta = at_least_float32(use.a), at_least_float32(use.delta)
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else x.shape[1]
    normalised = F.group_norm(x, groups, None, None, module.eps)

    def per_channel(t: Tensor) -> Tensor:
        return t.reshape(batch, -1, t.shape[1], t[0, 0].numel()).sum((1, 3))

    return _slots(normalised, delta, use.wanted, per_channel)


def _slots(
    normalised: Tensor, delta: Tensor, wanted: set[str], reduce: Callable[[Tensor], Tensor]
) -> Slots:
    slots: Slots = []
    if "weight" in wanted:
        slots.append((("weight",), DenseGrad([reduce(normalised.mul_(delta))])))
    if "bias" in wanted:
        slots.append((("bias",), DenseGrad([reduce(delta)])))
    return slots
