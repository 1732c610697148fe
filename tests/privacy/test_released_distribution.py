"""End to end: what a run releases has exactly the distribution that the accountant analyses.

One record has a large gradient along the first coordinate, all others have none, and the weights do
not move. Then the first coordinate of every released sum, in units of the clip, is ``Bernoulli(q) +
N(0, σ²)``, the pair of distributions behind the Poisson-subsampled Gaussian mechanism; without the
record it is ``N(0, σ²)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc

RECORDS, STEPS, CLIP = 20, 4000, 2.5


def released(
    with_record: bool, batch_size: int, sigma: float, chunk: int | None, size: float = 1e3
) -> np.ndarray:
    x = torch.zeros(RECORDS if with_record else RECORDS - 1, 3)
    if with_record:
        x[0, 0] = size
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {
        "noise_multiplier": sigma,
        "delta": 1e-5,
        "steps": STEPS,
        "batch_size": batch_size,
        "clip": CLIP,
    }
    private = dpkfc.make_private(
        model,
        optimizer,
        TensorDataset(x),
        **settings,
        seed=11,
        max_physical_batch_size=chunk,
        options=dpkfc.Options(check=False),
        loss=lambda model, batch: model(batch[0]).mean(),
    )
    seen = []
    # every step counts, also those without records, which the loop does not see
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(model.weight.grad))
    for (batch,) in private.loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sums = torch.stack([grad[0] for grad in seen if grad is not None]) * batch_size / CLIP
    assert len(sums) == STEPS == private.steps
    return sums.double().numpy()


def mixture(rate: float, sigma: float, shift: float = 1.0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda z: (
        (1 - rate) * stats.norm.cdf(z, 0, sigma) + rate * stats.norm.cdf(z, shift, sigma)
    )


@pytest.mark.parametrize(
    ("batch_size", "sigma", "chunk"), [(6, 0.4, None), (6, 0.4, 2), (2, 1.0, None), (20, 0.7, 7)]
)
def test_with_the_record(batch_size: int, sigma: float, chunk: int | None) -> None:
    sums = released(True, batch_size, sigma, chunk)
    rate = batch_size / RECORDS
    assert stats.kstest(sums[:, 0], mixture(rate, sigma)).pvalue > 1e-3
    for other in (1, 2):
        assert stats.kstest(sums[:, other], "norm", args=(0, sigma)).pvalue > 1e-3
    spread = math.sqrt((rate * (1 - rate) + sigma**2) / STEPS)
    assert abs(sums[:, 0].mean() - rate) < 4.5 * spread
    steps = sums[:, 0] - sums[:, 0].mean()
    assert abs((steps[1:] * steps[:-1]).mean()) < 4.5 * (rate * (1 - rate) + sigma**2) / math.sqrt(
        STEPS
    )


def test_without_the_record() -> None:
    sums = released(False, 5, 0.5, None)
    for coordinate in range(3):
        assert stats.kstest(sums[:, coordinate], "norm", args=(0, 0.5)).pvalue > 1e-3


def test_a_small_gradient_is_not_scaled_up() -> None:
    sums = released(True, 10, 0.3, None, size=0.5)
    assert stats.kstest(sums[:, 0], mixture(0.5, 0.3, shift=0.5 / CLIP)).pvalue > 1e-3


def test_the_test_can_fail() -> None:
    """Noise or rate wrong by a third is noticed."""
    sums = released(True, 6, 0.4, None)[:, 0]
    assert stats.kstest(sums, mixture(0.3, 0.4 * 4 / 3)).pvalue < 1e-3
    assert stats.kstest(sums, mixture(0.4, 0.4)).pvalue < 1e-3
