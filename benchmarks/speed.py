"""Time and memory of one training step: ordinary training, Opacus two ways, DP-SGD and DP-KFC.

    python -m benchmarks.speed --json speed.json --plot speed.png
    python -m benchmarks.speed --json speed.json --workloads mlp,cnn --arms sgd,dpkfc --rounds 9

A step is forward, loss, backward, `optimizer.step()` and `zero_grad()`. Every arm trains its own
copy of the same model on the same records.

Time: the arms of a workload share one process and take turns, several steps each, in an order that
rotates from round to round, so that other load slows all of them alike. The median over rounds is
reported. Where it lies far above the best round, something else was using the processor, and the
output says so.

Refresh: DP-KFC rebuilds its maps every 50 steps. Each of its turns ends with one more step, which
includes a refresh. The extra time of that step, compared with the others of its turn, is the time
of the refresh. The reported time is that of a step plus a fiftieth of a refresh.

Memory: every arm takes a few steps alone in a fresh process, the last of them with a refresh if it
has one. Its peak resident size is reported, and the baseline: the size after all packages are
imported and before anything is built. The baseline is equal for all arms.

Compare ratios to the `sgd` arm of the same run, never seconds of different runs. An arm that cannot
train a model has an error: `{"error": "one line"}`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workloads import WORKLOADS, Record, Workload, loss
from dpkfc import KFC, Identity, make_private
from dpkfc.geometry.base import Geometry
from experiments.common.arguments import names_among

CLIP = NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01
MOMENTUM = 0.9
# Steps of a plan. In a long run, steps that compare the loop with the declared loss are rare.
LONG = 100_000
EVERY = 50  # steps between refreshes of DP-KFC
DISTURBED = 1.5  # ratio of the median to the best round above which a time is called disturbed
PACKAGES = (
    "dpkfc",
    "opacus",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
)

# glibc returns every tensor above this size to the system at once, so that a peak is live memory
# and does not depend on the state of the heap: readings repeat to 1 MB, and without it only to 15%.
# The memory runs of all arms use it, the timed ones do not.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}

Step = Callable[[], None]
# The measurements of one arm: seconds, seconds_best, peak_mb, baseline_mb, ratio; with a refresh
# also seconds_step (without it), seconds_refresh and refresh_in_steps (of `sgd`). Or error.
Figures = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """`step` takes one training step; `refresh` takes one that refreshes the geometry, if any."""

    step: Step
    refresh: Step | None = None


# Arms: (workload, model, one batch, number of steps that will be taken) -> Arm.


def sgd(workload: Workload, model: nn.Module, batch: Record, steps: int) -> Arm:
    """Ordinary training, without clipping and noise."""
    optimizer = _optimizer(model)

    def step() -> None:
        _finish(loss(workload.logits(model, batch), batch[-1]), optimizer)

    return Arm(step)


def opacus_hooks(workload: Workload, model: nn.Module, batch: Record, steps: int) -> Arm:
    """Opacus' default: hooks compute per-sample gradients, the optimizer clips and sums them."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(_optimizer(model), **_opacus_noise(workload))

    def step() -> None:
        _finish(loss(workload.logits(wrapped, batch), batch[-1]), optimizer)

    return Arm(step)


