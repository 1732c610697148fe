"""Linear layers: ``y_t = W a_t + b``, so ``g_W = Σ_t δ_t a_tᵀ`` and ``g_b = Σ_t δ_t``."""

from __future__ import annotations

from torch import Tensor, nn

from dpkfc.per_sample.base import GradsByName, KroneckerForm, LayerAdapter, LayerCall, PerSampleGrad
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.outer import OuterProductGrad, outer_product_grad
from dpkfc.per_sample.registry import register_layer
from dpkfc.per_sample.rounding import at_least_float32


def as_positions(x: Tensor, batch_size: int) -> Tensor:
    """[batch, *shared, features] to [batch, T, features]."""
    return x.reshape(batch_size, -1, x.shape[-1])


def _vectors(call: LayerCall) -> tuple[Tensor, Tensor]:
    """a and δ as [batch, T, features]."""
    assert call.activations is not None
    batch = call.batch_size
    return as_positions(call.activations, batch), as_positions(call.backprops, batch)


def _per_sample_grads(call: LayerCall, transposed: bool) -> GradsByName:
    a, delta = _vectors(call)
    bias = "bias" in call.params
    if "weight" in call.params and not call.shared:
        names = ("weight", "bias") if bias else ("weight",)
        preconditioner = call.preconditioner(*names)
        grad = outer_product_grad(delta, a, call.workspace, preconditioner, bias, transposed)
        return {names: grad}
    grads: dict[tuple[str, ...], PerSampleGrad] = {}
    if "weight" in call.params:  # shared: an outer product can be combined with the other uses
        grads["weight",] = OuterProductGrad(delta, a, transposed=transposed)
    if bias:
        grads["bias",] = DenseGrad([at_least_float32(delta).sum(1)])
    return grads


def _kronecker_vectors(call: LayerCall) -> tuple[Tensor, Tensor]:
    a, delta = _vectors(call)
    return a.unsqueeze(2), delta.unsqueeze(2)


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0], weight.shape[1]


register_layer(
    nn.Linear,
    LayerAdapter(
        lambda call: _per_sample_grads(call, transposed=False),
        kronecker=KroneckerForm(lambda m: (1, *_weight_shape(m)[::-1]), _kronecker_vectors),
    ),
)
# Hugging Face's Conv1D (GPT-2) is a linear layer whose weight is [in, out].
register_layer(
    "transformers.pytorch_utils.Conv1D",
    LayerAdapter(
        lambda call: _per_sample_grads(call, transposed=True),
        kronecker=KroneckerForm(lambda m: (1, *_weight_shape(m)), _kronecker_vectors),
        transposed=True,
    ),
)
