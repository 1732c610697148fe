"""Draw test accuracy against epsilon on MNIST: DP-SGD, DP-KFC, and DP-KFC with correlated noise.

    python docs/figures/accuracy_against_epsilon.py

reads the recorded runs in docs/results/optimizers/results.jsonl, prints the mean and the standard
deviation over the seeds, and writes docs/results/accuracy-against-epsilon.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent.parent / "results"
RECORDED_RUNS = RESULTS / "optimizers" / "results.jsonl"
PICTURE = RESULTS / "accuracy-against-epsilon.png"

EPSILONS = (1.0, 2.0, 5.0, 8.0)
LOSSES = {"cross-entropy": 0.0, "with label smoothing 0.3": 0.3}
# Recorded name: label, color, marker. The colors are those of Okabe and Ito (color-blind safe).
METHODS = {
    "dp-kfc + correlated noise": ("DP-KFC + correlated noise", "#009E73", "s"),
    "dp-kfc": ("DP-KFC", "#0072B2", "o"),
    "dp-sgd": ("DP-SGD", "#D55E00", "^"),
}

Run = dict[str, Any]


def recorded_runs() -> list[Run]:
    return [json.loads(line) for line in RECORDED_RUNS.read_text().splitlines()]


def accuracies(runs: list[Run], method: str, smoothing: float) -> dict[float, tuple[float, float]]:
    """Mean and standard deviation of the test accuracy in percent, for each epsilon.

    Runs with `validation` are the tuning runs at epsilon 1. They decide whether the averaged or the
    last weights are evaluated. Runs without it trained on all records and were evaluated once.
    """
    selected = [
        run
        for run in runs
        if run["setting"]["arm"] == method and run["setting"]["label_smoothing"] == smoothing
    ]
    weights = max(
        (run["result"][weights], weights)
        for run in selected
        if run["setting"]["validation"]
        for weights in ("average", "last")
    )[1]
    percentages: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
    for run in selected:
        if not run["setting"]["validation"]:
            percentages[run["setting"]["epsilon"]].append(100 * run["result"][weights])
    return {epsilon: (fmean(values), stdev(values)) for epsilon, values in percentages.items()}


def draw(runs: list[Run], file: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.3), sharey=True, layout="constrained")
    for panel, (loss, smoothing) in zip(panels, LOSSES.items(), strict=True):
        for method, (label, color, marker) in METHODS.items():
            points = accuracies(runs, method, smoothing)
            means = [points[epsilon][0] for epsilon in EPSILONS]
            deviations = [points[epsilon][1] for epsilon in EPSILONS]
            panel.errorbar(
                EPSILONS, means, deviations, label=label, color=color, marker=marker, capsize=3
            )
        panel.set_title(loss, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        panel.set_xlabel("ε (δ = 1e-5)")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("MNIST test accuracy, %")
    panels[1].legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(file, dpi=160, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    runs = recorded_runs()
    for loss, smoothing in LOSSES.items():
        for method in METHODS:
            points = accuracies(runs, method, smoothing).items()
            row = ", ".join(f"ε = {eps:g}: {mean:.2f} ± {dev:.2f}" for eps, (mean, dev) in points)
            print(f"{loss}; {method}: {row}")
    draw(runs, PICTURE)
    print(PICTURE)
