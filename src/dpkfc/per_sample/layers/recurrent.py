"""LSTM, GRU and RNN step by step, since the fused kernels do not run under vmap.

LSTM  i, f, g, o = W_ih x + b_ih + W_hh h + b_hh;  c' = σ(f) c + σ(i) tanh(g);  h' = σ(o) tanh(c')
GRU   r, z, n    = ...;  n = tanh(W_in x + b_in + r (W_hn h + b_hn));  h' = (1 - z) n + z h
RNN   h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.base import LayerAdapter
from dpkfc.per_sample.registry import register_layer

Recurrent = nn.LSTM | nn.GRU | nn.RNN


def _per_sample_forward(
    module: Recurrent,
    params: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The module's output with one copy of the parameters per sample."""
    x, state = _arguments(*args, **kwargs)
    kind = type(module).__name__
    if not isinstance(x, Tensor):
        raise PrivacyError(
            f"{kind}: a packed sequence mixes the samples. Pad the sequences and mask the loss "
            "instead"
        )
    if module.proj_size:
        raise PrivacyError(f"{kind}: proj_size is not supported. Add a Linear layer after it")
    frozen = {name: p for name, p in module.named_parameters() if name not in params}
    layers = module.num_layers * (2 if module.bidirectional else 1)
    zeros = x.new_zeros(batch_size, layers, module.hidden_size)
    if isinstance(module, nn.LSTM):
        h, c = (zeros, zeros) if state is None else (s.transpose(0, 1) for s in state)
    else:
        h, c = zeros if state is None else state.transpose(0, 1), zeros

    def sample_forward(
        own: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _unroll(module, {**frozen, **own}, x, h, c)

    out, h, c = torch.vmap(sample_forward, randomness="different")(params, x, h, c)
    h, c = h.transpose(0, 1), c.transpose(0, 1)
    return (out, (h, c)) if isinstance(module, nn.LSTM) else (out, h)


def _arguments(input: Any, hx: Any = None) -> tuple[Any, Any]:
    return input, hx


def _unroll(
    module: Recurrent, parameters: dict[str, Tensor], x: Tensor, h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One sample, x [T, features]; states [layers, hidden]."""
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(module.num_layers):
        directions = []
        for direction in range(2 if module.bidirectional else 1):
            suffix = f"l{layer}" + ("_reverse" if direction else "")
            weights = [
                parameters.get(f"{kind}_{suffix}")
                for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
            ]
            index = len(last_h)
            outputs, h, c = _scan(
                module, weights, x.flip(0) if direction else x, h0[index], c0[index]
            )
            directions.append(outputs.flip(0) if direction else outputs)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(directions, -1)
        if module.dropout and module.training and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout)
    return x, torch.stack(last_h), torch.stack(last_c)


def _scan(
    module: Recurrent, weights: list[Tensor | None], x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    w_ih, b_ih, w_hh, b_hh = weights
    assert w_ih is not None and w_hh is not None
    outputs = []
    for from_input in F.linear(x, w_ih, b_ih).unbind(0):
        from_state = F.linear(h, w_hh, b_hh)
        if isinstance(module, nn.LSTM):
            i, f, g, o = (from_input + from_state).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        elif isinstance(module, nn.GRU):
            r, z, _ = (from_input + from_state).chunk(3)
            z = torch.sigmoid(z)
            n = torch.tanh(from_input.chunk(3)[2] + torch.sigmoid(r) * from_state.chunk(3)[2])
            h = (1 - z) * n + z * h
        else:
            h = (torch.tanh if module.nonlinearity == "tanh" else torch.relu)(
                from_input + from_state
            )
        outputs.append(h)
    return torch.stack(outputs), h, c


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register_layer(_kind, LayerAdapter(per_sample_forward=_per_sample_forward, params=None))
