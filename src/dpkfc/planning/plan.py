"""The plan of a private run: what is sampled, clipped, noised and accounted, fixed before the first step.

Sampling and accounting both read this one frozen object, so they agree by construction.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal

import dp_accounting as dp
from rich.table import Table

from dpkfc.accounting.calibrate import Accountant, calibrate_noise, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.selection import BestOf
from dpkfc.app.reports.text import as_text
from dpkfc.clipping import MARGIN, SMALLEST_CLIP, SMALLEST_GAMMA, AutomaticClipping
from dpkfc.errors import PrivacyError
from dpkfc.noise.factorization import IDENTITY, Factorization
from dpkfc.noise.grid import DIAGONAL, spacing
from dpkfc.noise.sensitivity import Participation

Sampling = Literal["poisson", "cyclic-poisson", "min-separated"]
Unchecked = Literal["loss", "model", "seed", "ledger", "records", "public data"]
NOT_CHECKED: dict[Unchecked, str] = {
    "loss": 'loss="unchecked": nobody tried whether the loss keeps the records apart, as epsilon assumes',
    "model": "check=False: nobody tried in the loop whether model and loss keep the records apart, as epsilon assumes",
    "seed": "the noise comes from a seed: whoever knows it can subtract the noise",
    "ledger": "no ledger: other runs on the same records are not part of this epsilon, nor are steps lost in a crash",
    "records": "records= was not given: the number of records is that of the data set, and is treated as public",
    "public data": "only a sample of the public records was compared with the private ones",
}
NAMES: dict[Sampling, str] = {
    "poisson": "Poisson",
    "cyclic-poisson": "cyclic Poisson",
    "min-separated": "groups in turn",
}


@dataclass(frozen=True)
class Plan:
    """`steps` steps of sampled, clipped, noised gradient sums over `records` records.

    The guarantee: the sequence of all noisy sums, and so every model computed from them, is
    (`epsilon()`, `delta`)-differentially private under adding or removing one record. Each step draws
    every record with probability `batch_size / records`, clips its (mapped) gradient to norm `clip`,
    adds noise to the sum and divides by the expected batch size. The noise of all steps is ``C⁻¹ z`` with
    z ~ N(0, (`noise_multiplier` · `clip` · `noise_sensitivity`)² I); C is the identity for independent noise. How
    `sampling`, C and the accounting belong together is in `accounting.events.Mechanism`. With `best_of`, `epsilon()`
    is the price of the best of several such runs, not of each.

    >>> plan = Plan.make(records=60_000, batch_size=256, epochs=5, clip=1.0, epsilon=1.0, delta=1e-5)
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
    groups: int = 1  # that take turns; a record is in one of them
    noise_sensitivity: float = 1.0
    clip_gamma: float | None = None  # of automatic clipping
    growth: tuple[
        float, ...
    ] = ()  # of the sensitivity over the rounds, where it is not amplified by sampling
    neighbouring: str = "add or remove one record"
    best_of: BestOf | None = None  # of the repetitions of this run, if only the best is released
    unchecked: tuple[Unchecked, ...] = ()  # what epsilon relies on and nobody has checked

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
        """Check the wishes and calibrate the noise. Give `epsilon` or `noise_multiplier`; `epochs` or `steps`.

        With `best_of` the accountant is RDP, the only one that dp-accounting has for the best of several runs.
        """
        norm, gamma = read_clip(clip)
        batch_size, steps = batches(records, batch_size, epochs, steps)
        delta = _check_delta(delta, records)
        if (epsilon is None) == (noise_multiplier is None):
            raise PrivacyError(
                "give exactly one of epsilon (the noise is calibrated) and noise_multiplier"
            )
        if best_of is not None and accountant == "pld":
            accountant = "rdp"
        sampling = sampling or _preferred(noise, records // batch_size)
        groups, sensitivity, growth = _turns(noise, sampling, records, batch_size, steps)
        plan = Plan(
            records=records,
            batch_size=batch_size,
            steps=steps,
            clip=norm,
            noise_multiplier=1.0 if noise_multiplier is None else float(noise_multiplier),
            delta=delta,
            target_epsilon=epsilon,
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
        public = replace(
            plan.mechanism, public_geometry=True
        )  # which also refuses noise that is no number
        if epsilon is None:
            return plan
        return replace(plan, noise_multiplier=_calibrated(public, epsilon, delta, accountant))

    @property
    def sampling_rate(self) -> float:
        """The part of all records that a step is expected to draw."""
        return self.batch_size / self.records

    @property
    def rate_in_turn(self) -> float:
        """The probability with which a record joins a step that is its group's turn."""
        return self.groups * self.batch_size / self.records

    @property
    def mechanism(self) -> Mechanism:
        rate = 1.0 if self.growth else self.rate_in_turn
        return Mechanism(
            rate,
            self.noise_multiplier,
            self.steps,
            self.public_geometry,
            self.groups,
            self.growth,
            self.best_of,
        )

    @property
    def event(self) -> dp.DpEvent:
        """The whole run in dp-accounting's language, for an analysis of your own."""
        return self.mechanism.event()

    @property
    def noise_scale(self) -> float:
        """Standard deviation of z on every coordinate; for independent noise, of the noise on the sum.

        A computed norm may be wrong by rounding, so the noise is made for vectors of norm C (1 + MARGIN).
        """
        return self.noise_multiplier * self.clip * self.noise_sensitivity * (1 + MARGIN)

    @property
    def grid(self) -> float:
        """`.grad` holds multiples of this number, a power of two (`noise.grid`); 0 for a run without noise."""
        noise = self.noise_scale / self.batch_size
        return (
            spacing(noise) if self.noise == IDENTITY.name else spacing(noise / DIAGONAL, self.steps)
        )

    def epsilon(self, steps: int | None = None, delta: float | None = None) -> float:
        """The privacy loss after `steps` steps (all by default). Asking changes nothing."""
        mechanism = self.mechanism if steps is None else self.mechanism.after(steps)
        return epsilon_spent([mechanism], self.delta if delta is None else delta, self.accountant)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "growth": list(self.growth), "unchecked": list(self.unchecked)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Plan:
        best_of = fields.get("best_of")
        read = {
            "growth": tuple(fields.get("growth", ())),
            "best_of": None if best_of is None else BestOf(**best_of),
            "unchecked": tuple(fields.get("unchecked", ())),
        }
        return Plan(**{**fields, **read})

    def __rich__(self) -> Table:
        table = Table(title="Privacy plan", title_justify="left", show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, value in self.statement():
            table.add_row(name, value)
        return table

    def __str__(self) -> str:
        return as_text(self)

    def statement(self) -> list[tuple[str, str]]:
        """What is protected, and how: names and values, in words."""
        return [
            (
                "what is protected",
                f"one record: whether it is in the data set or not ({self.neighbouring})",
            ),
            (
                "epsilon",
                f"{round_up(self.epsilon())} after all {self.steps} steps"
                + ("" if self.best_of is None else ", the selection included")
                + (
                    f" (target {round_up(self.target_epsilon, 6)})"
                    if self.target_epsilon is not None
                    else ""
                )
                + (
                    ""
                    if self.public_geometry
                    else ": the geometry was built from the private records"
                ),
            ),
            ("delta", f"{self.delta:.3g} (1/N = {1 / self.records:.3g})"),
            (
                "accountant",
                {
                    "pld": "privacy loss distribution (upper bound)",
                    "rdp": "Rényi differential privacy (upper bound, looser than PLD)",
                }[self.accountant],
            ),
            ("records", f"{self.records} (this number is treated as public)"),
            ("sampling", self._sampling_in_words()),
            (
                "steps",
                f"{self.steps} ({self.steps * self.sampling_rate:.3g} expected passes over the data)",
            ),
            ("geometry", self.geometry),
            ("clipping", self._clipping_in_words()),
            ("noise", self._noise_in_words()),
            *([] if self.best_of is None else [("selection", str(self.best_of))]),
            (
                "not covered",
                "choices made by looking at the private data: "
                + ("hyperparameters" if self.best_of is None else "other hyperparameters")
                + ", when to stop, data cleaning"
                + self._empty_in_words(),
            ),
            *((f"not checked: {what}", NOT_CHECKED[what]) for what in self.unchecked),
        ]

    def _empty_in_words(self) -> str:
        """If it is likelier than a hundredth of delta that some batch is empty."""
        empty = self.steps * (1 - self.rate_in_turn) ** (self.records / self.groups)
        if empty <= self.delta / 100:
            return ""
        return (
            f"; how many batches are empty ({empty:.3g} of {self.steps} batches are expected to be empty): what a loop "
            "does once a batch besides optimizer.step(), such as averages and schedules, goes into private.after_step"
        )

    def _clipping_in_words(self) -> str:
        how = (
            ""
            if self.clip_gamma is None
            else f" by the factor {self.clip:g} / (norm + {self.clip_gamma:g})"
        )
        return f"each record's mapped gradient to L2 norm {self.clip:g}{how}, over all trainable parameters at once"

    def _sampling_in_words(self) -> str:
        expected = f"{self.batch_size} expected"
        if self.groups == 1:
            return f"Poisson: each record joins a step with probability {self.sampling_rate:.4g}, {expected}"
        return (
            f"{NAMES[self.sampling]}: {self.groups} random groups take turns, a record joins a step of its group with "
            f"probability {self.rate_in_turn:.4g}, {expected}"
            + ("; not counted in its favour" if self.growth else "")
        )

    def _noise_in_words(self) -> str:
        scale = f"{self.noise_multiplier:.4g} x {self.clip:g}"
        if self.noise == IDENTITY.name:
            return f"{self.noise}, standard deviation {scale} on the sum"
        return f"{self.noise}, standard deviation {scale} x {self.noise_sensitivity:.4g} (its sensitivity) before mixing"


@cache
def _calibrated(
    mechanism: Mechanism, epsilon: float, delta: float, accountant: Accountant
) -> float:
    return calibrate_noise(
        lambda sigma: replace(mechanism, noise_multiplier=sigma), epsilon, delta, accountant
    )


def _preferred(noise: Factorization, turns: int) -> Sampling:
    """The sampling with the best accounting for this noise, if groups take `turns` turns at most."""
    if noise.bands == 1:
        return "poisson"
    return "cyclic-poisson" if noise.bands is not None and noise.bands <= turns else "min-separated"


def _turns(
    noise: Factorization, sampling: Sampling, records: int, batch_size: int, steps: int
) -> tuple[int, float, tuple[float, ...]]:
    """The number of groups, the sensitivity that the noise is scaled by, and its growth over the rounds.

    Only combinations with a sound accountant get through.
    """
    turns = records // batch_size
    if sampling not in NAMES:
        raise PrivacyError(f"sampling={sampling!r}: choose one of {', '.join(map(repr, NAMES))}")
    if sampling == "poisson":
        if noise.bands != 1:
            raise PrivacyError(
                f"sampling='poisson' with correlated noise ({noise.name}): the noise of one step reaches into "
                "others in which the same record may be drawn again, and there is no accountant for that. Use "
                "sampling='cyclic-poisson' for banded noise, or 'min-separated' for any"
            )
        return 1, noise.column_norm(steps), ()
    if sampling == "cyclic-poisson":
        if noise.bands is None:
            raise PrivacyError(
                f"sampling='cyclic-poisson' with {noise.name}: its matrix is not banded, so the noise of one step "
                "reaches all later ones, and there is no accountant for that. Use sampling='min-separated', or "
                "banded noise such as BandedToeplitz"
            )
        if noise.bands > turns:
            raise PrivacyError(
                f"{noise.name} with sampling='cyclic-poisson' need at least as many turns of {batch_size} records as "
                f"there are bands, but {records} records give {turns}. Use at most {turns} bands, or smaller batches"
            )
        return noise.bands, noise.column_norm(steps), ()
    rounds = -(-steps // turns)
    each = [
        noise.sensitivity(min(r * turns, steps), Participation(turns, r)).value
        for r in range(1, rounds + 1)
    ]
    return turns, each[-1], tuple(min(s / each[-1], 1.0) for s in each)


def read_clip(clip: float | AutomaticClipping) -> tuple[float, float | None]:
    """The norm C that bounds what a record can do, and γ of automatic clipping."""
    norm, gamma = (clip.norm, clip.gamma) if isinstance(clip, AutomaticClipping) else (clip, None)
    if not (isinstance(norm, Real) and norm > 0 and math.isfinite(norm)):
        raise PrivacyError(
            f"clip={norm!r}: must be a positive, finite number, since it bounds what one record can do"
        )
    if norm < SMALLEST_CLIP:
        raise PrivacyError(
            f"clip={norm:g}: at least {SMALLEST_CLIP:g}; of smaller ones rounding errors would be a part. What the "
            "clip takes from the steps, a larger learning rate gives back"
        )
    if gamma is not None and not SMALLEST_GAMMA <= gamma < math.inf:
        raise PrivacyError(
            f"gamma={gamma!r} of automatic clipping: must be finite and at least {SMALLEST_GAMMA:g}; smaller ones "
            "would scale up the rounding errors of vanishing gradients"
        )
    return float(norm), gamma


def batches(
    records: int, batch_size: int, epochs: float | None, steps: int | None
) -> tuple[int, int]:
    """The expected batch size and the number of steps; give one of `epochs` and `steps`."""
    if records < 1:
        raise PrivacyError(f"the data set has {records} records; there is nothing to train on")
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise PrivacyError(
            f"batch_size={batch_size!r}: must be a positive whole number (the expected batch size)"
        )
    if batch_size > records:
        raise PrivacyError(
            f"batch_size={batch_size} exceeds the {records} records: the sampling rate would be above 1"
        )
    if (epochs is None) == (steps is None):
        raise PrivacyError("give exactly one of epochs and steps")
    if steps is None:
        assert epochs is not None
        if not (epochs > 0 and math.isfinite(epochs)):
            raise PrivacyError(f"epochs={epochs}: must be positive")
        steps = math.ceil(epochs * records / batch_size)
    if not isinstance(steps, Integral) or steps < 1:
        raise PrivacyError(f"steps={steps!r}: must be a positive whole number")
    return int(batch_size), int(steps)


def _check_delta(delta: float | None, records: int) -> float:
    if delta is None:
        raise PrivacyError(
            f"delta is missing: a common choice for {records} records is {0.1 / records:.1g} (well below 1/N)"
        )
    if not 0 < delta < 1:
        raise PrivacyError(f"delta={delta}: must lie strictly between 0 and 1")
    if delta > 1 / records:
        warnings.warn(
            f"delta={delta:g} is above 1/N = {1 / records:.3g}: a mechanism that publishes a random record would "
            "satisfy it. Choose a delta well below 1/N",
            stacklevel=4,
        )
    return float(delta)
