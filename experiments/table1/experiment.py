"""Tables 1 and 6 of the paper: private optimizers on MNIST at epsilon 1, 2, 5 and 8, tuned alike.

    python -m experiments.optimizers --data-dir DATA --out runs/optimizers.jsonl
    python -m experiments.optimizers --stage table --out runs

The paper's CNN, 5 epochs, batches of 256. The first block has its plain cross-entropy; in the second every arm has
labels smoothed by .3, which keeps the loss from saturating. Every arm has three learning rates to try at epsilon 1, in
each block. The other epsilons take over what was chosen there, with the noise that a step adds to the weights kept: the
rates of SGD grow as the noise multiplier falls, those of Adam, which divides by the noise, stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from experiments.common.setting import PAPER
from experiments.common.study import Follow, Grid, Study, main
from experiments.geometry.experiment import BRIGHT

from dpkfc.planning.plan import Plan

EPSILONS = (1.0, 2.0, 5.0, 8.0)
BLOCKS = {"plain": 0.0, "smoothed": 0.3}
PUBLISHED = {  # Table 6, at EPSILONS; its DP-SGD is Adam
    "dp-adam": (91.7, 92.5, 93.4, 93.7),
    "adadps": (91.3, 93.2, 93.6, 93.3),
    "disk": (93.7, 94.1, 94.3, 94.3),
    "dp-adambc": (94.0, 94.8, 95.2, 95.3),
    "public dp-kfc": (95.3, 95.7, 96.2, 96.4),
    "dp-kfc": (94.2, 95.0, 95.7, 95.9),
    "dp-kfc + adambc": (95.5, 96.1, 96.4, 96.4),
}
KFC: dict[str, Any] = PAPER | {"probe": BRIGHT["unit"], "rank": 32}
ADADPS: dict[str, Any] = {
    "kind": "Diagonal",
    "probe": BRIGHT["unit"],
    "every": 50,
    "probes": 512,
    "damping": 0.1,
    "stability": 0.0,
    "power": 1.0,
}
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


def name(block: str, epsilon: float) -> str:
    return f"{block} at epsilon {epsilon:g}"


def grid(task: str) -> Grid:
    rates = RATES[task.split()[0]]
    return {arm: [{**options, "lr": lr} for lr in rates[arm]] for arm, options in ARMS.items()}


@cache
def noise(epsilon: float) -> float:
    """The multiplier of independent noise in the paper's protocol."""
    return Plan.make(
        records=60_000, batch_size=256, epochs=5, clip=1.0, epsilon=epsilon, delta=1e-5
    ).noise_multiplier


def follow(block: str, epsilon: float) -> Follow:
    def factor(arm: str) -> float:
        return 1.0 if "adam" in arm else round(noise(1.0) / noise(epsilon), 2)

    return Follow(name(block, 1.0), factor)


STUDY = Study(
    module="experiments.optimizers",
    about="Tables 1 and 6 of the paper: private optimizers on MNIST at epsilon 1, 2, 5 and 8, tuned alike.",
    title="Private optimizers on MNIST, delta = 1e-5",
    tasks={
        name(block, epsilon): {
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
        (name(block, epsilon), arm): figure
        for block in BLOCKS
        for arm, figures in PUBLISHED.items()
        for epsilon, figure in zip(EPSILONS, figures, strict=True)
    },
    follows={
        name(block, epsilon): follow(block, epsilon) for block in BLOCKS for epsilon in EPSILONS[1:]
    },
)

if __name__ == "__main__":
    main(STUDY)
