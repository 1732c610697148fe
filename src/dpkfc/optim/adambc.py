"""DP-AdamBC (Tang, Shpilevskiy & Lécuyer, AAAI 2024): Adam with a corrected second moment.

The private gradient is ``g̃ = g + w`` with ``w ~ N(0, Φ I)``, so Adam's second moment estimates
``E[g²] + Φ``. Under DP, Φ is by far the larger part and the same for every coordinate: DP-Adam
divides by nearly a constant, and behaves like DP-SGD with momentum. But Φ is known, and is
subtracted:

    m_t = β₁ m_{t-1} + (1-β₁) g̃_t          v_t = β₂ v_{t-1} + (1-β₂) g̃_t²
    θ_t = θ_{t-1} - η  m̂_t / √max(v̂_t - Φ, floor)        m̂ = m / (1-β₁ᵗ),  v̂ = v / (1-β₂ᵗ)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

SMALLEST_FLOOR = 1e-16


class DPAdamBC(Optimizer):
    """Adam, corrected for the noise of the run.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: the learning rate η.
        betas: (β₁, β₂).
        floor: lower bound of the corrected second moment (γ' in the paper). By default the standard
            deviation of v̂ on noise alone, ``Φ √(2 (1-β₂)(1+β₂ᵗ) / ((1+β₂)(1-β₂ᵗ)))``: a smaller
            value cannot be distinguished from a zero gradient.
        weight_decay: decoupled, as in AdamW.
        noise_variance: Φ, the variance of the noise in every coordinate of ``.grad``.
            `make_private` sets it from the plan for every parameter group in which it is None.

    >>> import torch, dpkfc
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = dpkfc.optim.DPAdamBC(model.parameters(), lr=0.01)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
    >>> run = dpkfc.make_private(
    ...     model, optimizer, data, loss=dpkfc.losses.cross_entropy,
    ...     noise_multiplier=1.0, delta=1e-3, steps=5, batch_size=10,
    ... )
    >>> f"{optimizer.param_groups[0]['noise_variance']:.4f}"
    '0.0100'
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float | None = None,
        weight_decay: float = 0.0,
        noise_variance: float | None = None,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0):
            raise ValueError(f"lr={lr}, weight_decay={weight_decay}: must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: must lie in [0, 1)")
        if any(value is not None and not value >= 0 for value in (floor, noise_variance)):
            raise ValueError(
                f"floor={floor}, noise_variance={noise_variance}: must not be negative"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "floor": floor,
            "weight_decay": weight_decay,
            "noise_variance": noise_variance,
        }
        super().__init__(params, defaults)

    def set_noise_variance(self, noise_variance: float | None, why_unknown: str) -> None:
        """See `dpkfc.optim.base.NoiseAware`. Groups that already have a variance keep it."""
        for group in self.param_groups:
            if group["noise_variance"] is None:
                if noise_variance is None:
                    raise ValueError(
                        f"DPAdamBC corrects for noise of one known variance, but {why_unknown}. "
                        "Use Independent() noise and no map after the noise, or torch.optim.Adam"
                    )
                group["noise_variance"] = noise_variance

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update_(p, p.grad, group)
        return loss

    def _update_(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        noise = group["noise_variance"]
        if noise is None:
            raise ValueError(
                "DPAdamBC does not know the variance of the noise. Call make_private after the "
                "last parameter group was added, or pass noise_variance"
            )
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        state = self.state[p]
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        t = state["step"]
        mean, square = state["mean"], state["square"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        floor = second_moment_std(beta2, t) * noise if group["floor"] is None else group["floor"]
        corrected = (square / (1 - beta2**t)).sub_(noise).clamp_(min=max(floor, SMALLEST_FLOOR))
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(mean, corrected.sqrt_(), value=-lr / (1 - beta1**t))


def second_moment_std(beta: float, t: int) -> float:
    """Standard deviation of ``Σ_{k≤t} β^{t-k} z_k² (1-β)/(1-βᵗ)``, z independent standard normal.

    >>> round(second_moment_std(0.9, 1), 4), round(second_moment_std(0.9, 1000), 4)
    (1.4142, 0.3244)
    """
    return math.sqrt(2 * (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t)))
