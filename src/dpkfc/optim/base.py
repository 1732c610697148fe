"""What an optimizer may offer to a private run. Any `torch.optim.Optimizer` works without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that corrects for the variance of the noise."""

    def set_noise_variance(self, noise_variance: float | None, why_unknown: str) -> None:
        """Called by `make_private` with the variance per coordinate of ``.grad``.

        It is None if the variance is not the same for all coordinates and steps; `why_unknown` then
        says why.
        """


@runtime_checkable
class RunAware(Protocol):
    """An optimizer that takes several gradients of one batch."""

    def bind_run(self, accumulate_per_sample: Callable[[], AbstractContextManager[None]]) -> None:
        """Called by `make_private`.

        Inside ``accumulate_per_sample()``, gradients of several passes over one batch add up per
        sample before clipping.
        """

    def backward(self, closure: Callable[[], Tensor]) -> Any:
        """What the loop calls instead of ``closure().backward()``."""


@runtime_checkable
class KeepsIterate(Protocol):
    """An optimizer that holds the model at another point than its iterate between steps."""

    def iterate(self) -> AbstractContextManager[None]:
        """The model at the iterate, for evaluation and for release."""
