"""Tune hyperparameters on public data for free, then train once on private data.

    python examples/public_tuning.py            # about half a minute
    python examples/public_tuning.py --quick    # fewer tries, shorter runs

Hyperparameters that were chosen by looking at private records reveal something about them, and
epsilon does not cover it. On public records the choice is free: dpkfc.tune lets Optuna try settings
there, with the same noise multiplier as the private run. Here 400 of the digits stand for a public
data set. (For tuning on private records, with its price in epsilon, see dpkfc.tune_privately.)

Prints the best tries, the chosen settings, the test accuracy and the epsilon of the private run:

    chosen: damping 0.037, lr 0.16
    test accuracy 0.911  epsilon 2.999992568758807

The noise is secret and differs in every run, so the results differ too.

Needs: pip install 'dpkfc[demo,tune]'
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

import dpkfc
from dpkfc.app.models import digits_cnn
from dpkfc.app.readers.digits import digits

if TYPE_CHECKING:
    from optuna import Trial

EPSILON = 3.0
DELTA = 1e-5
BATCH_SIZE = 128
PROBE = dpkfc.probes.PinkNoise(shape=(1, 8, 8), classes=10, mean=0.3, std=0.3)


def train(
    data: Dataset[Any], *, lr: float, damping: float, **settings: Any
) -> tuple[torch.nn.Module, dpkfc.PrivateRun]:
    """Train a small CNN privately on `data`."""
    torch.manual_seed(0)  # the same initial weights; the noise stays secret
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    run = dpkfc.make_private(
        model,
        optimizer,
        data,
        loss=dpkfc.losses.cross_entropy,
        geometry=dpkfc.KFC(PROBE, damping=damping, every=20),
        delta=DELTA,
        batch_size=BATCH_SIZE,
        **settings,
    )
    for images, labels in run.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, run


def accuracy(model: torch.nn.Module, data: Dataset[Any]) -> float:
    images, labels = (torch.stack([torch.as_tensor(record[i]) for record in data]) for i in (0, 1))
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune on public data, train on private data.")
    parser.add_argument("--quick", action="store_true", help="fewer tries and shorter runs")
    args = parser.parse_args()
    steps = 30 if args.quick else 80

    records, test = digits()
    private = Subset(records, range(400, len(records)))
    public_train = Subset(records, range(300))
    public_test = Subset(records, range(300, 400))

    # The plan of the private run says how much noise it needs. It looks at no record.
    plan = dpkfc.Plan.make(
        records=len(private),
        batch_size=BATCH_SIZE,
        steps=steps,
        clip=1.0,
        epsilon=EPSILON,
        delta=DELTA,
    )

    def objective(trial: Trial) -> float:
        model, _ = train(
            public_train,
            lr=trial.suggest_float("lr", 0.01, 1.0, log=True),
            damping=trial.suggest_float("damping", 0.003, 0.3, log=True),
            noise_multiplier=plan.noise_multiplier,
            steps=steps,
        )
        return accuracy(model, public_test)

    tuned = dpkfc.tune(objective, tries=4 if args.quick else 15, seed=0)
    print(tuned)
    chosen = ", ".join(f"{name} {value:.2g}" for name, value in sorted(tuned.settings.items()))
    print(f"chosen: {chosen}")

    model, run = train(private, **tuned.settings, epsilon=EPSILON, steps=steps)
    print(f"test accuracy {accuracy(model, test):.3f}  epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
