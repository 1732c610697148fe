"""The figures of a run's report. They are drawn from probes and released weights only: public."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from dpkfc.app.reports.page import Picture
from dpkfc.diagnostics import clip_effect, layer_snr
from dpkfc.diagnostics.passes import captured_copy
from dpkfc.diagnostics.result import is_public
from dpkfc.geometry.base import Geometry
from dpkfc.geometry.kfc import KFC
from dpkfc.planning.plan import Plan
from dpkfc.probes.probe import Probe

PROBES = 256
CAPTIONS = {  # the description for readers who cannot see it, and the caption
    "geometry.png": (
        "spectrum and condition number of every layer's preconditioner",
        "Public: from probes and the released weights.",
    ),
    "snr.png": (
        "signal-to-noise ratio of one step, layer by layer",
        "Signal-to-noise ratio of one step, layer by layer, at the run's clip and noise. Public: "
        "from synthetic probes with random labels and the released weights. The profile over the "
        "layers is meaningful, the height is not.",
    ),
    "clipping.png": (
        "gradient norms of probes compared with the clip, and the share of each layer",
        "Clipping of the same probes: the norms of their gradients, and the layers that dominate "
        "them. Public.",
    ),
}


def draw_figures(
    folder: Path, model: nn.Module, geometry: Geometry, probe: Probe, plan: Plan
) -> None:
    """Draw the preconditioners at these weights, and the effect of one step on probes.

    For correlated noise, σ is that of the noise as it is drawn.
    """
    if not find_spec("matplotlib"):
        return
    if isinstance(geometry, KFC):
        # A shallow copy is enough: a refresh replaces attributes and changes none in place.
        fresh = copy.copy(geometry)
        with captured_copy(model) as (copied, capture):
            fresh.prepare(copied, capture)
            fresh.refresh(copied, capture, plan.steps)
        fresh.describe().plot(folder / "geometry.png")
    step: dict[str, Any] = {"clip": plan.clip, "geometry": geometry, "probes": PROBES}
    sigma = plan.noise_multiplier * plan.noise_sensitivity
    snr = layer_snr(model, probe, noise_multiplier=sigma, batch_size=plan.batch_size, **step)
    clipping = clip_effect(model, probe, **step)
    if is_public(snr.privacy) and is_public(clipping.privacy):
        clipping.plot(folder / "clipping.png")
        if len(snr.geometries["DP-SGD"]) > 1:  # one layer has no profile
            snr.plot(folder / "snr.png")


def read_figures(folder: Path, *names: str) -> list[Picture]:
    """Those of the figures that exist, with their captions."""
    return [
        Picture((folder / name).read_bytes(), *CAPTIONS[name])
        for name in names
        if (folder / name).exists()
    ]
