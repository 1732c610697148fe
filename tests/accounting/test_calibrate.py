"""Epsilon of a mechanism, noise for a target epsilon: golden values, tightness, monotonicity."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.accounting import calibrate
from dpkfc.accounting.calibrate import calibrate_noise, epsilon_spent, estimate_noise
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.root import Root
from dpkfc.accounting.selection import BestOf
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


SIXTY_THOUSAND = 256 / RECORDS
# Mechanism at noise 1, epsilon, delta, accountant, and the multiplier that a search on the fine
# grid alone found (brentq, to 1e-5).
GOLDEN = [
    (Mechanism(SIXTY_THOUSAND, 1, 1172), 1.0, 1e-5, "pld", 0.9037163494920905),
    (Mechanism(2 * SIXTY_THOUSAND, 1, 1172, cycle=2), 1.0, 1e-5, "pld", 1.0903656601766496),
    (Mechanism(4 * SIXTY_THOUSAND, 1, 1172, cycle=4), 1.0, 1e-5, "pld", 1.380157666815813),
    (Mechanism(8 * SIXTY_THOUSAND, 1, 1172, cycle=8), 1.0, 1e-5, "pld", 1.8199495020433758),
    (Mechanism(16 * SIXTY_THOUSAND, 1, 1172, cycle=16), 1.0, 1e-5, "pld", 2.4710564845175207),
    (
        Mechanism(1.0, 1, 1172, cycle=234, growth=(0.4, 0.6, 0.8, 0.9, 0.95, 1.0)),
        1.0,
        1e-5,
        "pld",
        3.730633452796193,
    ),
    (Mechanism(1.0, 1, 50), 3.0, 1e-6, "pld", 10.91675606534731),
    (Mechanism(SIXTY_THOUSAND, 1, 1172), 8.0, 1e-5, "pld", 0.4902416688116544),
    (Mechanism(16 * SIXTY_THOUSAND, 1, 1172, cycle=16), 8.0, 1e-5, "pld", 0.7410881735930002),
    (Mechanism(0.005, 1, 1000), 0.3, 1e-6, "pld", 2.228755152693402),
    (Mechanism(0.01, 1, 20_000), 3.0, 1e-7, "pld", 2.4998292366732233),
    (Mechanism(0.5, 1, 40, cycle=2), 2.0, 1e-5, "pld", 4.668816447576671),
    (Mechanism(0.05, 1, 20), 0.05, 1e-5, "pld", 13.237685201829205),
    (Mechanism(0.05, 1, 20), 60.0, 1e-5, "pld", 0.23095256687625756),
    (Mechanism(0.1, 1, 1), 1.0, 1e-5, "pld", 1.2589130693900945),
    (Mechanism(0.02, 1, 2500), 15.0, 1e-6, "pld", 0.7212930182652255),
    (Mechanism(SIXTY_THOUSAND, 1, 1172), 1.0, 1e-5, "rdp", 1.0649067231396887),
    (Mechanism(0.1, 1, 300, cycle=4), 8.0, 1e-5, "rdp", 0.93094828326748),
    (Mechanism(0.01, 1, 1000, best_of=BestOf(10)), 2.0, 1e-5, "rdp", 1.5756357613628647),
    (
        Mechanism(0.01, 1, 1000, best_of=BestOf(5, "poisson", 20.0)),
        4.0,
        1e-5,
        "rdp",
        0.9138421862314655,
    ),
]


def with_noise(mechanism: Mechanism) -> Callable[[float], Mechanism]:
    return lambda sigma: dataclasses.replace(mechanism, noise_multiplier=sigma)


@pytest.mark.parametrize(("mechanism", "epsilon", "delta", "accountant", "noise"), GOLDEN)
def test_calibrated_noise_is_that_of_a_search_on_the_fine_grid_alone(
    mechanism: Mechanism, epsilon: float, delta: float, accountant: Any, noise: float
) -> None:
    found = calibrate_noise(with_noise(mechanism), epsilon, delta, accountant)
    assert found == pytest.approx(noise, rel=2e-5)  # both searches stop within 1e-5
    estimate = estimate_noise(with_noise(mechanism), epsilon, delta, accountant)
    assert estimate == pytest.approx(noise, rel=2e-3)


def epsilon_on_the_fine_grid(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """By dp-accounting alone, on the grid that belongs to the target `epsilon`."""
    interval = 1e-4 * min(max(epsilon, 0.1), 10.0)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(mechanism.event()).get_epsilon(delta))


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "delta"), [case[:3] for case in GOLDEN if case[3] == "pld"]
)
def test_dp_accounting_confirms_the_target_and_that_less_noise_misses_it(
    mechanism: Mechanism, epsilon: float, delta: float
) -> None:
    sigma = calibrate_noise(with_noise(mechanism), epsilon, delta)
    at = with_noise(mechanism)
    assert epsilon_on_the_fine_grid(at(sigma), epsilon, delta) <= epsilon
    assert epsilon_on_the_fine_grid(at(sigma * (1 - 2e-5)), epsilon, delta) > epsilon


@pytest.mark.parametrize("error", [-1.0, -1e-3, 1e-3, 1.0])
@pytest.mark.parametrize("slope", [-100.0, -0.1, None])
def test_a_wrong_estimate_costs_time_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: float, slope: float | None
) -> None:
    """The estimate is not a bound: what is returned was computed on the fine grid."""
    mechanism, epsilon, delta, _, noise = GOLDEN[4]
    wrong = Root(math.log(noise) + error, 0.0, slope)
    monkeypatch.setattr(calibrate._Search, "estimate", lambda self, tolerance: wrong)
    sigma = calibrate_noise(with_noise(mechanism), epsilon, delta)
    spent = epsilon_on_the_fine_grid(with_noise(mechanism)(sigma), epsilon, delta)
    assert spent <= epsilon
    if slope != -100.0:  # which claims that any epsilon is close to the target
        assert sigma == pytest.approx(noise, rel=1.2e-4)


def test_calibration_needs_few_evaluations_on_the_fine_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated = []
    fine = calibrate._Search.on_fine_grid

    def counted(self: Any, x: float) -> float:
        evaluated.append(x)
        return fine(self, x)

    monkeypatch.setattr(calibrate._Search, "on_fine_grid", counted)
    cases = [case for case in GOLDEN if case[3] == "pld"]
    for mechanism, epsilon, delta, _, _ in cases:
        calibrate_noise(with_noise(mechanism), epsilon, delta)
    assert len(evaluated) <= 2 * len(cases)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-12), (500.0, 1e-5), (1.0, 0.9)])
def test_unusual_targets_are_kept(epsilon: float, delta: float) -> None:
    sigma = calibrate_noise(lambda noise: Mechanism(1.0, noise, 1), epsilon, delta)
    assert epsilon_on_the_fine_grid(Mechanism(1.0, sigma, 1), epsilon, delta) <= epsilon


def test_a_run_that_reads_no_record_needs_no_noise() -> None:
    assert calibrate_noise(lambda sigma: Mechanism(0.0, sigma, 10), 1.0, 1e-5) <= 0.011
