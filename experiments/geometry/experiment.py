"""DP-SGD beside DP-KFC on MNIST and FashionMNIST, tuned alike: the paper's CNN, Poisson sampling, PLD accounting.

python -m experiments.geometry --data-dir DATA --task mnist --out runs/mnist.jsonl
python -m experiments.geometry --stage table --out runs
"""

from __future__ import annotations

from experiments.common.setting import PAPER, Setting
from experiments.common.study import Grid, Study, main

from dpkfc.app.readers.idx import Scaling

# Both are scalings that need no statistic of the data. FashionMNIST is centred because that helps plain DP-SGD by a
# point; DP-KFC does not mind. Probes about as bright as pixels are, on either scale:
SCALING: dict[str, Scaling] = {"mnist": "unit", "fashion-mnist": "centred"}
BRIGHT = {
    "unit": {"alpha": 2.0, "std": 0.3, "mean": 0.3},
    "centred": {"alpha": 2.0, "std": 0.6, "mean": -0.4},
}


def grid(dataset: str) -> Grid:
    """As many tries for every arm.

    "best" cuts factors at rank 32 and adds a milder map after the noise. lr · clip is the step that the noise takes.
    """
    rates = (0.04, 0.08, 0.02, 0.06, 0.03, 0.01)
    best = PAPER | {"probe": BRIGHT[SCALING[dataset]], "post": 0.5, "rank": 32}
    return {
        "dp-sgd": [
            {"lr": step / clip, "clip": clip} for clip in (1.0, 0.1) for step in (0.08, 0.04, 0.16)
        ],
        "dp-kfc (paper)": [{"lr": lr, "geometry": PAPER} for lr in rates],
        "dp-kfc (paper at rank 32)": [{"lr": lr, "geometry": PAPER | {"rank": 32}} for lr in rates],
        "dp-kfc (best)": [
            *({"lr": lr, "geometry": best} for lr in (0.03, 0.02, 0.04, 0.06)),
            *(
                {"lr": lr, "geometry": best | {"every": 15, "probes": 1024, "rank": 96}}
                for lr in (0.03, 0.04)
            ),
        ],
        "dp-sgd + smoothing": [
            {"lr": 0.08, "label_smoothing": 0.1},
            *({"lr": lr, "label_smoothing": 0.3} for lr in (0.12, 0.08, 0.2, 0.05, 0.3)),
        ],
        "dp-kfc (best) + smoothing": [
            *({"lr": lr, "label_smoothing": 0.1, "geometry": best} for lr in (0.02, 0.03, 0.04)),
            *({"lr": lr, "label_smoothing": 0.3, "geometry": best} for lr in (0.04, 0.02, 0.08)),
        ],
    }


STUDY = Study(
    module="experiments.geometry",
    about="DP-SGD beside DP-KFC on MNIST and FashionMNIST, tuned alike.",
    title=f"Accuracy at epsilon = {Setting.epsilon:g}, delta = {Setting.delta:g}",
    tasks={
        dataset: {"dataset": dataset, "scaling": scaling} for dataset, scaling in SCALING.items()
    },
    grid=grid,
    published={
        ("mnist", "dp-sgd"): 91.7,
        ("mnist", "dp-kfc (paper)"): 94.2,
        ("fashion-mnist", "dp-sgd"): 83.5,
        ("fashion-mnist", "dp-kfc (paper)"): 87.8,
    },
)

if __name__ == "__main__":
    main(STUDY)
