"""Give a layer of your own a fast path: dpkfc.register_layer.

    python examples/custom_layer.py            # a few seconds
    python examples/custom_layer.py --quick    # fewer epochs

A module that the library does not know trains without any registration: it runs under torch.vmap
with one copy of its parameters per record. That is exact but slower. An adapter computes the same
per-sample gradients from the layer's inputs a ("activations") and the gradients δ at its outputs
("backprops"), which an ordinary backward pass provides.

A wrong adapter would break the guarantee, because the clip would bound the wrong vectors. So the
library compares every registered adapter with autograd on the first batch, before anything is
released, and raises PrivacyError if they differ.

Prints the test accuracy and the epsilon spent:

    test accuracy 0.947  epsilon 2.999989760776702

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[demo]'
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkfc
from dpkfc.app.readers.digits import digits
from dpkfc.per_sample.base import LayerCall
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.registry import LayerAdapter


class ScaledLinear(nn.Module):
    """y = s ⊙ (W a): a linear layer whose outputs have a trained scale each."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.T)


def per_sample_grads(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    """Per-sample gradients of W and s, summed over the positions t that share the layer.

    From y_t = s ⊙ (W a_t) follow

        ∂L/∂W = Σ_t (s ⊙ δ_t) a_tᵀ        ∂L/∂s = Σ_t δ_t ⊙ (W a_t)

    with inputs a_t and output gradients δ_t; L is the loss of one record.
    """
    layer = call.module
    batch = len(call.activations)
    # [batch, ..., features] -> [batch, positions, features]
    a = call.activations.reshape(batch, -1, call.activations.shape[-1])
    delta = call.backprops.reshape(batch, -1, call.backprops.shape[-1])
    grads = {
        "weight": torch.einsum("bto,bti->boi", delta * layer.scale, a),
        "scale": (delta * (a @ layer.weight.T)).sum(1),
    }
    # call.params names the parameters that are trained; a frozen one needs no gradient.
    return {(name,): DenseGrad([grads[name]]) for name in call.params}


dpkfc.register_layer(
    ScaledLinear,
    LayerAdapter(per_sample_grads=per_sample_grads, params=("weight", "scale")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Private training with a custom layer.")
    parser.add_argument("--quick", action="store_true", help="train for fewer epochs")
    args = parser.parse_args()

    train, test = digits()
    torch.manual_seed(0)  # the same initial weights; the noise stays secret
    model = nn.Sequential(nn.Flatten(), ScaledLinear(64, 64), nn.ReLU(), ScaledLinear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    run = dpkfc.make_private(
        model,
        optimizer,
        train,
        loss=dpkfc.losses.cross_entropy,
        epsilon=3.0,
        delta=1e-5,
        epochs=5 if args.quick else 20,
        batch_size=256,
    )
    for images, labels in run.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    images, labels = test.tensors
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).float().mean())
    print(f"test accuracy {accuracy:.3f}  epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
