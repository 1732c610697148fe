"""Private optimizers on MNIST at four epsilons, tuned alike.

The paper's CNN, 5 epochs, batches of 256. The first block has the plain cross-entropy of the
paper. In the second block every arm has labels smoothed by .3, which keeps the loss from
saturating. Every arm has three learning rates to try at epsilon 1, in each block. The other
epsilons reuse the choice made there and keep the noise that a step adds to the weights: learning
rates of SGD grow as the noise multiplier falls, those of Adam, which divides by the noise, stay.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dpkfc.planning.plan import Plan
from experiments.common.options import ReproduceOptions
from experiments.common.setting import ADADPS, BRIGHT, PAPER
from experiments.common.study import Follow, Grid, Study, reproduce_study

EPSILONS = (1.0, 2.0, 5.0, 8.0)
BLOCKS = {"plain": 0.0, "smoothed": 0.3}
# Table 6, at EPSILONS. Its "DP-SGD" uses Adam.
PUBLISHED = {
    "dp-adam": (91.7, 92.5, 93.4, 93.7),
    "adadps": (91.3, 93.2, 93.6, 93.3),
    "disk": (93.7, 94.1, 94.3, 94.3),
    "dp-adambc": (94.0, 94.8, 95.2, 95.3),
    "public dp-kfc": (95.3, 95.7, 96.2, 96.4),
    "dp-kfc": (94.2, 95.0, 95.7, 95.9),
    "dp-kfc + adambc": (95.5, 96.1, 96.4, 96.4),
}
KFC: dict[str, Any] = PAPER | {"probe": BRIGHT["unit"], "rank": 32}
ARMS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "dp-adam": {"optimizer": {"name": "Adam"}},
    "adadps": {"geometry": ADADPS},
    "disk": {"optimizer": {"name": "DiSK", "kappa": 0.7}},
    "dp-adambc": {"optimizer": {"name": "DPAdamBC"}},
    "public dp-kfc": {"geometry": KFC | {"probe": {"public": "fashion-mnist"}, "post": 0.5}},
    "dp-kfc": {"geometry": KFC | {"post": 0.5}},
    "dp-kfc + adambc": {"geometry": KFC, "optimizer": {"name": "DPAdamBC"}},
    "dp-kfc + correlated noise": {
        "geometry": KFC,
        "noise": {"name": "BandedSquareRoot", "bands": 16},
    },
}
RATES: dict[str, dict[str, tuple[float, float, float]]] = {
    "plain": {
        "dp-sgd": (0.08, 0.04, 0.16),
        "dp-adam": (2e-3, 1e-3, 4e-3),
        "adadps": (0.04, 0.08, 0.02),
        "disk": (0.08, 0.16, 0.04),
        "dp-adambc": (1e-3, 5e-4, 2e-3),
        "public dp-kfc": (0.03, 0.04, 0.02),
        "dp-kfc": (0.03, 0.04, 0.06),
        "dp-kfc + adambc": (4e-4, 2e-4, 8e-4),
        "dp-kfc + correlated noise": (0.04, 0.08, 0.16),
    },
    "smoothed": {
        "dp-sgd": (0.12, 0.2, 0.08),
        "dp-adam": (4e-3, 2e-3, 8e-3),
        "adadps": (0.08, 0.04, 0.16),
        "disk": (0.12, 0.2, 0.08),
        "dp-adambc": (1e-3, 2e-3, 5e-4),
        "public dp-kfc": (0.04, 0.02, 0.08),
        "dp-kfc": (0.04, 0.02, 0.08),
        "dp-kfc + adambc": (4e-4, 8e-4, 2e-4),
        "dp-kfc + correlated noise": (0.08, 0.04, 0.16),
    },
}


def task_name(block: str, epsilon: float) -> str:
    return f"{block} at epsilon {epsilon:g}"


def grid(task: str) -> Grid:
    """Return the tries of a task: three learning rates per arm."""
    rates = RATES[task.split()[0]]
    return {arm: [{**options, "lr": lr} for lr in rates[arm]] for arm, options in ARMS.items()}


@cache
def noise_multiplier(epsilon: float) -> float:
    """Return the multiplier of independent noise in the paper's protocol."""
    return Plan.make(
        records=60_000, batch_size=256, epochs=5, clip=1.0, epsilon=epsilon, delta=1e-5
    ).noise_multiplier


def follow(block: str, epsilon: float) -> Follow:
    """Reuse the choice at epsilon 1, with learning rates scaled by the noise multiplier."""

    def factor(arm: str) -> float:
        if "adam" in arm:
            return 1.0
        return round(noise_multiplier(1.0) / noise_multiplier(epsilon), 2)

    return Follow(task_name(block, 1.0), factor)


STUDY = Study(
    module="experiments.table1",
    about="Tables 1 and 6 of the paper: private optimizers on MNIST at epsilon 1, 2, 5 and 8.",
    title="Private optimizers on MNIST, delta = 1e-5",
    tasks={
        task_name(block, epsilon): {
            "dataset": "mnist",
            "scaling": "unit",
            "epsilon": epsilon,
            "label_smoothing": smoothing,
        }
        for block, smoothing in BLOCKS.items()
        for epsilon in EPSILONS
    },
    grid=grid,
    published={
        (task_name(block, epsilon), arm): percent
        for block in BLOCKS
        for arm, percents in PUBLISHED.items()
        for epsilon, percent in zip(EPSILONS, percents, strict=True)
    },
    follows={
        task_name(block, epsilon): follow(block, epsilon)
        for block in BLOCKS
        for epsilon in EPSILONS[1:]
    },
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
