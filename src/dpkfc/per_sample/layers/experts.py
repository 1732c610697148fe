"""Mixture of experts as transformers 5 stores them: all experts of a layer in 3-dimensional
parameters (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss and others).

A router sends token t to the experts e_t1, ..., e_tk with weights w_t1, ..., w_tk:

    y_t = Σ_j w_tj (D_e (φ(U_e x_t + b_e)) + d_e)   with e = e_tj

U is `gate_up_proj` or `up_proj`, D is `down_proj`, and φ is the gate or activation of the module.
The rows x_t are the tokens of all samples, batch-major. Which expert a token goes to depends on the
data, which does not run under vmap. Here the pairs (t, j) of each sample are sorted by expert, and
expert e multiplies, for all samples at once, the pairs [batch, c_e] that chose it with one copy of
its weights per sample. c_e is the largest number of such pairs in a sample; samples with fewer are
filled up with rows of zeros, whose outputs are set to zero and discarded. So a sample's gradient is
zero for experts that none of its tokens chose, also if a weight is not finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.per_sample.base import LayerAdapter
from dpkfc.per_sample.layers.vmap import by_sample
from dpkfc.per_sample.registry import register_structure

DECORATED_IN = "transformers.integrations.moe"


def is_experts(module: nn.Module) -> bool:
    """True for classes that transformers' `use_experts_implementation` decorates.

    The decorator declares that the class computes the formula above, for parameters and options
    that it names: transformers itself replaces the class's forward by such a formula. A subclass
    with its own forward, or a module with other parameters, is not recognised.
    """
    forward: Any = module.forward
    function = getattr(forward, "__func__", None)
    if not inspect.isfunction(function) or function.__globals__.get("__name__") != DECORATED_IN:
        return False
    options: Any = module
    up = "gate_up_proj" if options.has_gate else "up_proj"
    names = {up, "down_proj"}
    if options.has_bias:
        names |= {f"{up}_bias", "down_proj_bias"}
    plain = not options._is_expert_parallel and not options.has_post_expert_norm
    return plain and {name for name, _ in module.named_parameters()} == names


def _per_sample_forward(
    module: Any,
    params: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """The module's output with one copy of the parameters per sample."""
    hidden, index, weights = _arguments(*args, **kwargs)
    x = by_sample(hidden, batch_size, "batch * tokens", "features")
    tokens, choices = x.shape[1], index.shape[-1]
    # one more token per sample, of zeros, for what fills up
    x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
    weights = weights.reshape(batch_size, -1)
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    up = "gate_up_proj" if module.has_gate else "up_proj"
    layers = zip(
        _by_expert(module, params, up), _by_expert(module, params, "down_proj"), strict=True
    )
    chosen = _pairs_by_expert(index.reshape(batch_size, -1), module.num_experts)
    for (up_layer, down_layer), (pairs, valid) in zip(layers, chosen, strict=True):
        if pairs.shape[1] == 0:
            continue
        token = torch.where(valid, pairs // choices, tokens).unsqueeze(2).expand(-1, -1, x.shape[2])
        inner = _linear(x.gather(1, token), *up_layer, valid, module.is_transposed)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y = _linear(inner, *down_layer, valid, module.is_transposed)
        y = y * weights.gather(1, pairs).unsqueeze(2)
        out.scatter_add_(1, token, y.to(out.dtype))
    return out[:, :tokens].reshape(hidden.shape).to(hidden.dtype)


def _arguments(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return hidden_states, top_k_index, top_k_weights


def _pairs_by_expert(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each expert the pairs [batch, c] that chose it, and which of them are not filled up.

    Args:
        index: [batch, pairs], the expert of each pair. Numbers from `experts` on are no expert.
    """
    counts = torch.stack([(index == expert).sum(1) for expert in range(experts)], 1)
    order = index.argsort(dim=1, stable=True)
    starts = counts.cumsum(1) - counts
    for expert, most in enumerate(counts.amax(0).tolist()):
        place = torch.arange(most, device=index.device).unsqueeze(0)
        valid = place < counts[:, expert : expert + 1]
        at = (starts[:, expert : expert + 1] + place).clamp(max=index.shape[1] - 1)
        yield order.gather(1, at), valid


def _by_expert(
    module: nn.Module, params: dict[str, Tensor], name: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each expert, with a leading batch dimension: 1 if they are frozen."""

    def parts(key: str) -> tuple[Tensor, ...]:
        value = params[key] if key in params else getattr(module, key).unsqueeze(0)
        return value.unbind(1)

    weights = parts(name)
    has_bias = getattr(module, f"{name}_bias", None) is not None
    biases = parts(f"{name}_bias") if has_bias else (None,) * len(weights)
    return list(zip(weights, biases, strict=True))


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, valid: Tensor, transposed: bool
) -> Tensor:
    """``W x + b`` where `valid`, else zero: neither the output nor its gradient sees 0 · inf."""
    y = x @ (weight if transposed else weight.transpose(1, 2))
    y = y if bias is None else y + bias.unsqueeze(1)
    return torch.where(valid.unsqueeze(2), y, torch.zeros_like(y))


register_structure(is_experts, LayerAdapter(per_sample_forward=_per_sample_forward, params=None))
