"""Choice of the noise: the error of every candidate in the parameters, at the same epsilon.

Correlated noise loses some amplification by sampling, since a record may join only every b-th step,
and gains by cancellation. Which effect is larger depends on the run and can be computed in advance,
within a memory budget. No private data is needed for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

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

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Correlated noise must reduce the error to this share, or the simpler independent noise is kept.
WORTH_IT = 0.95
# Among errors within this factor of the smallest, the number of buffers decides.
CLOSE = 1.01
# Estimates of the error are taken to be right within this share, which is checked for contenders.
# `contenders` leaves room for two of them on either side: (1 + ESTIMATE_ERROR)² < DOUBT.
ESTIMATE_ERROR = 0.004
DOUBT = 1.01
NOT_LINEAR = (
    "{}, but correlated noise cancels only if later gradients reach the parameters on the same "
    "scale. Privacy is not affected, but the gain is: the error of 16 optimised bands, .43 of that "
    "of independent noise with SGD, was .84 with Adam and 5.4 with coordinates rescaled at random "
    "in every step; that of 2 buffers .45, 1.7 and 11 (`dpkfc reproduce rescaling`). Use "
    "torch.optim.SGD, or Independent() noise"
)


class Noise(Protocol):
    """A kind of noise, from which a factorization can be made: `Independent`, `BandedToeplitz`."""

    @property
    def workload(self) -> Workload | None:
        """The workload to optimise for; None stands for that of the optimizer."""

    def factorize(self, workload: Workload, n: int, separation: int) -> Factorization:
        """The strategy matrix C for n steps; a record returns after `separation` steps or more."""


@dataclass(frozen=True)
class Candidate:
    """A noise with its plan, calibrated or, if `plan.target_epsilon` is None, estimated."""

    noise: Noise
    factorization: Factorization
    plan: Plan
    rmse: float  # root mean square of the noise in one parameter, for a learning rate of 1


def noise_candidates(max_buffers: int, turns: int) -> list[Noise]:
    """Every noise worth trying within the memory, independent noise first.

    Args:
        max_buffers: memory for past noise, in vectors of the model's size.
        turns: number of batches in one pass over the data.
    """
    if max_buffers < 0:
        raise ValueError(f"max_buffers={max_buffers}: must not be negative")
    if turns < 2:
        return [Independent()]
    most_bands = min(max_buffers + 1, turns)
    widths = {p for p in (2, 4, 8, 16, 32, 64, 128, 256, turns) if p <= most_bands}
    candidates: list[Noise] = [Independent()]
    for bands in sorted(widths):
        candidates += [BandedSquareRoot(bands), BandedToeplitz(bands)]
    candidates += [BufferedToeplitz(buffers) for buffers in (1, 2, 3) if buffers <= max_buffers]
    regenerated = InverseSquareRoot(min(max(max_buffers + 1, MAX_REGENERATED_BANDS), turns))
    return [*candidates, LambdaCGD(), regenerated]


def evaluate(noise: Noise, workload: Workload, **run: Any) -> Candidate:
    """Calibrate the noise for a run with these arguments of `Plan.make`, and compute its error."""
    factorization = _factorize(noise, workload, run)
    plan = Plan.make(**run, noise=factorization)
    error = factorization.error(workload, run["steps"])
    return Candidate(noise, factorization, plan, plan.noise_scale / plan.batch_size * error)


def compare(kinds: Iterable[Noise], workload: Workload, **run: Any) -> list[Candidate]:
    """A candidate for each kind of noise, in this order, for `best` to choose from.

    A calibration takes several times as long as an estimate of the same noise multiplier. So only
    candidates that could be the best are calibrated. For the others the estimate, which is right
    to about 0.1 %, is enough to know that they are not.

    Args:
        kinds: for example `noise_candidates`, independent noise first.
        workload: how noise accumulates in the parameters.
        run: the arguments of `Plan.make`, with `epsilon`.

    **Guarantee.** `best` of these candidates is calibrated.
    """
    epsilon = run["epsilon"]
    unscaled = {**run, "epsilon": None, "noise_multiplier": 1.0}

    def estimated(kind: Noise) -> Candidate:
        candidate = evaluate(kind, workload, **unscaled)
        return _with_plan(candidate, candidate.plan.estimated(epsilon))

    def calibrated(candidate: Candidate) -> Candidate:
        return _with_plan(candidate, candidate.plan.calibrated(epsilon))

    estimates = [estimated(kind) for kind in kinds]
    possible = contenders([estimate.rmse for estimate in estimates])
    candidates = [
        calibrated(estimate) if i in possible else estimate for i, estimate in enumerate(estimates)
    ]
    if all(
        abs(candidate.rmse - estimate.rmse) <= ESTIMATE_ERROR * candidate.rmse
        for candidate, estimate in zip(candidates, estimates, strict=True)
    ):
        return candidates
    return [calibrated(estimate) for estimate in estimates]


def _with_plan(candidate: Candidate, plan: Plan) -> Candidate:
    """The candidate with another noise multiplier, to which its error is proportional."""
    rmse = candidate.rmse / candidate.plan.noise_multiplier * plan.noise_multiplier
    return replace(candidate, plan=plan, rmse=rmse)


def contenders(errors: Sequence[float]) -> set[int]:
    """The indices that `best` might choose if each error were off by `ESTIMATE_ERROR`.

    >>> contenders([1.0, 0.8, 0.7, 0.71])
    {2, 3}
    >>> contenders([1.0, 0.99])
    {0}
    """
    smallest = min(errors)
    share = smallest / (WORTH_IT * errors[0])
    if share >= DOUBT:  # nothing is worth it
        return {0}
    close = {i for i, error in enumerate(errors) if error <= CLOSE * DOUBT * smallest}
    return close | {0} if share > 1 / DOUBT else close


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the fewest buffers whose error is within 1 % of the smallest.

    The first candidate, independent noise, is kept unless another one is clearly better.
    """
    smallest = min(candidate.rmse for candidate in candidates)
    if smallest >= WORTH_IT * candidates[0].rmse:
        return candidates[0]
    close = [candidate for candidate in candidates if candidate.rmse <= CLOSE * smallest]
    return min(close, key=lambda candidate: (candidate.factorization.buffers, candidate.rmse))


