"""One private step before its noise: per-sample norms, clip factors, and sums, by layer.

The functions of `engine.step` clip and add up here as in training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpkfc.clipping import AutomaticClipping
from dpkfc.diagnostics.passes import Examples, layer_names
from dpkfc.engine.step import clip_and_sum, preconditioned_sum
from dpkfc.geometry.base import Geometry
from dpkfc.geometry.identity import Identity
from dpkfc.per_sample.base import LinearMap, ParamKey, PreconditionerOf
from dpkfc.per_sample.capture import CapturedGrads, GradAccumulator, GradientCapture
from dpkfc.per_sample.rounding import full_precision
from dpkfc.planning.plan import read_clip

Clip = float | AutomaticClipping | Literal["median"]


@dataclass(frozen=True, eq=False)
class Step:
    """What a step computes from n examples in the preconditioned space, by layer."""

    clip: float  # R
    norms: Tensor  # [n], ‖U g_i‖
    weights: Tensor  # [n], c_i; 0 for an example that is not finite
    squares: dict[str, Tensor]  # [n], ‖U_l g_il‖²
    plain: dict[str, Tensor]  # Σ U_l g_il / n over the finite examples
    clipped: dict[str, Tensor]  # Σ c_i U_l g_il / n

    @property
    def finite(self) -> Tensor:
        return torch.isfinite(self.norms)


def beside_dp_sgd(geometry: Geometry | Mapping[str, Geometry]) -> dict[str, Geometry]:
    """Geometries by name, with that of DP-SGD in front."""
    if isinstance(geometry, Mapping):
        named = dict(geometry)
    else:
        named = {str(getattr(geometry, "name", "")).split(" (")[0]: geometry}
    for name, given in named.items():
        if not hasattr(given, "map_of"):
            raise TypeError(
                f"geometry {name!r} is {type(given).__name__}: give a geometry such as "
                "dpkfc.KFC(...), or a dict of them"
            )
    others = {name: given for name, given in named.items() if not isinstance(given, Identity)}
    return {"DP-SGD": Identity()} | others


def step_of(
    model: nn.Module,
    capture: GradientCapture,
    examples: Examples,
    geometry: Geometry,
    clip: Clip,
) -> Step:
    """Clip and add up the examples, with maps built at the model's weights.

    `geometry` is not changed. With clip="median", R is the median of ``‖U g_i‖``: the same rule for
    every geometry, whatever its scale.
    """
    # a refresh replaces what a geometry holds, and modifies none of it
    geometry = copy.copy(geometry)
    geometry.prepare(model, capture)
    geometry.refresh(model, capture, 0)
    name_of = {p: name for name, p in model.named_parameters()}

    def preconditioner_of(key: ParamKey) -> LinearMap:
        return geometry.map_of(tuple(name_of[p] for p in key))

    if clip == "median":
        norm, gamma = _median_norm(model, capture, examples, preconditioner_of), None
    else:
        norm, gamma = read_clip(clip)
    all_layers = layer_names(capture.hooked_modules)
    layers = {p: layer for p, layer in all_layers.items() if p.requires_grad}
    plain = {p: torch.zeros_like(p).flatten() for p in layers}
    clipped = {p: torch.zeros_like(p).flatten() for p in layers}
    squares: dict[str, list[Tensor]] = {layer: [] for layer in layers.values()}
    norms, factors = [], []
    for captured, scale in _captured(model, capture, examples, preconditioner_of):
        assert captured.squared_norms is not None
        squared = captured.squared_norms * scale**2
        by_layer = {layer: torch.zeros_like(squared) for layer in squares}
        for key, part in captured.squared_norms_by_key.items():
            by_layer[layers[key[0]]] += part * scale**2
        for layer, part in by_layer.items():
            squares[layer].append(part)
        finite = torch.isfinite(squared)
        for key, grad in captured.grads.items():
            weights = finite.to(squared) * scale
            sums = preconditioned_sum(grad.masked(finite), weights, preconditioner_of(key))
            for p, total in zip(key, sums, strict=True):
                plain[p] = plain[p] + total.flatten()
        batch = clip_and_sum(
            captured,
            preconditioner_of,
            clip=norm,
            gamma=gamma,
            grad_scale=scale,
            expected_batch_size=1,
        )
        assert batch is not None
        for key, sums in batch.sums.items():
            for p, total in zip(key, sums, strict=True):
                clipped[p] = clipped[p] + total.flatten()
        norms.append(squared.sqrt())
        factors.append(batch.clip_factors)
    count = sum(map(len, norms))
    return Step(
        norm,
        torch.cat(norms),
        torch.cat(factors),
        {layer: torch.cat(parts) for layer, parts in squares.items()},
        _by_layer(plain, layers, count),
        _by_layer(clipped, layers, count),
    )


def _captured(
    model: nn.Module,
    capture: GradientCapture,
    examples: Examples,
    preconditioner_of: PreconditionerOf,
) -> Iterator[tuple[CapturedGrads, float]]:
    """Pass by pass: the gradients with their norms, and the scale of a gradient."""
    accumulator = GradAccumulator(preconditioner_of)
    for calls, scale in examples.passes(model, capture):
        with full_precision(calls[0].backprops.device):
            for call in calls:
                accumulator.receive(call)
            yield accumulator.take(), scale
        capture.reuse_workspaces()


def _median_norm(
    model: nn.Module,
    capture: GradientCapture,
    examples: Examples,
    preconditioner_of: PreconditionerOf,
) -> float:
    squared = [
        captured.squared_norms * scale**2
        for captured, scale in _captured(model, capture, examples, preconditioner_of)
        if captured.squared_norms is not None
    ]
    norms = torch.cat(squared).sqrt()
    finite = norms[torch.isfinite(norms)]
    median = float(finite.median()) if len(finite) else 0.0
    if median <= 0:
        raise ValueError(
            'clip="median": the median gradient norm is zero, or no norm is finite. Give a number'
        )
    return median


def _by_layer(
    sums: dict[nn.Parameter, Tensor], layers: dict[nn.Parameter, str], count: int
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for p, layer in layers.items():
        parts.setdefault(layer, []).append(sums[p] / count)
    return {layer: torch.cat(tensors) for layer, tensors in parts.items()}
