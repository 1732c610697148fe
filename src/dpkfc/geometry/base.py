"""What a run needs of a geometry.

A geometry is a linear map ``g -> U g`` that is applied to each per-sample gradient before clipping.
It is built without the private data, so clipping and noising U g is exactly as private as clipping
and noising g: for a fixed map U that is independent of the batch, ``Σ clip(U g_i)`` has sensitivity
R (Proposition 5.6 of the paper).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from dpkfc.distributed import ALONE, Ranks
from dpkfc.per_sample.base import LinearMap
from dpkfc.per_sample.capture import GradientCapture

ParamNames = tuple[str, ...]  # a `ParamKey` by the parameters' names in the model


class Geometry(Protocol):
    """Builds the preconditioners of all parameters, and builds them anew every few steps."""

    @property
    def name(self) -> str: ...

    @property
    def public(self) -> bool:
        """False if built from the private records: the run then reports epsilon = inf."""

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        """Inspect the model before any budget is spent, and refuse what cannot work."""

    def due(self, step: int) -> bool:
        """True if the maps must be built before this step.

        Depends on nothing but the step number.
        """

    def refresh(
        self, model: nn.Module, capture: GradientCapture, step: int, ranks: Ranks = ALONE
    ) -> None:
        """Build the maps at the model's current weights: the same bits on all ranks.

        The ranks may share the work. All of them call this, with the same weights.
        """

    def probe_norms(
        self, model: nn.Module, capture: GradientCapture, ranks: Ranks = ALONE
    ) -> Tensor | None:
        """``‖U g‖`` of probes at the model's current weights; None if there are no probes.

        The same bits on all ranks.
        """

    def map_of(self, names: ParamNames) -> LinearMap:
        """The preconditioner of the parameters with these names."""

    def after_noise(self) -> dict[ParamNames, LinearMap]:
        """Maps of the noisy gradient: free post-processing."""

    def state_dict(self) -> dict[str, Any]:
        """The maps, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The maps from a checkpoint."""
