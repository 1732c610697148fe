"""Correlated noise keeps the invariants.

What is sampled is accounted, noise is added once, resumes replay nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.clipping import MARGIN
from dpkfc.noise.grid import DIAGONAL
from dpkfc.planning.choose_noise import Noise
from dpkfc.random import add_normal_, next_key, sub_key
from dpkfc.sampling import CyclicPoisson

RECORDS, BATCH, CLIP = 40, 8, 2.5
NOISES: dict[str, Noise] = {
    "independent": dpkfc.noise.Independent(),
    "square root": dpkfc.noise.BandedSquareRoot(3),
    "optimised": dpkfc.noise.BandedToeplitz(3),
    "dense optimum": dpkfc.noise.Banded(3),
    "inverse square root": dpkfc.noise.InverseSquareRoot(6),
    "regenerated": dpkfc.noise.InverseSquareRoot(3),
    "anticorrelated": dpkfc.noise.LambdaCGD(),
    "buffered": dpkfc.noise.BufferedToeplitz(2),
    "output": dpkfc.noise.OutputPerturbation(),
}


def by_noise(names: list[str] | None = None) -> Any:
    chosen = NOISES if names is None else {name: NOISES[name] for name in names}
    return pytest.mark.parametrize("noise", chosen.values(), ids=chosen.keys())


def records(count: int = RECORDS, large: bool = False) -> TensorDataset:
    """No record has a gradient, but for the first, if `large`, which has one along the first
    coordinate.
    """
    x = torch.zeros(count, 3)
    if large:
        x[0, 0] = 1e3
    return TensorDataset(x)


def output(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()  # type: ignore[no-any-return]


def a_run(
    data: TensorDataset,
    noise: Noise,
    lr: float = 0.0,
    momentum: float = 0.9,
    sampling: Any = None,
    **settings: Any,
) -> tuple[nn.Linear, torch.optim.SGD, dpkfc.PrivateRun]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    settings = {"noise_multiplier": 1.5, "delta": 1e-5, "steps": 24, "seed": 5} | settings
    options = dpkfc.Options(check=False, sampling=sampling)
    private = dpkfc.make_private(
        model,
        optimizer,
        data,
        batch_size=BATCH,
        clip=CLIP,
        noise=noise,
        loss=output,
        options=options,
        **settings,
    )
    return model, optimizer, private


def go(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    private: dpkfc.PrivateRun,
    steps: int | None = None,
) -> None:
    for batch in private.loader if steps is None else private.loader.take(steps):
        output(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def releases(model: nn.Linear, optimizer: torch.optim.SGD, private: dpkfc.PrivateRun) -> np.ndarray:
    """All released sums, also of the steps that the loop does not see."""
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        if model.weight.grad is not None:  # None within a batch that is split
            seen.append(model.weight.grad.flatten().double() * BATCH)

    optimizer.register_step_pre_hook(look)
    go(model, optimizer, private)
    return torch.stack(seen).numpy()


def groups_of(key: bytes, groups: int, count: int = RECORDS) -> list[list[int]]:
    """The records of each group: what is drawn at a rate of 1."""
    sampler = CyclicPoisson(key, count, groups, 1.0, planned_records=count)
    return [sampler.draw(b"d" * 32, group) for group in range(groups)]


class TestWhatIsSampledIsAccounted:
    """6."""

    def released(
        self, noise: Noise, present: bool, steps: int
    ) -> tuple[np.ndarray, dpkfc.PrivateRun]:
        """C times the stream: rows of ``C x + z`` in units of the clip."""
        model, optimizer, private = a_run(records(large=present), noise, steps=steps)
        stream = releases(model, optimizer, private)
        return private.factorization.materialize(steps) @ stream / CLIP, private

    @by_noise(["square root", "optimised"])
    def test_a_cycle_is_a_subsampled_gaussian_with_the_planned_noise(self, noise: Noise) -> None:
        """The sufficient statistic of the rows that a participation reaches is ``Bernoulli(q) +
        N(0, σ²)``.

        In units of ‖C[:, t]‖ · clip, up to the margin for rounding.
        """
        steps = 2100
        rows, private = self.released(noise, True, steps)
        plan, c = private.plan, private.factorization.materialize(steps)
        assert (plan.sampling, plan.groups) == ("cyclic-poisson", 3)
        sigma, norms = plan.noise_multiplier * (1 + MARGIN), np.linalg.norm(c, axis=0)
        assert norms.max() == pytest.approx(plan.noise_sensitivity)
        along = c.T @ rows[:, 0] / norms / plan.noise_sensitivity
        (group,) = (g for g, rows in enumerate(groups_of(private._group_key, 3)) if 0 in rows)
        own = along[group::3][: steps // 3 - 2]
        rate = plan.rate_in_turn
        assert rate == 3 * BATCH / RECORDS

        def law(s: np.ndarray) -> np.ndarray:
            return (1 - rate) * stats.norm.cdf(s, scale=sigma) + rate * stats.norm.cdf(
                s - 1, scale=sigma
            )

        assert stats.kstest(own, law).pvalue > 1e-3
        assert stats.kstest(own, stats.norm(scale=sigma).cdf).pvalue < 1e-6, (
            "the record should show"
        )
        others = (rows / plan.noise_sensitivity)[:, 1:]
        assert stats.kstest(others.ravel(), stats.norm(scale=sigma).cdf).pvalue > 1e-3

    @by_noise(["anticorrelated", "buffered", "regenerated"])
    def test_without_amplification_the_whole_stream_is_one_gaussian_release(
        self, noise: Noise
    ) -> None:
        """z has the planned scale, and what the record adds to C x is within the planned
        sensitivity.
        """
        with_it, private = self.released(noise, True, 400)
        without, _ = self.released(noise, False, 400)
        plan = private.plan
        assert plan.sampling == "min-separated" and plan.groups == RECORDS // BATCH
        moved = np.linalg.norm(with_it - without)
        assert 0.9 * plan.noise_sensitivity < moved <= plan.noise_sensitivity * (1 + 1e-4)
        z = without.ravel() / plan.noise_sensitivity
        assert (
            stats.kstest(z, stats.norm(scale=plan.noise_multiplier * (1 + MARGIN)).cdf).pvalue
            > 1e-3
        )

    def test_a_record_joins_only_the_turns_of_its_group_also_after_a_resume_with_losses(
        self, tmp_path: Path
    ) -> None:
        ledger = dpkfc.Ledger(tmp_path / "ledger.db", "these")
        data = TensorDataset(
            torch.arange(RECORDS, dtype=torch.float32)[:, None].expand(-1, 3).clone()
        )
        noise = dpkfc.noise.BandedSquareRoot(3)
        seen: list[tuple[int, int]] = []

        def look(
            private: dpkfc.PrivateRun,
            model: nn.Module,
            optimizer: torch.optim.Optimizer,
            steps: int,
        ) -> None:
            for (x,) in private.loader.take(steps):
                seen.extend((private.charged, int(row)) for row in x[:, 0])
                model(x).mean().backward()
                optimizer.step()

        model, optimizer, private = a_run(data, noise, steps=60, ledger=ledger)
        look(private, model, optimizer, 10)
        private.save(tmp_path / "kept")
        look(private, model, optimizer, 7)  # lost
        model, optimizer, private = a_run(
            data, noise, steps=60, ledger=dpkfc.Ledger(tmp_path / "ledger.db", "these")
        )
        private.load(tmp_path / "kept")
        assert private.charged == 17
        look(private, model, optimizer, 40)
        turns = {row: {step % 3 for step, r in seen if r == row} for row in range(RECORDS)}
        assert max(len(found) for found in turns.values()) == 1
        assert {step % 3 for step, _ in seen} == {0, 1, 2}

    @pytest.mark.parametrize("groups", [2, 7, 16])
    def test_groups_do_not_depend_on_other_records_and_are_uniform(self, groups: int) -> None:
        """So a record can be added or removed without moving the others (equal groups would move
        them).
        """
        many, fewer = (groups_of(b"k" * 32, groups, count) for count in (20_000, 19_999))
        assert [[row for row in rows if row < 19_999] for rows in many] == fewer
        assert sorted(row for rows in many for row in rows) == list(range(20_000))
        assert stats.chisquare([len(rows) for rows in many]).pvalue > 1e-3

    def test_the_expected_batch_is_the_planned_one(self) -> None:
        sampler = CyclicPoisson(b"k" * 32, 10_000, 5, 5 * 200 / 10_000, planned_records=10_000)
        sizes = [len(sampler.draw(sub_key(b"k" * 32, str(step)), step)) for step in range(500)]
        assert (
            abs(np.mean(sizes) - 200) < 5 * math.sqrt(200 / 500) + 200 * 0.02
        )  # groups are not quite equal


class TestOnlySoundCombinations:
    """Refused before anything is spent, with what to do instead."""

    @pytest.mark.parametrize(
        ("noise", "sampling", "message"),
        [
            (dpkfc.noise.BandedSquareRoot(3), "poisson", "cyclic-poisson"),
            (dpkfc.noise.LambdaCGD(), "poisson", "no accountant"),
            (dpkfc.noise.LambdaCGD(), "cyclic-poisson", "not banded"),
            (dpkfc.noise.BufferedToeplitz(1), "cyclic-poisson", "min-separated"),
            (dpkfc.noise.BandedSquareRoot(6), "cyclic-poisson", "at most 5 bands"),
        ],
    )
    def test_refused(self, noise: Noise, sampling: Any, message: str) -> None:
        with pytest.raises(dpkfc.PrivacyError, match=message):
            a_run(records(), noise, sampling=sampling)

    def test_an_unknown_sampling_is_refused(self) -> None:
        with pytest.raises(ValueError, match="choose one of"):
            a_run(records(), dpkfc.noise.BandedSquareRoot(3), sampling="shuffled")

    @pytest.mark.parametrize("sampling", ["poisson", "cyclic-poisson", "min-separated"])
    def test_independent_noise_goes_with_any(self, sampling: Any) -> None:
        _, _, private = a_run(records(), dpkfc.noise.Independent(), sampling=sampling)
        assert private.plan.groups == (5 if sampling == "min-separated" else 1)

    def test_more_bands_than_turns_are_accounted_without_amplification(self) -> None:
        _, _, private = a_run(records(), dpkfc.noise.BandedSquareRoot(8))
        assert private.plan.sampling == "min-separated" and len(private.plan.growth) == 5

    def test_freezing_during_a_run_is_refused_and_costs_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            "steps": 9,
            "batch_size": BATCH,
        }
        private = dpkfc.make_private(
            model,
            optimizer,
            records(),
            noise=dpkfc.noise.BandedSquareRoot(3),
            loss=output,
            **settings,
        )
        go(model, optimizer, private, 2)
        model[1].weight.requires_grad_(False)
        with pytest.raises(dpkfc.PrivacyError, match=r"1\.weight: frozen or unfrozen"):
            go(model, optimizer, private, 1)
        assert private.charged == 2


@by_noise()
def test_the_noise_of_a_step_is_that_of_the_plan_and_is_added_once(noise: Noise) -> None:
    """7. Whatever the chunking.

    The stream of the run is the dense C⁻¹z of its keys, at the planned scale.
    """
    for chunk in (None, 2):
        model, optimizer, private = a_run(records(), noise, max_physical_batch_size=chunk)
        key, z = private._key, []
        for _ in range(private.plan.steps):
            drawn = torch.zeros(3)
            add_normal_([drawn], sub_key(key, "noise"), 1.0)
            z.append(drawn.double().numpy())
            key = next_key(key)
        c = private.factorization.materialize(private.plan.steps)
        assert np.diag(c).max() <= DIAGONAL, (
            "the grid supposes no less noise in a step than there is"
        )
        want = private.plan.noise_scale * np.linalg.solve(c, np.array(z))
        got = releases(model, optimizer, private)
        grid = private.plan.grid * private.plan.batch_size  # what is released is rounded to it
        want = np.round(want / grid) * grid
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@by_noise()
def test_resuming_continues_bit_for_bit(noise: Noise, tmp_path: Path) -> None:
    """7. Through a checkpoint on disk, in a new process's objects."""
    model, optimizer, private = a_run(records(), noise, lr=0.1)
    go(model, optimizer, private)
    first, its_optimizer, stopped = a_run(records(), noise, lr=0.1)
    go(first, its_optimizer, stopped, 7)
    stopped.save(tmp_path / "kept")
    again, its_optimizer, resumed = a_run(records(), noise, lr=0.1, seed=99)
    resumed.load(tmp_path / "kept")
    go(again, its_optimizer, resumed)
    assert resumed.steps == 24 and torch.equal(again.weight, model.weight)


