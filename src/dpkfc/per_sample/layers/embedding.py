"""Embeddings: row ``id_t`` of the weight receives δ_t, so a gradient is a few rows.

In an `nn.EmbeddingBag`, ``y = Σ_t w_t E[id_t]``, row ``id_t`` receives w_t δ. The weights w are one
(sum), one over the number of ids that are not padding (mean), or given with the call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.base import GradsByName, LayerAdapter, LayerCall
from dpkfc.per_sample.layers.linear import as_positions
from dpkfc.per_sample.layers.vmap import by_sample
from dpkfc.per_sample.registry import register_layer, register_structure
from dpkfc.per_sample.rounding import at_least_float32
from dpkfc.per_sample.rows import RowSparseGrad


def _per_sample_grads(call: LayerCall) -> GradsByName:
    """Positions that hold `padding_idx` receive no gradient, as in PyTorch."""
    module = call.module
    assert isinstance(module, nn.Embedding) and call.activations is not None
    ids = call.activations.reshape(call.batch_size, -1)
    values = as_positions(call.backprops, call.batch_size)
    if module.padding_idx is not None:
        padding = (ids == module.padding_idx).unsqueeze(2)
        values = torch.where(padding, torch.zeros_like(values), values)
    return {("weight",): RowSparseGrad.merged(ids, values, module.num_embeddings)}


def _bag_arguments(
    input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The ids [rows, length] and their weights."""
    if input.dim() != 2:  # torch itself refuses offsets with ids of two dimensions
        raise PrivacyError(
            "ids in one dimension with offsets do not tell which record an id belongs to. Pad the "
            "ids of each record to [batch, length] and set padding_idx"
        )
    return input, per_sample_weights


def _bag_activations(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The ids; with weights, [rows, 2, length] of both, in float64, which holds ids exactly."""
    ids, weights = _bag_arguments(*args, **kwargs)
    return ids if weights is None else torch.stack([ids.double(), weights.double()], 1)


def _bag_grads(call: LayerCall) -> GradsByName:
    """The modes sum and mean."""
    module, batch = call.module, call.batch_size
    assert isinstance(module, nn.EmbeddingBag) and call.activations is not None
    delta = at_least_float32(call.backprops)
    if call.activations.dim() == 3:
        ids, weights = call.activations[:, 0].long(), call.activations[:, 1].to(delta.dtype)
    else:
        ids = call.activations.long()
        weights = torch.ones_like(ids, dtype=delta.dtype)
    used = torch.ones_like(ids, dtype=torch.bool)
    if module.padding_idx is not None:
        used = ids != module.padding_idx
    if module.mode == "mean":
        weights = weights / used.sum(1, keepdim=True).clamp(min=1)
    values = weights.unsqueeze(2) * delta.unsqueeze(1)
    values = torch.where(used.unsqueeze(2), values, torch.zeros_like(values))
    values = as_positions(values, batch)
    return {("weight",): RowSparseGrad.merged(ids.view(batch, -1), values, module.num_embeddings)}


def _max_forward(
    module: nn.EmbeddingBag,
    params: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """The mode max, with one copy of the weight per sample."""
    ids, _ = _bag_arguments(*args, **kwargs)

    def sample_forward(weight: Tensor, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids, weight, mode="max", padding_idx=module.padding_idx)

    if len(ids) == 1:  # one input for all samples
        ids = ids.expand(batch_size, -1)
    rows = by_sample(ids, batch_size, "batch", "length")
    out: Tensor = torch.vmap(sample_forward)(params["weight"], rows).flatten(0, 1)
    return out


def _is_bag(module: nn.Module, modes: tuple[str, ...]) -> bool:
    if not isinstance(module, nn.EmbeddingBag) or module.mode not in modes:
        return False
    plain = type(module).forward is nn.EmbeddingBag.forward and not any(module.children())
    return plain and module._parameters.keys() == {"weight"}


register_layer(nn.Embedding, LayerAdapter(_per_sample_grads))
register_structure(
    lambda module: _is_bag(module, ("sum", "mean")),
    LayerAdapter(_bag_grads, activations=_bag_activations),
)
register_structure(
    lambda module: _is_bag(module, ("max",)), LayerAdapter(per_sample_forward=_max_forward)
)
