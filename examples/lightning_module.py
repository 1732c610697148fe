"""Train a LightningModule privately: one callback, the rest is ordinary Lightning.

    python examples/lightning_module.py            # scikit-learn's digits, about a minute
    python examples/lightning_module.py --quick    # a few seconds, less accurate

The callback takes module, optimizer and training data from the Trainer. The Trainer's settings keep
their meaning: here a step has 4 x 64 expected records, of which 64 are in memory at a time, and the
learning rate falls with every private step. Validation and logging work as usual.

Prints the number of steps, the test accuracy and the epsilon spent:

    240 private steps
    test accuracy 0.942  epsilon 2.99996081533564

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[lightning,demo]'
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import dpkfc
from dpkfc.app.models import paper_cnn
from dpkfc.app.readers.digits import digits
from dpkfc.integrations.lightning import PrivateTraining


class Classifier(L.LightningModule):
    def __init__(self, shape: tuple[int, ...], lr: float) -> None:
        super().__init__()
        self.net = paper_cnn(shape)
        self.lr = lr

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description="A private LightningModule on digits.")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    args = parser.parse_args()
    # Lightning suggests more workers and more frequent logging
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    train, test = digits()
    shape = tuple(train.tensors[0].shape[1:])
    probe = dpkfc.probes.PinkNoise(shape=shape, classes=10, mean=0.3, std=0.3)
    private = PrivateTraining(epsilon=args.epsilon, delta=1e-5, geometry=dpkfc.KFC(probe, every=20))
    trainer = L.Trainer(
        max_epochs=10 if args.quick else 40,
        accumulate_grad_batches=4,
        accelerator="cpu",
        callbacks=[private],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)  # the initial weights; the noise stays secret
    module = Classifier(shape, lr=0.4 if args.quick else 0.1)
    test_loader = DataLoader(test, batch_size=360)
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), test_loader)

    (metrics,) = trainer.validate(module, test_loader, verbose=False)
    print(f"{trainer.global_step} private steps")
    print(f"test accuracy {metrics['accuracy']:.3f}  epsilon {private.run.epsilon()}")


if __name__ == "__main__":
    main()
