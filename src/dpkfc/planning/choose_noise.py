"""Which noise: every candidate's error in the parameters, at the same epsilon, within a budget of memory.

Correlated noise gives up some amplification by sampling, since a record may join only every b-th step, and
wins by cancellation. What prevails depends on the run; so it is computed, and nothing private is needed for it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from dpkfc.errors import PrivacyError
from dpkfc.noise.auto import Auto
from dpkfc.noise.factorization import IDENTITY, MAX_REGENERATED_BANDS, Factorization
from dpkfc.noise.independent import Independent
from dpkfc.noise.toeplitz import (
    BandedSquareRoot,
    BandedToeplitz,
    BufferedToeplitz,
    InverseSquareRoot,
    LambdaCGD,
)
from dpkfc.noise.workload import Workload, is_linear
from dpkfc.planning.plan import Plan, Sampling

WORTH_IT = 0.95  # of the error of independent noise; above that, simpler is better


class Noise(Protocol):
    """A recipe for a factorization: `Independent`, `BandedToeplitz`, ..."""

    @property
    def workload(self) -> Workload | None:
        """What the noise is shaped for; None: what the optimizer does."""

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """The matrix C for a run of n steps, in which a record returns after `separation` steps at the earliest."""


@dataclass(frozen=True)
class Candidate:
    """A noise with its plan. `rmse`: root mean square of its part in a parameter, for a learning rate of 1."""

    noise: Noise
    factorization: Factorization
    plan: Plan
    rmse: float


def recipes(max_buffers: int, turns: int) -> list[Noise]:
    """Every noise worth trying within the memory, the independent one first; `turns` batches make a pass."""
    if max_buffers < 0:
        raise PrivacyError(f"max_buffers={max_buffers}: must not be negative")
    found: list[Noise] = [Independent()]
    if turns < 2:
        return found
    widths = {p for p in (2, 4, 8, 16, 32, 64, 128, 256, turns) if p <= min(max_buffers + 1, turns)}
    for bands in sorted(widths):
        found += [BandedSquareRoot(bands), BandedToeplitz(bands)]
    found += [BufferedToeplitz(buffers) for buffers in (1, 2, 3) if buffers <= max_buffers]
    return [
        *found,
        LambdaCGD(),
        InverseSquareRoot(min(max(max_buffers + 1, MAX_REGENERATED_BANDS), turns)),
    ]


def evaluate(noise: Noise, workload: Workload, **run: Any) -> Candidate:
    """The noise calibrated for a run with these arguments of `Plan.make`, and its error."""
    factorization = _factorize(noise, workload, run)
    plan = Plan.make(**run, noise=factorization)
    error = factorization.error(workload, run["steps"])
    return Candidate(noise, factorization, plan, plan.noise_scale / plan.batch_size * error)


def best(found: list[Candidate]) -> Candidate:
    """The least error, and of those within 1 % of it the one with the fewest buffers.

    If nothing is clearly better than independent noise, the first of them, that is kept.
    """
    least = min(candidate.rmse for candidate in found)
    if least >= WORTH_IT * found[0].rmse:
        return found[0]
    close = [candidate for candidate in found if candidate.rmse <= 1.01 * least]
    return min(close, key=lambda candidate: (candidate.factorization.buffers, candidate.rmse))


def choose(
    noise: Noise | Auto | Literal["auto"] | None,
    optimizer: Optimizer,
    rescaled: str | None,
    sampling: Sampling | None,
    **run: Any,
) -> Factorization:
    """The factorization for a run with these arguments of `Plan.make`.

    `rescaled` says what changes the noisy gradients over time before they reach the parameters, if anything does.
    """
    if noise is None or isinstance(noise, Independent):
        return IDENTITY
    if noise == "auto":
        noise = Auto()
    if isinstance(noise, str) or not (isinstance(noise, Auto) or hasattr(noise, "factorize")):
        raise PrivacyError(
            f"noise={noise!r}: pass 'auto', or an object such as dpkfc.noise.BandedToeplitz(bands=16)"
        )
    linear = is_linear(optimizer)
    if not linear:
        rescaled = (
            rescaled or f"{type(optimizer).__name__} rescales every gradient by the past ones"
        )
    if isinstance(noise, Auto):
        if sampling is not None:
            raise PrivacyError("noise='auto' chooses the sampling too: leave sampling out")
        if run.get("epsilon") is None:
            raise PrivacyError(
                "noise='auto' compares at equal epsilon: give epsilon instead of noise_multiplier"
            )
        if rescaled:
            return IDENTITY
        workload = noise.workload or Workload.of(optimizer)
        tried = recipes(noise.max_buffers, run["records"] // run["batch_size"])
        return best([evaluate(one, workload, **run) for one in tried]).factorization
    if rescaled:
        warnings.warn(WHY_NOT.format(rescaled), stacklevel=3)
    workload = noise.workload or (Workload.of(optimizer) if linear else Workload.sgd(momentum=0.9))
    return _factorize(noise, workload, run)


WHY_NOT = (
    "{}, but correlated noise cancels only if later gradients reach the parameters on the same scale. Privacy is not "
    "affected, but the gain is: the error of 16 optimised bands, .43 of that of independent noise with SGD, was .84 "
    "with Adam and 5.4 with coordinates rescaled at random in every step; that of 2 buffers .45, 1.7 and 11 (`dpkfc "
    "reproduce rescaling`). Use torch.optim.SGD, or Independent() noise"
)


def _factorize(noise: Noise, workload: Workload, run: dict[str, Any]) -> Factorization:
    workload.check(run["steps"])
    return noise.factorize(workload, run["steps"], run["records"] // run["batch_size"])
