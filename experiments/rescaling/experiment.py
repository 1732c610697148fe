"""What becomes of correlated noise when something rescales the noisy gradients on their way to the parameters.

Noise, as the plan of a run would calibrate it, and a small constant gradient go through an optimizer, together and the
noise alone. Measured is the root mean square that the noise has in the parameters over all steps, divided by how far
the gradient moved them (Adam, for one, scales both), and that relative to independent noise on the same way. Correlated
noise must take back in later steps what it added in earlier ones, so it depends on what happens in between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from experiments.common.options import ReproduceOptions
from rich.progress import track
from rich.table import Table
from torch import Tensor

import dpkfc
from dpkfc.app.reports.text import markdown_table
from dpkfc.planning.choose_noise import Noise, evaluate
from dpkfc.random import first_key, next_key, sub_key

RUN: dict[str, Any] = {
    "records": 60_000,
    "batch_size": 256,
    "steps": 700,
    "clip": 1.0,
    "epsilon": 3.0,
    "delta": 1e-5,
}
SIZE, SEEDS = 4000, (0, 1, 2)
SIGNAL = 1e-4  # a twentieth of the independent noise of a step
NOISES: dict[str, Noise] = {
    "independent": dpkfc.noise.Independent(),
    "square root, 16 bands": dpkfc.noise.BandedSquareRoot(16),
    "optimised, 16 bands": dpkfc.noise.BandedToeplitz(16),
    "buffered, 2 buffers": dpkfc.noise.BufferedToeplitz(2),
}
Way = tuple[str, Callable[[list[Tensor]], torch.optim.Optimizer], int | None, bool]


def _sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


WAYS: tuple[
    Way, ...
] = (  # name, optimizer, steps between random rescalings of every coordinate, cosine schedule?
    ("SGD with momentum", _sgd, None, False),
    ("SGD, cosine learning rate", _sgd, None, True),
    ("SGD, coordinates rescaled every 100 steps", _sgd, 100, False),
    ("SGD, coordinates rescaled every step", _sgd, 1, False),
    ("Adam", lambda parameters: torch.optim.Adam(parameters, lr=1.0), None, False),
)


def error(noise: Noise, way: Way, seed: int) -> float:
    """Noise over signal in the path of θ. Rescaling: every coordinate by a factor exp(N(0, .5²)) of its own."""
    candidate = evaluate(noise, dpkfc.noise.Workload.sgd(momentum=0.9), **RUN)
    stream, scale = (
        candidate.factorization.stream(SIZE),
        candidate.plan.noise_scale / candidate.plan.batch_size,
    )
    _, make, every, cosine = way
    both, alone = (torch.zeros(SIZE, requires_grad=True) for _ in range(2))
    optimizers = [make([both]), make([alone])]
    generator, key, factor = torch.Generator().manual_seed(seed), first_key(seed), torch.ones(SIZE)
    noisy_path = moved = 0.0
    for step in range(RUN["steps"]):
        if every and step % every == 0:
            factor = torch.randn(SIZE, generator=generator).mul_(0.5).exp_()
        drawn = torch.zeros(SIZE)
        stream.add_([drawn], sub_key(key, "noise"), scale, step)
        both.grad, alone.grad = (drawn + SIGNAL) * factor, drawn * factor
        for optimizer in optimizers:
            if cosine:
                optimizer.param_groups[0]["lr"] = (1 + math.cos(math.pi * step / RUN["steps"])) / 2
            optimizer.step()
        key, noisy_path = next_key(key), noisy_path + float(alone.detach().double().square().mean())
        moved += float((both - alone).detach().double().mean())
    return math.sqrt(noisy_path * RUN["steps"]) / abs(moved)


def run(order: ReproduceOptions) -> None:
    """Print the table; write rescaling.json and rescaling.md."""
    out, console, seeds = order.out, order.console, order.seeds(SEEDS)
    found: dict[str, dict[str, list[float]]] = {}
    for way in track(WAYS, "rescaling", console=console, transient=True):
        errors = {
            name: [error(noise, way, seed) for seed in seeds] for name, noise in NOISES.items()
        }
        found[way[0]] = {
            name: [own / alone for own, alone in zip(values, errors["independent"], strict=True)]
            for name, values in errors.items()
            if name != "independent"
        }
    names = [name for name in NOISES if name != "independent"]
    cells = [
        [way, *(f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}" for name in names)]
        for way, ratios in found.items()
    ]
    title = f"Error in the parameters relative to independent noise, least to most of {len(seeds)} seeds"
    table = Table("on the way", *names, title=title, title_justify="left")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rescaling.json").write_text(
        json.dumps({"run": RUN, "seeds": seeds, "ratios": found}, indent=1) + "\n"
    )
    markdown = markdown_table(["on the way", *names], cells)
    settings = ", ".join(f"{name} {value:g}" for name, value in RUN.items())
    (out / "rescaling.md").write_text(
        f"# {title}\n\n`dpkfc reproduce rescaling`: {settings}.\n\n{markdown}\n"
    )