@by_noise()
def test_going_back_replays_no_noise_and_starts_the_stream_anew(
    noise: Noise, tmp_path: Path
) -> None:
    """7, 8. What may have been seen stays charged, and its noise is not used on other sums."""
    model, optimizer, private = a_run(records(), noise)
    go(model, optimizer, private, 7)
    private.save(tmp_path / "kept")
    first: list[torch.Tensor] = []
    hook = optimizer.register_step_pre_hook(lambda *_: first.append(model.weight.grad.clone()))
    go(model, optimizer, private, 3)
    hook.remove()
    private.load(tmp_path / "kept")
    assert private.charged == 10
    after: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: after.append(model.weight.grad.clone()))
    go(model, optimizer, private)
    assert private.charged == 24 and len(after) == 14
    assert not any(torch.equal(a, b) for a in first for b in after)


def test_a_matrix_that_may_not_forget_is_not_resumed_after_a_loss(tmp_path: Path) -> None:
    """Beyond one cycle and with negative entries, it is not known whether starting anew keeps the
    sensitivity.
    """
    signed = dpkfc.noise.OutputPerturbation(
        workload=dpkfc.noise.Workload.toeplitz([1.0, -0.9] + [0.0] * 30)
    )
    model, optimizer, private = a_run(records(), signed)
    assert not private.factorization.non_negative(24)
    go(model, optimizer, private, 2)
    private.save(tmp_path / "kept")
    private.load(tmp_path / "kept")  # nothing lost
    go(model, optimizer, private, 1)
    with pytest.raises(dpkfc.PrivacyError, match="negative entries"):
        private.load(tmp_path / "kept")


