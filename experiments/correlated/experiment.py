"""Independent beside correlated noise, with and without DP-KFC, on FashionMNIST: where it should win, and where not.

    python -m experiments.correlated --data-dir DATA --task "little noise" --out runs/little.jsonl
    python -m experiments.correlated --stage table --out runs

Correlated noise pays where sampling amplifies little: the multiplier of DP-SGD is .63 at epsilon 3 in small
batches ("little noise"), and 2.2 at epsilon .5 in large ones ("much noise"). SGD with momentum .9 everywhere.
"""

from __future__ import annotations

from experiments.common.setting import PAPER
from experiments.common.study import Grid, Study, main
from experiments.geometry.experiment import BRIGHT

BANDS = 16
NOISES = {
    "independent": None,
    "square root": {"name": "BandedSquareRoot", "bands": BANDS},
    "optimised": {"name": "BandedToeplitz", "bands": BANDS},
}
KFC = PAPER | {"probe": BRIGHT["centred"], "rank": 32}
EVERY = {
    "little noise": 50,
    "much noise": 10,
}  # refreshes of the geometry, for 704 steps and for 59
RATES = {
    ("little noise", "dp-sgd"): (0.32, 0.64, 0.16, 1.28, 0.45),
    ("little noise", "dp-kfc"): (0.08, 0.04, 0.16, 0.32, 0.64),
    ("much noise", "dp-sgd"): (0.64, 0.32, 1.28, 2.56, 1.8),
    ("much noise", "dp-kfc"): (0.32, 0.16, 0.64, 1.28, 2.56),
}


def grid(task: str) -> Grid:
    """The same learning rates for every noise."""
    geometries = {"dp-sgd": None, "dp-kfc": KFC | {"every": EVERY[task]}}
    return {
        f"{geometry}, {noise}": [
            {"lr": lr, "geometry": map_, "noise": options} for lr in RATES[task, geometry]
        ]
        for geometry, map_ in geometries.items()
        for noise, options in NOISES.items()
    }


STUDY = Study(
    module="experiments.correlated",
    about="Independent beside correlated noise, with and without DP-KFC, on FashionMNIST.",
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

if __name__ == "__main__":
    main(STUDY)