def opacus_ghost(workload: Workload, model: nn.Module, batch: Record, steps: int) -> Arm:
    """Opacus' ghost clipping: one backward pass for the norms, a second one for the clipped sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(_optimizer(model), **_opacus_noise(workload))
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        logits = workload.logits(wrapped, batch)
        _finish(
            criterion(logits.flatten(0, -2), batch[-1].flatten(), shape=logits.shape), optimizer
        )

    return Arm(step)


def dpkfc(workload: Workload, model: nn.Module, batch: Record, steps: int) -> Arm:
    """DP-SGD of dpkfc."""
    return Arm(_private(workload, model, batch, steps, Identity()))


def dpkfc_kfc(workload: Workload, model: nn.Module, batch: Record, steps: int) -> Arm:
    """DP-KFC of dpkfc."""
    geometry = RefreshOnDemand(workload.probe, every=EVERY, loss=workload.probe_loss)
    step = _private(workload, model, batch, steps, geometry)

    def refresh() -> None:
        geometry.requested = True
        step()

    return Arm(step, refresh)


class RefreshOnDemand(KFC):
    """A KFC that is refreshed on the first step and on request, so that refreshes can be timed."""

    requested = False

    def due(self, step: int) -> bool:
        due = step == 0 or self.requested
        self.requested = False
        return due


ARMS = {arm.__name__: arm for arm in (sgd, opacus_hooks, opacus_ghost, dpkfc, dpkfc_kfc)}


def _private(
    workload: Workload, model: nn.Module, batch: Record, steps: int, geometry: Geometry
) -> Step:
    """Return a step of dpkfc, its loader included.

    With one batch of records at sampling rate 1, every Poisson batch holds all records.
    """
    optimizer = _optimizer(model)
    run = make_private(
        model,
        optimizer,
        TensorDataset(*batch),
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-5,
        steps=max(steps, LONG),
        batch_size=workload.batch_size,
        clip=CLIP,
        geometry=geometry,
        loss=lambda model, batch: loss(workload.logits(model, batch), batch[-1]),
    )
    batches = iter(run.loader)

    def step() -> None:
        drawn = next(batches)
        _finish(loss(workload.logits(model, drawn), drawn[-1]), optimizer)

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _opacus_noise(workload: Workload) -> dict[str, Any]:
    return dict(
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        expected_batch_size=workload.batch_size,
    )


def _finish(loss_of_batch: Any, optimizer: Any) -> None:
    loss_of_batch.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# Time.


def time_workload(
    workload: Workload, arms: Sequence[str], rounds: int, warmup: int
) -> dict[str, Figures]:
    """Measure the seconds of a step for each arm in turns: the median over rounds, and the best."""
    torch.manual_seed(0)
    model = workload.build().train()
    batch = workload.batch(workload.batch_size)
    built: dict[str, Arm] = {}
    turns: dict[str, list[Figures]] = {arm: [] for arm in arms}
    errors: dict[str, Figures] = {}
    for turn in range(rounds + 1):
        for arm in _rotated(arms, turn):
            if arm in errors:
                continue
            try:
                if turn == 0:
                    steps = warmup + rounds * (workload.steps + 1)
                    built[arm] = ARMS[arm](workload, copy.deepcopy(model), batch, steps)
                    _take(built[arm].step, warmup)
                else:
                    turns[arm].append(_turn(built[arm], workload.steps))
            except Exception as problem:  # a library that cannot train a model is a result
                errors[arm] = {"error": _one_line(problem)}
    return {arm: errors.get(arm) or _summary(turns[arm]) for arm in arms}


def _turn(arm: Arm, times: int) -> Figures:
    """Measure one turn of several steps; with a refresh, its extra seconds and its share."""
    step = _seconds(arm.step, times)
    if arm.refresh is None:
        return {"seconds": step}
    refresh = _seconds(arm.refresh, 1) - step
    return {"seconds": step + refresh / EVERY, "seconds_step": step, "seconds_refresh": refresh}


def _summary(turns: list[Figures]) -> Figures:
    medians = {name: median(turn[name] for turn in turns) for name in turns[0]}
    return {**medians, "seconds_best": min(turn["seconds"] for turn in turns)}


def _seconds(step: Step, times: int) -> float:
    started = time.perf_counter()
    _take(step, times)
    return (time.perf_counter() - started) / times


def _take(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _rotated(arms: Sequence[str], turn: int) -> list[str]:
    shift = turn % len(arms)
    return [*arms[shift:], *arms[:shift]]


def _one_line(problem: Exception) -> str:
    message = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {message}"[:200]


# Memory.


def memory_of(name: str, arm: str, steps: int, threads: int) -> Figures:
    """Measure `peak_mb` and `baseline_mb` of one arm, alone in a fresh process."""
    call = (
        "from benchmarks.speed import report_memory; "
        f"report_memory({name!r}, {arm!r}, {steps}, {threads})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call],
        env=os.environ
        | ALLOCATOR
        | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        error = lines[-1] if lines else f"memory run ended with code {done.returncode}"
        return {"error": error[:200]}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def report_memory(name: str, arm: str, steps: int, threads: int) -> None:
    """Train a little, then print the figures as a line of JSON; `memory_of` runs it."""
    for package in PACKAGES:
        with suppress(ImportError):
            importlib.import_module(package)
    gc.collect()
    baseline = resident_mb("VmRSS")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    built = ARMS[arm](
        workload, workload.build().train(), workload.batch(workload.batch_size), steps
    )
    _take(built.step, steps - 1)
    _take(built.refresh or built.step, 1)
    print(json.dumps({"peak_mb": resident_mb("VmHWM"), "baseline_mb": baseline}))


def resident_mb(field: str) -> float:
    """Return VmRSS (now) or VmHWM (peak) of this process in MB.

    Linux starts a child's `ru_maxrss` at the size of its parent, which here holds every arm of a
    workload. So it is read only where there is no /proc, and there "now" is the peak so far.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) / 1024
            for line in status.read_text().splitlines()
            if line.startswith(field)
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


