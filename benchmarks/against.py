"""Time of a private step in this checkout against another commit: two processes that take turns on the same machine.

    python -m benchmarks.against HEAD~5
    python -m benchmarks.against v0.1 --workloads mlp,cnn --arms dpkfc,dpkfc_kfc --pairs 21

Each process builds the arm of its own checkout's `benchmarks.speed` and takes its steps only when it is told to, so
that whatever slows the machine slows both alike. A round is a few steps of one and then of the other, in alternating
order; the median ratio of a few rounds is one measurement. Two processes with the same code may differ by a fifth,
because of where their memory lies, so new pairs are started again and again, with an allocator that keeps its memory.
The median over pairs is reported, with a 95 % interval for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}  # glibc
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
    begun = time.perf_counter()
    for _ in range(int(line)):
        arm.step()
    print(time.perf_counter() - begun, flush=True)
"""


class Worker:
    """The arm of one checkout, in a process of its own."""

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
            raise SystemExit(f"{checkout}: the arm {arm} of {workload} did not start")

    def seconds(self, steps: int) -> float:
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
    """Seconds of this checkout over those of the other, in one pair of processes."""
    workers = [Worker(checkout, workload, arm, threads) for checkout in (HERE, other)]
    try:
        steps = max(1, round(seconds / (workers[0].seconds(3) / 3)))
        found = []
        for number in range(rounds):
            order = workers if number % 2 else workers[::-1]
            taken = {id(worker): worker.seconds(steps) for worker in order}
            found.append(taken[id(workers[0])] / taken[id(workers[1])])
        return median(found)
    finally:
        for worker in workers:
            worker.stop()


def interval(values: list[float]) -> tuple[float, float]:
    """95 % for the median: between the order statistics that a fair coin leaves outside with at most 2.5 % each.

    >>> interval([float(k) for k in range(1, 22)])
    (6.0, 16.0)
    """
    ordered = sorted(values)
    cut = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return ordered[cut], ordered[-1 - cut]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="what this checkout is compared with")
    parser.add_argument("--workloads", default="mlp,cnn,resnet")
    parser.add_argument("--arms", default="dpkfc,dpkfc_kfc")
    parser.add_argument("--pairs", type=int, default=11, help="of processes")
    parser.add_argument("--rounds", type=int, default=7, help="of a pair")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", other, given.commit],
            cwd=HERE,
            check=True,
        )
        try:
            for workload in given.workloads.split(","):
                for arm in given.arms.split(","):
                    found = [
                        ratio(other, workload, arm, given.rounds, given.seconds, given.threads)
                        for _ in range(given.pairs)
                    ]
                    low, high = interval(found)
                    shown = f"{median(found):.3f} times {given.commit} ({low:.3f} to {high:.3f})"
                    print(f"{workload} {arm}: {shown}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=HERE, check=True)


if __name__ == "__main__":
    main()
