"""Embeddings: row ``id_t`` of the weight receives δ_t, so a gradient is a few rows."""

from __future__ import annotations

import torch
from torch import nn

from dpkfc.per_sample.base import GradsByName, LayerAdapter, LayerCall
from dpkfc.per_sample.layers.linear import as_positions
from dpkfc.per_sample.registry import register_layer
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


register_layer(nn.Embedding, LayerAdapter(_per_sample_grads))
