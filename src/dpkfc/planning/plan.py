"""The plan of a private run: sampling, clipping, noise and accounting, fixed before the first step.

Sampling and accounting both read this frozen object, so they agree by construction.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpkfc.accounting.calibrate import (
    Accountant,
    calibrate_noise,
    epsilon_spent,
    estimate_noise,
)
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.selection import BestOf
from dpkfc.accounting.unchecked import Unchecked
from dpkfc.clipping import MARGIN, SMALLEST_CLIP, SMALLEST_GAMMA, AutomaticClipping
from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import IDENTITY, Factorization
from dpkfc.noise.grid import DIAGONAL, spacing
from dpkfc.noise.sensitivity import Participation
from dpkfc.planning.statement import statement
from dpkfc.tables import ShownAsTable, TextTable

if TYPE_CHECKING:
    import dp_accounting as dp

Sampling = Literal["poisson", "cyclic-poisson", "min-separated"]


@dataclass(frozen=True)
class Plan(ShownAsTable):
    """`steps` steps of sampled, clipped, noisy gradient sums over `records` records.

    Each step draws every record with probability q = `batch_size` / `records`, clips its (mapped)
    gradient to norm R = `clip`, adds noise to the sum and divides by the expected batch size. The
    noise of all steps is ``C⁻¹ z`` with ``z ~ N(0, (σ · R · noise_sensitivity)² I)`` and
    σ = `noise_multiplier`; the strategy matrix C is the identity for independent noise. How
    `sampling`, C and the accounting belong together is described in
    `dpkfc.accounting.events.Mechanism`.

    **Guarantee.** The sequence of all noisy sums, and therefore every model computed from them, is
    (`epsilon()`, `delta`)-differentially private under adding or removing one record. With
    `best_of`, `epsilon()` is the price of the best of several such runs, not of each.

    >>> plan = Plan.make(
    ...     records=60_000, batch_size=256, epochs=5, clip=1.0, epsilon=1.0, delta=1e-5
    ... )
    >>> round(plan.noise_multiplier, 3), plan.steps
    (0.904, 1172)
    """

    records: int
    batch_size: int
    steps: int
    clip: float
    noise_multiplier: float
    delta: float
    target_epsilon: float | None = None
    accountant: Accountant = "pld"
    geometry: str = "identity (DP-SGD)"
    public_geometry: bool = True
    noise: str = IDENTITY.name
    sampling: Sampling = "poisson"
    groups: int = 1  # groups that take turns; each record belongs to one
    noise_sensitivity: float = 1.0
    clip_gamma: float | None = None  # γ of automatic clipping
    # Sensitivity after each round relative to the last; empty if sampling amplifies privacy.
    growth: tuple[float, ...] = ()
    neighbouring: str = "add or remove one record"
    best_of: BestOf | None = None  # set if the run is repeated and only the best is released
    unchecked: tuple[Unchecked, ...] = ()  # assumptions of epsilon that nobody has checked

    @staticmethod
    def make(
        *,
        records: int,
        batch_size: int,
        clip: float | AutomaticClipping,
        delta: float | None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        accountant: Accountant = "pld",
        geometry: str = "identity (DP-SGD)",
        public_geometry: bool = True,
        noise: Factorization = IDENTITY,
        sampling: Sampling | None = None,
        best_of: BestOf | None = None,
    ) -> Plan:
        """Check the arguments and calibrate the noise.

        Give either `epsilon` or `noise_multiplier`, and either `epochs` or `steps`.

        Args:
            records: number of records N; treated as public.
            batch_size: expected number of records per step.
            clip: the clip norm R, or automatic clipping.
            delta: well below 1 / `records`.
            epsilon: target of the calibration.
            noise_multiplier: σ, without calibration.
            epochs: expected passes over the data.
            steps: number of steps T.
            accountant: "pld" (tight) or "rdp". With `best_of` it is always "rdp", the only
                accountant that dp-accounting has for the best of several runs.
            geometry: name of the geometry, for the statement.
            public_geometry: False if the geometry was built from private records.
            noise: factorization of the noise; independent by default.
            sampling: by default the one with the best accounting for `noise`.
            best_of: how often the run is repeated, if only the best run is released.

        Raises:
            ValueError: if an argument is out of range.
            TypeError: if an argument has the wrong type.
            PrivacyError: if there is no accountant for the combination of noise and sampling.
        """
        norm, gamma = read_clip(clip)
        batch_size, steps = batches(records, batch_size, epochs, steps)
        delta = _check_delta(delta, records)
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                "give exactly one of epsilon (the noise is calibrated) and noise_multiplier"
            )
        if best_of is not None and accountant == "pld":
            accountant = "rdp"
        sampling = sampling or _preferred_sampling(noise, records // batch_size)
        groups, sensitivity, growth = _turns(noise, sampling, records, batch_size, steps)
        plan = Plan(
            records=records,
            batch_size=batch_size,
            steps=steps,
            clip=norm,
            noise_multiplier=1.0 if noise_multiplier is None else float(noise_multiplier),
            delta=delta,
            accountant=accountant,
            geometry=geometry,
            public_geometry=public_geometry,
            noise=noise.name,
            sampling=sampling,
            groups=groups,
            noise_sensitivity=sensitivity,
            clip_gamma=gamma,
            growth=growth,
            best_of=best_of,
        )
        if epsilon is not None:
            return plan.calibrated(epsilon)
        _ = plan.mechanism  # refuses a noise multiplier that is not a number
        return plan

    def calibrated(self, epsilon: float) -> Plan:
        """This plan with the smallest noise multiplier, to 0.001 %, that keeps `epsilon`.

        **Guarantee.** The accounted epsilon is at most the target (`calibrate_noise`).
        """
        noise = _calibrated(self._with_unit_noise(), epsilon, self.delta, self.accountant)
        return replace(self, noise_multiplier=noise, target_epsilon=epsilon)

    def estimated(self, epsilon: float) -> Plan:
        """This plan with about the noise multiplier of `calibrated`, for comparisons.

        It spends about `epsilon`, perhaps a little more, so this is not its target.
        """
        noise = _estimated(self._with_unit_noise(), epsilon, self.delta, self.accountant)
        return replace(self, noise_multiplier=noise, target_epsilon=None)

    def _with_unit_noise(self) -> Mechanism:
        """What is calibrated; a geometry that is not public makes no difference to the noise."""
        return replace(self.mechanism, noise_multiplier=1.0, public_geometry=True)

    @property
    def sampling_rate(self) -> float:
        """q: the share of all records that a step is expected to draw."""
        return self.batch_size / self.records

    @property
    def rate_in_turn(self) -> float:
        """The probability that a record joins a step in which it is its group's turn."""
        return self.groups * self.batch_size / self.records

    @property
    def mechanism(self) -> Mechanism:
        """The run as the accountant analyses it."""
        return Mechanism(
            sampling_rate=1.0 if self.growth else self.rate_in_turn,
            noise_multiplier=self.noise_multiplier,
            steps=self.steps,
            public_geometry=self.public_geometry,
            cycle=self.groups,
            growth=self.growth,
            best_of=self.best_of,
        )

    @property
    def event(self) -> dp.DpEvent:
        """The whole run as a dp-accounting event, for your own analysis."""
        return self.mechanism.event()

    @property
    def noise_scale(self) -> float:
        """Standard deviation of z on every coordinate; for independent noise, of the noise itself.

        A computed norm may exceed R by rounding, so the noise is scaled for norm R (1 + MARGIN).
        """
        return self.noise_multiplier * self.clip * self.noise_sensitivity * (1 + MARGIN)

    @property
    def grid(self) -> float:
        """`.grad` holds multiples of this power of two (`dpkfc.noise.grid`); 0 without noise."""
        noise = self.noise_scale / self.batch_size
        if self.noise == IDENTITY.name:
            return spacing(noise)
        return spacing(noise / DIAGONAL, self.steps)

    def epsilon(self, steps: int | None = None, delta: float | None = None) -> float:
        """The privacy loss after `steps` steps, all by default. Does not consume budget."""
        mechanism = self.mechanism if steps is None else self.mechanism.after(steps)
        return epsilon_spent([mechanism], self.delta if delta is None else delta, self.accountant)

    def statement(self) -> list[tuple[str, str]]:
        """The privacy statement, as names and values in words."""
        return statement(self)

    def table(self) -> TextTable:
        return TextTable.statement("Privacy plan", self.statement())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "growth": list(self.growth), "unchecked": list(self.unchecked)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Plan:
        best_of = fields.get("best_of")
        converted = {
            "growth": tuple(fields.get("growth", ())),
            "best_of": None if best_of is None else BestOf(**best_of),
            "unchecked": tuple(fields.get("unchecked", ())),
        }
        return Plan(**{**fields, **converted})


