"""The time that a plan takes: `dpkfc plan`, and the calibration of noise for a few runs.

    python -m benchmarks.planning
    python -m benchmarks.planning --before ../other-checkout --json planning.json

Every arm runs in a fresh process, as a plan mostly does, and the best of several rounds is
reported: seconds by the clock, and seconds of processor time, which depend less on what else the
machine does. With `--before`, the arms of this version and of another checkout take turns in the
same run. Compare their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PLAN = ("-m", "dpkfc", "plan", "60000", "--epochs", "5", "--batch-size", "256", "--epsilon", "1")

CALIBRATION = """
from dpkfc.planning.plan import Plan
Plan.make(records={records}, batch_size={batch_size}, steps={steps}, clip=1.0,
          epsilon={epsilon}, delta=1e-5)
"""
EPSILON = """
from dpkfc.planning.plan import Plan
Plan.make(records=60_000, batch_size=256, steps=1172, clip=1.0, noise_multiplier=0.9037,
          delta=1e-5).epsilon()
"""
AUTO = """
import torch, dpkfc
data = torch.utils.data.TensorDataset(torch.zeros(60_000, 2), torch.zeros(60_000).long())
model = torch.nn.Linear(2, 2)
dpkfc.make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data, noise="auto",
    loss=dpkfc.losses.cross_entropy, epsilon=1.0, delta=1e-5, epochs=5, batch_size=256,
)
"""


def calibration(records: int, batch_size: int, steps: int, epsilon: float) -> tuple[str, str]:
    code = CALIBRATION.format(records=records, batch_size=batch_size, steps=steps, epsilon=epsilon)
    return "-c", code


# What to run, as arguments of Python. The imports are the part that no arm can do without.
ARMS: dict[str, tuple[str, ...]] = {
    "import of dp-accounting": ("-c", "import dp_accounting"),
    "import of torch": ("-c", "import torch"),
    "dpkfc plan": PLAN,
    "make_private, noise='auto'": ("-c", AUTO),
    "calibration, 1172 steps of 256 in 60,000, ε = 1": calibration(60_000, 256, 1172, 1.0),
    "calibration, 1172 steps of 256 in 60,000, ε = 8": calibration(60_000, 256, 1172, 8.0),
    "calibration, 20,000 steps of 500 in 50,000, ε = 3": calibration(50_000, 500, 20_000, 3.0),
    "epsilon of 1172 steps of 256 in 60,000": ("-c", EPSILON),
}
QUICK = ("import of dp-accounting", "calibration, 1172 steps of 256 in 60,000, ε = 8")

Figures = dict[str, float]


def seconds_of(arm: Sequence[str], root: Path) -> Figures:
    """Wall-clock and processor seconds of a Python process with the package of `root`."""
    environment = os.environ | {"PYTHONPATH": _search_path(root), "OMP_NUM_THREADS": "1"}
    before = _processor_seconds()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arm], env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(arm)[:60]} failed with {root}:\n{done.stderr[-2000:]}")
    return {"seconds": seconds, "processor_seconds": _processor_seconds() - before}


def _search_path(root: Path) -> str:
    """The package of `root` comes before any other that is installed."""
    return os.pathsep.join([str(root / "src"), str(root), *(path for path in sys.path if path)])


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def phases() -> Figures:
    """Seconds of the phases of `dpkfc plan`, in the order in which it takes them.

    Run it in a fresh process: calibrations are cached.
    """
    figures: Figures = {}
    last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        figures[name] = now - last
        last = now

    from dpkfc.app.reports.noise_table import noise_table
    from dpkfc.noise.workload import Workload
    from dpkfc.planning.choose_noise import contenders, evaluate, noise_candidates

    mark("import of dpkfc")
    import dp_accounting  # noqa: F401

    mark("import of dp-accounting")
    workload = Workload.sgd(momentum=0.9)
    run = {"records": 60_000, "batch_size": 256, "steps": 1172, "clip": 1.0, "delta": 1e-5}
    drafts = [
        evaluate(kind, workload, **run, noise_multiplier=1.0)
        for kind in noise_candidates(16, 60_000 // 256)
    ]
    mark("factorizations")
    errors = [draft.rmse * draft.plan.estimated(1.0).noise_multiplier for draft in drafts]
    mark("estimates of all candidates")
    plans = [drafts[i].plan.calibrated(1.0) for i in sorted(contenders(errors))]
    mark("calibration of the contenders")
    noise_table(drafts, drafts[0], workload.name)
    plans[-1].statement()
    mark("table and statement")
    return figures


PHASES = ("-c", "from benchmarks.planning import *; print(json.dumps(phases()))")


def measure(arms: Mapping[str, Sequence[str]], rounds: int, before: Path | None) -> dict[str, Any]:
    """The best figures of each arm; with `before`, of that checkout too, and their ratio."""
    roots = {"now": ROOT} | ({"before": before.resolve()} if before else {})
    result: dict[str, Any] = {}
    for name, arm in arms.items():
        turns = [
            {version: seconds_of(arm, root) for version, root in roots.items()}
            for _ in range(rounds)
        ]
        figures: dict[str, Any] = {
            version: {key: min(turn[version][key] for turn in turns) for key in turns[0][version]}
            for version in roots
        }
        if before:
            figures["ratio"] = {
                key: figures["now"][key] / figures["before"][key] for key in figures["now"]
            }
        result[name] = figures
    return result


def measure_phases(rounds: int) -> Figures:
    """The shortest time of each phase of `dpkfc plan`, in fresh processes."""
    turns = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, *PHASES],
            env=os.environ | {"PYTHONPATH": _search_path(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        turns.append(json.loads(done.stdout))
    return {name: min(turn[name] for turn in turns) for name in turns[0]}


def print_tables(result: Mapping[str, Any], console: Console) -> None:
    is_compared = any("ratio" in figures for figures in result["arms"].values())
    headings = ["in a fresh process", "seconds", "of the processor"]
    if is_compared:
        headings += ["seconds before", "of the processor", "ratio", "of the processor"]
    table = Table(*headings, title="Planning a run, on one core")
    for name, figures in result["arms"].items():
        cells = [f"{value:.2f}" for value in figures["now"].values()]
        if is_compared:
            cells += [f"{value:.2f}" for value in figures["before"].values()]
            cells += [f"{value:.2f}" for value in figures["ratio"].values()]
        table.add_row(name, *cells)
    console.print(table)
    table = Table("phase of dpkfc plan", "seconds", title="dpkfc plan, phase by phase")
    for name, seconds in result["phases"].items():
        table.add_row(name, f"{seconds:.3f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the results")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="a checkout of the version to compare with"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two arms and one round, to see that it works"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes per arm (default 3)")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: must be at least 1")
    if chosen.before and not (chosen.before / "src" / "dpkfc").is_dir():
        parser.error(f"--before {chosen.before}: there is no src/dpkfc in it")
    rounds = 1 if chosen.quick else chosen.rounds
    arms = {name: ARMS[name] for name in QUICK} if chosen.quick else ARMS
    result = {"arms": measure(arms, rounds, chosen.before), "phases": measure_phases(rounds)}
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    print_tables(result, Console())


if __name__ == "__main__":
    main()
