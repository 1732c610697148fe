"""Is geometry from noise as good as geometry from the private records? The test that would refute the data-free claim.

    dpkfc reproduce falsify --data-dir DATA
    python -m experiments.falsify --data-dir DATA --task "mnist mlp" --out runs/falsify.jsonl

The same model, batches, noise and clip, seed by seed; only the source of the factors differs: synthetic pink noise, the
private records (the oracle, which is not private), another public data set, white noise, or no geometry (DP-SGD).
Short runs at epsilon 1: one epoch by the perceptron, half a one by the CNN. Every arm has two learning rates, chosen on
validation records, then five new seeds. Two measures: the test accuracy at the end, and convergence, the mean of the
accuracies at eight times of the run. Differences to the oracle are taken within a seed, with a 95% interval of
Student's t. "Materially different" is an interval that lies wholly beyond ±0.5 points, "the same" one wholly within;
anything else is not decided by this many seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.common.setting import PAPER
from experiments.common.study import Grid, Row, Study, choose, finals, main
from experiments.geometry.experiment import BRIGHT, SCALING
from rich.console import Console
from scipy import stats

from dpkfc.app.readers.idx import Scaling
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.text import markdown_table

MARGIN = 0.5  # points that matter
SHORT: dict[str, dict[str, Any]] = {  # runs of seconds, by model: 118 and 235 steps of 256 records
    "cnn": {"model": None, "epochs": 0.5, "ema": 0.95, "course": 8},
    "mlp": {"model": "mlp", "epochs": 1, "ema": 0.95, "course": 8},
}
RATES = {"cnn": (0.16, 0.08), "mlp": (0.16, 0.32)}
PUBLIC = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
COLORS = {
    "dp-sgd": "tab:gray",
    "synthetic": "tab:blue",
    "oracle": "black",
    "public": "tab:green",
    "white noise": "tab:orange",
}
Measure = Callable[
    [Mapping[str, Any], str], float
]  # of a result, and of the weights that were chosen


def kfc(probe: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's map, before the noise only, cut at rank 32; factors from `probe`."""
    return PAPER | {"probe": dict(probe), "rank": 32}


def pink(scaling: Scaling, **changes: Any) -> dict[str, Any]:
    return {**BRIGHT[scaling], **changes}


def common(dataset: str, model: str) -> dict[str, Any]:
    return {"dataset": dataset, "scaling": SCALING[dataset], **SHORT[model]}


def grid(name: str) -> Grid:
    dataset, model = name.split()
    bright = SCALING[dataset]
    geometries: dict[str, dict[str, Any] | None] = {
        "dp-sgd": None,
        "synthetic": kfc(pink(bright)),
        "oracle": kfc({"oracle": "records"}),
        "public": kfc({"public": PUBLIC[dataset]}),
        "white noise": kfc(pink(bright, alpha=0.0)),
    }
    return {
        arm: [{"lr": lr, "geometry": found} for lr in RATES[model]]
        for arm, found in geometries.items()
    }


@dataclass(frozen=True)
class Difference:
    """Of two arms, within each seed, in points: the mean and its 95% interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def beyond_chance(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f}, {self.seeds} seeds)"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """``d̄ ± t_{.975, n-1} s_d / √n`` over the seeds that both have; None for fewer than two.

    >>> print(paired({1: 0.91, 2: 0.93, 3: 0.95}, {1: 0.90, 2: 0.91, 3: 0.92}))
    +2.00 (-0.48 to +4.48, 3 seeds)
    """
    gaps = [100 * (own[seed] - other[seed]) for seed in own if seed in other]
    if len(gaps) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    return Difference(fmean(gaps), fmean(gaps) - half, fmean(gaps) + half, len(gaps))


def verdict(difference: Difference) -> str:
    if difference.low > MARGIN:
        return "materially better"
    if difference.high < -MARGIN:
        return "materially worse"
    return "the same" if difference.low >= -MARGIN and difference.high <= MARGIN else "not decided"


def at_the_end(result: Mapping[str, Any], weights: str) -> float:
    return float(result[weights])


def on_the_way(result: Mapping[str, Any], weights: str) -> float:
    return fmean(result["course"])


def by_seed(
    study: Study, rows: Sequence[Row], task: str, arm: str, measure: Measure = at_the_end
) -> dict[int, float]:
    """What is measured of an arm's chosen setting, by the seed of the run; nothing if it was not run."""
    try:
        weights = choose(study, rows, task, arm)[1]
    except ValueError:
        return {}
    found = {row["key"]: row["result"] for row in rows}
    runs = [final for final in finals(study, rows, task, [arm]) if final.key in found]
    return {run.seed: measure(found[run.key], weights) for run in runs}


