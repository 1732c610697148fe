"""Which noise: every candidate's error in the parameters, at the same epsilon, within a budget of memory.

Correlated noise gives up some amplification by sampling, since a record may join only every b-th step, and
wins by cancellation. What prevails depends on the run; so it is computed, and nothing private is needed for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import Factorization
from dpkfc.noise.independent import Independent
from dpkfc.noise.toeplitz import BandedSquareRoot, BandedToeplitz, BufferedToeplitz, InverseSquareRoot, LambdaCGD
from dpkfc.noise.workload import Workload, is_linear
from dpkfc.plan import Plan, Sampling

WORTH_IT = 0.95  # of the error of independent noise; above that, simpler is better


class Noise(Protocol):
    """A recipe for a factorization: `Independent`, `BandedToeplitz`, ..."""

    @property
    def workload(self) -> Workload | None:
        """What the noise is shaped for; None: what the optimizer does."""

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """The matrix C for a run of n steps, in which a record returns after `separation` steps at the earliest."""


@dataclass(frozen=True)
class Auto:
    """The noise with the least error on the workload, keeping at most `max_buffers` vectors of the model's size."""

    max_buffers: int = 16
    workload: Workload | None = None


@dataclass(frozen=True)
class Candidate:
    """A noise with its plan. `rmse`: root mean square of its part in a parameter, for a learning rate of 1."""

    noise: Noise
    factorization: Factorization
    plan: Plan
    rmse: float


def candidates(workload: Workload, max_buffers: int, **run: Any) -> Iterator[Candidate]:
    """Every noise worth trying for a run with these arguments of `Plan.make`, the independent one first."""
    records, batch_size = run["records"], run["batch_size"]
    turns = records // batch_size
    widths = {p for p in (2, 4, 8, 16, 32, 64, 128, 256, turns) if 1 < p <= min(max_buffers + 1, turns)}
    yield _candidate(Independent(), workload, **run)
    for bands in sorted(widths):
        yield _candidate(BandedSquareRoot(bands), workload, **run)
        yield _candidate(BandedToeplitz(bands), workload, **run)
    if turns > 1:
        yield _candidate(LambdaCGD(), workload, **run)
        for buffers in range(1, min(3, max_buffers) + 1):
            yield _candidate(BufferedToeplitz(buffers), workload, **run)
        yield _candidate(InverseSquareRoot(4 if max_buffers < 4 else min(max_buffers + 1, turns)), workload, **run)


def best(found: list[Candidate]) -> Candidate:
    """The least error; independent noise, the first of them, if nothing is clearly better."""
    least = min(found, key=lambda candidate: candidate.rmse)
    return least if least.rmse < WORTH_IT * found[0].rmse else found[0]


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
    if noise is None:
        noise = Independent()
    if isinstance(noise, Independent):
        return noise.factorize(noise.workload, run["steps"], 1)
    if isinstance(noise, str):
        if noise != "auto":
            raise PrivacyError(f"noise={noise!r}: pass 'auto', or an object such as dpkfc.BandedToeplitz(bands=16)")
        noise = Auto()
    if not (isinstance(noise, Auto) or hasattr(noise, "factorize")):
        raise PrivacyError(f"noise={noise!r}: pass 'auto', or an object such as dpkfc.BandedToeplitz(bands=16)")
    if not is_linear(optimizer):
        rescaled = rescaled or f"{type(optimizer).__name__} rescales every gradient by the past ones"
    if isinstance(noise, Auto):
        if sampling is not None:
            raise PrivacyError("noise='auto' chooses the sampling too: leave sampling out")
        if run.get("epsilon") is None:
            raise PrivacyError("noise='auto' compares at equal epsilon: give epsilon instead of noise_multiplier")
        if rescaled:
            return Independent().factorize(Independent.workload, run["steps"], 1)
        workload = noise.workload or Workload.of(optimizer)
        return best(list(candidates(workload, noise.max_buffers, **run))).factorization
    if rescaled:
        warnings.warn(WHY_NOT.format(rescaled), stacklevel=3)
    workload = noise.workload or (Workload.of(optimizer) if is_linear(optimizer) else Workload.sgd(momentum=0.9))
    return _factorize(noise, workload, run)


WHY_NOT = (
    "{}, but correlated noise cancels only if later gradients reach the parameters on the same scale: rescaling every "
    "step at random makes its error many times larger (docs/correlated-noise.md). Privacy is not affected. Use "
    "torch.optim.SGD, or Independent() noise"
)


def _candidate(noise: Noise, workload: Workload, **run: Any) -> Candidate:
    factorization = _factorize(noise, workload, run)
    plan = Plan.make(**run, noise=factorization)
    error = factorization.error(workload, run["steps"])
    return Candidate(noise, factorization, plan, plan.noise_scale / plan.batch_size * error)


def _factorize(noise: Noise, workload: Workload, run: dict[str, Any]) -> Factorization:
    return noise.factorize(workload, run["steps"], run["records"] // run["batch_size"])
