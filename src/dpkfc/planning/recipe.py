"""A preset: all that a private run needs, from the model, the number of records and epsilon. No record is looked at.

**The learning rate.** A step too large drowns the weights in noise, one too small does not use the budget. How much
noise a run of learning rate η leaves in a parameter is known before it begins: ``η · rmse``, with rmse from the plan
(`noise.choose.evaluate`: the root mean square over the steps, of momentum and correlated noise alike). So η is chosen
by the *length of the noise in the weights of one unit*, the row of a weight matrix that makes one output:

    η = ρ √(units / parameters) / rmse

Over 14 sweeps of DP-KFC (three data sets, four models, epsilon .5 to 3, 54 to 1,075 steps, independent and correlated
noise) the best η differ by a factor of 58 and the best ρ by 4: they lie between 1 and 4.1. ρ = 2 costs .1 points in the
median and 2.3 at worst (`docs/recipe.md`).

Noise in the weights is felt in the outputs, as ``η · rmse · ‖x‖``: ρ times the root mean square of a unit's inputs. So
the rule supposes that this is about 1, as with standardised features. Rows of another length L, such as texts of length
1, want to be multiplied by √features / L; the hashed words of `dpkfc train` are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpkfc.accounting.rounding import round_up
from dpkfc.engine.checks import check_model
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry
from dpkfc.geometry.kfc import KFC
from dpkfc.noise.independent import Independent
from dpkfc.noise.toeplitz import BandedToeplitz
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import Candidate, Noise, best, evaluate, recipes
from dpkfc.planning.plan import batches
from dpkfc.probes.probe import Probe
from dpkfc.tables import Column, ShownAsTable, TextTable

NOISE_LENGTH = 2.0  # ρ
EPOCHS, STEPS = 15.0, 800
REFRESHES = 20  # of the geometry, in a run
MOMENTUM, CLIP, MAX_BUFFERS = 0.9, 1.0, 16


@dataclass(frozen=True)
class Recipe(ShownAsTable):
    """What `recipe` found. Use it as in the example there."""

    arguments: Mapping[str, Any]  # of make_private
    lr: float
    momentum: float
    decay: float  # of the averaged weights
    noise_length: float  # ρ
    reasons: tuple[tuple[str, str, str], ...]  # what, its value, and why

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(trainable(model), lr=self.lr, momentum=self.momentum)

    def averaged(self, model: nn.Module) -> AveragedModel:
        """A copy of the model that follows it: ``private.after_step(lambda: averaged.update_parameters(model))``.

        The plain mean at first, so that the start is forgotten; then the last tenth of the run.
        """

        def follow(mean: Tensor, now: Tensor, seen: Tensor | int) -> Tensor:
            return mean.lerp(now, max(1 - self.decay, 1 / (int(seen) + 1)))

        return AveragedModel(model, avg_fn=follow)

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

    DP-KFC at clip 1, SGD with momentum .9, whichever noise leaves least in the weights, the learning rate of the
    module's formula, and an average of the last tenth of the iterates.

    Args:
        delta: a tenth of 1 / records by default.
        epochs: passes over the data, 15 by default. More is better, slowly: it is a matter of time.
        batch_size: by default what makes 800 steps.
        probe: of the geometry; inferred from the model if not given.
        geometry: instead of DP-KFC.
        noise: by default independent noise or optimised banded noise, whichever leaves less in the weights.
        noise_length: ρ.

    >>> import torch, dpkfc
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> data = torch.utils.data.TensorDataset(torch.randn(1000, 64), torch.randint(10, (1000,)))
    >>> recipe = dpkfc.recipe(model, records=len(data), epsilon=3.0, delta=1e-5, epochs=2, batch_size=500)
    >>> optimizer, averaged = recipe.optimizer(model), recipe.averaged(model)
    >>> private = dpkfc.make_private(model, optimizer, data, **recipe.arguments, loss=dpkfc.losses.cross_entropy)
    >>> private.after_step(lambda: averaged.update_parameters(model))
    >>> for x, y in private.loader:
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> private.epsilon() <= 3.0
    True
    """
    check_model(model)
    if isinstance(records, bool) or not isinstance(records, int) or records < 1:
        raise PrivacyError(f"recipe: records={records!r}: give the number of records, at least 1")
    if not (noise_length > 0 and math.isfinite(noise_length)):
        raise PrivacyError(f"recipe: noise_length={noise_length!r}: must be a positive number")
    if geometry is not None and probe is not None:
        raise PrivacyError("recipe: give probe, or a geometry that has its own, not both")
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
    candidates = _candidates(records // batch_size) if noise == "auto" else [noise]
    tried = [evaluate(candidate, workload, **run) for candidate in candidates]
    chosen = best(tried)
    units, parameters = size(model)
    lr = noise_length * math.sqrt(units / parameters) / chosen.rmse
    every = max(1, steps // REFRESHES)
    decay = 1 - min(1.0, 10 / steps)
    geometry = KFC(probe=probe, every=every) if geometry is None else geometry
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
                "given, or a tenth of 1 / records",
            ),
            (
                "batch size",
                f"{batch_size}",
                f"{steps} steps in {epochs:g} passes over {records} records",
            ),
            (
                "geometry",
                geometry.name,
                "probes tell which gradients are large; none of the records do",
            ),
            (
                "clip",
                f"{CLIP:g}",
                "most mapped gradients are longer, so it only sets the scale of the rate",
            ),
            ("noise", chosen.factorization.name, _why(chosen, tried)),
            (
                "optimizer",
                f"SGD, momentum {MOMENTUM:g}",
                "linear, so that correlated noise cancels",
            ),
            (
                "learning rate",
                f"{lr:.3g}",
                f"noise of length {noise_length:g} in each of {units} units' weights",
            ),
            (
                "averaged weights",
                f"decay {decay:.4g}",
                "the last tenth of the run; free post-processing",
            ),
        ),
    )


def usual_delta(records: int) -> float:
    """A tenth of 1 / records: delta, where none is given."""
    return 0.1 / records


def size(model: nn.Module) -> tuple[int, int]:
    """Units, the rows of weight matrices, and parameters, of all that is trained.

    >>> size(nn.Sequential(nn.Conv2d(1, 16, 3), nn.Linear(100, 10)))
    (26, 1170)
    """
    weights = trainable(model)
    return max(1, sum(len(w) for w in weights if w.dim() > 1)), sum(w.numel() for w in weights)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _candidates(turns: int) -> list[Noise]:
    """Independent and optimised banded noise: one of these has the least error, or nearly so."""
    return [
        noise
        for noise in recipes(MAX_BUFFERS, turns)
        if isinstance(noise, Independent | BandedToeplitz)
    ]


def _why(chosen: Candidate, tried: list[Candidate]) -> str:
    if len(tried) == 1:
        return "given"
    if chosen is tried[0]:
        return "no correlated noise leaves clearly less in the weights"
    return (
        f"leaves {chosen.rmse / tried[0].rmse:.2f} of what independent noise would in the weights"
    )
