"""What a run offers to an optimizer. An optimizer takes part by having the methods of a protocol.

`make_private` accepts any `torch.optim.Optimizer`. If it also has these methods, they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that uses the variance of the noise in ``.grad``.

    >>> import torch, dpkfc
    >>> isinstance(dpkfc.optim.DPAdamBC([torch.zeros(2, requires_grad=True)]), NoiseAware)
    True
    """

    def set_noise_variance(self, noise_variance: float | None, why_unknown: str) -> None:
        """Called once by `make_private`, before the first step.

        Args:
            noise_variance: the variance of the noise in every coordinate of ``.grad``. None if it
                differs between coordinates or steps.
            why_unknown: the reason, if `noise_variance` is None.

        Raises:
            ValueError: the optimizer needs the variance and `noise_variance` is None.
        """


@runtime_checkable
class RunAware(Protocol):
    """An optimizer that computes several gradients per step and combines them per sample.

    >>> import torch, dpkfc
    >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    >>> isinstance(dpkfc.optim.DiSK(sgd), RunAware), isinstance(sgd, RunAware)
    (True, False)
    """

    def bind_run(self, accumulate_per_sample: Callable[[], AbstractContextManager[None]]) -> None:
        """Called once by the run, before the first step.

        Args:
            accumulate_per_sample: returns a context manager. The gradients of all backward passes
                within it are added up per sample, and each sample is then clipped once. All passes
                must be over the same batch.
        """

    def backward(self, closure: Callable[[], Tensor]) -> Tensor:
        """Replaces ``loss.backward()``.

        Args:
            closure: computes the loss of the batch. It may be called more than once.

        Returns:
            The loss, detached.
        """


@runtime_checkable
class KeepsIterate(Protocol):
    """An optimizer that keeps the model at another point than its iterate between steps.

    >>> import torch, dpkfc
    >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    >>> isinstance(dpkfc.optim.DiSK(sgd), KeepsIterate), isinstance(sgd, KeepsIterate)
    (True, False)
    """

    def iterate(self) -> AbstractContextManager[None]:
        """The model is at the iterate within the context, for evaluation and release."""
