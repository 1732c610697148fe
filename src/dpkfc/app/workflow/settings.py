"""The settings of a run, and the checks that refuse bad ones before anything is read or spent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

FEWEST_RECORDS = 8  # expected in a batch; with fewer, the noise is larger than any signal
SEEDS = 2**63  # torch takes seeds below


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on besides the data. None: `dpkfc.recipe` decides.

    Args:
        epsilon, delta: the privacy budget.
        model: a name as in `dpkfc train --model`.
        epochs: expected passes over the data.
        batch_size: expected number of records per step.
        lr: the learning rate; or
        rho: the norm of the noise in the weights of one unit, from which the learning rate follows.
        clip: the clip norm.
        method, noise: as in `dpkfc train`.
        physical_batch_size: records in memory at once.
        ledger: the file of a ledger.
        dataset: the name of the data set in the ledger.
        budget: (epsilon, delta) for all runs in the ledger together; its delta is that of the run
            if None.
        records: the public number of training records. None: their true number is public.
        seed: makes the run reproducible, and its noise known to whoever knows the seed.
    """

    epsilon: float
    delta: float | None = None
    model: str | None = None
    epochs: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    rho: float | None = None
    clip: float | None = None
    method: Literal["kfc", "sgd"] = "kfc"
    noise: Literal["auto", "independent"] = "auto"
    physical_batch_size: int = 512
    ledger: str | None = None
    dataset: str | None = None
    budget: tuple[float, float | None] | None = None
    records: int | None = None
    seed: int | None = None
    device: str = "cpu"

    def public_count(self, records: int) -> int:
        """The number of records that the plan is computed from: the stated one, or `records`."""
        return records if self.records is None else self.records


def check_settings(settings: Settings) -> None:
    """Raise ValueError for settings that no run can have."""
    for name in ("lr", "rho", "clip", "epochs", "epsilon"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} {value:g}: must be a positive number")
    check_seed(settings.seed)
    check_budget(settings)
    if settings.records is not None and settings.records < FEWEST_RECORDS:
        raise ValueError(
            f"--records {settings.records}: the public number of training records must be at "
            f"least {FEWEST_RECORDS}; a useful model needs thousands"
        )
    if settings.lr is not None and settings.rho is not None:
        raise ValueError("--lr and --rho both set the size of the steps: give one of them")
    if settings.batch_size is not None and settings.batch_size < FEWEST_RECORDS:
        raise ValueError(
            f"--batch-size {settings.batch_size}: noise dominates so small a batch: give at least "
            f"{FEWEST_RECORDS}"
        )
    if settings.physical_batch_size < 1:
        raise ValueError(
            f"--physical-batch-size {settings.physical_batch_size}: must be at least 1"
        )
    if settings.delta is not None and not 0 < settings.delta < 1:
        raise ValueError(
            f"--delta {settings.delta:g}: must lie between 0 and 1, and well below 1 / records"
        )
    if settings.method not in ("kfc", "sgd"):
        raise ValueError(f"--method {settings.method}: choose kfc or sgd")
    if settings.noise not in ("auto", "independent"):
        raise ValueError(f"--noise {settings.noise}: choose auto or independent")
    check_device(settings.device)


def parse_budget(text: str) -> tuple[float, float | None]:
    """Read --budget: EPSILON or EPSILON,DELTA.

    >>> parse_budget("8,1e-5"), parse_budget("8")
    ((8.0, 1e-05), (8.0, None))
    """
    try:
        epsilon, *rest = [float(part) for part in text.split(",")]
    except ValueError:
        epsilon, rest = math.nan, []
    delta = rest[0] if rest else None
    if not 0 < epsilon < math.inf or len(rest) > 1 or (delta is not None and not 0 < delta < 1):
        raise ValueError(
            f"--budget {text}: give EPSILON or EPSILON,DELTA, as in --budget 8,1e-5: epsilon "
            "positive and finite, delta between 0 and 1"
        )
    return epsilon, delta


def check_budget(settings: Settings) -> None:
    """Raise ValueError for a budget without a ledger, or below the epsilon of this run alone."""
    if settings.budget is None:
        return
    epsilon, delta = settings.budget
    parse_budget(f"{epsilon}" if delta is None else f"{epsilon},{delta}")
    if settings.ledger is None:
        raise ValueError(
            "--budget is the cap for all runs together and is kept in a ledger: give --ledger "
            "FILE too"
        )
    if epsilon < settings.epsilon and delta in (None, settings.delta):
        raise ValueError(
            f"--budget {epsilon:g} for all runs together is less than --epsilon "
            f"{settings.epsilon:g} of this run: give a smaller --epsilon, or a larger budget if "
            "the ledger has none yet"
        )


def check_seed(seed: int | None) -> None:
    """Raise ValueError for a seed that torch does not take."""
    if seed is not None and not 0 <= seed < SEEDS:
        raise ValueError(
            f"--seed {seed}: give a whole number from 0 to {SEEDS - 1}, or none for secret noise"
        )


def check_device(device: str) -> None:
    """Raise ValueError for a device that cannot compute."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise ValueError(
            f"--device {device} cannot be used ({reason}): choose from {', '.join(devices())}"
        ) from problem


def devices() -> list[str]:
    """The devices of this machine."""
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    return [*names, "mps"] if torch.backends.mps.is_available() else names
