"""Linear layers: ``y_t = W a_t + b``, so the gradient of W is ``Σ_t δ_t a_tᵀ`` and of b is ``Σ_t δ_t``."""

from __future__ import annotations

from torch import Tensor

from dpkfc.per_sample.record import (
    DenseGrad,
    OuterProductGrad,
    PerSampleGrad,
    Use,
    at_least_float32,
    matrix,
)

Slots = list[tuple[tuple[str, ...], PerSampleGrad]]


def as_positions(x: Tensor, batch: int) -> Tensor:
    """[batch, *shared, features] to [batch, T, features]."""
    return x.reshape(batch, -1, x.shape[-1])


def linear(use: Use) -> Slots:
    """nn.Linear: weight is [out, in]."""
    return _matrix(use, transposed=False)


def conv1d_of_transformers(use: Use) -> Slots:
    """Hugging Face's Conv1D (GPT-2), a linear layer whose weight is [in, out]."""
    return _matrix(use, transposed=True)


def _matrix(use: Use, transposed: bool) -> Slots:
    a, delta = as_positions(use.a, use.batch), as_positions(use.delta, use.batch)
    slots: Slots = []
    if use.joint and "weight" in use.wanted:
        names = ("weight", "bias") if "bias" in use.wanted else ("weight",)
        form = matrix(
            delta,
            a,
            use.workspace,
            use.map_of(names),
            bias="bias" in use.wanted,
            transposed=transposed,
        )
        return [(names, form)]
    if "weight" in use.wanted:  # tied: `OuterProductGrad` can be joined with the other uses
        slots.append((("weight",), OuterProductGrad(delta, a, transposed=transposed)))
    if "bias" in use.wanted:
        slots.append((("bias",), DenseGrad([at_least_float32(delta).sum(1)])))
    return slots
