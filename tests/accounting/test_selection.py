"""The best of several runs: its cost by the paper's formulas, files, ledgers, calibration."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import stats
from scipy.special import gammaln, logsumexp

from dpkfc import PrivacyError
from dpkfc.accounting.calibrate import calibrate_noise, epsilon_spent, selection_orders
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger, read
from dpkfc.accounting.selection import BestOf

DELTA = 1e-5
SHAPES = [
    BestOf(10),
    BestOf(10, "poisson"),
    BestOf(10, "geometric", 20.0),
    BestOf(2.5, "poisson", 8.0),
]


# The paper's formulas, written down a second time


def gaussian(orders: np.ndarray, sigma: float) -> np.ndarray:
    return orders / (2 * sigma**2)


def subsampled(orders: np.ndarray, rate: float, sigma: float) -> np.ndarray:
    """Mironov, Talwar & Zhang (2019), for whole orders.

    ``log Σ_k C(λ, k) (1-q)^(λ-k) q^k e^(k(k-1)/2σ²) / (λ - 1)``.
    """
    found = []
    for order in orders:
        k = np.arange(order + 1)
        log_choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = (
            log_choose
            + (order - k) * math.log1p(-rate)
            + k * math.log(rate)
            + k * (k - 1) / (2 * sigma**2)
        )
        found.append(logsumexp(terms) / (order - 1))
    return np.array(found)


def best_of_geometric(orders: np.ndarray, run: np.ndarray, mean: float) -> np.ndarray:
    """Theorem 2 with η = 1, γ = 1/mean."""
    return (
        run
        + math.log(mean) / (orders - 1)
        + 2 * np.min((1 - 1 / orders) * run + math.log(mean) / orders)
    )


def epsilon_of(orders: np.ndarray, renyi: np.ndarray, delta: float) -> float:
    """Canonne, Kamath & Steinke (2020), proposition 12."""
    return float(np.min(renyi + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))


@pytest.mark.parametrize("mean", [1, 3, 10, 100.5])
@pytest.mark.parametrize(
    ("sigma", "score_noise"), [(4.0, None), (4.0, 10.0), (20.0, None), (1.0, 5.0)]
)
def test_the_geometric_price_is_that_of_the_paper(
    mean: float, sigma: float, score_noise: float | None
) -> None:
    orders = np.array(selection_orders(), dtype=float)
    run = gaussian(orders, sigma) + (0 if score_noise is None else gaussian(orders, score_noise))
    price = epsilon_of(orders, best_of_geometric(orders, run, mean), DELTA)
    chosen = Mechanism(1.0, sigma, 1, best_of=BestOf(mean, "geometric", score_noise))
    assert epsilon_spent([chosen], DELTA) == pytest.approx(price, rel=1e-9)


def test_the_price_of_a_subsampled_run_in_composition_is_that_of_the_paper() -> None:
    """At whole orders only, which keeps the reference simple: an upper bound, and close."""
    orders = np.array([order for order in selection_orders() if order == int(order)], dtype=float)
    run = 300 * subsampled(orders, 0.02, 1.2)
    renyi = best_of_geometric(orders, run, 5) + 40 * subsampled(orders, 0.1, 2.0)
    chosen, other = Mechanism(0.02, 1.2, 300, best_of=BestOf(5)), Mechanism(0.1, 2.0, 40)
    price = epsilon_of(orders, renyi, DELTA)
    assert 0.98 * price < epsilon_spent([chosen, other], DELTA) <= price * (1 + 1e-9)
    assert epsilon_spent([other, chosen], DELTA, "rdp") == epsilon_spent(
        [chosen, other], DELTA, "pld"
    )


@pytest.mark.parametrize("mean", [2, 10])
@pytest.mark.parametrize("sigma", [2.0, 8.0])
def test_the_poisson_price_is_at_least_that_of_the_paper_with_the_exact_delta(
    mean: float, sigma: float
) -> None:
    """Theorem 6 with the exact δ̂ of the Gaussian, which dp-accounting bounds through RDP."""
    orders = np.array(selection_orders(), dtype=float)
    hat = np.log1p(1 / (orders - 1))
    gap = stats.norm.cdf(0.5 / sigma - hat * sigma) - np.exp(hat) * stats.norm.cdf(
        -0.5 / sigma - hat * sigma
    )
    least = epsilon_of(
        orders, gaussian(orders, sigma) + mean * gap + math.log(mean) / (orders - 1), DELTA
    )
    found = epsilon_spent([Mechanism(1.0, sigma, 1, best_of=BestOf(mean, "poisson"))], DELTA)
    assert least <= found < 1.5 * least


@pytest.mark.parametrize("sigma", [0.7, 2.0, 8.0, 25.0, 60.0])
@pytest.mark.parametrize("mean", [2, 10, 200])
def test_the_orders_are_fine_enough(mean: float, sigma: float) -> None:
    dense = 1 + np.geomspace(1e-3, 2e4, 20_000)
    least = epsilon_of(dense, best_of_geometric(dense, gaussian(dense, sigma), mean), DELTA)
    assert (
        least
        <= epsilon_spent([Mechanism(1.0, sigma, 1, best_of=BestOf(mean))], DELTA)
        < 1.02 * least
    )


# What a choice costs


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_choice_costs_more_than_a_run_and_more_the_more_there_is_to_choose_from(
    shape: BestOf,
) -> None:
    run = Mechanism(1.0, 6.0, 4)

    def price(best_of: BestOf | None) -> float:
        return epsilon_spent([Mechanism(1.0, 6.0, 4, best_of=best_of)], DELTA, "rdp")

    assert epsilon_spent([run], DELTA) < price(None) < price(shape)
    assert price(shape) < price(BestOf(3 * shape.mean, shape.runs, shape.score_noise))
    assert (
        price(BestOf(shape.mean, shape.runs))
        <= price(shape)
        < price(BestOf(shape.mean, shape.runs, 2.0))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("epsilon", [0.8, 6.0])
def test_calibration_keeps_the_target_and_wastes_nothing(shape: BestOf, epsilon: float) -> None:
    def run(sigma: float) -> Mechanism:
        return Mechanism(1.0, sigma, 20, best_of=shape)

    if shape.score_noise is not None and epsilon < 1:
        epsilon *= 20 / shape.score_noise  # the score alone costs about that
    noise = calibrate_noise(run, epsilon, DELTA)
    assert 0.999 * epsilon < epsilon_spent([run(noise)], DELTA) <= epsilon
    assert epsilon_spent([run(0.999 * noise)], DELTA) > epsilon


def test_calibration_of_a_subsampled_run() -> None:
    noise = calibrate_noise(
        lambda sigma: Mechanism(256 / 60_000, sigma, 1172, best_of=BestOf(10)), 1.0, DELTA
    )
    assert noise == pytest.approx(1.547, abs=2e-3)
    assert epsilon_spent([Mechanism(256 / 60_000, noise, 1172, best_of=BestOf(10))], DELTA) <= 1.0


@pytest.mark.parametrize("best_of", [None, BestOf(5)])
def test_orders_that_do_not_converge_are_left_out_without_a_word(
    best_of: BestOf | None, caplog: pytest.LogCaptureFixture
) -> None:
    def spent() -> float:
        return epsilon_spent([Mechanism(0.5, 1.0, 10, best_of=best_of)], DELTA, "rdp")

    found = spent()
    assert caplog.records == []
    direct = dp.rdp.RdpAccountant(selection_orders())
    direct.compose(Mechanism(0.5, 1.0, 10, best_of=best_of).event())
    assert "Excluding this order" in caplog.text, "dp-accounting would have told"
    assert found == pytest.approx(direct.get_epsilon(DELTA), rel=1e-12) and math.isfinite(found)


def test_a_score_that_costs_more_than_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="more noise to the score"):
        calibrate_noise(
            lambda sigma: Mechanism(1.0, sigma, 1, best_of=BestOf(5, score_noise=1.0)), 1.0, DELTA
        )


# The fields of a mechanism


@pytest.mark.parametrize(
    ("mechanism", "event", "epsilon"),
    [
        (Mechanism(0.1, 1.5, 0, best_of=BestOf(3, score_noise=2.0)), dp.NoOpDpEvent(), 0.0),
        (Mechanism(0.1, 0.0, 3, best_of=BestOf(3)), dp.NonPrivateDpEvent(), math.inf),
        (Mechanism(0.1, 1.5, 3, False, best_of=BestOf(3)), dp.NonPrivateDpEvent(), math.inf),
        (
            Mechanism(1.0, 3.0, 4, best_of=BestOf(3)),
            RepeatAndSelectDpEvent(dp.GaussianDpEvent(1.5), 3, 1),
            None,
        ),
        (
            Mechanism(1.0, 3.0, 4, best_of=BestOf(3, "poisson", 7.0)),
            RepeatAndSelectDpEvent(
                dp.ComposedDpEvent([dp.GaussianDpEvent(1.5), dp.GaussianDpEvent(7.0)]), 3, math.inf
            ),
            None,
        ),
    ],
)
def test_events(mechanism: Mechanism, event: dp.DpEvent, epsilon: float | None) -> None:
    assert mechanism.event() == event
    if epsilon is not None:
        assert epsilon_spent([mechanism], DELTA) == epsilon


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_run_that_stops_early_is_still_one_of_several(shape: BestOf) -> None:
    run = Mechanism(1.0, 6.0, 10, best_of=shape)
    assert run.after(4) == Mechanism(1.0, 6.0, 4, best_of=shape)
    assert 0 < epsilon_spent([run.after(4)], DELTA) < epsilon_spent([run], DELTA)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("more", [(), (False,), (True, 4), (True, 10, (0.5, 0.8, 1.0))])
def test_files_keep_a_selection_as_it_is(shape: BestOf, more: tuple[Any, ...]) -> None:
    mechanism = Mechanism(1.0, 1.2, 30, *more, best_of=shape)
    written = json.loads(json.dumps(mechanism.to_json()))
    assert Mechanism.from_json(written) == mechanism
    assert written["mechanism"] == "best-of", "older versions must not take it for a single run"


@pytest.mark.parametrize(
    ("mechanism", "text"),
    [
        (
            Mechanism(0.1, 1.2, 30),
            '{"mechanism": "poisson-gaussian", "sampling_rate": 0.1, "noise_multiplier": 1.2, '
            '"steps": 30, "public_geometry": true}',
        ),
        (
            Mechanism(1.0, 2.0, 20, False, 10, (0.5, 1.0)),
            '{"mechanism": "correlated-gaussian", "sampling_rate": 1.0, "noise_multiplier": 2.0, '
            '"steps": 20, "public_geometry": false, "cycle": 10, "growth": [0.5, 1.0]}',
        ),
    ],
)
def test_older_files_are_unchanged_byte_for_byte(mechanism: Mechanism, text: str) -> None:
    assert json.dumps(mechanism.to_json()) == text


@pytest.mark.parametrize(
    "best_of",
    [
        None,
        {},
        {"mean": 3, "runs": "geometric", "score_noise": None, "shape": 2},
        {"mean": 3, "runs": "tnb"},
    ],
)
def test_a_selection_of_a_newer_version_is_not_skipped(tmp_path: Path, best_of: object) -> None:
    fields = Mechanism(0.1, 1.2, 30, best_of=BestOf(3)).to_json() | {"best_of": best_of}
    with pytest.raises((ValueError, TypeError)):
        Mechanism.from_json(fields)
    with pytest.raises(TypeError, match="best_of="):
        Mechanism.from_json(Mechanism(0.1, 1.2, 30).to_json() | {"best_of": {"mean": 3}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean": 0.9}, "mean=0.9"),
        ({"mean": math.inf}, "mean=inf"),
        ({"mean": math.nan}, "mean=nan"),
        ({"mean": "10"}, "mean='10'"),
        ({"mean": 3, "runs": "fixed"}, "choose one of 'geometric', 'poisson'"),
        ({"mean": 3, "score_noise": 0.0}, "score_noise=0.0"),
        ({"mean": 3, "score_noise": math.inf}, "score_noise=inf"),
        ({"mean": 3, "score_noise": "1"}, "score_noise='1'"),
    ],
)
def test_impossible_selections_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BestOf(**fields)


# How often


@pytest.mark.parametrize(
    ("shape", "law"),
    [
        (BestOf(4), stats.geom(1 / 4)),
        (BestOf(1.2), stats.geom(1 / 1.2)),
        (BestOf(4, "poisson"), stats.poisson(4)),
        (BestOf(1, "poisson"), stats.poisson(1)),
    ],
    ids=["geometric", "hardly more than one", "poisson", "often none"],
)
def test_the_number_of_runs_is_drawn_from_its_law(shape: BestOf, law: Any) -> None:
    generator, count = np.random.default_rng(0), 20_000
    drawn = np.array([shape.draw(generator) for _ in range(count)])
    largest = int(law.ppf(0.999))
    expected = count * np.append(law.pmf(np.arange(largest)), law.sf(largest - 1))
    seen = np.bincount(np.minimum(drawn, largest), minlength=largest + 1)
    assert seen[expected == 0].sum() == 0, "a geometric number is at least 1"
    assert stats.chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_one_expected_run_is_one_run() -> None:
    generator = np.random.default_rng(0)
    assert {BestOf(1).draw(generator) for _ in range(100)} == {1}


# In a ledger


def test_a_ledger_keeps_a_selection_in_numbers_of_its_own(tmp_path: Path) -> None:
    # type: ignore[arg-type]
    chosen = Mechanism(1.0, 16.0, 100, best_of=BestOf(np.float32(2.5), "poisson", np.float64(8.0)))
    other = Mechanism(1.0, 30.0, 10)
    with closing(Ledger(tmp_path / "ledger.db", "people", budget=(8.0, DELTA))) as ledger:
        ledger.open_run("tuning", chosen)
        ledger.charge("tuning", 100)
        ledger.open_run("other", other)
        ledger.charge("other", 10)
        assert ledger.open_run("tuning", chosen) == 100
        with pytest.raises(PrivacyError, match="was opened with"):
            ledger.open_run("tuning", Mechanism(1.0, 16.0, 100))
        with pytest.raises(PrivacyError, match="does not fit"):
            ledger.open_run("again", Mechanism(1.0, 0.5, 1, best_of=BestOf(50)))
        spent = ledger.epsilon(DELTA)
    # type: ignore[union-attr]
    assert type(chosen.best_of.mean) is type(chosen.best_of.score_noise) is float
    assert [run.spent for run in read(tmp_path / "ledger.db")] == [chosen, other]
    direct = dp.rdp.RdpAccountant(selection_orders())
    direct.compose(chosen.event()).compose(other.event())
    assert spent == pytest.approx(direct.get_epsilon(DELTA), rel=1e-12)
