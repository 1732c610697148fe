"""LSTM, GRU and RNN, and their cells, step by step: the fused kernels do not run under vmap.

LSTM  i, f, g, o = W_ih x + b_ih + W_hh h + b_hh;  c' = σ(f) c + σ(i) tanh(g);  h' = σ(o) tanh(c')
GRU   r, z, n    = ...;  n = tanh(W_in x + b_in + r (W_hn h + b_hn));  h' = (1 - z) n + z h
RNN   h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu

With `proj_size`, the h' of an LSTM is W_hr h'. In a packed sequence the state of a sequence changes
only at its own time steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpkfc.per_sample.base import LayerAdapter
from dpkfc.per_sample.layers.vmap import by_sample
from dpkfc.per_sample.registry import register_layer

Recurrent = nn.LSTM | nn.GRU | nn.RNN
Cell = nn.LSTMCell | nn.GRUCell | nn.RNNCell

_PACK_INSIDE = (
    ". To use packed sequences, pass the padded sequences and their lengths to the model and call "
    "pack_padded_sequence inside its forward"
)


def _cell_forward(
    module: Cell,
    params: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One time step with one copy of the parameters per sample; x is [rows, features]."""
    x, state = _arguments(*args, **kwargs)
    x_rows = by_sample(x, batch_size, "batch", "features")
    if state is None:
        state = x.new_zeros(len(x), module.hidden_size)
        state = (state, state) if isinstance(module, nn.LSTMCell) else state
    h, c = state if isinstance(module, nn.LSTMCell) else (state, state)
    frozen = {name: p for name, p in module.named_parameters() if name not in params}

    def sample_forward(own: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> Any:
        weights = {**frozen, **own}
        from_input = F.linear(x, weights["weight_ih"], weights.get("bias_ih"))
        from_state = F.linear(h, weights["weight_hh"], weights.get("bias_hh"))
        return _step(module, from_input, from_state, h, c)

    states = [by_sample(s, batch_size, "batch", "hidden") for s in (h, c)]
    h, c = (y.flatten(0, 1) for y in torch.vmap(sample_forward)(params, x_rows, *states))
    return (h, c) if isinstance(module, nn.LSTMCell) else h


def _sequence_forward(
    module: Recurrent,
    params: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The module's output with one copy of the parameters per sample.

    A sample may have several sequences: x is [rows, T, features] with a multiple of `batch_size`
    rows. Sequence j of a packed sequence, in the order before sorting, is row j.
    """
    x, state = _arguments(*args, **kwargs)
    packed = x if isinstance(x, PackedSequence) else None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
    inputs = {"x": by_sample(x, batch_size, "batch", "time", "features", hint=_PACK_INSIDE)}
    frozen = {name: p for name, p in module.named_parameters() if name not in params}
    if state is None:
        directions = module.num_layers * (2 if module.bidirectional else 1)
        h = x.new_zeros(directions, len(x), module.proj_size or module.hidden_size)
        c = x.new_zeros(directions, len(x), module.hidden_size)
    else:
        h, c = state if isinstance(module, nn.LSTM) else (state, state)
    for name, states in (("h", h), ("c", c)):
        by_row = states.transpose(0, 1)
        inputs[name] = by_sample(by_row, batch_size, "batch", "layers", "hidden")
    if packed is not None:
        valid = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).to(x.device)
        inputs["valid"] = by_sample(valid, batch_size, "batch", "time")
        if module.dropout and module.training and module.num_layers > 1:
            masks = _dropout_masks(module, x)
            inputs["masks"] = by_sample(masks, batch_size, "batch", "time", "layers", "features")

    def sample_forward(own: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
        return _unroll(module, {**frozen, **own}, **inputs)

    results = torch.vmap(sample_forward, randomness="different")(params, inputs)
    out, h, c = (y.flatten(0, 1) for y in results)
    h, c = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
    out = out if packed is None else _packed_like(packed, out, lengths)
    return (out, (h, c)) if isinstance(module, nn.LSTM) else (out, h)


def _arguments(input: Any, hx: Any = None) -> tuple[Any, Any]:
    return input, hx


def _dropout_masks(module: Recurrent, x: Tensor) -> Tensor:
    """Masks of the dropout between layers of a packed sequence: [rows, T, layers - 1, features].

    They are drawn time by time from one seed. So neither a sample's masks nor what is drawn after
    them depends on T, the length of the longest sequence in the batch.
    """
    generator = torch.Generator(x.device).manual_seed(int(torch.randint(2**62, ())))
    width = (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
    ones = x.new_ones(len(x), module.num_layers - 1, width)
    keep = 1 - module.dropout
    draws = [torch.bernoulli(ones * keep, generator=generator) for _ in range(x.shape[1])]
    return torch.stack(draws, 1) * (1 / keep if keep else 0.0)


def _packed_like(packed: PackedSequence, out: Tensor, lengths: Tensor) -> PackedSequence:
    """Pack `out` ([rows, T, features], in the order before sorting) as the input was packed."""
    if packed.sorted_indices is not None:
        out = out[packed.sorted_indices]
        lengths = lengths[packed.sorted_indices.cpu()]
    data = pack_padded_sequence(out, lengths, batch_first=True).data
    return packed._replace(data=data)


def _unroll(
    module: Recurrent,
    parameters: dict[str, Tensor],
    x: Tensor,
    h: Tensor,
    c: Tensor,
    valid: Tensor | None = None,
    masks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences of one sample: x [rows, T, features]; states [rows, layers, hidden].

    `valid` ([rows, T]) is false behind the end of a sequence; `masks` are those of `_dropout_masks`
    if they are drawn already.
    """
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(module.num_layers):
        directions = []
        for direction in range(2 if module.bidirectional else 1):
            suffix = f"l{layer}" + ("_reverse" if direction else "")
            weights = {
                name.removesuffix(f"_{suffix}"): p
                for name, p in parameters.items()
                if name.endswith(f"_{suffix}")
            }
            index = len(last_h)
            outputs, end_h, end_c = _scan(
                module, weights, x, h[:, index], c[:, index], valid, backwards=bool(direction)
            )
            directions.append(outputs)
            last_h.append(end_h)
            last_c.append(end_c)
        x = torch.cat(directions, -1)
        if module.dropout and module.training and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout) if masks is None else x * masks[:, :, layer]
    return x, torch.stack(last_h, 1), torch.stack(last_c, 1)


def _scan(
    module: Recurrent,
    weights: dict[str, Tensor],
    x: Tensor,
    h: Tensor,
    c: Tensor,
    valid: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction: the outputs [rows, T, hidden] and the last state."""
    from_inputs = F.linear(x, weights["weight_ih"], weights.get("bias_ih"))
    outputs: dict[int, Tensor] = {}
    for t in reversed(range(x.shape[1])) if backwards else range(x.shape[1]):
        from_state = F.linear(h, weights["weight_hh"], weights.get("bias_hh"))
        next_h, next_c = _step(module, from_inputs[:, t], from_state, h, c)
        if "weight_hr" in weights:
            next_h = F.linear(next_h, weights["weight_hr"])
        if valid is not None:
            is_valid = valid[:, t].unsqueeze(1)
            next_h, next_c = torch.where(is_valid, next_h, h), torch.where(is_valid, next_c, c)
        h, c = next_h, next_c
        outputs[t] = h
    return torch.stack([outputs[t] for t in range(x.shape[1])], 1), h, c


def _step(
    module: Recurrent | Cell, from_input: Tensor, from_state: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """The formulas above, from ``W_ih x + b_ih`` and ``W_hh h + b_hh``: the next h and c."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        i, f, g, o = (from_input + from_state).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if isinstance(module, nn.GRU | nn.GRUCell):
        r, z, _ = (from_input + from_state).chunk(3, -1)
        z = torch.sigmoid(z)
        n = torch.tanh(from_input.chunk(3, -1)[2] + torch.sigmoid(r) * from_state.chunk(3, -1)[2])
        return (1 - z) * n + z * h, c
    nonlinearity = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return nonlinearity(from_input + from_state), c


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register_layer(_kind, LayerAdapter(per_sample_forward=_sequence_forward, params=None))
for _cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    register_layer(_cell, LayerAdapter(per_sample_forward=_cell_forward, params=None))
