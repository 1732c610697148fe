"""A small private run that any number of ranks can do, and what it released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.sharding import is_sharded, like_parameter

FEATURES, CLASSES, RECORDS, STEPS = 6, 3, 120, 20


@dataclass
class Released:
    """What one rank saw of a run, with sharded tensors put together."""

    weights: list[Tensor]
    sums: list[list[Tensor]]  # of every step, before the noise
    noise: list[list[Tensor]]  # of every step
    epsilon: float
    steps: int
    batches: int  # that the loop saw
    rows: int  # that counted


def records(more: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS + 10, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (RECORDS + 10,), generator=generator)
    x[RECORDS:] *= 30  # large gradients
    return TensorDataset(x[: RECORDS + more], y[: RECORDS + more])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, CLASSES)
    )


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 on the first layer, and on the model, which takes the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(next(model.children()), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if is_sharded(p) else p).detach().clone()


def geometry_of(name: str) -> Any:
    probe = dpkfc.probes.Tabular(FEATURES, classes=CLASSES)
    return dpkfc.KFC(probe, every=7) if name == "kfc" else None


def noise_of(name: str) -> Any:
    bands = {"banded": dpkfc.noise.BandedToeplitz(bands=4)}
    return bands.get(name)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def begin(model: nn.Module, data: Any, optimizer: Any = None, **options: Any) -> Any:
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    defaults: dict[str, Any] = {
        "loss": loss_of,
        "noise_multiplier": 1.0,
        "delta": 1e-4,
        "steps": STEPS,
        "batch_size": 12,
        "clip": 0.7,
        "seed": 5,
    }
    return dpkfc.make_private(model, optimizer, data, **{**defaults, **options})


def record_noise(run: Any) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """From now on, keep the sums and the noise of every step."""
    sums_of_steps: list[list[Tensor]] = []
    noise_of_steps: list[list[Tensor]] = []
    add = run._noise.add_

    def put_together(parts: list[Tensor]) -> list[Tensor]:
        params = run._trainable().values()
        return [
            whole(like_parameter(p, part.clone())) for p, part in zip(params, parts, strict=True)
        ]

    def recorded(sums: list[Tensor], *args: Any) -> None:
        noise = [torch.zeros_like(part) for part in sums]
        add(noise, *args)
        sums_of_steps.append(put_together(sums))
        noise_of_steps.append(put_together(noise))
        for part, its_noise in zip(sums, noise, strict=True):
            part.add_(its_noise)

    run._noise.add_ = recorded
    return sums_of_steps, noise_of_steps


def loop(run: Any, called: nn.Module, most: int | None = None) -> int:
    batches = 0
    for x, y in run.loader:
        F.cross_entropy(called(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        batches += 1
        if most is not None and run.steps >= most:
            break
    return batches


def train(
    layout: str,
    geometry: str = "identity",
    noise: str = "independent",
    more: int = 0,
    ledger: str | None = None,
    **options: Any,
) -> Released:
    """A whole run."""
    model = network()
    called: nn.Module = model
    if layout == "fsdp":
        called = model = sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if layout == "ddp before":
        called = nn.parallel.DistributedDataParallel(model)
    if ledger is not None:
        options["ledger"] = dpkfc.Ledger(ledger, dataset="people")
    run = begin(
        called,
        records(more),
        optimizer,
        geometry=geometry_of(geometry),
        noise=noise_of(noise),
        **options,
    )
    if layout == "ddp after":
        called = nn.parallel.DistributedDataParallel(model)
    sums, noises = record_noise(run)
    batches = loop(run, called)
    released = Released(
        [whole(p) for p in model.parameters()],
        sums,
        noises,
        run.epsilon(),
        run.steps,
        batches,
        run.not_private.samples,
    )
    run.detach()
    return released
