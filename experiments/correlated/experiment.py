"""Independent and correlated noise where correlated noise should win, and where it should not.

Correlated noise pays off where sampling amplifies little. The noise multiplier of DP-SGD is .63 at
epsilon 3 in small batches ("little noise") and 2.2 at epsilon .5 in large batches ("much noise").
All arms use SGD with momentum .9.
"""

from __future__ import annotations

from experiments.common.options import ReproduceOptions
from experiments.common.setting import BRIGHT, PAPER
from experiments.common.study import Grid, Study, reproduce_study

BANDS = 16
NOISES = {
    "independent": None,
    "square root": {"name": "BandedSquareRoot", "bands": BANDS},
    "optimised": {"name": "BandedToeplitz", "bands": BANDS},
}
KFC = PAPER | {"probe": BRIGHT["centred"], "rank": 32}
# Steps between refreshes of the geometry: the tasks have 704 and 59 steps.
EVERY = {"little noise": 50, "much noise": 10}
RATES = {
    ("little noise", "dp-sgd"): (0.32, 0.64, 0.16, 1.28, 0.45),
    ("little noise", "dp-kfc"): (0.08, 0.04, 0.16, 0.32, 0.64),
    ("much noise", "dp-sgd"): (0.64, 0.32, 1.28, 2.56, 1.8),
    ("much noise", "dp-kfc"): (0.32, 0.16, 0.64, 1.28, 2.56),
}


def grid(task: str) -> Grid:
    """Return the tries of a task: the same learning rates for every noise."""
    geometries = {"dp-sgd": None, "dp-kfc": KFC | {"every": EVERY[task]}}
    return {
        f"{method}, {noise_name}": [
            {"lr": lr, "geometry": geometry, "noise": noise} for lr in RATES[task, method]
        ]
        for method, geometry in geometries.items()
        for noise_name, noise in NOISES.items()
    }


STUDY = Study(
    module="experiments.correlated",
    about="Independent and correlated noise, with and without DP-KFC, on FashionMNIST.",
    title="Independent and correlated noise on FashionMNIST, delta = 1e-5",
    tasks={
        "little noise": {
            "dataset": "fashion-mnist",
            "scaling": "centred",
            "epochs": 3,
            "batch_size": 256,
            "epsilon": 3.0,
        },
        "much noise": {
            "dataset": "fashion-mnist",
            "scaling": "centred",
            "epochs": 2,
            "batch_size": 2048,
            "epsilon": 0.5,
        },
    },
    grid=grid,
)


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
