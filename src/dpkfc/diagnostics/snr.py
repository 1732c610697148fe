"""Signal and noise of one private step, layer by layer (Figure 1 of the paper).

The signal of layer l is the norm of its part of the clipped mean gradient. The noise is
N(0, (σ R / B)²) on each of its d_l coordinates and has norm ``σ R √d_l / B`` (the root of its mean
square). Under DP-SGD, layers with small gradients and many weights have a low ratio; a geometry
should level the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dpkfc.diagnostics.passes import AnyLoss, Examples, Reduction, captured_copy
from dpkfc.diagnostics.result import DiagnosticResult, empty_table, privacy_statement
from dpkfc.diagnostics.step import Clip, Step, beside_dp_sgd, step_of
from dpkfc.geometry.base import Geometry
from dpkfc.probes.arguments import check_integer, check_number
from dpkfc.tables import TextTable


@dataclass(frozen=True)
class LayerSNR:
    """Signal and noise of one layer, or of all layers together, under one geometry."""

    layer: str
    parameters: int  # d_l
    signal: float  # ‖Σ w_i U_l g_il / n‖
    noise: float  # σ R √d_l / B

    @property
    def ratio(self) -> float:
        return self.signal / self.noise


@dataclass(frozen=True)
class SNR(DiagnosticResult):
    """The profile of every geometry, DP-SGD first. Layers are in the order of the model."""

    geometries: dict[str, tuple[LayerSNR, ...]]
    clips: dict[str, float]  # R
    noise_multiplier: float  # σ
    batch_size: int  # B
    examples: int
    privacy: str

    def whole(self, geometry: str) -> LayerSNR:
        """All layers together."""
        rows = self.geometries[geometry]
        return LayerSNR(
            layer="all layers",
            parameters=sum(row.parameters for row in rows),
            signal=math.hypot(*(row.signal for row in rows)),
            noise=math.hypot(*(row.noise for row in rows)),
        )

    def table(self) -> TextTable:
        title = (
            f"Signal to noise of one step (σ = {self.noise_multiplier:.3g}, B = {self.batch_size})"
        )
        names = list(self.geometries)
        headings = ["parameters", *(f"{name}\nR = {self.clips[name]:.3g}" for name in names)]
        table = empty_table(title, self.privacy, ["layer"], headings)
        for rows in [*zip(*self.geometries.values(), strict=True), tuple(map(self.whole, names))]:
            ratios = (f"{row.ratio:.3g}" for row in rows)
            table.add_row(rows[0].layer, f"{rows[0].parameters:,}", *ratios)
        return table

    def plot(self, file: str | Path) -> None:
        """Write a plot of the profiles, layer by layer, to `file`."""
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
    """Signal to noise at the present weights, for DP-SGD and for other geometries.

    Args:
        model: stays unchanged.
        source: a batch of records, or a probe. The labels of a probe are random: compare layers,
            not absolute ratios.
        noise_multiplier: σ, as in `run.plan`.
        batch_size: the expected batch size B, as in `run.plan`.
        clip: the clip norm R, `AutomaticClipping()`, or "median", which takes the median of the
            norms under each geometry: the same R has different effects on geometries of different
            scale.
        geometry: `KFC(...)`, or several by name; each is refreshed on the copy. DP-SGD is always
            included.
        loss: ``(model, batch) -> scalar`` for records; a probe loss, as in `KFC`, for probes.
        loss_reduction: over the records of a batch, "mean" or "sum".
        probes: number of probes; the default of the probe if not given.
        vmap_modules: as in `Options`.
        seed: of the probes.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import layer_snr
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    >>> probe = dpkfc.probes.Tabular(4)
    >>> step = {"noise_multiplier": 1.0, "batch_size": 64, "clip": "median"}
    >>> snr = layer_snr(model, probe, geometry=dpkfc.KFC(probe), **step)
    >>> list(snr.geometries), snr.privacy
    (['DP-SGD', 'DP-KFC'], 'public: probes and weights only')
    """
    sigma = check_number("noise_multiplier", noise_multiplier, above=0)
    batch_size = check_integer("batch_size", batch_size, 1)
    examples = Examples(source, loss, loss_reduction, probes, seed)
    compared = beside_dp_sgd(geometry)
    with captured_copy(model, vmap_modules) as (copied, capture):
        steps = {
            name: step_of(copied, capture, examples, one, clip) for name, one in compared.items()
        }
    return SNR(
        geometries={name: _rows(step, sigma, batch_size) for name, step in steps.items()},
        clips={name: step.clip for name, step in steps.items()},
        noise_multiplier=sigma,
        batch_size=batch_size,
        examples=len(steps["DP-SGD"].norms),
        privacy=privacy_statement([source], compared.values()),
    )


def _rows(step: Step, sigma: float, batch_size: int) -> tuple[LayerSNR, ...]:
    return tuple(
        LayerSNR(
            layer=layer,
            parameters=part.numel(),
            signal=float(part.norm()),
            noise=sigma * step.clip * math.sqrt(part.numel()) / batch_size,
        )
        for layer, part in step.clipped.items()
    )
