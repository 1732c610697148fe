"""One private step before its noise, seen from inside: per-sample norms, clip weights, and sums by layer.

The same functions measure and add up here as in training: ``‖U g_i‖`` from the captured forms, `clip_weights`, and
``Σ w_i U g_i = U Σ w_i g_i``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpkfc.clipping import AutomaticClipping, clip_weights
from dpkfc.diagnostics.passes import Examples, layers_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry, Identity, LinearMap
from dpkfc.geometry.probing import gradients
from dpkfc.per_sample.capture import GradientCapture, ParamKey
from dpkfc.per_sample.record import PerSampleGrad, full_precision
from dpkfc.planning.plan import read_clip

Clip = float | AutomaticClipping | Literal["median"]


@dataclass(frozen=True, eq=False)
class Step:
    """What a step makes of n examples, in the metric of its geometry; everything by layer."""

    clip: float  # C
    norms: Tensor  # [n], ‖U g_i‖
    weights: Tensor  # [n], 0 of an example that is not finite
    squares: dict[str, Tensor]  # [n], ‖U_l g_il‖²
    plain: dict[str, Tensor]  # Σ U_l g_il / n over the finite ones
    clipped: dict[str, Tensor]  # Σ w_i U_l g_il / n

    @property
    def finite(self) -> Tensor:
        return torch.isfinite(self.norms)


def beside_dp_sgd(geometry: Geometry | Mapping[str, Geometry]) -> dict[str, Geometry]:
    """Geometries by name, with that of DP-SGD in front."""
    given = (
        geometry
        if isinstance(geometry, Mapping)
        else {str(getattr(geometry, "name", "")).split(" (")[0]: geometry}
    )
    for name, one in given.items():
        if not hasattr(one, "map_of"):
            raise PrivacyError(
                f"geometry {name!r} is {type(one).__name__}: give a geometry such as dpkfc.KFC(...), or a dict of them"
            )
    return {"DP-SGD": Identity()} | {
        n: one for n, one in given.items() if not isinstance(one, Identity)
    }


def step_of(
    model: nn.Module, capture: GradientCapture, examples: Examples, geometry: Geometry, clip: Clip
) -> Step:
    """Clip and add up the examples under maps that are built at the model's weights; `geometry` is not changed.

    With clip="median", C is the median of ``‖U g_i‖``: the same rule for every geometry, whatever its scale.
    """
    geometry = copy.copy(
        geometry
    )  # a refresh replaces what a geometry holds, and writes into none of it
    geometry.prepare(model, capture)
    geometry.refresh(model, capture, 0)
    norm, gamma = (
        (_median(model, capture, examples, geometry), None) if clip == "median" else read_clip(clip)
    )
    layers = {p: layer for p, layer in layers_of(capture.units).items() if p.requires_grad}
    plain, clipped = ({p: torch.zeros_like(p).flatten() for p in layers} for _ in range(2))
    squares: dict[str, list[Tensor]] = {layer: [] for layer in layers.values()}
    norms, weights = [], []
    for forms, maps, squared, scale in _measured(model, capture, examples, geometry):
        total = torch.stack(list(squared.values())).sum(0)
        weight, finite = clip_weights(total, norm, gamma)
        for slot, form in forms.items():
            form = form.masked(finite)
            for into, factor in ((plain, finite.to(weight)), (clipped, weight)):
                for p, part in zip(
                    slot, maps[slot].apply(form.weighted_sum(factor * scale)), strict=True
                ):
                    into[p] = into[p] + part.flatten()
        by_layer = {layer: torch.zeros_like(total) for layer in squares}
        for slot, part in squared.items():
            by_layer[layers[slot[0]]] += part
        for layer, part in by_layer.items():
            squares[layer].append(part)
        norms.append(total.sqrt())
        weights.append(weight)
    count = sum(map(len, norms))
    return Step(
        norm,
        torch.cat(norms),
        torch.cat(weights),
        {layer: torch.cat(parts) for layer, parts in squares.items()},
        _by_layer(plain, layers, count),
        _by_layer(clipped, layers, count),
    )


Measured = tuple[
    dict[ParamKey, PerSampleGrad], dict[ParamKey, LinearMap], dict[ParamKey, Tensor], float
]


def _measured(
    model: nn.Module, capture: GradientCapture, examples: Examples, geometry: Geometry
) -> Iterator[Measured]:
    """Pass by pass: the gradients, their maps, ``‖U g_i‖²`` of each slot, and the scale of a gradient."""
    names = {p: name for name, p in model.named_parameters()}
    for calls, scale in examples.passes(model, capture):
        with full_precision(calls[0].delta.device):
            forms = gradients(calls)
            maps = {slot: geometry.map_of(tuple(names[p] for p in slot)) for slot in forms}
            yield (
                forms,
                maps,
                {slot: f.squared_norms(maps[slot]) * scale**2 for slot, f in forms.items()},
                scale,
            )
        capture.recycle()


def _median(
    model: nn.Module, capture: GradientCapture, examples: Examples, geometry: Geometry
) -> float:
    found = _measured(model, capture, examples, geometry)
    norms = torch.cat(
        [torch.stack(list(squared.values())).sum(0) for _, _, squared, _ in found]
    ).sqrt()
    median = (
        float(norms[torch.isfinite(norms)].median()) if bool(torch.isfinite(norms).any()) else 0.0
    )
    if median <= 0:
        raise PrivacyError(
            'clip="median": the median of the gradient norms is zero or none is finite. Give a number'
        )
    return median


def _by_layer(
    sums: dict[nn.Parameter, Tensor], layers: dict[nn.Parameter, str], count: int
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for p, layer in layers.items():
        parts.setdefault(layer, []).append(sums[p] / count)
    return {layer: torch.cat(found) for layer, found in parts.items()}
