"""Diagonal maps: AdaDPS, and parameters that have no Kronecker form.

A norm layer, an embedding or a bare parameter has no factors A_l and G_l. If its gradient were left
as it is beside layers whose gradients are whitened, the noise would dominate it: all parameters
share one clip and one noise. `DiagonalMap` multiplies such a gradient by one number, or entry by
entry. `Diagonal` does so for the whole model: AdaDPS (Li et al., ICML 2022) with side information
from public data or from synthetic probes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.distributed import ALONE, Ranks
from dpkfc.geometry.base import ParamNames
from dpkfc.geometry.probing import Probing, combined_grads, diverged
from dpkfc.geometry.sharing import build_once, demand_same_maps, owners, sum_at_owners
from dpkfc.per_sample.base import IDENTITY_MAP, LayerCall, LinearMap
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.rounding import add_up
from dpkfc.per_sample.workspace import Allocate
from dpkfc.probes.infer import infer_probe
from dpkfc.probes.probe import Probe
from dpkfc.probes.public import Hybrid
from dpkfc.probes.targets import Loss


@dataclass
class DiagonalMap:
    """``g -> s ⊙ g`` with s a number, or one tensor per parameter."""

    scale: float | list[Tensor]
    transposed: bool = False  # the weight is [in, out]

    work = (0, 0)

    @cached_property
    def gain(self) -> float:
        if isinstance(self.scale, float):
            return self.scale
        return max(float(s.max()) for s in self.scale)

    @cached_property
    def condition(self) -> float:
        if isinstance(self.scale, float):
            return 1.0
        return self.gain / min(float(s.min()) for s in self.scale)

    @property
    def factored(self) -> bool:
        return isinstance(self.scale, float)

    def map_factors(
        self,
        left: Tensor,
        right: Tensor,
        bias_input: Tensor | None,
        workspaces: tuple[Allocate, Allocate] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(self.scale, float)
        return left * self.scale, right, bias_input

    def outer_squared_norms(self, left: Tensor, right: Tensor, bias_input: Tensor | None) -> Tensor:
        """``Σ_op s_op² left_o² right_p²``: one matrix product for all samples."""
        assert not isinstance(self.scale, float)
        weight, *bias = (s.to(left).square() for s in self.scale)
        matrix = weight.T if self.transposed else weight.flatten(1)
        squares = left.square()
        norms = ((squares @ matrix) * right.square()).sum(1)
        if bias_input is not None:
            norms = norms + (squares @ bias[0]) * bias_input.square()
        return norms

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        if isinstance(self.scale, float):
            return values * self.scale
        return values * self.scale[0].to(values)[ids]

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(self.scale, float):
            return [g * self.scale for g in grads]
        return [
            (g.reshape(-1, s.numel()) * s.to(g).flatten()).view_as(g)
            for g, s in zip(grads, self.scale, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "transposed": self.transposed}


class Diagonal:
    """AdaDPS: divides each gradient entry by the root of its second moment on the source.

    ``g_j -> g_j (v_j + π v̄ + γ)^(-power/2)`` with ``v_j = E[g_j²]`` over per-sample gradients of
    the source, and v̄ its mean over the parameters that are preconditioned together (one parameter,
    or the weight and bias of one layer).

    Args:
        source: `PublicData` as in the original, or `PinkNoise`, `Tokens`, `Tabular`; inferred from
            the model if not given.
        every, probes, power, loss, chunk, seed: as in `KFC`.
        damping: π, relative to the mean second moment.
        stability: γ, absolute.

    >>> import dpkfc
    >>> source = dpkfc.probes.PinkNoise(shape=(1, 28, 28), classes=10)
    >>> dpkfc.Diagonal(source).public
    True
    """

    def __init__(
        self,
        source: Probe | None = None,
        *,
        every: int = 50,
        probes: int | None = None,
        damping: float = 0.1,
        stability: float = 0.0,
        power: float = 1.0,
        loss: Loss = "cross_entropy",
        chunk: int | None = None,
        seed: int = 0,
    ) -> None:
        check_numbers(
            "Diagonal",
            locals(),
            whole=("every", "probes", "chunk"),
            real=("damping", "stability", "power"),
        )
        if isinstance(source, Hybrid) or not (source is None or hasattr(source, "draw")):
            raise TypeError(
                f"Diagonal: source={type(source).__name__}: pass one probe, such as "
                "dpkfc.probes.PublicData(dataset)"
            )
        self.source, self.every = source, every
        self.damping, self.stability, self.power = damping, stability, power
        self._probing = Probing(probes, chunk, loss, seed)
        self._maps: dict[ParamNames, DiagonalMap] = {}

    @property
    def name(self) -> str:
        source = "inferred" if self.source is None else self.source.name
        return (
            f"diagonal (AdaDPS, power {self.power:g}, source: {source}, every {self.every} steps)"
        )

    @property
    def public(self) -> bool:
        return self.source is None or self.source.public

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        self.source = infer_probe(model) if self.source is None else self.source
        self._probing.try_out(model, capture, self.source)

    def due(self, step: int) -> bool:
        return not self._maps or step % self.every == 0

    def probe_norms(
        self, model: nn.Module, capture: GradientCapture, ranks: Ranks = ALONE
    ) -> Tensor | None:
        assert self.source is not None
        self.refresh(model, capture, 0, ranks)
        return self._probing.mapped_norms(model, capture, self.source, self.map_of, ranks)

    def map_of(self, names: ParamNames) -> LinearMap:
        return self._maps.get(names, IDENTITY_MAP)

    def after_noise(self) -> dict[ParamNames, LinearMap]:
        return {}

    def refresh(
        self, model: nn.Module, capture: GradientCapture, step: int, ranks: Ranks = ALONE
    ) -> None:
        """Build the maps. The ranks share the work as `dpkfc.geometry.sharing` describes."""
        assert self.source is not None
        name_of = {p: name for name, p in model.named_parameters()}
        sums: dict[ParamNames, list[Tensor]] = {}
        sizes: list[int] = []

        def receive(calls: list[LayerCall]) -> None:
            sizes.append(calls[0].batch_size if calls else 0)
            with torch.no_grad():
                for key, grad in combined_grads(calls).items():
                    names = tuple(name_of[p] for p in key)
                    so_far = [sums[names]] if names in sums else []
                    sums[names] = add_up([*so_far, grad.sum_of_squares()])
            capture.reuse_workspaces()

        self._probing.share_passes(model, capture, self.source, step, "diagonal", ranks, receive)
        count = sum(ranks.everyone(sum(sizes)))
        device = next(model.parameters()).device
        transposed = {name_of[p] for p in transposed_weights(capture)}
        owner_of = _to_owners(sums, ranks, device)

        def build(names: ParamNames) -> DiagonalMap | None:
            moments = [s / count for s in sums[names]]
            floor = self.damping * mean_entry(moments, names) + self.stability
            if floor <= 0:
                return None
            scales = [(m + floor) ** (-self.power / 2) for m in moments]
            return DiagonalMap(scales, names[0] in transposed)

        with torch.no_grad():
            built = build_once(ranks, owner_of, build, device)
        maps = {names: diagonal for names, diagonal in built.items() if diagonal is not None}
        demand_same_maps(ranks, _state(maps))
        self._maps = maps

    def state_dict(self) -> dict[str, Any]:
        return _state(self._maps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._maps = {
            tuple(names.split("|")): DiagonalMap(**fields)
            for names, fields in state["scaled"].items()
        }


def _state(maps: dict[ParamNames, DiagonalMap]) -> dict[str, Any]:
    return {"scaled": {"|".join(names): m.state() for names, m in maps.items()}}


def _to_owners(
    sums: dict[ParamNames, list[Tensor]], ranks: Ranks, device: torch.device
) -> dict[ParamNames, int]:
    """Choose an owner for each sum of squares, and add it up there, in place of `sums`."""
    if ranks.count == 1:
        return dict.fromkeys(sums, 0)
    held = {names: [(s.shape, s.dtype) for s in tensors] for names, tensors in sums.items()}
    shapes = {names: kinds for each in ranks.everyone(held) for names, kinds in each.items()}
    parts: dict[tuple[ParamNames, int], Tensor] = {}
    for names, kinds in shapes.items():
        # a rank without probes, or whose probes did not use the parameter
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in kinds]
        for number, part in enumerate(sums.pop(names, zeros)):
            parts[names, number] = part
    entries = {names: float(sum(s.numel() for s, _ in kinds)) for names, kinds in shapes.items()}
    owner_of = owners(entries, ranks.count)
    totals = sum_at_owners(ranks, parts, {key: owner_of[key[0]] for key in parts})
    for (names, _), total in totals.items():
        sums.setdefault(names, []).append(total)
    return owner_of


def mean_entry(moments: list[Tensor], names: ParamNames) -> float:
    """The mean over all entries of several tensors."""
    total = float(torch.stack([m.sum() for m in moments]).sum())
    mean = total / sum(m.numel() for m in moments)
    if not math.isfinite(mean):
        raise diverged(names[0])
    return mean


def transposed_weights(capture: GradientCapture) -> set[nn.Parameter]:
    """Weights that are [in, out]."""
    return {
        hooked.params["weight"]
        for hooked in capture.hooked_modules
        if hooked.adapter is not None and hooked.adapter.transposed
    }


def check_numbers(
    where: str, arguments: dict[str, Any], whole: Sequence[str], real: Sequence[str]
) -> None:
    """Refuse what is not a whole number from 1 (or None), or not a finite number from 0."""
    for name in whole:
        value = arguments[name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_int or value < 1):
            raise ValueError(f"{where}: {name}={value!r}: must be a whole number of at least 1")
    for name in real:
        value = arguments[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ValueError(f"{where}: {name}={value!r}: must be a finite number of at least 0")
    if arguments["damping"] == arguments["stability"] == 0:
        raise ValueError(
            f"{where}: damping=0 and stability=0: directions that the probes do not reach would be "
            "divided by zero. Give one of them"
        )
