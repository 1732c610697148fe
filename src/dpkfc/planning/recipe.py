"""A preset: all settings of a private run, from the model, the number of records and epsilon.

No record is read.

**The learning rate.** If the step is too large, noise dominates the weights; if it is too small,
the budget is not used. The noise that a run with learning rate η leaves in a parameter is known in
advance: ``η · rmse``, where rmse comes from the plan (`dpkfc.planning.choose_noise.evaluate`: the
root mean square over the steps, for momentum and correlated noise as well). So η is chosen by the
*length of the noise in the weights of one unit*, where a unit is the row of a weight matrix that
produces one output:

    η = ρ √(units / parameters) / rmse

Over 14 sweeps of DP-KFC (three data sets, four models, epsilon .5 to 3, 54 to 1,075 steps,
independent and correlated noise) the best η differ by a factor of 58, but the best ρ only by a
factor of 4: they lie between 1 and 4.1. ρ = 2 costs .1 points in the median and 2.3 at worst
(`docs/recipe.md`).

The noise in the weights reaches the outputs as ``η · rmse · ‖x‖``: ρ times the root mean square of
the inputs of a unit. The rule assumes that this root mean square is about 1, as for standardised
features. Rows of another length L, such as texts of length 1, should be multiplied by
√features / L; `dpkfc train` does this for hashed words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from dpkfc.accounting.rounding import round_up
from dpkfc.geometry.base import Geometry
from dpkfc.geometry.kfc import KFC
from dpkfc.noise.independent import Independent
from dpkfc.noise.toeplitz import BandedToeplitz
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import Candidate, Noise, best, compare, noise_candidates
from dpkfc.planning.plan import batches
from dpkfc.probes.probe import Probe
from dpkfc.tables import Column, ShownAsTable, TextTable

NOISE_LENGTH = 2.0  # ρ
EPOCHS = 15.0
STEPS = 800
REFRESHES = 20  # of the geometry, per run
MOMENTUM = 0.9
CLIP = 1.0
MAX_BUFFERS = 16


@dataclass(frozen=True)
class Recipe(ShownAsTable):
    """The settings that `recipe` computed; see the example there."""

    arguments: Mapping[str, Any]  # of make_private
    lr: float
    momentum: float
    decay: float  # of the averaged weights
    noise_length: float  # ρ
    reasons: tuple[tuple[str, str, str], ...]  # setting, value, reason

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """SGD over the trainable parameters, with this learning rate and momentum."""
        return torch.optim.SGD(trainable(model), lr=self.lr, momentum=self.momentum)

    def averaged(self, model: nn.Module) -> AveragedModel:
        """A copy of the model for the averaged weights.

        Update it with ``run.after_step(lambda: averaged.update_parameters(model))``. It is the
        plain mean at first, so that the initial weights are forgotten, and later an exponential
        average over the last tenth of the run.
        """

        def average(mean: Tensor, weights: Tensor, updates: Tensor | int) -> Tensor:
            return mean.lerp(weights, max(1 - self.decay, 1 / (int(updates) + 1)))

        return AveragedModel(model, avg_fn=average)

    def table(self) -> TextTable:
        columns = [Column("what"), Column("value", wrap=True), Column("why", wrap=True)]
        title = "Recipe (no private data was used)"
        return TextTable(title, columns, list(self.reasons), width=110)


def recipe(
    model: nn.Module,
    *,
    records: int,
    epsilon: float,
    delta: float | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    probe: Probe | None = None,
    geometry: Geometry | None = None,
    noise: Noise | Literal["auto"] = "auto",
    noise_length: float = NOISE_LENGTH,
) -> Recipe:
    """Settings for training `model` on `records` records at this epsilon, without tuning.

    DP-KFC with clip norm 1, SGD with momentum .9, the noise with the smallest error in the weights,
    the learning rate of the module's formula, and an average over the last tenth of the iterates.

    Args:
        model: only its architecture and what it declares about its inputs are used.
        records: number of records; treated as public.
        epsilon: the privacy budget.
        delta: a tenth of 1 / `records` by default.
        epochs: passes over the data, 15 by default. More passes improve the model slowly and take
            more time.
        batch_size: by default such that there are 800 steps.
        probe: of the geometry; inferred from the model if not given.
        geometry: instead of DP-KFC.
        noise: by default independent noise or optimised banded noise, whichever has the smaller
            error in the weights.
        noise_length: ρ.

    Returns:
        The arguments of `make_private`, the optimizer and the averaged model, with the reason for
        each setting.

    Raises:
        ValueError: if an argument is out of range, or the model has no trainable parameter.
        TypeError: if an argument has the wrong type.

    **Guarantee.** The recipe reads no record: it costs no privacy, and the run has the guarantee of
    `make_private`.

    >>> import torch, dpkfc
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> x, y = torch.randn(1000, 64), torch.randint(10, (1000,))
    >>> data = torch.utils.data.TensorDataset(x, y)
    >>> recipe = dpkfc.recipe(
    ...     model, records=len(data), epsilon=3.0, delta=1e-5, epochs=2, batch_size=500
    ... )
    >>> optimizer, averaged = recipe.optimizer(model), recipe.averaged(model)
    >>> run = dpkfc.make_private(
    ...     model, optimizer, data, **recipe.arguments, loss=dpkfc.losses.cross_entropy
    ... )
    >>> run.after_step(lambda: averaged.update_parameters(model))
    >>> for x, y in run.loader:
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> run.epsilon() <= 3.0
    True
    """
    _check_model(model)
    if isinstance(records, bool) or not isinstance(records, int):
        raise TypeError(f"recipe: records={records!r}: must be a whole number")
    if records < 1:
        raise ValueError(f"recipe: records={records!r}: must be at least 1")
    if not (noise_length > 0 and math.isfinite(noise_length)):
        raise ValueError(f"recipe: noise_length={noise_length!r}: must be a positive number")
    if geometry is not None and probe is not None:
        raise ValueError("recipe: give probe, or a geometry that has its own, not both")
    epochs = EPOCHS if epochs is None else epochs
    if batch_size is None:
        batch_size = min(max(1, round(epochs * records / STEPS)), records)
    batch_size, steps = batches(records, batch_size, epochs, None)
    run = {
        "records": records,
        "batch_size": batch_size,
        "steps": steps,
        "clip": CLIP,
        "epsilon": epsilon,
        "delta": usual_delta(records) if delta is None else delta,
    }
    workload = Workload.sgd(momentum=MOMENTUM)
    kinds = _candidates(records // batch_size) if noise == "auto" else [noise]
    candidates = compare(kinds, workload, **run)
    chosen = best(candidates)
    units, parameters = count_units_and_parameters(model)
    lr = noise_length * math.sqrt(units / parameters) / chosen.rmse
    decay = 1 - min(1.0, 10 / steps)
    if geometry is None:
        geometry = KFC(probe=probe, every=max(1, steps // REFRESHES))
    arguments = {name: value for name, value in run.items() if name != "records"}
    return Recipe(
        arguments={**arguments, "geometry": geometry, "noise": chosen.noise},
        lr=lr,
        momentum=MOMENTUM,
        decay=decay,
        noise_length=noise_length,
        reasons=(
            (
                "epsilon, delta",
                f"{round_up(epsilon, 6)}, {run['delta']:.3g}",
                "delta is a tenth of 1 / records unless given",
            ),
            (
                "batch size",
                f"{batch_size}",
                f"{steps} steps in {epochs:g} passes over {records} records",
            ),
            ("geometry", geometry.name, "built from probes; no record is read"),
            (
                "clip",
                f"{CLIP:g}",
                "most mapped gradients are longer, so the clip only scales the learning rate",
            ),
            ("noise", chosen.factorization.name, _noise_reason(chosen, candidates)),
            (
                "optimizer",
                f"SGD, momentum {MOMENTUM:g}",
                "linear, so that correlated noise cancels",
            ),
            (
                "learning rate",
                f"{lr:.3g}",
                f"noise of length {noise_length:g} in the weights of each of {units} units",
            ),
            (
                "averaged weights",
                f"decay {decay:.4g}",
                "the last tenth of the run; free post-processing",
            ),
        ),
    )


def usual_delta(records: int) -> float:
    """A tenth of 1 / `records`: the default of delta."""
    return 0.1 / records


def count_units_and_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of units (rows of weight matrices) and of parameters, over all that is trained.

    >>> count_units_and_parameters(nn.Sequential(nn.Conv2d(1, 16, 3), nn.Linear(100, 10)))
    (26, 1170)
    """
    weights = trainable(model)
    units = sum(len(weight) for weight in weights if weight.dim() > 1)
    return max(1, units), sum(weight.numel() for weight in weights)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _check_model(model: nn.Module) -> None:
    """Check what the recipe itself needs; `make_private` checks that the model can be private."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"recipe: model must be a torch.nn.Module, not {type(model).__name__}")
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"recipe: parameter '{name}' is not initialised: run one forward pass on public or "
                "random input first"
            )
    if not trainable(model):
        raise ValueError(
            "recipe: the model has no trainable parameter: set requires_grad on the parameters to "
            "train"
        )


def _candidates(turns: int) -> list[Noise]:
    """Independent and optimised banded noise: one of them has nearly the smallest error."""
    kinds = noise_candidates(MAX_BUFFERS, turns)
    return [kind for kind in kinds if isinstance(kind, Independent | BandedToeplitz)]


def _noise_reason(chosen: Candidate, candidates: list[Candidate]) -> str:
    if len(candidates) == 1:
        return "given"
    if chosen is candidates[0]:
        return "no correlated noise has a clearly smaller error in the weights"
    share = chosen.rmse / candidates[0].rmse
    return f"its error in the weights is {share:.2f} of that of independent noise"