# The whole measurement and its presentation.


def measure(
    workloads: Sequence[str],
    arms: Sequence[str],
    rounds: int,
    threads: int,
    warmup: int = 1,
    memory_steps: int = 2,
) -> dict[str, Any]:
    """Measure time and memory; the result is what `--json` saves."""
    torch.set_num_threads(threads)
    results: dict[str, dict[str, Figures]] = {}
    for name in workloads:
        figures = time_workload(WORKLOADS[name], arms, rounds, warmup)
        gc.collect()
        for arm in arms:
            if "error" not in figures[arm]:
                memory = memory_of(name, arm, memory_steps, threads)
                figures[arm] = memory if "error" in memory else figures[arm] | memory
        results[name] = with_ratios(figures)
    settings = {
        "rounds": rounds,
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "warmup_steps": warmup,
        "memory_steps": memory_steps,
        "memory_allocator": ALLOCATOR,
        "batch_size": {name: WORKLOADS[name].batch_size for name in workloads},
        "steps_per_round": {name: WORKLOADS[name].steps for name in workloads},
        "optimizer": f"SGD, learning rate {LEARNING_RATE}, momentum {MOMENTUM}",
        "clip": CLIP,
        "noise_multiplier": NOISE_MULTIPLIER,
        "refresh_every": EVERY,
        "versions": versions(),
    }
    return {"workloads": results, "settings": settings}


def with_ratios(figures: dict[str, Figures]) -> dict[str, Figures]:
    """Add the ratio of each arm to `sgd`: of seconds, of the peak, and of the peak above baseline.

    A refresh is counted in steps of `sgd`.
    """
    ordinary = figures.get("sgd", {"error": "not run"})
    if "error" in ordinary:
        return figures
    for arm in figures.values():
        if "error" in arm:
            continue
        arm["ratio"] = {"seconds": arm["seconds"] / ordinary["seconds"]}
        if "peak_mb" in arm:
            arm["ratio"] |= {
                "peak_mb": arm["peak_mb"] / ordinary["peak_mb"],
                "net_mb": (arm["peak_mb"] - arm["baseline_mb"])
                / (ordinary["peak_mb"] - ordinary["baseline_mb"]),
            }
        if "seconds_refresh" in arm:
            arm["refresh_in_steps"] = arm["seconds_refresh"] / ordinary["seconds"]
    return figures


