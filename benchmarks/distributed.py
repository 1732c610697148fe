"""Private against ordinary training on several processes: time per step, and bytes sent.

    python -m benchmarks.distributed --json distributed.json
    python -m benchmarks.distributed --json distributed.json --workloads mlp --quick

Every rank has the same batch on one process as on two (weak scaling) and one thread. The model is
wrapped in DistributedDataParallel (`ddp`) or divided by `fully_shard` (`fsdp`), on one process too,
so that like is compared with like. The processes talk over gloo on one machine.

Time: the arms of all jobs take turns in one run. In a round, each arm of each job takes a few steps
between two barriers, in an order that rotates from round to round. The *overhead* of a round is the
time of a private step divided by that of the ordinary step of the same processes in the same round.
Medians over rounds are reported. DP-KFC includes 1/50 of a refresh, as in `benchmarks.speed`. The
claim to check: overhead on two processes / overhead on one process is at most 1.1.

Bytes: one more step is taken while every collective is counted, as a ring sends it. With n ranks, a
rank sends (n-1)/n of a tensor for a reduce-scatter or an all-gather (of the whole tensor), twice
that for an all-reduce, and the tensor once for a broadcast. Messages of integers are *control*:
the agreement of the ranks on a step. The step that is counted includes no refresh.

Compare overheads, never seconds: other work on the machine slows all arms of a round alike.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from benchmarks.speed import (
    CLIP,
    EVERY,
    LONG,
    NOISE_MULTIPLIER,
    Arm,
    RefreshOnDemand,
    Step,
    _finish,
    _optimizer,
    versions,
)
from benchmarks.workloads import WORKLOADS, Record, Workload, loss
from dpkfc import Identity, make_private
from dpkfc.geometry.base import Geometry
from experiments.common.arguments import names_among

COUNTS = (1, 2)
LAYOUTS = ("ddp", "fsdp")
METHODS = ("ordinary", "dp-sgd", "dp-kfc")
LIMIT = 1.1  # of the overhead on two processes, relative to that on one
# records per rank; other workloads have their own
BATCHES = {"vit": 16, "minilm": 4, "gpt2": 2}
PATIENCE = 900  # seconds that a rank may take for a turn

Figures = dict[str, Any]


def workload_of(name: str) -> Workload:
    workload = WORKLOADS[name]
    return replace(workload, batch_size=BATCHES.get(name, workload.batch_size))


# Arms: what one rank does.


def distributed_model(workload: Workload, layout: str) -> nn.Module:
    """The same model on every rank, wrapped or divided."""
    torch.manual_seed(0)
    model = workload.build().train()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered together: the blocks of a transformer; else the children with parameters."""
    parents: list[nn.Module] = [x for x in model.modules() if isinstance(x, nn.ModuleList)]
    parents = parents or [model]
    children = [child for parent in parents for child in parent.children()]
    return [child for child in children if any(True for _ in child.parameters())]


def build(workload: Workload, layout: str, method: str, rank: int, count: int) -> Arm:
    """An arm of one rank: every rank trains on its own `batch_size` records."""
    model = distributed_model(workload, layout)
    optimizer = _optimizer(model)
    torch.manual_seed(1)
    records = workload.batch(workload.batch_size * count)
    if method == "ordinary":
        own = tuple(part[rank::count] for part in records)
        return Arm(ordinary_step(workload, model, optimizer, own))
    if method == "dp-sgd":
        return Arm(private_step(workload, model, optimizer, records, Identity(), count))
    geometry = RefreshOnDemand(
        workload.probe, every=EVERY, probes=workload.batch_size, loss=workload.probe_loss
    )
    step = private_step(workload, model, optimizer, records, geometry, count)

    def refresh() -> None:
        geometry.requested = True
        step()

    return Arm(step, refresh)


def ordinary_step(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Record
) -> Step:
    def step() -> None:
        _finish(loss(workload.logits(model, batch), batch[-1]), optimizer)

    return step


def private_step(
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    records: Record,
    geometry: Geometry,
    count: int,
) -> Step:
    """At sampling rate 1 every batch holds all records, of which each rank gets its share."""
    run = make_private(
        model,
        optimizer,
        TensorDataset(*records),
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-5,
        steps=LONG,
        batch_size=workload.batch_size * count,
        clip=CLIP,
        geometry=geometry,
        loss=lambda model, batch: loss(workload.logits(model, batch), batch[-1]),
    )
    batches = iter(run.loader)

    def step() -> None:
        drawn = next(batches)
        _finish(loss(workload.logits(model, drawn), drawn[-1]), optimizer)

    return step


