"""The workload A: how the optimizer turns noisy gradients x into parameters, ``θ = A x``.

θ is meant up to sign and learning rate. Correlated noise is shaped for the workload. *Privacy does
not depend on it*: a workload that does not fit the optimizer costs accuracy and nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.noise.sensitivity import MAX_DENSE_STEPS
from dpkfc.noise.series import Array, lower_toeplitz, quotient

if TYPE_CHECKING:
    from torch.optim import Optimizer

Schedule = Sequence[float] | Callable[[int], float]
TRIAL_STEPS = 48  # steps in which the optimizer is compared with its formula


@dataclass(frozen=True)
class Workload:
    """A lower-triangular matrix A with ``θ_t = Σ_s A[t, s] x_s``.

    Make it with `Workload.sgd`, `Workload.toeplitz`, `Workload.linear` or `Workload.of`.

    Args:
        name: for plans and messages.
        numerator, denominator: the generating function ``a(ζ) = numerator / denominator`` of a
            Toeplitz A. If A is not Toeplitz, that of the nearest Toeplitz case (a constant learning
            rate), or None.
        matrix: maps n to A, if A is not Toeplitz.

    >>> workload = Workload.sgd(momentum=0.9, weight_decay=0.001, coupled=False)
    >>> workload.coefficients(3).round(6).tolist()
    [1.0, 1.899, 2.707101]
    """

    name: str
    numerator: tuple[float, ...] | None
    denominator: tuple[float, ...] = (1.0,)
    matrix: Callable[[int], Array] | None = None

    @staticmethod
    def sgd(
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        lr: float = 1.0,
        coupled: bool = True,
        nesterov: bool = False,
        lr_schedule: Schedule | None = None,
    ) -> Workload:
        """SGD with momentum β, weight decay λ and learning rate η.

        Args:
            momentum: β.
            weight_decay: λ.
            lr: η.
            coupled: True, as in torch.optim.SGD: ``m_t = β m_{t-1} + x_t + λ θ_{t-1}``,
                ``θ_t = θ_{t-1} - η m_t``. False, as in the BSR paper: ``m_t = β m_{t-1} + x_t``,
                ``θ_t = (1 - ηλ) θ_{t-1} - η m_t``.
            nesterov: the step is ``x_t + λ θ_{t-1} + β m_t``.
            lr_schedule: multiplies η at each step: a function of the step number (as in LambdaLR),
                or one factor per step.
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must lie in [0, 1)")
        if not (lr > 0 and weight_decay >= 0 and lr * weight_decay < 1):
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}: need lr > 0 and 0 <= lr * weight_decay < 1"
            )
        beta = momentum
        decay = lr * weight_decay
        numerator = np.array([1 + beta, -beta]) if nesterov else np.ones(1)
        scale = numerator[0]
        if coupled:
            denominator = np.array([1.0, -1 - beta, beta])
            denominator[1 : 1 + len(numerator)] += decay * numerator
        else:
            denominator = np.convolve([1, -(1 - decay)], [1, -beta])
        name = f"SGD, momentum {beta:g}"
        name += " (Nesterov)" if nesterov else ""
        name += f", {'' if coupled else 'decoupled '}decay {decay:.3g} a step" if decay else ""
        matrix = None
        if lr_schedule is not None:
            schedule = lr_schedule
            name += ", learning-rate schedule"

            def matrix(n: int) -> Array:
                rates = _rates(schedule, n)
                return np.asarray(_sgd_with_schedule(rates, beta, decay, coupled, nesterov) / scale)

        numerator = numerator / scale
        return Workload(name, tuple(numerator.tolist()), tuple(denominator.tolist()), matrix)

    @staticmethod
    def toeplitz(coefficients: Sequence[float], name: str = "given coefficients") -> Workload:
        """``A[t, s] = coefficients[t - s]``; one coefficient per step of the run is needed."""
        if not len(coefficients) or not np.isfinite(coefficients).all() or coefficients[0] <= 0:
            raise ValueError(
                "the coefficients of a workload must be finite numbers, the first of them positive"
            )
        return Workload(name, tuple(float(c) for c in coefficients))

    @staticmethod
    def linear(matrix: Array, name: str = "given matrix") -> Workload:
        """Any lower-triangular matrix, for factorizations of any matrix (`Banded`)."""
        dense = np.asarray(matrix, dtype=float)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or np.triu(dense, 1).any():
            raise ValueError(
                "a workload must be a square lower-triangular matrix: step t uses gradients up to t"
            )
        if not (np.isfinite(dense).all() and (np.diag(dense) != 0).all()):
            raise ValueError("a workload must be finite, without zeros on its diagonal")

        def leading_block(n: int) -> Array:
            if n > len(dense):
                raise ValueError(
                    f"the workload is given for {len(dense)} steps; the run has {n}. Give a matrix "
                    f"of {n} x {n}"
                )
            return dense[:n, :n]

        return Workload(name, None, (1.0,), leading_block)

    @staticmethod
    def of(optimizer: Optimizer) -> Workload:
        """The workload of an optimizer with its present settings, compared with its steps.

        Parameter groups may differ in learning rate and weight decay; the largest group decides.

        Raises:
            ValueError: the optimizer is not linear in the gradients (Adam and similar), so it has
                no workload; or it is linear, but its formula is not known.

        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9)
        >>> Workload.of(sgd).name
        'SGD, momentum 0.9'
        """
        group = _largest_group(optimizer)
        kind = type(optimizer).__name__
        response = impulse_response(optimizer, group, TRIAL_STEPS)
        if response is None:
            raise ValueError(
                f"{kind} is not linear in the gradients, so it has no workload to shape correlated "
                "noise for: noise that is rescaled between steps no longer cancels. Use "
                "torch.optim.SGD, or Independent() noise; or name a workload yourself: "
                "noise=BandedToeplitz(workload=Workload.sgd(momentum=0.9))"
            )
        workload = Workload.sgd(
            group.get("momentum", 0.0),
            float(group.get("weight_decay", 0.0)),
            lr=_rate(group),
            nesterov=bool(group.get("nesterov", False)),
        )
        if not np.allclose(response, workload.coefficients(TRIAL_STEPS), rtol=1e-9, atol=1e-9):
            raise ValueError(
                f"{kind} has a different impulse response from SGD with its momentum and weight "
                "decay. Name its workload: "
                "noise=BandedToeplitz(workload=Workload.toeplitz(coefficients))"
            )
        return workload

    def coefficients(self, n: int) -> Array:
        """The first column of the Toeplitz matrix."""
        self.check(n)
        return quotient(*self.generating_function(), n)

    def check(self, n: int) -> None:
        """Raise if the given coefficients end before step n."""
        if self.numerator is not None and self.denominator == (1.0,) and len(self.numerator) < n:
            raise ValueError(
                f"the workload is given for {len(self.numerator)} steps; the run has {n}. Give one "
                "coefficient per step"
            )

    def generating_function(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Numerator and denominator."""
        if self.numerator is None:
            raise ValueError(
                f"the workload ({self.name}) is not Toeplitz, so it has no Toeplitz square root. "
                "Use Banded(bands=...)"
            )
        return self.numerator, self.denominator

    def materialize(self, n: int) -> Array:
        """A as an n x n matrix."""
        if n > MAX_DENSE_STEPS:
            raise ValueError(
                f"the workload ({self.name}) would need a matrix of {n} x {n}. Omit the "
                "learning-rate schedule: it changes the shape of the noise little, and privacy not "
                "at all"
            )
        return lower_toeplitz(self.coefficients(n), n) if self.matrix is None else self.matrix(n)


def is_linear(optimizer: Optimizer) -> bool:
    """Whether the parameters are known to be a linear, time-invariant function of the gradients."""
    try:
        return impulse_response(optimizer, _largest_group(optimizer), 8) is not None
    except ValueError:
        return False


def _largest_group(optimizer: Optimizer) -> dict[str, Any]:
    return max(optimizer.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))


def _rate(group: dict[str, Any]) -> float:
    """The learning rate before any scheduler. A rate of 0 has no shape, so it counts as 1."""
    return float(group.get("initial_lr", group["lr"])) or 1.0


def impulse_response(optimizer: Optimizer, group: dict[str, Any], steps: int) -> Array | None:
    """How a single gradient of 1 moves a parameter during `steps` steps; None if not linear.

    A copy of the optimizer drives a parameter of its own. A step without a gradient comes first,
    because torch's `dampening` treats the first step differently.
    """
    import torch

    accepted = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()

    def respond(impulse: float, impulse_step: int) -> Array:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        twin = type(optimizer)([parameter], **{k: optimizer.defaults[k] for k in accepted})
        settings = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        twin.param_groups[0].update(settings, lr=_rate(group))
        path = []
        for step in range(impulse_step + steps):
            parameter.grad = torch.full_like(parameter, impulse if step == impulse_step else 0.0)
            twin.step()
            path.append(parameter.item())
        return np.array(path[impulse_step:])

    try:
        unit = respond(1.0, impulse_step=1)
        scaled = respond(-2.0, impulse_step=1)
        later = respond(1.0, impulse_step=3)
    except Exception as problem:
        raise ValueError(
            f"{type(optimizer).__name__} could not be tried on a single number ({problem}): name "
            "its workload, noise=BandedToeplitz(workload=Workload.sgd(momentum=0.9))"
        ) from problem
    is_homogeneous = np.allclose(scaled, -2 * unit, rtol=1e-6, atol=0)
    is_time_invariant = np.allclose(later, unit, rtol=1e-6, atol=0)
    return unit / unit[0] if is_homogeneous and is_time_invariant and unit[0] else None


def _rates(schedule: Schedule, n: int) -> Array:
    if callable(schedule):
        rates = np.array([schedule(t) for t in range(n)], dtype=float)
    else:
        if len(schedule) < n:
            raise ValueError(f"lr_schedule has {len(schedule)} factors; the run has {n} steps")
        rates = np.asarray(schedule[:n], dtype=float)
    if not (np.isfinite(rates).all() and (rates >= 0).all() and rates.any()):
        raise ValueError("lr_schedule must be made of finite factors, 0 or larger, and not all 0")
    return rates


def _sgd_with_schedule(
    rates: Array, momentum: float, decay: float, coupled: bool, nesterov: bool
) -> Array:
    """The recursions of `Workload.sgd` on unit gradients, all columns at once.

    η is 1, so λ is the decay per step.
    """
    n = len(rates)
    theta = np.zeros(n)
    velocity = np.zeros(n)
    rows = np.zeros((n, n))
    for t, rate in enumerate(rates):
        gradient = -decay * theta if coupled else np.zeros(n)
        gradient[t] += 1
        velocity = momentum * velocity + gradient
        step = gradient + momentum * velocity if nesterov else velocity
        theta = (1 if coupled else 1 - rate * decay) * theta + rate * step
        rows[t] = theta
    return rows
