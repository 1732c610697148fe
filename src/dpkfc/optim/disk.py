"""DiSK (Zhang et al., ICLR 2025): a simplified Kalman filter of private gradients.

The filter predicts how the gradient changes along the last move ``d = x_t - x_{t-1}`` and corrects
the prediction by the new, noisy gradient. Each record ξ contributes one vector, clipped once:

    h(ξ) = a ∇f(x_t + γ d; ξ) + (1 - a) ∇f(x_t; ξ)        a = (1-κ) / (κγ)
    g_t  = (1-κ) g_{t-1} + κ (Σ clip(h) + noise) / B

The wrapped optimizer steps with g_t. With γ = (1-κ)/κ, a is 1, and a step needs one gradient, at
``x_t + γ d``. Any other γ needs two gradients per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpkfc.optim.base import NoiseAware


class DiSK(Optimizer):
    """Filters the private gradients of `optimizer` and shares its parameter groups.

    With one gradient per step (`gamma=None`) the training loop stays the same. Between steps the
    model is at ``x_t + γ d``, where the next gradient is computed. To evaluate the model at x_t,
    write ``with optimizer.iterate(): ...``. With two gradients per step, replace
    ``loss.backward()`` by ``optimizer.backward(lambda: loss(model(x), y))``.

    Args:
        optimizer: takes the steps.
        kappa: κ, the weight of the new gradient, in (0, 1]. With 1 nothing is filtered.
        gamma: γ, the look-ahead distance in units of the last move. None is (1-κ)/κ, which needs
            one gradient per step.

    >>> import torch, dpkfc
    >>> model = torch.nn.Linear(4, 2)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> dpkfc.optim.DiSK(sgd, kappa=0.7).gradients_per_step
    1
    >>> dpkfc.optim.DiSK(sgd, kappa=0.7, gamma=1.0).gradients_per_step
    2
    """

    def __init__(
        self, optimizer: Optimizer, kappa: float = 0.7, gamma: float | None = None
    ) -> None:
        if not 0 < kappa <= 1:
            raise ValueError(f"kappa={kappa}: must lie in (0, 1]")
        if gamma is not None and not gamma > 0:
            raise ValueError(f"gamma={gamma}: must be positive")
        one_gradient_gamma = (1 - kappa) / kappa
        self.optimizer = optimizer
        self.kappa = kappa
        self.gamma = one_gradient_gamma if gamma is None else gamma
        needs_one = gamma is None or abs(gamma - one_gradient_gamma) < 1e-12 or kappa == 1
        self.gradients_per_step = 1 if needs_one else 2
        self._accumulate_per_sample: Callable[[], AbstractContextManager[None]] = nullcontext
        # The same dictionaries as the optimizer's, so that learning-rate schedulers reach both.
        super().__init__(optimizer.param_groups, {})
        self.defaults = optimizer.defaults

    def set_noise_variance(self, noise_variance: float | None, why_unknown: str) -> None:
        """See `dpkfc.optim.base.NoiseAware`.

        The filter reduces the variance of independent noise to κ / (2-κ) of it.
        """
        if isinstance(self.optimizer, NoiseAware):
            if noise_variance is not None:
                noise_variance = noise_variance * self.kappa / (2 - self.kappa)
            self.optimizer.set_noise_variance(noise_variance, why_unknown)

    def bind_run(self, accumulate_per_sample: Callable[[], AbstractContextManager[None]]) -> None:
        """See `dpkfc.optim.base.RunAware`."""
        self._accumulate_per_sample = accumulate_per_sample

    def backward(self, closure: Callable[[], Tensor]) -> Tensor:
        """Compute one or two gradients of ``closure()``, the loss of the batch.

        Two gradients are combined per sample, before clipping. Returns the loss at x_t, or at
        ``x_t + γ d`` if there is one gradient per step.
        """
        if self.gradients_per_step == 1:
            loss = closure()
            loss.backward()
            return loss.detach()
        ahead_weight = (1 - self.kappa) / (self.kappa * self.gamma)
        with self._accumulate_per_sample():
            loss = closure()
            ((1 - ahead_weight) * loss).backward()
            with self._parameters_at(self._look_ahead):
                (ahead_weight * closure()).backward()
        return loss.detach()

    @contextmanager
    def iterate(self) -> Iterator[None]:
        """The model is at x_t within the context, for evaluation."""
        with self._parameters_at(lambda state: state["iterate"]):
            yield

    def _look_ahead(self, state: dict[str, Any]) -> Tensor:
        """``x_t + γ d``."""
        ahead: Tensor = state["iterate"].add(state["move"], alpha=self.gamma)
        return ahead

    @contextmanager
    def _parameters_at(self, point: Callable[[dict[str, Any]], Tensor]) -> Iterator[None]:
        """Move the parameters to `point` of their state, and back afterwards."""
        before = [(p, p.detach().clone()) for p in self._parameters() if p in self.state]
        try:
            with torch.no_grad():
                for p, _ in before:
                    p.copy_(point(self.state[p]))
            yield
        finally:
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Filter the gradients, step the optimizer, and move on to ``x_t + γ d``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for p, grad in with_grad:
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
        for p, _ in with_grad:
            state = self.state[p]
            torch.sub(p, state["iterate"], out=state["move"])
            state["iterate"].copy_(p)
            if self.gradients_per_step == 1:
                p.add_(state["move"], alpha=self.gamma)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of the filter and of the optimizer."""
        return {"filter": super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states and share the parameter groups again."""
        super().load_state_dict(state_dict["filter"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