@cache
def _calibrated(
    mechanism: Mechanism, epsilon: float, delta: float, accountant: Accountant
) -> float:
    return calibrate_noise(
        lambda sigma: replace(mechanism, noise_multiplier=sigma), epsilon, delta, accountant
    )


@cache
def _estimated(mechanism: Mechanism, epsilon: float, delta: float, accountant: Accountant) -> float:
    return estimate_noise(
        lambda sigma: replace(mechanism, noise_multiplier=sigma), epsilon, delta, accountant
    )


def _preferred_sampling(noise: Factorization, turns: int) -> Sampling:
    """The sampling with the best accounting for this noise, for at most `turns` groups."""
    if noise.bands == 1:
        return "poisson"
    return "cyclic-poisson" if noise.bands is not None and noise.bands <= turns else "min-separated"


def _turns(
    noise: Factorization, sampling: Sampling, records: int, batch_size: int, steps: int
) -> tuple[int, float, tuple[float, ...]]:
    """The number of groups, the sensitivity of the noise, and its growth over the rounds.

    Combinations without a sound accountant are refused.
    """
    turns = records // batch_size
    if sampling not in get_args(Sampling):
        close = get_close_matches(str(sampling), get_args(Sampling), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        choices = ", ".join(map(repr, get_args(Sampling)))
        raise ValueError(f"sampling={sampling!r}: choose one of {choices}.{hint}")
    if sampling == "poisson":
        if noise.bands != 1:
            raise PrivacyError(
                f"sampling='poisson' with correlated noise ({noise.name}): the noise of one step "
                "also enters other steps, in which the same record may be drawn again, and there "
                "is no accountant for that. Use sampling='cyclic-poisson' for banded noise, or "
                "'min-separated' for any noise"
            )
        return 1, noise.column_norm(steps), ()
    if sampling == "cyclic-poisson":
        if noise.bands is None:
            raise PrivacyError(
                f"sampling='cyclic-poisson' with {noise.name}: its matrix is not banded, so the "
                "noise of one step enters all later ones, and there is no accountant for that. "
                "Use sampling='min-separated', or banded noise such as BandedToeplitz"
            )
        if noise.bands > turns:
            raise PrivacyError(
                f"{noise.name} with sampling='cyclic-poisson' need at least as many turns of "
                f"{batch_size} records as there are bands, but {records} records give {turns}. "
                f"Use at most {turns} bands, or smaller batches"
            )
        return noise.bands, noise.column_norm(steps), ()
    rounds = -(-steps // turns)
    separation = min(turns, steps)  # a record that joins once has no other step to be apart from
    sensitivities = [
        noise.sensitivity(min(r * turns, steps), Participation(separation, r)).value
        for r in range(1, rounds + 1)
    ]
    final = sensitivities[-1]
    return turns, final, tuple(min(s / final, 1.0) for s in sensitivities)


def read_clip(clip: float | AutomaticClipping) -> tuple[float, float | None]:
    """The clip norm R, and γ of automatic clipping or None."""
    norm, gamma = (clip.norm, clip.gamma) if isinstance(clip, AutomaticClipping) else (clip, None)
    if not isinstance(norm, Real):
        raise TypeError(
            f"clip={norm!r}: must be a number or AutomaticClipping(), not {type(norm).__name__}"
        )
    if not (norm > 0 and math.isfinite(norm)):
        raise ValueError(
            f"clip={norm!r}: must be a positive, finite number, since it bounds the contribution "
            "of one record"
        )
    if norm < SMALLEST_CLIP:
        raise ValueError(
            f"clip={norm:g}: at least {SMALLEST_CLIP:g}, since rounding errors are not negligible "
            "below. Use a larger clip and a smaller learning rate"
        )
    if gamma is not None and not SMALLEST_GAMMA <= gamma < math.inf:
        raise ValueError(
            f"gamma={gamma!r} of AutomaticClipping: must be finite and at least "
            f"{SMALLEST_GAMMA:g}. A smaller gamma scales up the rounding errors of vanishing "
            "gradients"
        )
    return float(norm), gamma


def batches(
    records: int, batch_size: int, epochs: float | None, steps: int | None
) -> tuple[int, int]:
    """The expected batch size and the number of steps; give one of `epochs` and `steps`."""
    if records < 1:
        raise ValueError(f"the data set has {records} records; there is nothing to train on")
    if not isinstance(batch_size, Integral):
        raise TypeError(
            f"batch_size={batch_size!r}: must be a whole number (the expected batch size)"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: must be at least 1")
    if batch_size > records:
        raise ValueError(
            f"batch_size={batch_size} exceeds the {records} records: the sampling rate would be "
            "above 1"
        )
    if (epochs is None) == (steps is None):
        raise ValueError("give exactly one of epochs and steps")
    if steps is None:
        assert epochs is not None
        if not (epochs > 0 and math.isfinite(epochs)):
            raise ValueError(f"epochs={epochs}: must be positive")
        steps = math.ceil(epochs * records / batch_size)
    if not isinstance(steps, Integral):
        raise TypeError(f"steps={steps!r}: must be a whole number")
    if steps < 1:
        raise ValueError(f"steps={steps!r}: must be at least 1")
    return int(batch_size), int(steps)


def _check_delta(delta: float | None, records: int) -> float:
    if delta is None:
        raise ValueError(
            f"delta is missing: a common choice for {records} records is {0.1 / records:.1g} (well "
            "below 1/N)"
        )
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta}: must lie strictly between 0 and 1")
    if delta > 1 / records:
        warnings.warn(
            f"delta={delta:g} is above 1/N = {1 / records:.3g}: a mechanism that publishes a "
            "random record would satisfy it. Choose a delta well below 1/N",
            stacklevel=4,
        )
    return float(delta)