def versions() -> dict[str, str]:
    return {package: _version(package) for package in ("dpkfc", "torch", "opacus", "transformers")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def table(result: dict[str, Any]) -> Table:
    """Return one row per arm: seconds and memory with their ratios to `sgd`, and the refresh."""
    settings = result["settings"]
    drawn = Table(
        title=f"One training step ({settings['threads']} threads, "
        f"median of {settings['rounds']} rounds)",
        caption="refresh: the time of one, in steps of sgd",
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("workload", "arm"):
        drawn.add_column(heading, no_wrap=True)
    for heading in ("seconds", "x sgd", "refresh", "peak MB", "net MB", "x sgd"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for name, arms in result["workloads"].items():
        for position, (arm, figures) in enumerate(arms.items()):
            label = f"{name} ({settings['batch_size'][name]})" if position == 0 else ""
            drawn.add_row(label, arm, *_cells(figures))
        drawn.add_section()
    return drawn


def remarks(result: dict[str, Any]) -> list[str]:
    """Return why an arm has no figures, and which figures were disturbed by other load."""
    notes = []
    for name, arms in result["workloads"].items():
        for arm, figures in arms.items():
            if "error" in figures:
                notes.append(f"{name}, {arm}: {figures['error']}")
            elif figures["seconds"] > DISTURBED * figures["seconds_best"]:
                best = f"{figures['seconds_best']:.4f} s per step"
                notes.append(f"{name}, {arm}: disturbed, the best round took {best}")
    return notes


def _cells(figures: Figures) -> list[str]:
    if "error" in figures:
        return ["failed"] + [""] * 5
    ratio = figures.get("ratio", {})
    return [
        f"{figures['seconds']:.4f}",
        f"{ratio['seconds']:.2f}" if ratio else "",
        f"{figures['refresh_in_steps']:.1f}" if "refresh_in_steps" in figures else "",
        f"{figures['peak_mb']:.0f}",
        f"{figures['peak_mb'] - figures['baseline_mb']:.0f}",
        f"{ratio['net_mb']:.2f}" if ratio else "",
    ]


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw one group of bars per workload: ratios to ordinary training, and a refresh."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = result["workloads"]
    arms = list(
        dict.fromkeys(arm for figures in workloads.values() for arm in figures if arm != "sgd")
    )
    colours = {arm: f"C{index}" for index, arm in enumerate(arms)}
    refreshed = [
        arm
        for arm in arms
        if any("refresh_in_steps" in figures[arm] for figures in workloads.values())
    ]
    rows = 3 if refreshed else 2
    figure, panels = plt.subplots(
        rows, 1, figsize=(10, 3.2 * rows), sharex=True, layout="constrained"
    )
    for panel, quantity in zip(panels, ("seconds", "net_mb"), strict=False):
        ratios = {
            arm: [f[arm].get("ratio", {}).get(quantity, math.nan) for f in workloads.values()]
            for arm in arms
        }
        _bars(panel, ratios, colours)
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        panel.set_yscale("log")
        panel.margins(y=0.15)
        panel.set_ylim(bottom=0.5)
        panel.set_ylabel("ratio to ordinary SGD")
    every = result["settings"]["refresh_every"]
    panels[0].set_title(
        f"Time of a step (with 1/{every} of a refresh)" if refreshed else "Time of a step"
    )
    panels[1].set_title("Peak memory above imports")
    if refreshed:
        costs = {
            arm: [f[arm].get("refresh_in_steps", math.nan) for f in workloads.values()]
            for arm in refreshed
        }
        _bars(panels[2], costs, colours)
        panels[2].margins(y=0.15)
        panels[2].set_ylabel("ordinary SGD steps")
        panels[2].set_title("Time of one refresh")
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=len(arms), loc="outside upper center"
    )
    panels[-1].set_xticks(range(len(workloads)), list(workloads))
    panels[-1].set_xlim(-0.5, len(workloads) - 0.5)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _bars(panel: Any, heights: dict[str, list[float]], colours: dict[str, str]) -> None:
    """Draw bars with their values above them, and "n/a" where one is missing."""
    width = 0.8 / max(len(heights), 2)
    for index, (arm, values) in enumerate(heights.items()):
        places = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(values))]
        panel.bar(places, values, width, label=arm, color=colours[arm])
        for place, value in zip(places, values, strict=True):
            label, height = ("n/a", 1.0) if math.isnan(value) else (f"{value:.1f}", value)
            panel.annotate(
                label, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the file for the results"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the ratios too (needs matplotlib)"
    )
    parser.add_argument(
        "--workloads",
        type=names_among(WORKLOADS),
        default=list(WORKLOADS),
        metavar="A,B",
        help="default: all",
    )
    parser.add_argument(
        "--arms", type=names_among(ARMS), default=list(ARMS), metavar="A,B", help="default: all"
    )
    parser.add_argument("--rounds", type=positive, default=7, help="timing rounds (default 7)")
    parser.add_argument("--threads", type=positive, default=2, help="torch threads (default 2)")
    chosen = parser.parse_args(arguments)
    # Opacus and torch warn about hooks and insecure noise on every arm.
    warnings.filterwarnings("ignore")
    result = measure(chosen.workloads, chosen.arms, chosen.rounds, chosen.threads)
    chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    console.print(table(result))
    for remark in remarks(result):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    if chosen.plot:
        plot(result, chosen.plot)


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1 is needed")
    return int(text)


if __name__ == "__main__":
    main()
