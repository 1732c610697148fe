"""What a normal number costs: the keyed stream beside torch's own generator, in one run.

    python -m benchmarks.noise

Both add noise to a vector of the given size, as a step does to the gradient; the best of several turns, taken in
alternation, in nanoseconds a number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from dpkfc.noise.rng import add_normal_, first_key

SIZES = (100_000, 1_000_000, 10_000_000)


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def compare(size: int, turns: int) -> tuple[float, float]:
    """Best seconds of the keyed stream and of `torch.normal_`."""
    target, key, generator = torch.zeros(size), first_key(0), torch.Generator().manual_seed(0)
    arms = [
        lambda: add_normal_([target], key, 0.5),
        lambda: target.add_(torch.empty(size).normal_(generator=generator), alpha=0.5),
    ]
    for arm in arms:
        arm()
    rounds = [[seconds(arm) for arm in arms] for _ in range(turns)]
    return min(r[0] for r in rounds), min(r[1] for r in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("numbers", "keyed stream, ns each", "torch normal_, ns each", "ratio")
    for size in SIZES:
        ours, theirs = compare(size, options.turns)
        table.add_row(f"{size:,}", f"{ours / size * 1e9:.2f}", f"{theirs / size * 1e9:.2f}", f"{ours / theirs:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
