"""What was done to the data, apart from how it is analysed: `Mechanism` to dp-accounting events.

A `Mechanism` is one row of a privacy statement. It is plain data (JSON in, JSON out), so a ledger can
keep it on disk for years and analyse it with a better accountant later.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dpkfc.accounting.selection import BestOf
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    import dp_accounting as dp

PLAIN, CORRELATED, SELECTED = "poisson-gaussian", "correlated-gaussian", "best-of"  # names in files


@dataclass(frozen=True)
class Mechanism:
    """`steps` noisy sums of the records' vectors, of norm at most C each. Two kinds:

    *Amplified* (`growth` is empty). Each record belongs to one of `cycle` groups, drawn for it at random; step t
    includes each record of group t mod `cycle` with probability `sampling_rate`. The noise is C⁻¹z for a matrix C of at
    most `cycle` bands, with ``z ~ N(0, (noise_multiplier · C · max_t ‖C[:, t]‖)² I)``. One cycle is then no worse than
    one Poisson-subsampled Gaussian with that multiplier, and ⌈steps / cycle⌉ of them compose (Choquette-Choo et al.,
    2023; the argument is in `dpkfc.sampling.CyclicPoisson`). DP-SGD is the case of one group and C = I.

    *Not amplified.* A record takes part at most once in `cycle` steps, and the whole stream is one Gaussian release
    with ``z ~ N(0, (noise_multiplier · C · sens)² I)``, where sens is the sensitivity of all planned steps. Stopped
    within round r, it has the sensitivity ``growth[r - 1] · sens``.

    Both hold for gradients chosen adaptively, from everything released before (Denisov et al., 2022), and under adding
    or removing one record. `public_geometry` is False when the map before clipping was built from the private records
    themselves: then nothing bounds what is released, and the loss is infinite.

    With `best_of`, all of that is one run of several, of which only the best is released.
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
            raise PrivacyError(f"sampling_rate={self.sampling_rate}: must lie between 0 and 1")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise PrivacyError(
                f"noise_multiplier={self.noise_multiplier}: must be a finite number, 0 or larger"
            )
        if self.steps < 0:
            raise PrivacyError(f"steps={self.steps}: must not be negative")
        if self.cycle < 1:
            raise PrivacyError(f"cycle={self.cycle}: must be at least 1")
        if self.growth:
            if self.sampling_rate != 1:
                raise PrivacyError(
                    "noise correlated beyond one cycle has no accountant that profits from sampling: sampling_rate "
                    f"must be 1, not {self.sampling_rate}"
                )
            if (
                self.rounds > len(self.growth)
                or not self.growth[-1] == 1 == max(self.growth)
                or min(self.growth) <= 0
            ):
                raise PrivacyError(
                    f"growth={self.growth}: must be a factor above 0 for each of the {self.rounds} rounds, the last 1"
                )
        if not isinstance(self.best_of, BestOf | None):
            raise PrivacyError(
                f"best_of={self.best_of!r}: must be a dpkfc.tuning.BestOf(mean=...), or None"
            )

    @property
    def rounds(self) -> int:
        """How often one record may have taken part."""
        return -(-self.steps // self.cycle)

    def after(self, steps: int) -> Mechanism:
        """The same mechanism stopped after `steps` steps."""
        return replace(self, steps=steps)

    def event(self) -> dp.DpEvent:
        """The event in dp-accounting's language; a mechanism without noise is non-private."""
        import dp_accounting as dp

        if self.steps == 0:
            return dp.NoOpDpEvent()
        if self.noise_multiplier == 0 or not self.public_geometry:
            return dp.NonPrivateDpEvent()
        return self._one_run() if self.best_of is None else self.best_of.event(self._one_run())

    def _one_run(self) -> dp.DpEvent:
        import dp_accounting as dp

        if self.growth:
            return dp.GaussianDpEvent(self.noise_multiplier / max(self.growth[: self.rounds]))
        if self.sampling_rate == 1:  # r Gaussians are one
            return dp.GaussianDpEvent(self.noise_multiplier / math.sqrt(self.rounds))
        gaussian = dp.GaussianDpEvent(self.noise_multiplier)
        return dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(self.sampling_rate, gaussian), self.rounds
        )

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "growth": list(self.growth)}
        if self.best_of is not None:
            return {"mechanism": SELECTED, **fields}
        del fields["best_of"]
        if self.cycle > 1 or self.growth:
            return {"mechanism": CORRELATED, **fields}
        return {"mechanism": PLAIN} | {
            k: v for k, v in fields.items() if k not in ("cycle", "growth")
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Mechanism:
        fields = dict(fields)
        kind = fields.pop("mechanism", None)
        if kind not in (PLAIN, CORRELATED, SELECTED):
            raise PrivacyError(
                f"unknown mechanism {kind!r}: this file was written by a newer dpkfc; upgrade to read it"
            )
        if kind == SELECTED:
            fields["best_of"] = BestOf(**fields.pop("best_of", {}))
        return Mechanism(**{**fields, "growth": tuple(fields.get("growth", ()))})
