"""The cost of drawing a batch: time and memory per draw do not grow with the number of records.

    python -m benchmarks.sampling

Every arm draws batches of 1000 expected records, by Poisson sampling or from b groups that take
turns. Numbers of records take turns too, and the median over all draws is reported, with its ratio
to the smallest number. The first draw also computes the permutation of the slots, if there are
groups. Memory is the peak of a process of its own that draws from this number of records alone,
above its size after a small draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.speed import resident_mb
from dpkfc.permutation import permutation
from dpkfc.random import first_key, sub_key
from dpkfc.sampling import CyclicPoisson

RECORDS = (10**6, 10**8, 10**9)
BATCH = 1000
# the number of groups; None: as many as there are batches in the records, each used as a whole
ARMS: dict[str, int | None] = {
    "Poisson": 1,
    "cyclic, b=4": 4,
    "cyclic, b=64": 64,
    "cyclic, b=512": 512,
    "whole groups": None,
}
DRAWS_FOR_MEMORY = 20


def drawing(arm: str, records: int) -> Callable[[], list[int]]:
    """Return a function that draws the batch of the next step."""
    groups = ARMS[arm] or records // BATCH
    rate = groups * BATCH / records
    key = sub_key(first_key(0), "groups")
    sampler = CyclicPoisson(key, records, groups, rate, planned_records=records)
    steps = count()

    def draw() -> list[int]:
        step = next(steps)
        return sampler.draw(sub_key(key, f"step {step}"), step)

    return draw


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(sizes: Sequence[int], draws: int) -> dict[str, dict[int, dict[str, float]]]:
    """Time and memory by arm and number of records."""
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for arm in ARMS:
        draw = {records: drawing(arm, records) for records in sizes}
        permutation.cache_clear()
        first = {records: seconds(draw[records]) for records in sizes}
        rounds = [[seconds(draw[records]) for records in sizes] for _ in range(draws)]
        times = dict(zip(sizes, zip(*rounds, strict=True), strict=True))
        figures[arm] = {
            records: {
                "drawn": statistics.mean(len(draw[records]()) for _ in range(draws)),
                "seconds": statistics.median(times[records]),
                "seconds_first": first[records],
                "peak_mb": memory_of(arm, records),
            }
            for records in sizes
        }
        for of_size in figures[arm].values():
            of_size["ratio"] = of_size["seconds"] / figures[arm][sizes[0]]["seconds"]
    return figures


def memory_of(arm: str, records: int) -> float:
    """Measure the peak of the draws in MB, alone in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.sampling", "--memory-of", arm, str(records)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["peak_mb"])


def report_memory(arm: str, records: int) -> None:
    """Print the peak as a line of JSON; `memory_of` runs it."""
    drawing(arm, 10 * BATCH)()
    # Where the system can, forget the peak of importing.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    baseline = resident_mb("VmRSS")
    draw = drawing(arm, records)
    for _ in range(DRAWS_FOR_MEMORY):
        draw()
    print(json.dumps({"peak_mb": resident_mb("VmHWM") - baseline}))


def show(figures: dict[str, dict[int, dict[str, float]]]) -> Table:
    table = Table(title=f"Drawing batches of {BATCH} expected records")
    for heading in ("sampling", "records", "drawn", "ms", "ratio", "first draw, ms", "peak MB"):
        table.add_column(heading, justify="left" if heading == "sampling" else "right")
    for arm, sizes in figures.items():
        for records, of_size in sizes.items():
            table.add_row(
                arm,
                f"{records:.0e}",
                f"{of_size['drawn']:.0f}",
                f"{of_size['seconds'] * 1e3:.2f}",
                f"{of_size['ratio']:.2f}",
                f"{of_size['seconds_first'] * 1e3:.1f}",
                f"{of_size['peak_mb']:.1f}",
            )
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--records", type=int, nargs="+", default=list(RECORDS))
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args(arguments)
    if chosen.memory_of:
        report_memory(chosen.memory_of[0], int(chosen.memory_of[1]))
        return
    figures = measure(chosen.records, chosen.draws)
    Console().print(show(figures))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
