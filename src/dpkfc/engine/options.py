"""The less common settings of `make_private`, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpkfc.accounting.calibrate import Accountant
from dpkfc.accounting.selection import BestOf
from dpkfc.planning.plan import Sampling


@dataclass(frozen=True)
class Options:
    """Settings of `make_private` that most runs leave at their defaults.

    Args:
        loss_reduction: how the loop's loss combines the records of one forward pass: their "mean"
            or their "sum".
        vmap_modules: names of modules to run as a whole under `torch.vmap`, for parameters that are
            used outside the forward of their own module.
        grad_scaler: the `torch.amp.GradScaler` of a float16 loop, whose scale is divided out.
        sampling: "poisson" for independent noise, "cyclic-poisson" for banded noise,
            "min-separated" (whole groups in turn, no amplification) for any noise. By default the
            one with the best accounting for the noise.
        accountant: "pld" (tight) or "rdp". With `best_of` always "rdp".
        best_of: this run is one try of `tune_privately`, and epsilon is the price of the whole
            tuning.
        check: compare the loop with the declared loss, and check that records do not influence each
            other's gradients, at the first step and at a few secretly chosen later steps. False is
            recorded in the plan, the report and the ledger.
    """

    loss_reduction: Literal["mean", "sum"] = "mean"
    vmap_modules: Sequence[str] = ()
    grad_scaler: Any = None
    sampling: Sampling | None = None
    accountant: Accountant = "pld"
    best_of: BestOf | None = None
    check: bool = True
