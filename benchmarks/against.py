"""Compare the time of a private step in this checkout with that of another commit.

    python -m benchmarks.against HEAD~5
    python -m benchmarks.against v0.1 --workloads mlp,cnn --arms dpkfc,dpkfc_kfc --pairs 21

Two processes take turns on the same machine. Each process builds the arm of its own checkout's
`benchmarks.speed`, and takes steps only on request, so that other load slows both alike. All it
needs from a checkout is `benchmarks.speed.ARMS` and `benchmarks.workloads.WORKLOADS`, so commits
with another module layout can be compared too.

A round is a few steps of one process and then of the other, in alternating order; the median ratio
of a few rounds is one measurement. Two processes with the same code may differ by a fifth, because
of the placement of their memory. So new pairs are started again and again, with an allocator that
keeps its memory. The median over pairs is reported, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

# glibc's allocator keeps its memory with these settings.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
HERE = Path(__file__).resolve().parent.parent
WORKER = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[3]))
from benchmarks.speed import ARMS
from benchmarks.workloads import WORKLOADS
workload = WORKLOADS[sys.argv[1]]
torch.manual_seed(0)
model, batch = workload.build().train(), workload.batch(workload.batch_size)
arm = ARMS[sys.argv[2]](workload, model, batch, 10**5)
for _ in range(5):
    arm.step()
print("ready", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    for _ in range(int(line)):
        arm.step()
    print(time.perf_counter() - started, flush=True)
"""


class Worker:
    """The arm of one checkout, in its own process."""

    def __init__(self, checkout: Path, workload: str, arm: str, threads: int) -> None:
        environment = {
            **os.environ,
            **ALLOCATOR,
            "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'src'}",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, workload, arm, str(threads)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            raise SystemExit(
                f"{checkout}: the arm {arm} of {workload} did not start: see the error above"
            )

    def seconds(self, steps: int) -> float:
        """Take some steps and return how long they took."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._line())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def ratio(other: Path, workload: str, arm: str, rounds: int, seconds: float, threads: int) -> float:
    """Return the time of this checkout over that of the other, in one pair of processes."""
    workers = [Worker(checkout, workload, arm, threads) for checkout in (HERE, other)]
    try:
        steps = max(1, round(seconds / (workers[0].seconds(3) / 3)))
        ratios = []
        for number in range(rounds):
            in_turn = workers if number % 2 else workers[::-1]
            times = {id(worker): worker.seconds(steps) for worker in in_turn}
            ratios.append(times[id(workers[0])] / times[id(workers[1])])
        return median(ratios)
    finally:
        for worker in workers:
            worker.stop()


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % interval for the median, from order statistics.

    By the binomial distribution at most 2.5 % lie outside on either side.

    >>> interval([float(k) for k in range(1, 22)])
    (6.0, 16.0)
    """
    ordered = sorted(values)
    count = len(ordered)
    cut = 0
    while sum(math.comb(count, k) for k in range(cut + 2)) <= 0.025 * 2**count:
        cut += 1
    return ordered[cut], ordered[-1 - cut]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the commit that this checkout is compared with")
    parser.add_argument("--workloads", default="mlp,cnn,resnet")
    parser.add_argument("--arms", default="dpkfc,dpkfc_kfc")
    parser.add_argument("--pairs", type=int, default=11, help="pairs of processes (default 11)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per pair (default 7)")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per turn (default 0.3)")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", other, chosen.commit],
            cwd=HERE,
            check=True,
        )
        try:
            for workload in chosen.workloads.split(","):
                for arm in chosen.arms.split(","):
                    ratios = [
                        ratio(other, workload, arm, chosen.rounds, chosen.seconds, chosen.threads)
                        for _ in range(chosen.pairs)
                    ]
                    low, high = interval(ratios)
                    shown = f"{median(ratios):.3f} times {chosen.commit} ({low:.3f} to {high:.3f})"
                    print(f"{workload} {arm}: {shown}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=HERE, check=True)


if __name__ == "__main__":
    main()
