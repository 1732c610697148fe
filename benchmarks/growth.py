"""How the cost of a training step grows with width, length and batch size.

    python -m benchmarks.growth --json growth.json --plot growth.png
    python -m benchmarks.growth --json growth.json --quick

Ordinary training, DP-SGD and DP-KFC are measured as `benchmarks.speed` does, with the refresh
included: at every size the arms take turns in one process. Compare the ratios to the `sgd` arm at
the same size.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.speed import EVERY, positive, remarks, time_workload, versions, with_ratios
from benchmarks.workloads import Record, Workload
from dpkfc.app.models import mlp
from dpkfc.app.models.transformer import Block, MeanPool
from dpkfc.probes import Tabular, Tokens

ARMS = ("sgd", "dpkfc", "dpkfc_kfc")
VOCABULARY = 1000
CLASSES = 10


@dataclass(frozen=True)
class SizeSweep:
    """A sweep over one size.

    Args:
        title: The heading of its panel.
        sizes: The sizes.
        work: The number of steps in a row within a timing round, times the size.
        workload: Builds the workload from the size and the number of steps.
    """

    title: str
    sizes: tuple[int, ...]
    work: int
    workload: Callable[[int, int], Workload]


def wide(width: int, batch_size: int, steps: int) -> Workload:
    """A perceptron with two layers of width x width."""

    def batch(rows: int) -> Record:
        return torch.randn(rows, width), torch.randint(CLASSES, (rows,))

    probe = Tabular(width, classes=CLASSES, count=batch_size)
    return Workload(batch_size, steps, lambda: mlp([width, width, width, CLASSES]), batch, probe)


def long(tokens: int, batch_size: int, steps: int) -> Workload:
    """A transformer of two layers, 256 wide, that classifies sequences."""

    def batch(rows: int) -> Record:
        return torch.randint(VOCABULARY, (rows, tokens)), torch.randint(CLASSES, (rows,))

    def build() -> nn.Module:
        blocks = (Block(256, heads=4) for _ in range(2))
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 256),
            *blocks,
            nn.LayerNorm(256),
            MeanPool(),
            nn.Linear(256, CLASSES),
        )

    return Workload(
        batch_size,
        steps,
        build,
        batch,
        Tokens(VOCABULARY, tokens, mask=None, classes=CLASSES, count=batch_size),
    )


SWEEPS = {
    "width": SizeSweep(
        "Perceptron, batch 128",
        (256, 512, 1024, 2048, 4096),
        4096,
        lambda width, steps: wide(width, 128, steps),
    ),
    "tokens": SizeSweep(
        "Transformer, width 256, batch 8",
        (16, 32, 64, 128, 256, 512, 1024),
        256,
        lambda tokens, steps: long(tokens, 8, steps),
    ),
    "batch": SizeSweep(
        "Perceptron, width 512",
        (16, 32, 64, 128, 256, 512, 1024),
        2048,
        lambda batch_size, steps: wide(512, batch_size, steps),
    ),
}
QUICK = {"width": (64, 128), "tokens": (8, 16), "batch": (8, 16)}


def measure(
    sizes: Mapping[str, Sequence[int]], rounds: int, threads: int, max_steps: int | None = None
) -> dict[str, Any]:
    """Measure the named sweeps at `sizes`, with at most `max_steps` in a row.

    The result is what `--json` saves.
    """
    torch.set_num_threads(threads)
    results: dict[str, dict[str, Any]] = {}
    for name, chosen in sizes.items():
        sweep = SWEEPS[name]
        results[name] = {}
        for size in chosen:
            steps = max(1, min(sweep.work // size, max_steps or sweep.work))
            figures = time_workload(sweep.workload(size, steps), ARMS, rounds, warmup=1)
            results[name][str(size)] = with_ratios(figures)
            gc.collect()
    settings = {
        "rounds": rounds,
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "refresh_every": EVERY,
        "sweeps": {name: SWEEPS[name].title for name in sizes},
        "versions": versions(),
    }
    return {"sweeps": results, "settings": settings}


def table(result: dict[str, Any]) -> Table:
    """Return one row per size: the seconds of an ordinary step, ratios to it, and the refresh."""
    drawn = Table(
        title=f"One training step, refresh every {EVERY} included",
        caption="refresh: the time of one, in steps of sgd",
    )
    for heading in ("", "size", "sgd seconds", *(f"{arm} x sgd" for arm in ARMS[1:]), "refresh"):
        drawn.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, points in result["sweeps"].items():
        for position, (size, arms) in enumerate(points.items()):
            ratios = [f"{_ratio(arms[arm]):.2f}" for arm in ARMS[1:]]
            refresh = f"{arms[ARMS[2]].get('refresh_in_steps', math.nan):.1f}"
            seconds = f"{arms['sgd'].get('seconds', math.nan):.4f}"
            drawn.add_row("" if position else name, size, seconds, *ratios, refresh)
        drawn.add_section()
    return drawn


def _ratio(figures: dict[str, Any]) -> float:
    ratio: float = figures.get("ratio", {}).get("seconds", math.nan)
    return ratio


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw one column per sweep: the seconds of a step, and their ratio to ordinary training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sweeps = result["sweeps"]
    figure, panels = plt.subplots(
        2,
        len(sweeps),
        figsize=(4.2 * len(sweeps), 6.5),
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    for (name, points), seconds, ratios in zip(sweeps.items(), panels[0], panels[1], strict=True):
        sizes = [int(size) for size in points]
        # The colours are those of the plot of `benchmarks.speed`.
        for arm, colour in zip(ARMS, ("black", "C2", "C3"), strict=True):
            style = {"marker": "o", "markersize": 4, "color": colour}
            seconds.plot(
                sizes,
                [p[arm].get("seconds", math.nan) for p in points.values()],
                label=arm,
                **style,
            )
            ratios.plot(sizes, [_ratio(p[arm]) for p in points.values()], **style)
        for panel in (seconds, ratios):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
        ratios.xaxis.set_major_locator(FixedLocator(sizes))
        ratios.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        ratios.set_xlabel(name)
        seconds.set_title(result["settings"]["sweeps"][name])
    known = [
        _ratio(arm) for points in sweeps.values() for p in points.values() for arm in p.values()
    ]
    highest = max(ratio for ratio in [1.0, *known] if not math.isnan(ratio))
    ticks = [tick for tick in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if tick <= 1.3 * highest]
    for panel in panels[1]:
        panel.set_ylim(0.9, max(2.2, 1.15 * highest))
        panel.yaxis.set_major_locator(FixedLocator(ticks))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[0][0].set_ylabel("seconds of a step")
    panels[1][0].set_ylabel("ratio to ordinary SGD")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), ncols=len(ARMS), loc="outside upper center"
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the file for the results"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw a figure too (needs matplotlib)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two small sizes per sweep and one round, to see that it works",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="timing rounds (default 5)")
    parser.add_argument("--threads", type=positive, default=2, help="torch threads (default 2)")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # torch warns about hooks
    if chosen.quick:
        result = measure(QUICK, 1, chosen.threads, max_steps=2)
    else:
        result = measure(
            {name: sweep.sizes for name, sweep in SWEEPS.items()}, chosen.rounds, chosen.threads
        )
    chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    console.print(table(result))
    for name, points in result["sweeps"].items():
        for remark in remarks(
            {"workloads": {f"{name} {size}": arms for size, arms in points.items()}}
        ):
            console.print(remark, markup=False, highlight=False, soft_wrap=True)
    if chosen.plot:
        plot(result, chosen.plot)


if __name__ == "__main__":
    main()