def compared(
    study: Study,
    rows: Sequence[Row],
    against: str,
    arms: Iterable[str],
    measure: Measure = at_the_end,
) -> dict[tuple[str, str], Difference]:
    """The differences of arms to one of them, by task and arm, where there are runs enough."""
    found = {}
    for task in study.tasks:
        reference = by_seed(study, rows, task, against, measure)
        for arm in arms:
            difference = paired(by_seed(study, rows, task, arm, measure), reference)
            if arm != against and difference is not None:
                found[task, arm] = difference
    return found


def report(study: Study, rows: Sequence[Row], folder: Path, console: Console) -> None:
    ends, ways = (
        compared(study, rows, "oracle", study.arms, measure) for measure in (at_the_end, on_the_way)
    )
    cells = [
        [*name, str(end), verdict(end), str(ways[name]), verdict(ways[name])]
        for name, end in ends.items()
    ]
    headings = ["task", "arm", "at the end, points", "", "on the way, points", ""]
    text = "\n\n".join(
        [
            "# Geometry from noise against geometry from the private records",
            "    dpkfc reproduce falsify",
            finding(ends, ways),
            "Accuracy less that of the oracle, whose factors come from the private records (so it is not private), at "
            "the same noise, batches and first weights: mean over seeds and its 95% interval. At the end: test "
            "accuracy after one epoch (mlp) or half a one (cnn). On the way: the mean over eight times of the run, for "
            "how fast it converges. "
            f"Materially: the interval lies beyond ±{MARGIN:g} points. Accuracies and tries are in accuracy.md.",
            markdown_table(headings, cells, left=2),
            "![accuracy on the way, by arm](falsify.png)",
        ]
    )
    publish(folder / "falsify", text + "\n", console, partial(plot, study, rows))


def finding(
    ends: Mapping[tuple[str, str], Difference], ways: Mapping[tuple[str, str], Difference]
) -> str:
    """What becomes of the claim that synthetic geometry is as good as the oracle's."""
    by_verdict: dict[str, list[str]] = {}
    apart = []
    for measured, differences in (("at the end", ends), ("on the way", ways)):
        for (name, arm), difference in differences.items():
            if arm == "synthetic":
                by_verdict.setdefault(verdict(difference), []).append(f"{name} {measured}")
                if difference.beyond_chance:
                    apart.append(f"{name} {measured} ({difference.mean:+.2f})")
    if not by_verdict:
        return "Too few runs for a finding."
    told = "; ".join(f"{outcome}: {', '.join(where)}" for outcome, where in by_verdict.items())
    told += f". Apart from zero, by however little: {', '.join(apart) or 'none'}"
    if "materially worse" in by_verdict:
        return (
            f"**The data-free claim is refuted in part.** Synthetic against the oracle is {told}."
        )
    if "materially better" in by_verdict:
        return f"**Synthetic geometry is at least as good as the oracle's.** It is {told}."
    return f"**Not refuted: no difference is shown to be material.** Synthetic against the oracle is {told}."


def plot(study: Study, rows: Sequence[Row], file: Path) -> None:
    """A panel a task: accuracy on the way, mean over seeds, and a band from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    courses = {
        (task, arm): _courses(study, rows, task, arm) for task in study.tasks for arm in study.arms
    }
    tasks = [task for task in study.tasks if any(courses[task, arm] for arm in study.arms)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(3.6 * len(tasks) + 0.6, 3.6), squeeze=False, layout="constrained"
    )
    for panel, task in zip(panels[0], tasks, strict=True):
        for arm in study.arms:
            if runs := courses[task, arm]:
                times = [(1 + number) / len(runs[0]) for number in range(len(runs[0]))]
                by_time = [[100 * accuracy for accuracy in at] for at in zip(*runs, strict=True)]
                panel.plot(
                    times, [*map(fmean, by_time)], "o-", markersize=3, color=COLORS[arm], label=arm
                )
                panel.fill_between(
                    times, [*map(min, by_time)], [*map(max, by_time)], color=COLORS[arm], alpha=0.12
                )
        panel.set_title(task)
        panel.set_xlabel("part of the run")
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("test accuracy, %")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), ncols=len(study.arms), loc="outside upper center"
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _courses(study: Study, rows: Sequence[Row], task: str, arm: str) -> list[list[float]]:
    found = {row["key"]: row["result"]["course"] for row in rows if row["result"].get("course")}
    try:
        return [
            found[final.key] for final in finals(study, rows, task, [arm]) if final.key in found
        ]
    except ValueError:
        return []


STUDY = Study(
    module="experiments.falsify",
    about="Geometry from synthetic noise against geometry from the private records, at equal noise.",
    title="Geometry from noise, from the private records and from public ones, epsilon = 1, delta = 1e-05",
    tasks={f"{dataset} {model}": common(dataset, model) for model in RATES for dataset in PUBLIC},
    grid=grid,
    seeds=(1, 2, 3, 4, 5),
    report=report,
)

if __name__ == "__main__":
    main(STUDY)
