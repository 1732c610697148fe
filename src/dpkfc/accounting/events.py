"""What was done to the data, apart from how it is analysed: `Mechanism` to dp-accounting events.

A `Mechanism` is one row of a privacy statement. It is plain data (JSON in, JSON out), so a ledger can
keep it on disk for years and analyse it with a better accountant later.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import dp_accounting as dp

from dpkfc.errors import PrivacyError


@dataclass(frozen=True)
class Mechanism:
    """`steps` releases of a Gaussian sum, each over a fresh Poisson sample of the records.

    One step includes every record independently with probability `sampling_rate`, sums vectors of
    norm at most C and adds N(0, (noise_multiplier * C)^2 I). Adding or removing one record moves the
    sum by at most C, so a step is a Poisson-subsampled Gaussian mechanism under add-or-remove-one.
    `public_geometry` is False when the map before clipping was built from the private records
    themselves: then nothing bounds what is released, and the loss is infinite.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    public_geometry: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.sampling_rate <= 1:
            raise PrivacyError(f"sampling_rate={self.sampling_rate}: must lie between 0 and 1")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise PrivacyError(f"noise_multiplier={self.noise_multiplier}: must be a finite number, 0 or larger")
        if self.steps < 0:
            raise PrivacyError(f"steps={self.steps}: must not be negative")

    def after(self, steps: int) -> Mechanism:
        """The same mechanism stopped after `steps` steps."""
        return Mechanism(self.sampling_rate, self.noise_multiplier, steps, self.public_geometry)

    def event(self) -> dp.DpEvent:
        """The event in dp-accounting's language; a mechanism without noise is non-private."""
        if self.steps == 0:
            return dp.NoOpDpEvent()
        if self.noise_multiplier == 0 or not self.public_geometry:
            return dp.NonPrivateDpEvent()
        gaussian = dp.GaussianDpEvent(self.noise_multiplier)
        return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(self.sampling_rate, gaussian), self.steps)

    def to_json(self) -> dict[str, float | int | bool | str]:
        return {"mechanism": "poisson-gaussian", **asdict(self)}

    @staticmethod
    def from_json(fields: dict[str, float | int | bool | str]) -> Mechanism:
        fields = dict(fields)
        kind = fields.pop("mechanism", None)
        if kind != "poisson-gaussian":
            raise PrivacyError(
                f"unknown mechanism {kind!r}: this file was written by a newer dpkfc; upgrade to read it"
            )
        return Mechanism(**fields)  # type: ignore[arg-type]
