"""The workload: what the optimizer makes of the stream of noisy gradients, ``θ = A x`` up to sign and rate.

Correlated noise is shaped for the workload. *Privacy does not depend on it*: a workload that does not fit the
optimizer costs accuracy and nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from dpkfc.errors import PrivacyError
from dpkfc.noise.sensitivity import DENSE
from dpkfc.noise.series import Array, lower_toeplitz, quotient

Schedule = Sequence[float] | Callable[[int], float]
TRIED = 48  # steps of the optimizer that are compared with the formula


@dataclass(frozen=True)
class Workload:
    """A lower-triangular matrix A with ``θ_t = Σ_s A[t, s] x_s``.

    It is Toeplitz, with the generating function ``A(z) = numerator / denominator``, unless `matrix` says otherwise;
    then the generating function is that of the nearest Toeplitz case (a constant learning rate), or None.

    >>> Workload.sgd(momentum=0.9, weight_decay=0.001, coupled=False).coefficients(3).round(6).tolist()
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

        coupled, as in torch.optim.SGD:  ``m_t = β m_{t-1} + x_t + λ θ_{t-1}``,  ``θ_t = θ_{t-1} - η m_t``
        decoupled, as in the BSR paper:  ``m_t = β m_{t-1} + x_t``,  ``θ_t = (1 - ηλ) θ_{t-1} - η m_t``

        With Nesterov's momentum the step is ``x_t + λ θ_{t-1} + β m_t``. `lr_schedule` multiplies η at each step: a
        function of the number of the step (as in LambdaLR), or one factor a step.
        """
        if not 0 <= momentum < 1:
            raise PrivacyError(f"momentum={momentum}: must lie in [0, 1)")
        if not (lr > 0 and weight_decay >= 0 and lr * weight_decay < 1):
            raise PrivacyError(
                f"lr={lr}, weight_decay={weight_decay}: need lr > 0 and 0 <= lr * weight_decay < 1"
            )
        b, decay = momentum, lr * weight_decay
        numerator = np.array([1 + b, -b]) if nesterov else np.ones(1)
        scale = numerator[0]
        if coupled:
            denominator = np.array([1.0, -1 - b, b])
            denominator[1 : 1 + len(numerator)] += decay * numerator
        else:
            denominator = np.convolve([1, -(1 - decay)], [1, -b])
        name = f"SGD, momentum {b:g}"
        name += " (Nesterov)" if nesterov else ""
        name += f", {'' if coupled else 'decoupled '}decay {decay:.3g} a step" if decay else ""
        matrix = None
        if lr_schedule is not None:
            schedule = lr_schedule
            name += ", learning-rate schedule"

            def matrix(n: int) -> Array:
                return np.asarray(
                    _sgd_with_schedule(_rates(schedule, n), b, decay, coupled, nesterov) / scale
                )

        return Workload(
            name, tuple((numerator / scale).tolist()), tuple(denominator.tolist()), matrix
        )

    @staticmethod
    def toeplitz(coefficients: Sequence[float], name: str = "given coefficients") -> Workload:
        """``A[t, s] = coefficients[t - s]``, which must reach as far as the run has steps."""
        if not len(coefficients) or not np.isfinite(coefficients).all() or coefficients[0] <= 0:
            raise PrivacyError(
                "the coefficients of a workload must be finite numbers, the first of them positive"
            )
        return Workload(name, tuple(float(c) for c in coefficients))

    @staticmethod
    def linear(matrix: Array, name: str = "given matrix") -> Workload:
        """Any lower-triangular matrix, for the factorizations that do not need a Toeplitz one (`Banded`)."""
        dense = np.asarray(matrix, dtype=float)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or np.triu(dense, 1).any():
            raise PrivacyError(
                "a workload must be a square lower-triangular matrix: step t uses gradients up to t"
            )
        if not (np.isfinite(dense).all() and (np.diag(dense) != 0).all()):
            raise PrivacyError("a workload must be finite, without zeros on its diagonal")

        def leading(n: int) -> Array:
            if n > len(dense):
                raise PrivacyError(f"the workload is given for {len(dense)} steps; the run has {n}")
            return dense[:n, :n]

        return Workload(name, None, (1.0,), leading)

    @staticmethod
    def of(optimizer: Optimizer) -> Workload:
        """The workload of the user's optimizer at its present settings, checked against what the optimizer does.

        Of several parameter groups, which may differ in learning rate and weight decay, the largest decides.
        An optimizer that is not linear in the gradients (Adam and its kin) has no workload, and is refused.
        """
        group = _largest_group(optimizer)
        kind = type(optimizer).__name__
        response = impulse_response(optimizer, group, TRIED)
        if response is None:
            raise PrivacyError(
                f"{kind} is not linear in the gradients, so it has no workload to shape correlated noise for; what it "
                "rescales from step to step no longer cancels. Use torch.optim.SGD, or Independent() noise; or name a "
                "workload yourself: noise=BandedToeplitz(workload=Workload.sgd(momentum=0.9))"
            )
        workload = Workload.sgd(
            group.get("momentum", 0.0),
            float(group.get("weight_decay", 0.0)),
            lr=_rate(group),
            nesterov=bool(group.get("nesterov", False)),
        )
        if not np.allclose(response, workload.coefficients(TRIED), rtol=1e-9, atol=1e-9):
            raise PrivacyError(
                f"{kind} answers an impulse otherwise than SGD with its momentum and weight decay would; name its "
                "workload: noise=BandedToeplitz(workload=Workload.toeplitz(coefficients))"
            )
        return workload

    def coefficients(self, n: int) -> Array:
        """The first column of the Toeplitz matrix."""
        self.check(n)
        return quotient(*self.generating_function(), n)

    def check(self, n: int) -> None:
        """Refuse a run that is longer than what was given."""
        if self.numerator is not None and self.denominator == (1.0,) and len(self.numerator) < n:
            raise PrivacyError(
                f"the workload is given for {len(self.numerator)} steps; the run has {n}"
            )

    def generating_function(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.numerator is None:
            raise PrivacyError(
                f"the workload ({self.name}) is not Toeplitz: it has no square root of that form. Use Banded(bands=...)"
            )
        return self.numerator, self.denominator

    def materialize(self, n: int) -> Array:
        """A as an n x n matrix."""
        if n > DENSE:
            raise PrivacyError(
                f"the workload ({self.name}) would need a matrix of {n} x {n}. Leave the learning-rate schedule out: "
                "it matters little to the shape of the noise, and not at all to privacy"
            )
        return lower_toeplitz(self.coefficients(n), n) if self.matrix is None else self.matrix(n)


def is_linear(optimizer: Optimizer) -> bool:
    """Is the path of the parameters known to be a linear function of the gradients, the same from every step on?"""
    try:
        return impulse_response(optimizer, _largest_group(optimizer), 8) is not None
    except PrivacyError:
        return False


def _largest_group(optimizer: Optimizer) -> dict[str, Any]:
    return max(optimizer.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))


def _rate(group: dict[str, Any]) -> float:
    """The learning rate, before any scheduler; a rate of 0 has no shape, so it counts as 1."""
    return float(group.get("initial_lr", group["lr"])) or 1.0


def impulse_response(optimizer: Optimizer, group: dict[str, Any], steps: int) -> Array | None:
    """How a single gradient of 1 moves a parameter over the `steps` steps from it on; None if that is not linear.

    A copy of the optimizer drives a parameter of its own. One step without a gradient comes first: torch's
    `dampening` treats the first step apart from all others.
    """

    accepted = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()

    def respond(impulse: float, at: int) -> Array:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        twin = type(optimizer)([parameter], **{k: optimizer.defaults[k] for k in accepted})
        twin.param_groups[0].update(
            {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}, lr=_rate(group)
        )
        moved = []
        for step in range(at + steps):
            parameter.grad = torch.full_like(parameter, impulse if step == at else 0.0)
            twin.step()
            moved.append(parameter.item())
        return np.array(moved[at:])

    try:
        one, two, later = respond(1.0, 1), respond(-2.0, 1), respond(1.0, 3)
    except Exception as problem:
        raise PrivacyError(
            f"{type(optimizer).__name__} could not be tried on a single number ({problem}): name its workload, "
            "noise=BandedToeplitz(workload=Workload.sgd(momentum=0.9))"
        ) from problem
    linear = np.allclose(two, -2 * one, rtol=1e-6, atol=0) and np.allclose(
        later, one, rtol=1e-6, atol=0
    )
    return one / one[0] if linear and one[0] else None


def _rates(schedule: Schedule, n: int) -> Array:
    if callable(schedule):
        rates = np.array([schedule(t) for t in range(n)], dtype=float)
    else:
        if len(schedule) < n:
            raise PrivacyError(f"lr_schedule has {len(schedule)} factors; the run has {n} steps")
        rates = np.asarray(schedule[:n], dtype=float)
    if not (np.isfinite(rates).all() and (rates >= 0).all() and rates.any()):
        raise PrivacyError("lr_schedule must be made of finite factors, 0 or larger, and not all 0")
    return rates


def _sgd_with_schedule(
    rates: Array, momentum: float, decay: float, coupled: bool, nesterov: bool
) -> Array:
    """The recursions of `Workload.sgd` on unit gradients, all columns at once (η = 1, so λ is the decay a step)."""
    n = len(rates)
    theta, velocity, rows = np.zeros(n), np.zeros(n), np.zeros((n, n))
    for t, rate in enumerate(rates):
        gradient = -decay * theta if coupled else np.zeros(n)
        gradient[t] += 1
        velocity = momentum * velocity + gradient
        step = gradient + momentum * velocity if nesterov else velocity
        theta = (1 if coupled else 1 - rate * decay) * theta + rate * step
        rows[t] = theta
    return rows
