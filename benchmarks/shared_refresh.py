"""A refresh of DP-KFC by one rank, and shared by all ranks of a job: time and bytes.

    python -m benchmarks.shared_refresh --ranks 2

One process per rank, one thread each, on the CPU over gloo. In every round the first rank refreshes
alone while the others wait, and then all refresh together. Reported are the medians over the
rounds: wall time, and processor time of the busiest rank, which does not depend on how many cores
are free. Bytes are those that one rank gives to the two kinds of messages of
`dpkfc.geometry.sharing`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dpkfc
from dpkfc.distributed import ALONE, Ranks, current_ranks
from dpkfc.per_sample.capture import GradientCapture


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2),
        nn.Tanh(),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(800, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def wide() -> nn.Module:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.Tanh(), *hidden, nn.Linear(512, 10))


PROBE = dpkfc.probes.PinkNoise((1, 28, 28), classes=10)
ARMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dpkfc.KFC]]] = {
    "convolutions, A, rank 32": (convolutions, lambda: dpkfc.KFC(PROBE)),
    "wide MLP, A, rank 32": (wide, lambda: dpkfc.KFC(PROBE)),
    "wide MLP, AG, full rank, 1024 probes": (
        wide,
        lambda: dpkfc.KFC(PROBE, factors="AG", rank=None, probes=1024),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(rank, arguments.ranks, arguments.rounds, folder))
            for rank in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def work(rank: int, count: int, rounds: int, folder: str) -> None:
    """All that one rank does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count
    )
    ranks = current_ranks()
    for name, (build, make) in ARMS.items():
        torch.manual_seed(0)
        model, geometry = build(), make()
        capture = GradientCapture(model)
        sent = _bytes_of_refresh(geometry, model, capture, ranks)
        alone: list[tuple[float, float]] = []
        shared: list[tuple[float, float]] = []
        for step in range(1, rounds + 1):
            dist.barrier()
            if rank == 0:
                alone.append(_seconds(geometry, model, capture, step, ALONE))
            dist.barrier()
            own = _seconds(geometry, model, capture, step, ranks)
            wall, processor = zip(*ranks.everyone(own), strict=True)
            shared.append((max(wall), max(processor)))
        if rank == 0:
            print(
                f"{name}: {_compared(alone, shared, count)}; to owners "
                f"{sent['reduce'] / 1e6:.2f} MB, to all {sent['broadcast'] / 1e6:.2f} MB",
                flush=True,
            )
    dist.destroy_process_group()


def _compared(
    alone: list[tuple[float, float]], shared: list[tuple[float, float]], count: int
) -> str:
    texts = []
    for kind, number in (("wall", 0), ("processor", 1)):
        before, after = ([times[number] for times in rounds] for rounds in (alone, shared))
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        texts.append(
            f"{kind} {statistics.median(before):.3f} s alone, {statistics.median(after):.3f} s "
            f"on {count} ranks, ratio {ratio:.2f}"
        )
    return "; ".join(texts)


def _seconds(
    geometry: dpkfc.KFC, model: nn.Module, capture: GradientCapture, step: int, ranks: Ranks
) -> tuple[float, float]:
    """Wall and processor time of a refresh."""
    wall, processor = time.perf_counter(), time.process_time()
    geometry.refresh(model, capture, step, ranks)
    return time.perf_counter() - wall, time.process_time() - processor


def _bytes_of_refresh(
    geometry: dpkfc.KFC, model: nn.Module, capture: GradientCapture, ranks: Ranks
) -> dict[str, int]:
    """The bytes of the tensors in each kind of message during a refresh."""
    counted = {"reduce": 0, "broadcast": 0}
    originals = {kind: getattr(dist, kind) for kind in counted}

    def counting(kind: str) -> Callable[..., Any]:
        def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counted[kind] += tensor.nbytes
            return originals[kind](tensor, *args, **kwargs)

        return send

    for kind in counted:
        setattr(dist, kind, counting(kind))
    try:
        geometry.refresh(model, capture, 0, ranks)
    finally:
        for kind, original in originals.items():
            setattr(dist, kind, original)
    return counted


if __name__ == "__main__":
    main()
