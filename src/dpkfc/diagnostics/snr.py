"""Signal and noise of one private step, layer by layer (Figure 1 of the paper).

The signal of layer l is the norm of its part of the clipped mean gradient; the noise, N(0, (σC/B)²) on each of its d_l
coordinates, has norm ``σ C √d_l / B`` (the root of its mean square). Under DP-SGD layers with small gradients and many
weights drown; a geometry is meant to level the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from dpkfc.diagnostics.passes import AnyLoss, Examples, Reduction, watched
from dpkfc.diagnostics.result import Result, privacy_of, table_of
from dpkfc.diagnostics.step import Clip, beside_dp_sgd, step_of
from dpkfc.geometry.identity import Geometry
from dpkfc.probes.arguments import check_integer, check_number


@dataclass(frozen=True)
class LayerSNR:
    """One layer, or all of them together, under one geometry."""

    layer: str
    parameters: int  # d_l
    signal: float  # ‖Σ w_i U_l g_il / n‖
    noise: float  # σ C √d_l / B

    @property
    def ratio(self) -> float:
        return self.signal / self.noise


@dataclass(frozen=True)
class SNR(Result):
    """The profile of every geometry, that of DP-SGD first. Layers are in the order of the model."""

    geometries: dict[str, tuple[LayerSNR, ...]]
    clips: dict[str, float]  # C
    noise_multiplier: float  # σ
    batch_size: int  # B
    examples: int
    privacy: str

    def whole(self, geometry: str) -> LayerSNR:
        """All layers together."""
        rows = self.geometries[geometry]
        signal, noise = (
            math.hypot(*(getattr(row, part) for row in rows)) for part in ("signal", "noise")
        )
        return LayerSNR("all layers", sum(row.parameters for row in rows), signal, noise)

    def __rich__(self) -> Table:
        title = (
            f"Signal to noise of one step (σ = {self.noise_multiplier:.3g}, B = {self.batch_size})"
        )
        names = list(self.geometries)
        headings = ["parameters", *(f"{name}\nC = {self.clips[name]:.3g}" for name in names)]
        table = table_of(title, self.privacy, ["layer"], headings)
        for rows in [*zip(*self.geometries.values(), strict=True), tuple(map(self.whole, names))]:
            figures = (f"{row.ratio:.3g}" for row in rows)
            table.add_row(rows[0].layer, f"{rows[0].parameters:,}", *figures)
        return table

    def plot(self, file: str | Path) -> None:
        """The profiles, layer by layer, as an image."""
        from dpkfc.diagnostics.plots import plot_snr

        plot_snr(self, Path(file))


def layer_snr(
    model: nn.Module,
    source: Any,
    *,
    noise_multiplier: float,
    batch_size: int,
    clip: Clip,
    geometry: Geometry | Mapping[str, Geometry],
    loss: AnyLoss = "cross_entropy",
    loss_reduction: Reduction = "mean",
    probes: int | None = None,
    vmap_modules: Iterable[str] = (),
    seed: int = 0,
) -> SNR:
    """Signal to noise at the model's present weights, for DP-SGD and for other geometries.

    Args:
        source: a batch of records, or a probe, whose labels are random: of these the profile over the layers
            means something, the height of it does not.
        noise_multiplier, batch_size: σ and the expected batch size B, as `private.plan` has them.
        clip: C, `AutomaticClipping()`, or "median": of the norms under each geometry. One C means different things to
            geometries of different scale.
        geometry: `KFC(...)`, or several by name; each is refreshed on the copy. DP-SGD is always there.
        loss: ``(model, batch) -> scalar`` for records, reduced by `loss_reduction`; a probe loss for probes.
        probes: how many to draw, if not as many as the probe thinks right.
        vmap_modules: as in `Options`.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import layer_snr
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    >>> probe = dpkfc.probes.Tabular(4)
    >>> found = layer_snr(model, probe, noise_multiplier=1.0, batch_size=64, clip="median", geometry=dpkfc.KFC(probe))
    >>> list(found.geometries), found.privacy
    (['DP-SGD', 'DP-KFC'], 'public: probes and weights only')
    """
    sigma, size = (
        check_number("noise_multiplier", noise_multiplier, above=0),
        check_integer("batch_size", batch_size, 1),
    )
    examples = Examples(source, loss, loss_reduction, probes, seed)
    compared = beside_dp_sgd(geometry)
    with watched(model, vmap_modules) as (copied, capture):
        steps = {
            name: step_of(copied, capture, examples, one, clip) for name, one in compared.items()
        }
    rows = {
        name: tuple(
            LayerSNR(
                layer,
                part.numel(),
                float(part.norm()),
                sigma * step.clip * math.sqrt(part.numel()) / size,
            )
            for layer, part in step.clipped.items()
        )
        for name, step in steps.items()
    }
    clips, count = {name: step.clip for name, step in steps.items()}, len(steps["DP-SGD"].norms)
    return SNR(rows, clips, sigma, size, count, privacy_of([source], compared.values()))
