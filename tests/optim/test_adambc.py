"""DP-AdamBC: the formulas of the paper in numpy, no bias on noise, checkpoints and schedulers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.optim import DPAdamBC
from dpkfc.optim.adambc import second_moment_std

GRADS = np.random.default_rng(0).normal(size=(7, 5))


def reference(floor: float | None, noise: float, decay: float = 0.0) -> np.ndarray:
    """Algorithm 1 of the paper, in numpy."""
    lr, b1, b2 = 0.1, 0.8, 0.95
    theta, m, v = np.ones(5), np.zeros(5), np.zeros(5)
    for t, g in enumerate(GRADS, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        least = floor
        if floor is None:
            weights = (1 - b2) * b2 ** np.arange(t) / (1 - b2**t)
            least = noise * math.sqrt(2 * (weights**2).sum())
        theta = theta * (1 - lr * decay)
        theta = theta - lr * m / (1 - b1**t) / np.sqrt(
            np.maximum(v / (1 - b2**t) - noise, max(least, 1e-16))
        )
    return theta


@pytest.mark.parametrize("floor", [None, 0.0, 1e-3, 10.0])
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_updates_are_those_of_the_paper(floor: float | None, noise: float, decay: float) -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = DPAdamBC([p], 0.1, (0.8, 0.95), floor, decay, noise)
    for g in GRADS:
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    np.testing.assert_allclose(p.detach().numpy(), reference(floor, noise, decay), rtol=1e-10)


def test_without_noise_it_is_adamw() -> None:
    ours, theirs = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    a = DPAdamBC([ours], 0.1, (0.8, 0.95), 0.0, 0.2, 0.0)
    b = torch.optim.AdamW([theirs], 0.1, (0.8, 0.95), eps=0.0, weight_decay=0.2)
    for g in GRADS:
        ours.grad, theirs.grad = torch.from_numpy(g.copy()), torch.from_numpy(g.copy())
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("steps", [1, 10, 300])
def test_on_noise_alone_the_corrected_second_moment_is_unbiased_with_the_stated_deviation(
    steps: int,
) -> None:
    size, noise, beta = 100_000, 0.04, 0.99
    p = nn.Parameter(torch.zeros(size))
    optimizer = DPAdamBC([p], 0.0, (0.9, beta), None, 0.0, noise)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(size, generator=generator) * math.sqrt(noise)
        optimizer.step()
    corrected = optimizer.state[p]["square"].double() / (1 - beta**steps) - noise
    expected = noise * second_moment_std(beta, steps)
    assert abs(float(corrected.mean())) < 5 * expected / math.sqrt(size)
    assert float(corrected.std()) == pytest.approx(expected, rel=0.02)


def make_run(
    make_optimizer: Any = None, **settings: Any
) -> tuple[nn.Module, Any, dpkfc.PrivateRun]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    if make_optimizer is None:
        optimizer = DPAdamBC(model.parameters(), lr=0.05)
    else:
        optimizer = make_optimizer(model)
    data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    settings = {
        "noise_multiplier": 1.5,
        "delta": 1e-4,
        "steps": 12,
        "batch_size": 8,
        "clip": 0.5,
        "seed": 1,
    } | settings
    run = dpkfc.make_private(model, optimizer, data, loss=dpkfc.losses.cross_entropy, **settings)
    return model, optimizer, run


def train(model: nn.Module, optimizer: Any, run: dpkfc.PrivateRun, steps: int = 12) -> None:
    for x, y in run.loader.take(steps):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_variance_is_that_of_the_noise_in_the_gradient() -> None:
    """Measured on a parameter that the data do not reach."""

    def at_zero(model: Any) -> DPAdamBC:
        for p in (*model[0].parameters(), model[2].weight):
            p.data.zero_()
        return DPAdamBC([*model.parameters()], lr=0.0)

    model, optimizer, run = make_run(at_zero, steps=3000)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    train(model, optimizer, run, 3000)
    (variance,) = {group["noise_variance"] for group in optimizer.param_groups}
    assert float(torch.stack(seen).double().square().mean()) == pytest.approx(variance, rel=0.03)


def test_groups_keep_a_variance_that_was_given() -> None:
    def two_groups(model: Any) -> DPAdamBC:
        return DPAdamBC(
            [
                {"params": model[0].parameters()},
                {"params": model[2].parameters(), "noise_variance": 0.5},
            ]
        )

    _, optimizer, run = make_run(two_groups)
    planned = (run.plan.noise_scale / run.plan.batch_size) ** 2
    assert [group["noise_variance"] for group in optimizer.param_groups] == [planned, 0.5]


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": dpkfc.noise.BandedToeplitz(2)},
        {"geometry": dpkfc.KFC(probe=dpkfc.probes.Tabular(features=4, classes=2), post=0.5)},
    ],
    ids=["correlated", "post"],
)
@pytest.mark.filterwarnings("ignore:.*correlated noise cancels")
def test_noise_without_one_variance_is_refused(settings: dict[str, Any]) -> None:
    seen: list[nn.Module] = []

    def remember(model: nn.Module) -> DPAdamBC:
        seen.append(model)
        return DPAdamBC(model.parameters())

    with pytest.raises(ValueError, match="DPAdamBC corrects for noise of one known variance"):
        make_run(remember, **settings)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in seen[0].modules()
    )


def test_an_optimizer_that_does_not_know_the_noise_says_so() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="does not know the variance of the noise"):
        DPAdamBC([p]).step()


def test_resuming_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer, run = make_run()
    train(model, optimizer, run, 12)
    first, first_optimizer, stopped = make_run()
    train(first, first_optimizer, stopped, 5)
    stopped.save(tmp_path / "kept")
    again, second_optimizer, resumed = make_run(seed=7)
    resumed.load(tmp_path / "kept")
    train(again, second_optimizer, resumed, 7)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_schedulers_reach_it() -> None:
    model, optimizer, run = make_run()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    train(model, optimizer, run, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"floor": -1.0}, "floor=-1.0"),
        ({"noise_variance": float("nan")}, "noise_variance=nan"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPAdamBC([nn.Parameter(torch.ones(2))], **settings)