# Time.


def timed(step: Step, times: int) -> float:
    """Seconds per step, from the moment when all ranks begin until all have finished."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        step()
    dist.barrier()
    return (time.perf_counter() - started) / times


def turn(arm: Arm, times: int) -> Figures:
    """A few steps, and the extra time of one that refreshes the geometry, if there is one."""
    seconds = timed(arm.step, times)
    if arm.refresh is None:
        return {"seconds": seconds, "refresh": 0.0}
    return {"seconds": seconds, "refresh": timed(arm.refresh, 1) - seconds}


# Bytes.


class CountBytes(TorchDispatchMode):
    """Adds up what this rank sends in all collectives inside the `with` block."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sums = 0.0  # bytes of floating-point tensors
        self.control = 0.0  # bytes of other messages
        self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self._count(func._opname, tensors)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensors: list[Tensor]) -> None:
        if name in ("barrier", "wait_tensor", "_wrap_tensor_autograd"):
            return
        sent = sent_bytes(name, sum(x.numel() * x.element_size() for x in tensors), self.ranks)
        if any(x.is_floating_point() for x in tensors):
            self.sums += sent
        else:
            self.control += sent
        self.messages += 1


def sent_bytes(name: str, given: float, n: int) -> float:
    """What one of n ranks sends in a ring, for an operation that is `given` this many bytes.

    >>> sent_bytes("allreduce_", 100, 2), sent_bytes("_allgather_base_", 150, 2)
    (100.0, 50.0)
    """
    # in and out are both given: one is the whole tensor, the other 1/n of it
    whole_of_both = given * n / (n + 1)
    once = (n - 1) / n
    sent = {
        "allreduce_": 2 * once * given,
        "all_reduce": 2 * once * given,
        "all_reduce_": 2 * once * given,
        "_allgather_base_": once * whole_of_both,
        "allgather_": once * whole_of_both,
        "_reduce_scatter_base_": once * whole_of_both,
        "reduce_scatter_": once * whole_of_both,
        "all_gather_into_tensor": once * given * n,
        "reduce_scatter_tensor": once * given,
        "broadcast_": given,
        "broadcast": given,
    }
    if name not in sent:
        raise NotImplementedError(f"how many bytes {name} sends is not known")
    return sent[name]


def bytes_of(arm: Arm, ranks: int) -> Figures:
    with CountBytes(ranks) as counted:
        arm.step()
    return {
        "bytes": counted.sums,
        "control_bytes": counted.control,
        "messages": counted.messages,
    }


# Processes.


class Job:
    """The ranks of one distributed job. They hold their arms and wait until they are called."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, store, there), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)

    def __call__(self, action: str, *arguments: Any) -> Figures:
        """Let all ranks do the same; return what the first one measured."""
        for end in self._ends:
            end.send((action, arguments))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} has not answered to '{action}'")
            answers.append(end.recv())
        for rank, (problem, _) in enumerate(answers):
            if problem:
                raise RuntimeError(f"rank {rank} failed in '{action}':\n{problem}")
        figures: Figures = answers[0][1]
        return figures

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, count: int, store: str, end: Connection) -> None:
    """Do what is asked until the other end is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    arms: dict[str, Arm] = {}

    def start(name: str, workload: str, layout: str, method: str, warmup: int) -> Figures:
        arms[name] = build(workload_of(workload), layout, method, rank, count)
        timed(arms[name].step, warmup)
        return {}

    def forget() -> Figures:
        arms.clear()
        return {}

    actions: dict[str, Callable[..., Figures]] = {
        "start": start,
        "turn": lambda name, times: turn(arms[name], times),
        "bytes": lambda name: bytes_of(arms[name], count),
        "forget": forget,
    }
    while True:
        try:
            action, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send(("", actions[action](*arguments)))
        except Exception:
            end.send((traceback.format_exc(), {}))


# The whole measurement and its presentation.


def measure(
    workloads: Sequence[str],
    layouts: Sequence[str],
    rounds: int,
    steps: int | None = None,
    warmup: int = 2,
) -> dict[str, Any]:
    """Time and bytes of every workload, layout and number of processes."""
    jobs = {count: Job(count) for count in COUNTS}
    try:
        results = {
            name: {
                layout: measure_layout(jobs, name, layout, rounds, steps, warmup)
                for layout in layouts
            }
            for name in workloads
        }
    finally:
        for job in jobs.values():
            job.close()
    settings = {
        "rounds": rounds,
        "threads_per_process": 1,
        "backend": "gloo",
        "processes": list(COUNTS),
        "batch_per_rank": {name: workload_of(name).batch_size for name in workloads},
        "refresh_every": EVERY,
        "processors": os.cpu_count(),
        "versions": versions(),
    }
    return {"workloads": results, "settings": settings}


