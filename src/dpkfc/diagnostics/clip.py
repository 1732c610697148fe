"""What clipping does to the given examples: how long they are, how many are cut, and where the mean then points.

Clipping is a bias: the mean of clipped gradients points elsewhere than their mean. The cosine between the two is 1
where all are scaled alike, and falls as the long ones, which are cut, differ from the short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.diagnostics.passes import AnyLoss, Examples, Reduction, watched
from dpkfc.diagnostics.result import Result, empty_table, privacy_of
from dpkfc.diagnostics.step import Clip, Step, beside_dp_sgd, step_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry
from dpkfc.tables import TextTable

SHOWN = (0, 5, 25, 50, 75, 95, 100)  # percentiles in the table


@dataclass(frozen=True)
class ClipEffect:
    """One geometry. Norms, means and shares are those of mapped gradients U g."""

    clip: float  # C
    percentiles: tuple[float, ...]  # of ‖U g_i‖, the 0th to the 100th
    clipped: float  # the part of the examples with a weight below 1
    mean_weight: float
    cosine: float  # between the mean of the clipped gradients and that of the unclipped
    length: float  # of the clipped mean, relative to the unclipped
    shares: dict[
        str, float
    ]  # mean over examples of ‖U_l g_il‖² / ‖U g_i‖², by layer; they add up to 1
    not_finite: int  # examples whose gradient is not, and which count as zero


@dataclass(frozen=True)
class Clipping(Result):
    """Every geometry, that of DP-SGD first."""

    geometries: dict[str, ClipEffect]
    examples: int
    privacy: str

    def table(self) -> TextTable:
        table = empty_table(
            f"Clipping of {self.examples} examples", self.privacy, [""], self.geometries
        )
        found = list(self.geometries.values())
        table.add_row("clip C", *(f"{one.clip:.3g}" for one in found))
        for level in SHOWN:
            table.add_row(f"norm, {level}%", *(f"{one.percentiles[level]:.3g}" for one in found))
        table.add_row("clipped", *(f"{one.clipped:.1%}" for one in found))
        table.add_row("mean weight", *(f"{one.mean_weight:.3g}" for one in found))
        table.add_row("cosine of the means", *(f"{one.cosine:.3f}" for one in found))
        table.add_row("length of the mean", *(f"× {one.length:.3g}" for one in found))
        if any(one.not_finite for one in found):
            table.add_row("not finite", *(str(one.not_finite) for one in found))
        table.add_section()
        for layer in found[0].shares:
            table.add_row(f"share of {layer}", *(f"{one.shares[layer]:.1%}" for one in found))
        return table

    def plot(self, file: str | Path) -> None:
        """The norms beside the clip, and the shares of the layers, as an image."""
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
    """What clipping to `clip` does to a batch of records, or to probes, with and without a geometry.

    The arguments are those of `layer_snr`.

    >>> import torch, dpkfc
    >>> import torch.nn.functional as F
    >>> from dpkfc.diagnostics import clip_effect
    >>> model, batch = torch.nn.Linear(4, 2), (torch.randn(16, 4), torch.randint(2, (16,)))
    >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    >>> found = clip_effect(model, batch, clip="median", geometry=dpkfc.KFC(dpkfc.probes.Tabular(4)), loss=loss)
    >>> found.privacy
    'not private: computed from the given records'
    """
    examples = Examples(source, loss, loss_reduction, probes, seed)
    compared = beside_dp_sgd(geometry)
    with watched(model, vmap_modules) as (copied, capture):
        steps = {
            name: step_of(copied, capture, examples, one, clip) for name, one in compared.items()
        }
    effects = {name: _effect(step) for name, step in steps.items()}
    return Clipping(effects, len(steps["DP-SGD"].norms), privacy_of([source], compared.values()))


def _effect(step: Step) -> ClipEffect:
    finite = step.finite
    norms, weights = step.norms[finite].double(), step.weights[finite]
    if not len(norms):
        raise PrivacyError(
            "no example has a finite gradient: the weights have diverged, or the inputs or the loss are not finite"
        )
    plain, clipped = (
        torch.cat(list(means.values())).double() for means in (step.plain, step.clipped)
    )
    some = norms > 0
    shares = {
        name: (part[finite][some].double() / norms[some].square())
        for name, part in step.squares.items()
    }
    return ClipEffect(
        clip=step.clip,
        percentiles=tuple(_quantiles(norms).tolist()),
        clipped=float((weights < 1).double().mean()),
        mean_weight=float(weights.double().mean()),
        cosine=float(plain @ clipped / (plain.norm() * clipped.norm())),
        length=float(clipped.norm() / plain.norm()),
        shares={name: float(part.mean()) for name, part in shares.items()},
        not_finite=int((~finite).sum()),
    )


def _quantiles(values: Tensor) -> Tensor:
    """The 0th to the 100th percentile, between neighbours by a straight line."""
    places = torch.linspace(0, 1, 101, dtype=values.dtype, device=values.device) * (len(values) - 1)
    ordered, low = values.sort().values, places.floor().long()
    return torch.lerp(ordered[low], ordered[(low + 1).clamp(max=len(values) - 1)], places - low)
