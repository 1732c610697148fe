"""The cost of noise: drawing it compared with torch's generator, correlating it, planning it.

    python -m benchmarks.noise

Every arm adds noise to a vector of the given size, as a step does to the gradient. Arms take turns,
and the best of several turns is reported. Correlated noise is compared with drawing the same
numbers alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import count

import torch
from rich.console import Console
from rich.table import Table

import dpkfc
from dpkfc.noise.sensitivity import Participation
from dpkfc.planning.choose_noise import Noise
from dpkfc.random import add_normal_, first_key

SIZES = (100_000, 1_000_000, 10_000_000)
PARAMETERS = 4_000_000
WORKLOAD = dpkfc.noise.Workload.sgd(momentum=0.9, weight_decay=0.001, coupled=False)
STREAMS: dict[str, Noise] = {
    "independent": dpkfc.noise.Independent(),
    **{f"square root, {p} bands": dpkfc.noise.BandedSquareRoot(p) for p in (2, 4, 8, 16, 32)},
    "anticorrelated, regenerated": dpkfc.noise.LambdaCGD(),
    "inverse square root, 4 bands, regenerated": dpkfc.noise.InverseSquareRoot(4),
    "buffered, 2 buffers": dpkfc.noise.BufferedToeplitz(2),
}
PLANS: list[tuple[str, Noise, int]] = [
    *(
        ("square root, 100 bands", dpkfc.noise.BandedSquareRoot(100), n)
        for n in (10_000, 100_000, 1_000_000)
    ),
    ("optimised Toeplitz, 100 bands", dpkfc.noise.BandedToeplitz(100), 2000),
    ("buffered, 2 buffers", dpkfc.noise.BufferedToeplitz(2), 2000),
]


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def alternate(arms: list[Callable[[], object]], turns: int) -> list[float]:
    """Return the best time of each arm, in seconds."""
    for arm in arms:
        arm()
    rounds = [[seconds(arm) for arm in arms] for _ in range(turns)]
    return [min(times) for times in zip(*rounds, strict=True)]


def drawing(size: int, turns: int) -> tuple[float, float]:
    """Return the times of the keyed stream and of `torch.normal_`, in seconds."""
    target = torch.zeros(size)
    key = first_key(0)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = alternate(
        [
            lambda: add_normal_([target], key, 0.5),
            lambda: target.add_(torch.empty(size).normal_(generator=generator), alpha=0.5),
        ],
        turns,
    )
    return ours, theirs


def step(noise: Noise, size: int) -> Callable[[], object]:
    """Return a function that takes the next step of the stream."""
    stream = noise.factorize(WORKLOAD, 1000, 200).stream([range(size)], torch.device("cpu"))
    steps = count()
    target = torch.zeros(size)
    key = first_key(0)
    return lambda: stream.add_([target], key, 0.5, next(steps))


def plan(noise: Noise, n: int, separation: int) -> Callable[[], object]:
    """Return a function that computes coefficients, sensitivity and error for n steps."""

    def arm() -> None:
        factorization = noise.factorize(WORKLOAD, n, separation)
        factorization.sensitivity(n, Participation.every(separation, n))
        factorization.error(WORKLOAD, n)

    return arm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    console = Console()
    table = Table(
        "numbers", "keyed stream, ns each", "torch normal_, ns each", "ratio", title="Drawing"
    )
    for size in SIZES:
        ours, theirs = drawing(size, chosen.turns)
        table.add_row(
            f"{size:,}",
            f"{ours / size * 1e9:.2f}",
            f"{theirs / size * 1e9:.2f}",
            f"{ours / theirs:.2f}",
        )
    console.print(table)

    arms = {"torch normal_ alone": dpkfc.noise.Independent(), **STREAMS}
    target = torch.zeros(PARAMETERS)
    generator = torch.Generator().manual_seed(0)
    steps = [step(noise, PARAMETERS) for noise in arms.values()]
    steps[0] = lambda: target.add_(torch.empty(PARAMETERS).normal_(generator=generator))
    times = alternate(steps, chosen.turns)
    table = Table(
        "noise",
        "ms per step",
        "relative to drawing",
        title=f"A step of noise for {PARAMETERS:,} parameters",
    )
    for name, best in zip(arms, times, strict=True):
        table.add_row(name, f"{best * 1e3:.1f}", f"{best / times[1]:.2f}")
    console.print(table)

    table = Table("plan", "steps", "seconds", title="Coefficients, sensitivity and error")
    for name, noise, n in PLANS:
        (best,) = alternate([plan(noise, n, 100)], 3)
        table.add_row(name, f"{n:,}", f"{best:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
