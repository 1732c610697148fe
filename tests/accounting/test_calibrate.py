"""Epsilon of a mechanism, noise for a target epsilon: golden values, tightness, monotonicity."""

from __future__ import annotations

import dataclasses
import json
import math

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.accounting.calibrate import calibrate_noise, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.errors import PrivacyError

RECORDS = 60_000
PRIVATE = Mechanism(0.01, 1.0, 1000)

rates = st.floats(0.02, 0.2)
noises = st.floats(1.0, 5.0)
counts = st.integers(100, 1000)


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("batch", "epochs", "noise"),
    [(256, 5, 0.905), (512, 5, 1.091), (1024, 5, 1.381), (1024, 15, 2.069)],
)
def test_noise_for_epsilon_one_on_60000_records(batch: int, epochs: int, noise: float) -> None:
    # The reference is from a ten times coarser grid and rounded up, so it is slightly larger.
    steps = math.ceil(epochs * RECORDS / batch)
    found = calibrate_noise(
        lambda sigma: Mechanism(batch / RECORDS, sigma, steps), epsilon=1.0, delta=1e-5
    )
    assert noise - 0.003 < found <= noise


@pytest.mark.parametrize(("accountant", "epsilon"), [("pld", 1.83), ("rdp", 2.10)])
def test_epsilon_of_the_textbook_run(accountant: str, epsilon: float) -> None:
    # type: ignore[arg-type]
    assert epsilon_spent([PRIVATE], 1e-5, accountant) == pytest.approx(epsilon, abs=0.01)


@pytest.mark.parametrize(
    ("accountant", "oracle"),
    [
        ("pld", lambda: dp.pld.PLDAccountant(value_discretization_interval=1e-4)),
        ("rdp", lambda: dp.rdp.RdpAccountant()),
    ],
)
def test_composition_of_unlike_mechanisms_is_the_accountants_own(
    accountant: str, oracle: object
) -> None:
    parts = [Mechanism(0.01, 1.0, 300), Mechanism(0.05, 2.0, 20), Mechanism(1.0, 8.0, 1)]
    direct = oracle()  # type: ignore[operator]
    for part in parts:
        gaussian = dp.GaussianDpEvent(part.noise_multiplier)
        direct.compose(dp.PoissonSampledDpEvent(part.sampling_rate, gaussian), part.steps)
    ours = epsilon_spent(parts, 1e-5, accountant)  # type: ignore[arg-type]
    assert ours == pytest.approx(direct.get_epsilon(1e-5), rel=2e-3)


def test_one_plain_gaussian_agrees_with_its_closed_form() -> None:
    sigma, epsilon = 2.0, epsilon_spent([Mechanism(1.0, 2.0, 1)], 1e-5)

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def delta(eps: float) -> float:  # Balle and Wang (2018), theorem 8
        a, b = 1 / (2 * sigma), eps * sigma
        return normal(a - b) - math.exp(eps) * normal(-a - b)

    assert delta(epsilon) <= 1e-5  # an upper bound
    assert delta(epsilon * 0.999) > 1e-5  # and tight


@few(3)
@given(rate=rates, steps=counts, epsilon=st.floats(0.8, 8.0))
def test_calibration_keeps_the_target_and_wastes_nothing(
    rate: float, steps: int, epsilon: float
) -> None:
    _keeps_the_target_and_wastes_nothing(rate, steps, epsilon, "pld")


@few(6)
@given(rate=rates, steps=counts, epsilon=st.floats(0.8, 8.0))
def test_calibration_with_rdp_keeps_the_target_and_wastes_nothing(
    rate: float, steps: int, epsilon: float
) -> None:
    _keeps_the_target_and_wastes_nothing(rate, steps, epsilon, "rdp")


def _keeps_the_target_and_wastes_nothing(
    rate: float, steps: int, epsilon: float, accountant: str
) -> None:
    # type: ignore[arg-type]
    noise = calibrate_noise(lambda sigma: Mechanism(rate, sigma, steps), epsilon, 1e-5, accountant)
    # type: ignore[arg-type]
    spent = epsilon_spent([Mechanism(rate, noise, steps)], 1e-5, accountant)
    assert spent <= epsilon
    # type: ignore[arg-type]
    assert epsilon_spent([Mechanism(rate, 0.999 * noise, steps)], 1e-5, accountant) > epsilon


@few(4)
@given(rate=rates, noise=noises, steps=counts)
def test_more_data_less_noise_or_more_steps_cost_more(
    rate: float, noise: float, steps: int
) -> None:
    base = epsilon_spent([Mechanism(rate, noise, steps)], 1e-5)
    assert epsilon_spent([Mechanism(1.2 * rate, noise, steps)], 1e-5) > base
    assert epsilon_spent([Mechanism(rate, noise / 1.2, steps)], 1e-5) > base
    assert epsilon_spent([Mechanism(rate, noise, 2 * steps)], 1e-5) > base
    assert epsilon_spent([Mechanism(rate, noise, steps)], 1e-6) > base


