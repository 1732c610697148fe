"""Train the paper's CNN privately, once with DP-SGD and once with DP-KFC, at the same epsilon.

    python examples/mnist_cnn.py                    # scikit-learn's digits, about half a minute
    python examples/mnist_cnn.py --data-dir DATA    # MNIST, from idx files in DATA/mnist
    python examples/mnist_cnn.py --quick            # a few seconds, less accurate

The two runs differ in the geometry only: DP-SGD clips gradients as they are, DP-KFC preconditions
them before clipping and noise. The preconditioner is built from pink noise, so it costs no budget.

Prints, for each method, the test accuracy and the epsilon spent:

    DP-SGD  test accuracy 0.869  epsilon 2.999962039949833
    DP-KFC  test accuracy 0.964  epsilon 2.999962039949833

The noise is secret and differs in every run, so the accuracies differ too.

Needs: pip install 'dpkfc[demo]'
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import paper_cnn
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.idx import idx_images


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    inputs, labels = data.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="DP-SGD and DP-KFC on MNIST or digits.")
    parser.add_argument("--data-dir", help="folder with mnist/*-ubyte[.gz]; default: the digits")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    args = parser.parse_args()

    # Preconditioned gradients have a different scale, so each method has its own learning rate.
    if args.data_dir:
        train, test = idx_images("mnist", args.data_dir)
        epochs = 5.0
        learning_rates = {"DP-SGD": 0.08, "DP-KFC": 0.08}
    else:
        train, test = digits()
        epochs = 40.0
        learning_rates = {"DP-SGD": 0.1, "DP-KFC": 0.05}
    # Fewer steps need less noise per step, and allow a larger learning rate.
    speedup = 4 if args.quick else 1

    shape = tuple(train.tensors[0].shape[1:])
    probe = dpkfc.probes.PinkNoise(shape=shape, classes=10, mean=0.3, std=0.3)
    geometries = {"DP-SGD": dpkfc.Identity(), "DP-KFC": dpkfc.KFC(probe, every=20)}
    for name, geometry in geometries.items():
        torch.manual_seed(0)  # the same initial weights; the noise stays secret
        model = paper_cnn(shape)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=speedup * learning_rates[name], momentum=0.9
        )
        run = dpkfc.make_private(
            model,
            optimizer,
            train,
            loss=dpkfc.losses.cross_entropy,
            epsilon=args.epsilon,
            delta=1e-5,
            epochs=epochs / speedup,
            batch_size=256,
            geometry=geometry,
        )
        for images, labels in run.loader:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{name}  test accuracy {accuracy(model, test):.3f}  epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
