"""Correlated noise through optimizers and schedules that rescale it, in a simulation.

Noise with the calibration of a run, plus a small constant gradient, passes through an optimizer;
so does the noise alone. The measured error is the root mean square of the noise in the parameters
over all steps, divided by how far the gradient moved them (because Adam, for one, scales both). It
is reported relative to independent noise through the same optimizer. Correlated noise must cancel
in later steps what it added in earlier ones, so it depends on what happens between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

import dpkfc
from dpkfc.app.reports.text import markdown_table
from dpkfc.planning.choose_noise import Noise, evaluate
from dpkfc.random import first_key, next_key, sub_key
from experiments.common.options import ReproduceOptions

RUN: dict[str, Any] = {
    "records": 60_000,
    "batch_size": 256,
    "steps": 700,
    "clip": 1.0,
    "epsilon": 3.0,
    "delta": 1e-5,
}
SIZE = 4000  # parameters
SEEDS = (0, 1, 2)
SIGNAL = 1e-4  # a twentieth of the independent noise of a step
NOISES: dict[str, Noise] = {
    "independent": dpkfc.noise.Independent(),
    "square root, 16 bands": dpkfc.noise.BandedSquareRoot(16),
    "optimised, 16 bands": dpkfc.noise.BandedToeplitz(16),
    "buffered, 2 buffers": dpkfc.noise.BufferedToeplitz(2),
}


@dataclass(frozen=True)
class Pipeline:
    """What a noisy gradient passes through on its way to the parameters.

    Args:
        name: Its name in the table.
        optimizer: Creates the optimizer.
        rescale_every: Steps between random rescalings of every coordinate; None for none.
        cosine: Whether the learning rate follows a cosine schedule.
    """

    name: str
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    rescale_every: int | None = None
    cosine: bool = False


def _sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


PIPELINES = (
    Pipeline("SGD with momentum", _sgd),
    Pipeline("SGD, cosine learning rate", _sgd, cosine=True),
    Pipeline("SGD, coordinates rescaled every 100 steps", _sgd, rescale_every=100),
    Pipeline("SGD, coordinates rescaled every step", _sgd, rescale_every=1),
    Pipeline("Adam", lambda parameters: torch.optim.Adam(parameters, lr=1.0)),
)


def error(noise: Noise, pipeline: Pipeline, seed: int) -> float:
    """Return the ratio of noise to signal along the path of θ.

    Rescaling multiplies every coordinate by its own factor exp(N(0, .5²)).
    """
    candidate = evaluate(noise, dpkfc.noise.Workload.sgd(momentum=0.9), **RUN)
    stream = candidate.factorization.stream([range(SIZE)], torch.device("cpu"))
    scale = candidate.plan.noise_scale / candidate.plan.batch_size
    both, alone = (torch.zeros(SIZE, requires_grad=True) for _ in range(2))
    optimizers = [pipeline.optimizer([both]), pipeline.optimizer([alone])]
    generator = torch.Generator().manual_seed(seed)
    key = first_key(seed)
    factor = torch.ones(SIZE)
    noisy_path = moved = 0.0
    for step in range(RUN["steps"]):
        if pipeline.rescale_every and step % pipeline.rescale_every == 0:
            factor = torch.randn(SIZE, generator=generator).mul_(0.5).exp_()
        drawn = torch.zeros(SIZE)
        stream.add_([drawn], sub_key(key, "noise"), scale, step)
        both.grad = (drawn + SIGNAL) * factor
        alone.grad = drawn * factor
        for optimizer in optimizers:
            if pipeline.cosine:
                optimizer.param_groups[0]["lr"] = (1 + math.cos(math.pi * step / RUN["steps"])) / 2
            optimizer.step()
        key = next_key(key)
        noisy_path += float(alone.detach().double().square().mean())
        moved += float((both - alone).detach().double().mean())
    return math.sqrt(noisy_path * RUN["steps"]) / abs(moved)


def reproduce(options: ReproduceOptions) -> None:
    """Print the table; write rescaling.json and rescaling.md. Quick: one seed."""
    seeds = options.seeds(SEEDS)
    ratios: dict[str, dict[str, list[float]]] = {}
    for pipeline in track(PIPELINES, "rescaling", console=options.console, transient=True):
        errors = {
            name: [error(noise, pipeline, seed) for seed in seeds] for name, noise in NOISES.items()
        }
        ratios[pipeline.name] = {
            name: [own / alone for own, alone in zip(values, errors["independent"], strict=True)]
            for name, values in errors.items()
            if name != "independent"
        }
    names = [name for name in NOISES if name != "independent"]
    cells = [
        [name, *(f"{min(of[noise]):.2f} to {max(of[noise]):.2f}" for noise in names)]
        for name, of in ratios.items()
    ]
    title = (
        "Error in the parameters relative to independent noise, "
        f"least to most of {len(seeds)} seeds"
    )
    table = Table("optimizer", *names, title=title, title_justify="left")
    for line in cells:
        table.add_row(*line)
    options.console.print(table)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "rescaling.json").write_text(
        json.dumps({"run": RUN, "seeds": seeds, "ratios": ratios}, indent=1) + "\n"
    )
    markdown = markdown_table(["optimizer", *names], cells)
    settings = ", ".join(f"{name} {value:g}" for name, value in RUN.items())
    (out / "rescaling.md").write_text(
        f"# {title}\n\n`dpkfc reproduce rescaling`: {settings}.\n\n{markdown}\n"
    )
