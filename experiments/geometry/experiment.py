"""DP-SGD and DP-KFC with the paper's CNN, Poisson sampling and PLD accounting, tuned alike."""

from __future__ import annotations

from experiments.common.options import ReproduceOptions
from experiments.common.setting import BRIGHT, PAPER, SCALING, StudySetting
from experiments.common.study import Grid, Study, reproduce_study


def grid(dataset: str) -> Grid:
    """Return the tries of a data set, as many for every arm.

    "best" truncates factors at rank 32 and adds a milder map after the noise. The clips of DP-SGD
    are tried at equal lr · clip, to which the noise of a step is proportional.
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
    about="DP-SGD and DP-KFC on MNIST and FashionMNIST, tuned alike.",
    title=f"Accuracy at epsilon = {StudySetting.epsilon:g}, delta = {StudySetting.delta:g}",
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


def reproduce(options: ReproduceOptions) -> None:
    """Run the study; quick: one try, one seed and a tenth of an epoch per arm."""
    reproduce_study(STUDY, options)
