"""The geometry of DP-SGD: none."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpkfc.distributed import ALONE, Ranks
from dpkfc.geometry.base import ParamNames
from dpkfc.per_sample.base import IDENTITY_MAP, LinearMap
from dpkfc.per_sample.capture import GradientCapture


class Identity:
    """Gradients are clipped as they are."""

    name = "identity (DP-SGD)"
    public = True

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        pass

    def due(self, step: int) -> bool:
        return False

    def refresh(
        self, model: nn.Module, capture: GradientCapture, step: int, ranks: Ranks = ALONE
    ) -> None:
        pass

    def probe_norms(
        self, model: nn.Module, capture: GradientCapture, ranks: Ranks = ALONE
    ) -> Tensor | None:
        return None

    def map_of(self, names: ParamNames) -> LinearMap:
        return IDENTITY_MAP

    def after_noise(self) -> dict[ParamNames, LinearMap]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
