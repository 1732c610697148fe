"""DiSK (Zhang et al., ICLR 2025): a simplified Kalman filter for private gradients, around any optimizer.

The filter predicts how the gradient changes along the last move ``d = x_t - x_{t-1}``, and corrects the prediction by
the new, noisy gradient. Each record contributes, clipped as one vector,

    h(ξ) = a ∇f(x_t + γ d; ξ) + (1 - a) ∇f(x_t; ξ)        a = (1-κ) / (κγ)
    g_t  = (1-κ) g_{t-1} + κ (Σ clip(h) + noise) / B

and the optimizer steps with g_t. With γ = (1-κ)/κ, a = 1: one gradient a step, taken ahead of the iterate. Any other γ
takes two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpkfc.errors import PrivacyError


class DiSK(Optimizer):
    """Filters the private gradients of `optimizer`, whose parameter groups it shares.

    With one gradient a step (`gamma=None`) the loop stays as it is. Between steps the model stands at
    ``x_t + γ d``, where the next gradient is taken; look at the iterate itself with ``with optimizer.iterate(): ...``.
    With two, write ``optimizer.backward(lambda: loss(model(x), y))`` for ``loss.backward()``.

    Args:
        kappa: how much of the new gradient is taken, in (0, 1]. 1 is the optimizer as it was.
        gamma: how far ahead, in units of the last move; None is (1-κ)/κ, which needs one gradient a step.

    >>> import torch, dpkfc
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = dpkfc.optim.DiSK(torch.optim.SGD(model.parameters(), lr=0.1), kappa=0.7)
    >>> optimizer.gradients_a_step
    1
    """

    def __init__(
        self, optimizer: Optimizer, kappa: float = 0.7, gamma: float | None = None
    ) -> None:
        if not 0 < kappa <= 1:
            raise PrivacyError(f"kappa={kappa}: must lie in (0, 1]")
        if gamma is not None and not gamma > 0:
            raise PrivacyError(f"gamma={gamma}: must be positive")
        ahead = (1 - kappa) / kappa
        self.optimizer, self.kappa = optimizer, kappa
        self.gamma = ahead if gamma is None else gamma
        self.gradients_a_step = (
            1 if gamma is None or abs(gamma - ahead) < 1e-12 or kappa == 1 else 2
        )
        self._accumulate_per_sample: Callable[[], AbstractContextManager[None]] = nullcontext
        super().__init__(
            optimizer.param_groups, {}
        )  # the same dictionaries, so schedulers reach both
        self.defaults = optimizer.defaults

    def set_noise_variance(self, noise_variance: float | None, why_unknown: str) -> None:
        """Called by `make_private`. The filter leaves κ / (2-κ) of the variance of independent noise."""
        if hasattr(self.optimizer, "set_noise_variance"):
            left = (
                None if noise_variance is None else noise_variance * self.kappa / (2 - self.kappa)
            )
            self.optimizer.set_noise_variance(left, why_unknown)

    def bind_run(self, accumulate_per_sample: Callable[[], AbstractContextManager[None]]) -> None:
        """Called by `make_private`: see `optim.base.RunAware`."""
        self._accumulate_per_sample = accumulate_per_sample

    def backward(self, closure: Callable[[], Tensor]) -> Tensor:
        """The gradients of ``closure()``, the loss of the batch: at one point, or at two, combined record by record."""
        if self.gradients_a_step == 1:
            loss = closure()
            loss.backward()
            return loss.detach()
        share = (1 - self.kappa) / (self.kappa * self.gamma)
        with self._accumulate_per_sample():
            loss = closure()
            ((1 - share) * loss).backward()
            with self._at(lambda state: state["iterate"].add(state["move"], alpha=self.gamma)):
                (share * closure()).backward()
        return loss.detach()

    @contextmanager
    def iterate(self) -> Iterator[None]:
        """The model at x_t, for evaluation."""
        with self._at(lambda state: state["iterate"]):
            yield

    @contextmanager
    def _at(self, place: Callable[[dict[str, Any]], Tensor]) -> Iterator[None]:
        held = [(p, p.detach().clone()) for p in self._parameters() if p in self.state]
        try:
            with torch.no_grad():
                for p, _ in held:
                    p.copy_(place(self.state[p]))
            yield
        finally:
            with torch.no_grad():
                for p, before in held:
                    p.copy_(before)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for p, grad in stepped:
            state = self.state[p]
            if not state:
                state.update(
                    filtered=grad.clone(), iterate=p.detach().clone(), move=torch.zeros_like(p)
                )
            else:
                state["filtered"].lerp_(grad, self.kappa)
                p.copy_(state["iterate"])
            p.grad = state["filtered"].clone()
        self.optimizer.step()
        for p, _ in stepped:
            state = self.state[p]
            torch.sub(p, state["iterate"], out=state["move"])
            state["iterate"].copy_(p)
            if self.gradients_a_step == 1:
                p.add_(state["move"], alpha=self.gamma)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"filter": super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["filter"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
