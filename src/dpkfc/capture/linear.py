"""Linear layers: ``y_t = W a_t + b``, so the gradient of W is ``Σ_t δ_t a_tᵀ`` and of b is ``Σ_t δ_t``."""

from __future__ import annotations

from torch import Tensor, nn

from dpkfc.capture.record import Dense, Form, at_least_float32, matrix

Slots = list[tuple[tuple[str, ...], Form]]


def as_positions(x: Tensor, batch: int) -> Tensor:
    """[batch, *shared, features] to [batch, T, features]."""
    return x.reshape(batch, -1, x.shape[-1])


def linear(module: nn.Module, a: Tensor, delta: Tensor, wanted: set[str], joint: bool, batch: int) -> Slots:
    """nn.Linear: weight is [out, in]."""
    return _matrix(as_positions(a, batch), as_positions(delta, batch), wanted, joint, transposed=False)


def conv1d_of_transformers(
    module: nn.Module, a: Tensor, delta: Tensor, wanted: set[str], joint: bool, batch: int
) -> Slots:
    """Hugging Face's Conv1D (GPT-2), a linear layer whose weight is [in, out]."""
    return _matrix(as_positions(a, batch), as_positions(delta, batch), wanted, joint, transposed=True)


def _matrix(a: Tensor, delta: Tensor, wanted: set[str], joint: bool, transposed: bool) -> Slots:
    if joint and wanted == {"weight", "bias"}:
        return [(("weight", "bias"), matrix(delta, a, ones=True, transposed=transposed))]
    slots: Slots = []
    if "weight" in wanted:
        slots.append((("weight",), matrix(delta, a, transposed=transposed)))
    if "bias" in wanted:
        slots.append((("bias",), Dense([at_least_float32(delta).sum(1)])))
    return slots
