"""The effect of clipping on given examples: norms, clipped share, and the direction of the mean.

Clipping biases the mean: the mean of clipped gradients has another direction than the mean of the
gradients. The cosine between the two is 1 if all gradients are scaled alike. It falls as the long
gradients, which are clipped, differ from the short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.diagnostics.passes import AnyLoss, Examples, Reduction, captured_copy
from dpkfc.diagnostics.result import DiagnosticResult, empty_table, privacy_statement
from dpkfc.diagnostics.step import Clip, Step, beside_dp_sgd, step_of
from dpkfc.geometry.base import Geometry
from dpkfc.tables import TextTable

SHOWN_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


@dataclass(frozen=True)
class ClipEffect:
    """The effect under one geometry. All numbers are those of mapped gradients U g."""

    clip: float  # R
    percentiles: tuple[float, ...]  # of ‖U g_i‖, from the 0th to the 100th
    clipped: float  # share of the examples with a weight below 1
    mean_weight: float
    cosine: float  # between the means of the clipped and of the unclipped gradients
    length: float  # of the clipped mean, relative to the unclipped one
    shares: dict[str, float]  # mean over i of ‖U_l g_il‖² / ‖U g_i‖², by layer l; their sum is 1
    not_finite: int  # examples whose gradient is not finite; they count as zero


@dataclass(frozen=True)
class Clipping(DiagnosticResult):
    """The effect under every geometry, DP-SGD first."""

    geometries: dict[str, ClipEffect]
    examples: int
    privacy: str

    def table(self) -> TextTable:
        title = f"Clipping of {self.examples} examples"
        table = empty_table(title, self.privacy, [""], self.geometries)
        effects = list(self.geometries.values())

        def add(name: str, text: Callable[[ClipEffect], str]) -> None:
            table.add_row(name, *map(text, effects))

        add("clip R", lambda effect: f"{effect.clip:.3g}")
        for level in SHOWN_PERCENTILES:
            norms = (f"{effect.percentiles[level]:.3g}" for effect in effects)
            table.add_row(f"norm, {level}%", *norms)
        add("clipped", lambda effect: f"{effect.clipped:.1%}")
        add("mean weight", lambda effect: f"{effect.mean_weight:.3g}")
        add("cosine of the means", lambda effect: f"{effect.cosine:.3f}")
        add("length of the mean", lambda effect: f"× {effect.length:.3g}")
        if any(effect.not_finite for effect in effects):
            add("not finite", lambda effect: str(effect.not_finite))
        table.add_section()
        for layer in effects[0].shares:
            shares = (f"{effect.shares[layer]:.1%}" for effect in effects)
            table.add_row(f"share of {layer}", *shares)
        return table

    def plot(self, file: str | Path) -> None:
        """Write a plot of the norms in units of the clip, and of the layers' shares, to `file`."""
        from dpkfc.diagnostics.plots import plot_clipping

        plot_clipping(self, Path(file))


def clip_effect(
    model: nn.Module,
    source: Any,
    *,
    clip: Clip,
    geometry: Geometry | Mapping[str, Geometry],
    loss: AnyLoss = "cross_entropy",
    loss_reduction: Reduction = "mean",
    probes: int | None = None,
    vmap_modules: Iterable[str] = (),
    seed: int = 0,
) -> Clipping:
    """Measure the effect of clipping on a batch of records or on probes.

    DP-SGD is always compared with the given geometries. The arguments are those of `layer_snr`.

    >>> import torch, dpkfc
    >>> import torch.nn.functional as F
    >>> from dpkfc.diagnostics import clip_effect
    >>> model, batch = torch.nn.Linear(4, 2), (torch.randn(16, 4), torch.randint(2, (16,)))
    >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    >>> geometry = dpkfc.KFC(dpkfc.probes.Tabular(4))
    >>> clip_effect(model, batch, clip="median", geometry=geometry, loss=loss).privacy
    'not private: computed from the given records'
    """
    examples = Examples(source, loss, loss_reduction, probes, seed)
    compared = beside_dp_sgd(geometry)
    with captured_copy(model, vmap_modules) as (copied, capture):
        steps = {
            name: step_of(copied, capture, examples, one, clip) for name, one in compared.items()
        }
    effects = {name: _effect(step) for name, step in steps.items()}
    privacy = privacy_statement([source], compared.values())
    return Clipping(effects, len(steps["DP-SGD"].norms), privacy)


def _effect(step: Step) -> ClipEffect:
    finite = step.finite
    norms = step.norms[finite].double()
    weights = step.weights[finite]
    if not len(norms):
        raise ValueError(
            "no example has a finite gradient: the weights have diverged, or the inputs or the "
            "loss are not finite"
        )
    plain = torch.cat(list(step.plain.values())).double()
    clipped = torch.cat(list(step.clipped.values())).double()
    positive = norms > 0
    squares = norms[positive].square()
    return ClipEffect(
        clip=step.clip,
        percentiles=tuple(_percentiles(norms).tolist()),
        clipped=float((weights < 1).double().mean()),
        mean_weight=float(weights.double().mean()),
        cosine=float(plain @ clipped / (plain.norm() * clipped.norm())),
        length=float(clipped.norm() / plain.norm()),
        shares={
            layer: float((part[finite][positive].double() / squares).mean())
            for layer, part in step.squares.items()
        },
        not_finite=int((~finite).sum()),
    )


def _percentiles(values: Tensor) -> Tensor:
    """The 0th to the 100th percentile, interpolated linearly."""
    last = len(values) - 1
    positions = torch.linspace(0, 1, 101, dtype=values.dtype, device=values.device) * last
    ordered = values.sort().values
    low = positions.floor().long()
    return torch.lerp(ordered[low], ordered[(low + 1).clamp(max=last)], positions - low)
