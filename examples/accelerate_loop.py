"""Train privately in a loop with Hugging Face accelerate, interrupt it, and resume it.

    python examples/accelerate_loop.py            # scikit-learn's digits, about half a minute
    python examples/accelerate_loop.py --quick    # a few seconds, less accurate

Model, optimizer and loader are prepared as usual, and then made private. The run is registered for
checkpointing: save_state and load_state carry its step count and its keys, so that the resumed run
continues with the privacy budget that is left. Weights without their privacy state would be
refused. The forward passes run in bfloat16.

Prints where the loop was interrupted, then the test accuracy and the epsilon spent:

    interrupted after 112 of 225 steps
    test accuracy 0.925  epsilon 2.999962039949833

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[hugging-face,demo]'
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import dpkfc
from dpkfc.app.models import paper_cnn
from dpkfc.app.readers.digits import digits


class Training:
    """What a program builds when it starts, for the first time or to resume."""

    def __init__(self, data: TensorDataset, **budget: Any) -> None:
        shape = tuple(data.tensors[0].shape[1:])
        torch.manual_seed(0)  # the initial weights; the noise stays secret
        model = paper_cnn(shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=256, shuffle=True)

        self.accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        probe = dpkfc.probes.PinkNoise(shape=shape, classes=10, mean=0.3, std=0.3)
        self.run = dpkfc.make_private(
            self.model,
            self.optimizer,
            loader,
            loss=dpkfc.losses.cross_entropy,
            geometry=dpkfc.KFC(probe, every=20),
            **budget,
        )
        self.accelerator.register_for_checkpointing(self.run)

    def train(self, until: int) -> None:
        for images, labels in self.run.loader.take(until - self.run.steps):
            loss = F.cross_entropy(self.model(images), labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="A private accelerate loop on digits.")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    args = parser.parse_args()

    data, test = digits()
    budget = {"epsilon": args.epsilon, "delta": 1e-5, "epochs": 20 if args.quick else 40}
    with tempfile.TemporaryDirectory() as folder:
        first = Training(data, **budget)
        steps = first.run.plan.steps
        first.train(until=steps // 2)
        print(f"interrupted after {first.run.steps} of {steps} steps")
        first.accelerator.save_state(folder)
        first.run.detach()

        resumed = Training(data, **budget)
        resumed.accelerator.load_state(folder)
        resumed.train(until=steps)

    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (resumed.model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {accuracy:.3f}  epsilon {resumed.run.epsilon()}")


if __name__ == "__main__":
    main()