def measure_layout(
    jobs: dict[int, Job], name: str, layout: str, rounds: int, steps: int | None, warmup: int
) -> Figures:
    """One workload in one layout: all methods on all jobs, in turns."""
    arms = [(count, method) for count in jobs for method in METHODS]
    for count, method in arms:
        jobs[count]("start", method, name, layout, method, warmup)
    turns: dict[tuple[int, str], list[Figures]] = {arm: [] for arm in arms}
    for number in range(rounds):
        print(f"{name}, {layout}: round {number + 1} of {rounds}", file=sys.stderr)
        shift = number % len(arms)
        for count, method in [*arms[shift:], *arms[:shift]]:
            times = steps or WORKLOADS[name].steps
            turns[count, method].append(jobs[count]("turn", method, times))
    sent = {(count, method): jobs[count]("bytes", method) for count, method in arms}
    for job in jobs.values():
        job("forget")
    return {
        method: {
            str(count): overhead(turns[count, method], turns[count, "ordinary"])
            | sent[count, method]
            for count in jobs
        }
        for method in METHODS
    }


def overhead(private: list[Figures], ordinary: list[Figures]) -> Figures:
    """Median seconds, and the median over rounds of the ratio to ordinary training."""
    ratios = [
        (mine["seconds"] + mine["refresh"] / EVERY) / theirs["seconds"]
        for mine, theirs in zip(private, ordinary, strict=True)
    ]
    without_refresh = [
        mine["seconds"] / theirs["seconds"] for mine, theirs in zip(private, ordinary, strict=True)
    ]
    refreshes = [
        mine["refresh"] / theirs["seconds"] for mine, theirs in zip(private, ordinary, strict=True)
    ]
    return {
        "seconds": median(turn["seconds"] for turn in private),
        "overhead": median(ratios),
        "quartiles": [_quantile(ratios, 0.25), _quantile(ratios, 0.75)],
        "overhead_without_refresh": median(without_refresh),
        "refresh_in_steps": median(refreshes),
    }


def _quantile(values: list[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def growth(figures: Figures) -> float:
    """Overhead on the most processes, relative to that on one."""
    few, *_, many = (figures[str(count)]["overhead"] for count in COUNTS)
    return float(many / few)


def table(result: dict[str, Any]) -> Table:
    """One row per workload, layout and method."""
    settings = result["settings"]
    drawn = Table(
        title=f"Overhead of private training (median of {settings['rounds']} rounds; MB sent per "
        "step and rank)"
    )
    for heading in ("workload", "layout", "method", *(f"{n} process(es)" for n in COUNTS)):
        drawn.add_column(heading)
    for heading in ("ratio", f"≤ {LIMIT}?", "MB", "MB ordinary", "control bytes", "messages"):
        drawn.add_column(heading, justify="right")
    for name, layouts in result["workloads"].items():
        for layout, methods in layouts.items():
            ordinary = methods["ordinary"][str(max(COUNTS))]
            for method in METHODS[1:]:
                figures = methods[method]
                many = figures[str(max(COUNTS))]
                drawn.add_row(
                    name,
                    layout,
                    method,
                    *(_with_quartiles(figures[str(count)]) for count in COUNTS),
                    f"{growth(figures):.2f}",
                    "yes" if growth(figures) <= LIMIT else "no",
                    f"{many['bytes'] / 1e6:.2f}",
                    f"{ordinary['bytes'] / 1e6:.2f}",
                    f"{many['control_bytes']:.0f}",
                    f"{many['messages']} ({ordinary['messages']})",
                )
    return drawn


def _with_quartiles(figures: Figures) -> str:
    low, high = figures["quartiles"]
    spread = "" if math.isclose(low, high) else f" ({low:.2f} to {high:.2f})"
    return f"{figures['overhead']:.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures are saved")
    parser.add_argument(
        "--workloads", type=names_among(WORKLOADS), default=["mlp", "vit"], metavar="NAMES"
    )
    parser.add_argument(
        "--layouts", type=names_among(LAYOUTS), default=list(LAYOUTS), metavar="NAMES"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round of one step")
    chosen = parser.parse_args()
    quick = {"rounds": 1, "steps": 1, "warmup": 1} if chosen.quick else {"rounds": chosen.rounds}
    result = measure(chosen.workloads, chosen.layouts, **quick)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1))
    Console(width=160).print(table(result))


if __name__ == "__main__":
    main()