@few(4)
@given(rate=rates, noise=noises, steps=counts)
def test_the_tight_accountant_is_below_the_loose_one(rate: float, noise: float, steps: int) -> None:
    run = [Mechanism(rate, noise, steps)]
    assert epsilon_spent(run, 1e-5, "pld") < epsilon_spent(run, 1e-5, "rdp")


@few(3)
@given(rate=rates, noise=noises, steps=counts, part=st.floats(0.1, 0.9))
def test_a_run_in_two_parts_costs_what_it_costs_in_one(
    rate: float, noise: float, steps: int, part: float
) -> None:
    whole, first = Mechanism(rate, noise, steps), int(part * steps)
    parts = [whole.after(first), whole.after(steps - first)]
    assert epsilon_spent(parts, 1e-5) == pytest.approx(epsilon_spent([whole], 1e-5), rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("mechanisms", "epsilon"),
    [
        ([], 0.0),
        ([PRIVATE.after(0)], 0.0),
        ([Mechanism(0.01, 0.0, 0)], 0.0),
        ([Mechanism(0.01, 1.0, 0, public_geometry=False)], 0.0),
        ([Mechanism(0.01, 0.0, 1)], math.inf),
        ([PRIVATE, Mechanism(0.01, 0.0, 1)], math.inf),
        ([Mechanism(0.01, 1.0, 1, public_geometry=False)], math.inf),
        ([PRIVATE, Mechanism(0.01, 1.0, 1, public_geometry=False)], math.inf),
    ],
)
def test_nothing_costs_nothing_and_no_protection_costs_everything(
    mechanisms: list[Mechanism], epsilon: float, accountant: str
) -> None:
    assert epsilon_spent(mechanisms, 1e-5, accountant) == epsilon  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mechanism", "event"),
    [
        (PRIVATE.after(0), dp.NoOpDpEvent()),
        (Mechanism(0.1, 0.0, 3), dp.NonPrivateDpEvent()),
        (Mechanism(0.1, 1.0, 3, public_geometry=False), dp.NonPrivateDpEvent()),
        (
            Mechanism(0.1, 1.5, 3),
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.5)), 3),
        ),
    ],
)
def test_events(mechanism: Mechanism, event: dp.DpEvent) -> None:
    assert mechanism.event() == event


@given(
    st.builds(
        Mechanism,
        sampling_rate=st.floats(0, 1),
        noise_multiplier=st.floats(0, 1e6),
        steps=st.integers(0, 2**62),
        public_geometry=st.booleans(),
    )
)
def test_a_mechanism_survives_json_bit_for_bit(mechanism: Mechanism) -> None:
    assert Mechanism.from_json(json.loads(json.dumps(mechanism.to_json()))) == mechanism


@given(steps=st.integers(0, 2000), public=st.booleans())
def test_after_changes_the_steps_alone(steps: int, public: bool) -> None:
    mechanism = dataclasses.replace(PRIVATE, public_geometry=public)
    assert mechanism.after(steps) == dataclasses.replace(mechanism, steps=steps)


@pytest.mark.parametrize("kind", [None, "", "tree-aggregation"])
def test_a_mechanism_of_an_unknown_kind_is_refused(kind: str | None) -> None:
    fields = PRIVATE.to_json() | {"mechanism": kind}
    with pytest.raises(PrivacyError, match="unknown mechanism"):
        Mechanism.from_json(fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf])
def test_a_delta_outside_zero_to_one_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        epsilon_spent([PRIVATE], delta)
    with pytest.raises(ValueError, match="delta"):
        calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 10), 1.0, delta)


@pytest.mark.parametrize("accountant", ["", "gdp", "PLD", None])
def test_an_accountant_that_is_no_bound_is_refused(accountant: str | None) -> None:
    with pytest.raises(ValueError, match="accountant"):
        epsilon_spent([PRIVATE], 1e-5, accountant)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accountant"):
        # type: ignore[arg-type]
        calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 10), 1.0, 1e-5, accountant)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_a_target_that_is_not_positive_and_finite_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 10), epsilon, 1e-5)


def test_a_target_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="out of reach"):
        calibrate_noise(lambda sigma: Mechanism(0.01, sigma, 10, public_geometry=False), 1.0, 1e-5)


@pytest.mark.parametrize("epsilon", [0.05, 60.0])
def test_far_targets_are_kept(epsilon: float) -> None:
    noise = calibrate_noise(lambda sigma: Mechanism(0.05, sigma, 20), epsilon, 1e-5)
    assert 0.97 * epsilon < epsilon_spent([Mechanism(0.05, noise, 20)], 1e-5) <= epsilon
