"""Diagonal maps: AdaDPS, and the parameters that have no Kronecker form.

A norm layer, an embedding or a bare parameter has no factors A and G. Left as it is beside layers whose
gradients are whitened, it would drown: all of them share one clip and one noise. `DiagonalMap` multiplies its
gradient by one number, or entry by entry. `Diagonal` does so for the whole model: AdaDPS (Li et al., ICML 2022)
with side information from public data or from noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import IDENTITY_MAP, LinearMap, Workspaces
from dpkfc.geometry.probing import Probing, diverged, gradients
from dpkfc.per_sample.layers.linear import conv1d_of_transformers
from dpkfc.per_sample.record import add_up
from dpkfc.probes.infer import infer_probe
from dpkfc.probes.probe import Probe
from dpkfc.probes.public import Hybrid
from dpkfc.probes.targets import Loss

if TYPE_CHECKING:
    from dpkfc.per_sample.capture import GradientCapture

Names = tuple[str, ...]


@dataclass
class DiagonalMap:
    """``g -> s ⊙ g`` with s a number, or one tensor for each parameter of the slot."""

    scale: float | list[Tensor]
    transposed: bool = False  # the weight is [in, out]

    work = (0, 0)

    @cached_property
    def gain(self) -> float:
        return (
            self.scale if isinstance(self.scale, float) else max(float(s.max()) for s in self.scale)
        )

    @cached_property
    def condition(self) -> float:
        return (
            1.0
            if isinstance(self.scale, float)
            else self.gain / min(float(s.min()) for s in self.scale)
        )

    @property
    def factored(self) -> bool:
        return isinstance(self.scale, float)

    def factors(
        self, left: Tensor, right: Tensor, last: Tensor | None, workspaces: Workspaces | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(self.scale, float)
        return left * self.scale, right, last

    def single(self, left: Tensor, right: Tensor, last: Tensor | None) -> Tensor:
        """``Σ_op s_op² left_o² right_p²``: one matrix product for all samples."""
        assert not isinstance(self.scale, float)
        weight, *bias = (s.to(left).square() for s in self.scale)
        matrix = weight.T if self.transposed else weight.flatten(1)
        squares = left.square()
        norms = ((squares @ matrix) * right.square()).sum(1)
        if last is not None:
            norms = norms + (squares @ bias[0]) * last.square()
        return norms

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values * (
            self.scale if isinstance(self.scale, float) else self.scale[0].to(values)[ids]
        )

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
    """AdaDPS: every entry of a gradient is divided by the root of its second moment on public or synthetic inputs.

    ``g_j -> g_j (v_j + π v̄ + γ)^(-power/2)`` with ``v_j = E[g_j²]`` over per-sample gradients of the source and v̄ its
    mean over the slot (one parameter, or the weight and bias of one layer).

    Args:
        source: `PublicData` as in the original, or `PinkNoise`, `Tokens`, `Tabular`; inferred if not given.
        every, probes, power, loss, chunk, seed: as in `KFC`.
        damping: π, relative to the mean second moment of each slot.
        stability: γ, absolute.

    >>> import dpkfc
    >>> geometry = dpkfc.Diagonal(source=dpkfc.probes.PinkNoise(shape=(1, 28, 28), classes=10))
    >>> geometry.public
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
            raise PrivacyError(
                f"Diagonal: source={type(source).__name__}: pass one probe, such as dpkfc.probes.PublicData(dataset)"
            )
        self.source, self.every, self.damping, self.stability, self.power = (
            source,
            every,
            damping,
            stability,
            power,
        )
        self._probing = Probing(probes, chunk, loss, seed)
        self._maps: dict[Names, DiagonalMap] = {}

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

    def probe_norms(self, model: nn.Module, capture: GradientCapture) -> Tensor | None:
        assert self.source is not None
        self.refresh(model, capture, 0)
        return self._probing.mapped_norms(model, capture, self.source, self.map_of)

    def map_of(self, parameters: Names) -> LinearMap:
        return self._maps.get(parameters, IDENTITY_MAP)

    def after_noise(self) -> dict[Names, LinearMap]:
        return {}

    def refresh(self, model: nn.Module, capture: GradientCapture, step: int) -> None:
        assert self.source is not None
        names = {p: name for name, p in model.named_parameters()}
        sums: dict[Names, list[Tensor]] = {}
        count = 0
        for calls in self._probing.passes(
            model, capture, self.source, self._probing.generator(step, "diagonal")
        ):
            count += calls[0].batch if calls else 0
            with torch.no_grad():
                for slot, form in gradients(calls).items():
                    key = tuple(names[p] for p in slot)
                    sums[key] = add_up([*([sums[key]] if key in sums else []), form.squares()])
            capture.recycle()
        transposed = {names[p] for p in transposed_weights(capture)}
        self._maps = {}
        for key, squares in sums.items():
            moments = [s / count for s in squares]
            floor = self.damping * mean_of(moments, key) + self.stability
            if floor > 0:
                self._maps[key] = DiagonalMap(
                    [(m + floor) ** (-self.power / 2) for m in moments], key[0] in transposed
                )

    def state_dict(self) -> dict[str, Any]:
        return {"scaled": {"|".join(names): one.state() for names, one in self._maps.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._maps = {
            tuple(names.split("|")): DiagonalMap(**one) for names, one in state["scaled"].items()
        }


def mean_of(moments: list[Tensor], names: Names) -> float:
    """The mean over all entries of a slot."""
    mean = float(torch.stack([m.sum() for m in moments]).sum()) / sum(m.numel() for m in moments)
    if not math.isfinite(mean):
        raise diverged(names[0])
    return mean


def transposed_weights(capture: GradientCapture) -> set[nn.Parameter]:
    """Weights that are [in, out]."""
    return {
        unit.parameters["weight"]
        for unit in capture.units
        if unit.handler is conv1d_of_transformers
    }


def check_numbers(
    where: str, given: dict[str, Any], whole: Sequence[str], real: Sequence[str]
) -> None:
    """Refuse arguments that are not whole numbers from 1 (or None), or not finite numbers from 0."""
    for name in whole:
        value = given[name]
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise PrivacyError(f"{where}: {name}={value!r}: must be a whole number of at least 1")
    for name in real:
        value = given[name]
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value < math.inf
        ):
            raise PrivacyError(f"{where}: {name}={value!r}: must be a finite number of at least 0")
    if given["damping"] == given["stability"] == 0:
        raise PrivacyError(
            f"{where}: damping=0 and stability=0: directions the probes do not reach would be divided by zero"
        )