@pytest.mark.parametrize("nesterov", [False, True])
@by_noise(["independent", "optimised", "buffered", "anticorrelated"])
def test_noise_cancels_in_the_parameters_while_the_geometry_changes(
    noise: Noise, nesterov: bool
) -> None:
    """The path of θ is ``-η A C⁻¹ z / E[batch]``, as if there were no geometry, though it is
    refreshed on the way.
    """
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.3, momentum=0.9, nesterov=nesterov, weight_decay=0.01
    )
    data = TensorDataset(torch.randn(RECORDS, 4), torch.zeros(RECORDS, dtype=torch.long))
    geometry = dpkfc.KFC(probe=dpkfc.probes.Tabular(features=4, classes=2), every=3, probes=8)
    n = 21

    def nothing(model: nn.Module, batch: Any) -> torch.Tensor:
        """No gradient, so that only noise moves the weights."""
        return 0.0 * F.cross_entropy(model(batch[0]), batch[1])

    private = dpkfc.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=2.0,
        delta=1e-5,
        steps=n,
        batch_size=BATCH,
        clip=CLIP,
        geometry=geometry,
        noise=noise,
        seed=3,
        loss=nothing,
    )
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    maps: list[torch.Tensor] = []
    key, z, path = private._key, [], []

    def remember(*_: Any) -> None:
        path.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy())

    optimizer.register_step_post_hook(remember)
    for batch in private.loader:
        nothing(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        maps.append(
            geometry.map_of(("0.weight", "0.bias")).apply([torch.eye(3, 4), torch.ones(3)])[0]
        )
    assert sum(not torch.equal(a, b) for a, b in pairwise(maps)) >= 4
    for _ in range(n):
        drawn = torch.zeros(len(start))
        add_normal_([drawn], sub_key(key, "noise"), 1.0)
        z.append(drawn.double().numpy())
        key = next_key(key)
    twin = copy.deepcopy(start).requires_grad_()  # the decay of the first weights, by torch itself
    alone = torch.optim.SGD([twin], lr=0.3, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    c = private.factorization.materialize(n)
    w = private.plan.noise_scale / BATCH * np.linalg.solve(c, np.array(z))
    w = np.round(w / private.plan.grid) * private.plan.grid
    for t in range(n):
        twin.grad = torch.from_numpy(w[t])
        alone.step()
        np.testing.assert_allclose(path[t], twin.detach().numpy(), rtol=1e-4, atol=1e-4)


class TestWarnings:
    """What rescales the noisy gradients over time undoes the cancellation.

    Said, with the reason.
    """

    def private(
        self, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any
    ) -> dpkfc.PrivateRun:
        model = nn.Linear(4, 2)
        settings = {
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            "steps": 9,
            "batch_size": BATCH,
        } | settings
        data = TensorDataset(torch.zeros(RECORDS, 4))
        return dpkfc.make_private(
            model, optimizer(model.parameters(), lr=0.1), data, loss=output, **settings
        )

    @pytest.mark.parametrize(
        "optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
    )
    def test_adam_and_its_kin(self, optimizer: Any) -> None:
        with pytest.warns(UserWarning, match=f"{optimizer.__name__} rescales"):
            private = self.private(optimizer, noise=dpkfc.noise.BandedToeplitz(3))
        assert private.factorization.bands == 3

    def test_a_map_after_the_noise(self) -> None:
        geometry = dpkfc.KFC(probe=dpkfc.probes.Tabular(features=4, classes=2), post=0.5)
        with pytest.warns(UserWarning, match="once more"):
            self.private(torch.optim.SGD, noise=dpkfc.noise.BandedToeplitz(3), geometry=geometry)

    def test_auto_keeps_independent_noise_then(self) -> None:
        settings = {"noise": "auto", "noise_multiplier": None, "epsilon": 8.0}
        assert self.private(torch.optim.Adam, **settings).plan.sampling == "poisson"
        assert self.private(torch.optim.SGD, **settings).plan.sampling != "poisson"
