"""`Mechanism`: what was done to the data, separate from how it is analysed.

A `Mechanism` is one row of a privacy statement. It is plain data (JSON in, JSON out), so a ledger
can keep it on disk for years and analyse it with a better accountant later.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dpkfc.accounting.selection import BestOf
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    import dp_accounting as dp

# The kinds of mechanisms in files.
PLAIN = "poisson-gaussian"
CORRELATED = "correlated-gaussian"
SELECTED = "best-of"


@dataclass(frozen=True)
class Mechanism:
    """`steps` noisy sums of vectors, one vector of norm at most R per record.

    R is the clip norm, C the strategy matrix, σ the noise multiplier. There are two kinds:

    *Amplified by sampling* (`growth` is empty). Each record belongs to one of `cycle` groups, drawn
    at random. Step t includes each record of group t mod `cycle` with probability `sampling_rate`.
    The noise is C⁻¹z for a C of at most `cycle` bands, with ``z ~ N(0, (σ R max_t ‖C[:, t]‖)² I)``.
    One cycle is then no worse than one Poisson-subsampled Gaussian with multiplier σ, and
    ⌈steps / cycle⌉ of them compose (Choquette-Choo et al., 2023; the argument is in
    `dpkfc.sampling.CyclicPoisson`). DP-SGD is the case of one group and C = I.

    *Not amplified.* A record joins at most one of `cycle` consecutive steps, and the whole stream
    is one Gaussian release with ``z ~ N(0, (σ R sens)² I)``, where sens is the sensitivity of all
    planned steps. A run that stops in round r has the sensitivity ``growth[r - 1] · sens``.

    Args:
        sampling_rate: the probability with which a record joins a step of its group.
        noise_multiplier: σ.
        steps: the number of steps.
        public_geometry: False if the map before clipping was computed from the private records.
            Then nothing bounds the loss, and epsilon is infinite.
        cycle: the number of groups.
        growth: the sensitivity after each round, relative to that of all planned steps.
        best_of: if given, all of this is one of several runs, of which only the best is released.

    **Guarantee.** Both kinds hold for gradients chosen adaptively, from everything released before
    (Denisov et al., 2022), under adding or removing one record.

    >>> Mechanism(sampling_rate=0.04, noise_multiplier=1.0, steps=1000, cycle=4).rounds
    250
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    public_geometry: bool = True
    cycle: int = 1
    growth: tuple[float, ...] = ()
    best_of: BestOf | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate={self.sampling_rate}: must lie between 0 and 1")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier}: must be a finite number, 0 or larger"
            )
        if self.steps < 0:
            raise ValueError(f"steps={self.steps}: must not be negative")
        if self.cycle < 1:
            raise ValueError(f"cycle={self.cycle}: must be at least 1")
        if self.growth:
            self._check_growth()
        if not isinstance(self.best_of, BestOf | None):
            raise TypeError(
                f"best_of={self.best_of!r}: must be a dpkfc.tuning.BestOf(mean=...), or None"
            )

    def _check_growth(self) -> None:
        if self.sampling_rate != 1:
            raise ValueError(
                "noise that is correlated beyond one cycle has no accountant with amplification by "
                f"sampling: sampling_rate must be 1, not {self.sampling_rate}"
            )
        if (
            self.rounds > len(self.growth)
            or not self.growth[-1] == 1 == max(self.growth)
            or min(self.growth) <= 0
        ):
            raise ValueError(
                f"growth={self.growth}: must be a factor above 0 for each of the {self.rounds} "
                "rounds, the last 1"
            )

    @property
    def rounds(self) -> int:
        """The largest number of steps that one record may have joined."""
        return -(-self.steps // self.cycle)

    def after(self, steps: int) -> Mechanism:
        """The same mechanism stopped after `steps` steps."""
        return replace(self, steps=steps)

    def event(self) -> dp.DpEvent:
        """The dp-accounting event; a mechanism without noise is non-private."""
        import dp_accounting as dp

        if self.steps == 0:
            return dp.NoOpDpEvent()
        if self.noise_multiplier == 0 or not self.public_geometry:
            return dp.NonPrivateDpEvent()
        run = self._event_of_one_run()
        return run if self.best_of is None else self.best_of.event(run)

    def reduced(self) -> Mechanism:
        """The mechanism of one group and no growth with the same event.

        Runs that differ in cycle and growth often have it in common, so it is what results are
        cached by.

        >>> Mechanism(sampling_rate=0.04, noise_multiplier=1.0, steps=1000, cycle=4).reduced().steps
        250
        """
        if self.growth:
            noise = self.noise_multiplier / max(self.growth[: self.rounds], default=1.0)
            steps = min(self.rounds, 1)
        elif self.sampling_rate == 1 and self.rounds:
            # r Gaussian mechanisms compose to one with σ / √r.
            noise = self.noise_multiplier / math.sqrt(self.rounds)
            steps = 1
        else:
            noise = self.noise_multiplier
            steps = self.rounds
        return replace(self, noise_multiplier=noise, steps=steps, cycle=1, growth=())

    def _event_of_one_run(self) -> dp.DpEvent:
        import dp_accounting as dp

        reduced = self.reduced()
        gaussian = dp.GaussianDpEvent(reduced.noise_multiplier)
        if reduced.sampling_rate == 1:
            return gaussian
        return dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(reduced.sampling_rate, gaussian), reduced.steps
        )

    def to_json(self) -> dict[str, Any]:
        """The fields for a file. Fields that a kind does not use are left out."""
        fields = {**asdict(self), "growth": list(self.growth)}
        if self.best_of is not None:
            return {"mechanism": SELECTED, **fields}
        del fields["best_of"]
        if self.cycle > 1 or self.growth:
            return {"mechanism": CORRELATED, **fields}
        del fields["cycle"], fields["growth"]
        return {"mechanism": PLAIN, **fields}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Mechanism:
        """The mechanism in a file.

        Raises:
            PrivacyError: a newer version of dpkfc wrote it. Skipping it would under-report.
        """
        fields = dict(fields)
        kind = fields.pop("mechanism", None)
        if kind not in (PLAIN, CORRELATED, SELECTED):
            raise PrivacyError(
                f"unknown mechanism {kind!r}: this file was written by a newer dpkfc; upgrade to "
                "read it"
            )
        if kind == SELECTED:
            fields["best_of"] = BestOf(**fields.pop("best_of", {}))
        return Mechanism(**{**fields, "growth": tuple(fields.get("growth", ()))})
