"""The choice of noise: at equal epsilon, within the memory, never worse than independent noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.noise.sensitivity import Participation
from dpkfc.planning.choose_noise import WORTH_IT, best, evaluate, noise_candidates

RUN: dict[str, Any] = {
    "records": 20_000,
    "batch_size": 100,
    "steps": 1000,
    "clip": 1.0,
    "delta": 1e-5,
}
MOMENTUM = dpkfc.noise.Workload.sgd(momentum=0.9)


@pytest.mark.parametrize(("epsilon", "bands", "ratio"), [(1.0, 16, 0.72), (8.0, 200, 0.29)])
def test_known_gains_over_independent_noise(epsilon: float, bands: int, ratio: float) -> None:
    """1,000 steps in 5 epochs, β = .9: known ratios of the error of optimised Toeplitz matrices."""
    run = RUN | {"epsilon": epsilon}
    alone = evaluate(dpkfc.noise.Independent(), MOMENTUM, **run)
    banded = evaluate(dpkfc.noise.BandedToeplitz(bands), MOMENTUM, **run)
    assert banded.rmse / alone.rmse == pytest.approx(ratio, abs=0.006)


def test_every_candidate_spends_the_same_epsilon_and_keeps_to_the_memory() -> None:
    run = RUN | {"epsilon": 4.0, "records": 2000, "steps": 60}
    found = [evaluate(noise, MOMENTUM, **run) for noise in noise_candidates(6, 20)]
    assert len({candidate.plan.noise for candidate in found}) == len(found) > 8
    for candidate in found:
        plan, matrix = candidate.plan, candidate.factorization
        assert 3.99 < plan.epsilon() <= 4.0
        assert matrix.buffers <= 6
        if plan.growth:
            assert plan.noise_sensitivity == matrix.sensitivity(60, Participation(20, 3)).value
        else:
            assert plan.noise_sensitivity == pytest.approx(matrix.column_norm(60))
        theta = matrix.error(MOMENTUM, 60) * plan.noise_multiplier * plan.noise_sensitivity / 100
        assert candidate.rmse == pytest.approx(theta, rel=1e-3)
    chosen, least = best(found), min(candidate.rmse for candidate in found)
    assert chosen.rmse <= 1.01 * least < chosen.rmse * 1.0101 and least < WORTH_IT * found[0].rmse
    assert all(
        c.rmse > 1.01 * least
        for c in found
        if c.factorization.buffers < chosen.factorization.buffers
    )


def test_independent_noise_is_left_only_for_a_clear_gain() -> None:
    run = RUN | {"epsilon": 1.0, "records": 4000, "batch_size": 400, "steps": 200}
    found = [
        evaluate(noise, dpkfc.noise.Workload.sgd(), **run)
        for noise in (dpkfc.noise.Independent(), dpkfc.noise.BandedToeplitz(2))
    ]
    assert found[1].rmse > WORTH_IT * found[0].rmse
    assert best(found) is found[0]


@pytest.mark.parametrize(("max_buffers", "turns"), [(0, 50), (1, 50), (5, 3), (16, 1), (300, 400)])
def test_candidates_fit(max_buffers: int, turns: int) -> None:
    found = noise_candidates(max_buffers, turns)
    assert isinstance(found[0], dpkfc.noise.Independent)
    assert (len(found) == 1) == (turns == 1)
    for noise in found:
        matrix = noise.factorize(MOMENTUM, 500, turns)
        assert matrix.buffers <= max_buffers
        assert matrix.bands is None or matrix.bands <= turns


def run_with(noise: Any, **settings: Any) -> dpkfc.PrivateRun:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"epsilon": 8.0, "delta": 1e-4, "steps": 30, "batch_size": 50} | settings
    data = TensorDataset(torch.zeros(1000, 3), torch.zeros(1000, dtype=torch.long))
    return dpkfc.make_private(
        model, optimizer, data, noise=noise, loss=dpkfc.losses.cross_entropy, **settings
    )


def test_auto_takes_the_best_within_its_memory() -> None:
    small, large = run_with(dpkfc.noise.Auto(max_buffers=0)), run_with("auto")
    assert small.factorization.buffers == 0 < large.factorization.buffers <= 16
    workload = dpkfc.noise.Workload.sgd(momentum=0.9)

    def error(run: dpkfc.PrivateRun) -> float:
        return run.plan.noise_scale * run.factorization.error(workload, 30)

    assert error(large) < error(small) < error(run_with(None))


def test_a_workload_of_ones_own_decides() -> None:
    shaped = run_with(
        dpkfc.noise.BandedToeplitz(4, workload=dpkfc.noise.Workload.sgd()),
        epsilon=None,
        noise_multiplier=1.0,
    )
    usual = run_with(dpkfc.noise.BandedToeplitz(4), epsilon=None, noise_multiplier=1.0)
    plain = dpkfc.noise.Workload.sgd()
    assert shaped.factorization.error(plain, 30) * shaped.plan.noise_sensitivity < (
        usual.factorization.error(plain, 30) * usual.plan.noise_sensitivity
    )


@pytest.mark.parametrize(
    ("noise", "settings", "error", "message"),
    [
        ("automatic", {}, ValueError, "pass 'auto'"),
        (3, {}, TypeError, "pass 'auto'"),
        (dpkfc.noise.BandedToeplitz, {}, TypeError, "pass 'auto', or an object"),
        (
            "auto",
            {"options": dpkfc.Options(sampling="poisson")},
            ValueError,
            "chooses the sampling too",
        ),
        ("auto", {"epsilon": None, "noise_multiplier": 1.0}, ValueError, "give epsilon"),
        (dpkfc.noise.Auto(max_buffers=-1), {}, ValueError, "max_buffers=-1"),
    ],
)
def test_wrong_arguments_are_refused(
    noise: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_with(noise, **settings)


@pytest.mark.parametrize(
    ("noise", "settings", "message"),
    [
        (dpkfc.noise.BandedToeplitz(0), {}, "bands=0"),
        (dpkfc.noise.LambdaCGD(decay=1.0), {}, "decay=1.0"),
        (
            dpkfc.noise.BandedSquareRoot(4, workload=dpkfc.noise.Workload.toeplitz([1.0, 0.5])),
            {},
            "given for 2 steps",
        ),
    ],
)
def test_noise_that_cannot_be_factorized_is_refused(
    noise: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_with(noise, **settings)
