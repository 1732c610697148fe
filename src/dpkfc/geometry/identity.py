"""The geometry of DP-SGD: none. It also states the interface that every geometry has.

A geometry is a linear map ``g -> U g`` applied to each per-sample gradient before clipping. It is built
without the private data, so a step that clips and noises U g is exactly as private as one that clips and
noises g: for a fixed map P independent of the batch, ``Σ clip(P g_i)`` has sensitivity C (Proposition 5.6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from dpkfc.per_sample.capture import GradientCapture


Workspaces = tuple[
    Callable[[tuple[int, ...], Tensor], Tensor], Callable[[tuple[int, ...], Tensor], Tensor]
]


class LinearMap(Protocol):
    """The map of one slot: one parameter, or the weight and bias of one layer."""

    @property
    def gain(self) -> float:
        """``‖U‖``, its largest eigenvalue or more: how far the rounding errors of g can grow in U g."""

    @property
    def condition(self) -> float:
        """``‖U‖ ‖U⁻¹‖`` or more."""

    @property
    def work(self) -> tuple[int, int]:
        """Multiplications to map one vector of the left factors, and one of the right."""

    @property
    def factored(self) -> bool:
        """Does the map act on the factors of a gradient one by one? Otherwise it must be formed first."""

    def factors(
        self, left: Tensor, right: Tensor, last: Tensor | None, workspaces: Workspaces | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map the factors of the gradient ``Σ_t left_t right_tᵀ`` ([B, T, features] each).

        `last` ([B, T]), if any, is one more coordinate behind `right`, whose column is the bias gradient. Large results
        are written into `rooms`, if given: one for the left and one for the right.
        """

    def single(self, left: Tensor, right: Tensor, last: Tensor | None) -> Tensor:
        """``‖U (left rightᵀ)‖²`` for [B, features] each, where the map is not `factored`."""

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """Map the rows `ids` ([U]) of a gradient that is zero elsewhere; `values` is [U, features]."""

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Map gradients of the slot's parameters; any dimensions in front of theirs are batch."""


class Geometry(Protocol):
    """What the pipeline needs of a geometry."""

    @property
    def name(self) -> str: ...

    @property
    def public(self) -> bool:
        """False if built from the private records: the run then reports epsilon = inf."""

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        """Look at the model before anything is spent, and refuse what cannot work."""

    def due(self, step: int) -> bool:
        """Must the maps be built anew before this step? It may depend on nothing but the number of the step."""

    def refresh(self, model: nn.Module, capture: GradientCapture, step: int) -> None:
        """Build the maps at the model's present weights."""

    def probe_norms(self, model: nn.Module, capture: GradientCapture) -> Tensor | None:
        """``‖U g‖`` of probes at the model's present weights; None if there are no probes."""

    def map_of(self, parameters: tuple[str, ...]) -> LinearMap:
        """The map, before clipping, for the slot with these parameter names."""

    def after_noise(self) -> dict[tuple[str, ...], LinearMap]:
        """Maps of the noisy gradient: free post-processing."""

    def state_dict(self) -> dict[str, Any]:
        """The maps, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The maps from a checkpoint."""


class _Unchanged:
    gain = condition = 1.0
    work = (0, 0)
    factored = True

    def factors(
        self, left: Tensor, right: Tensor, last: Tensor | None, workspaces: Workspaces | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return left, right, last

    def single(self, left: Tensor, right: Tensor, last: Tensor | None) -> Tensor:
        raise NotImplementedError

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return list(grads)


IDENTITY_MAP: LinearMap = _Unchanged()


class Identity:
    """No map: the gradients of DP-SGD."""

    name = "identity (DP-SGD)"
    public = True

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        pass

    def due(self, step: int) -> bool:
        return False

    def refresh(self, model: nn.Module, capture: GradientCapture, step: int) -> None:
        pass

    def probe_norms(self, model: nn.Module, capture: GradientCapture) -> Tensor | None:
        return None

    def map_of(self, parameters: tuple[str, ...]) -> LinearMap:
        return IDENTITY_MAP

    def after_noise(self) -> dict[tuple[str, ...], LinearMap]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