def choose(
    noise: Noise | Auto | Literal["auto"] | None,
    optimizer: Optimizer,
    rescaled: str | None,
    sampling: Sampling | None,
    **run: Any,
) -> Factorization:
    """The factorization for a run with these arguments of `Plan.make`.

    Args:
        noise: as in `make_private`.
        optimizer: determines the workload, unless `noise` has its own.
        rescaled: what changes the scale of noisy gradients over time before they reach the
            parameters, for the warning; None if nothing does.
        sampling: as in `Options`.
        run: the other arguments of `Plan.make`.
    """
    if noise is None or isinstance(noise, Independent):
        return IDENTITY
    if noise == "auto":
        noise = Auto()
    _check_noise(noise)
    linear = is_linear(optimizer)
    if not linear:
        optimizer_name = type(optimizer).__name__
        rescaled = rescaled or f"{optimizer_name} rescales every gradient by the past ones"
    if isinstance(noise, Auto):
        if sampling is not None:
            raise ValueError("noise='auto' chooses the sampling too: leave sampling out")
        if run.get("epsilon") is None:
            raise ValueError(
                "noise='auto' compares at equal epsilon: give epsilon instead of noise_multiplier"
            )
        if rescaled:
            return IDENTITY
        workload = noise.workload or Workload.of(optimizer)
        kinds = noise_candidates(noise.max_buffers, run["records"] // run["batch_size"])
        return best(compare(kinds, workload, **run)).factorization
    if rescaled:
        warnings.warn(NOT_LINEAR.format(rescaled), stacklevel=3)
    workload = noise.workload or (Workload.of(optimizer) if linear else Workload.sgd(momentum=0.9))
    return _factorize(noise, workload, run)


def _check_noise(noise: Any) -> None:
    if isinstance(noise, Auto) or (hasattr(noise, "factorize") and not isinstance(noise, type)):
        return
    advice = "pass 'auto', or an object such as dpkfc.noise.BandedToeplitz(bands=16)"
    error = ValueError if isinstance(noise, str) else TypeError
    raise error(f"noise={noise!r}: {advice}")


def _factorize(noise: Noise, workload: Workload, run: dict[str, Any]) -> Factorization:
    workload.check(run["steps"])
    return noise.factorize(workload, run["steps"], run["records"] // run["batch_size"])
