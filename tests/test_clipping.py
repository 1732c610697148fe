"""No weighted gradient is longer than the clip, for plain and automatic clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.engine.step import clip_factors

GAMMAS = [None, 1e-4, 0.01, 3.0]


@given(
    st.lists(st.floats(0, 1e18), min_size=1, max_size=8),
    st.floats(1e-3, 1e3),
    st.sampled_from(GAMMAS),
)
@settings(max_examples=60, deadline=None)
def test_nothing_exceeds_the_clip(norms: list[float], clip: float, gamma: float | None) -> None:
    """Also with the true norm, in float64, in place of the computed one."""
    weights, finite = clip_factors(torch.tensor(norms).square(), clip, gamma)
    assert finite.all() and (weights >= 0).all()
    assert (weights.double() * torch.tensor(norms, dtype=torch.float64) <= clip * (1 + 1e-9)).all()


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("exponent", range(-46, -10, 3))
def test_a_gradient_of_many_tiny_numbers_does_not_blow_up(
    gamma: float | None, exponent: int
) -> None:
    """Squares of numbers below 1e-19 underflow in float32: the norm of the result may exceed R."""
    g = torch.full((1000,), 10.0**exponent)
    (weight,), _ = clip_factors(g.square().sum()[None], 1.0, gamma)
    assert float((weight.double() * g.double()).norm()) <= 1.0


@pytest.mark.parametrize(("gamma", "norm"), [(1e-4, 1 / 1.01), (0.01, 0.5), (1.0, 0.01 / 1.01)])
def test_small_gradients_are_scaled_up(gamma: float, norm: float) -> None:
    (weight,), _ = clip_factors(torch.tensor([0.01**2]), 1.0, gamma)
    assert float(weight) * 0.01 == pytest.approx(norm, rel=1e-4)


def test_rounding_errors_of_a_vanishing_gradient_do_not_exceed_the_clip() -> None:
    """Parts of size 100 that cancel leave a float32 error of about 1e-5, and hardly a norm."""
    (weight,), _ = clip_factors(torch.tensor([1e-14]), 1.0, 1e-4)
    assert float(weight) * 1e-5 <= 0.2


@pytest.mark.parametrize("gamma", GAMMAS)
def test_samples_with_a_norm_that_is_not_finite_have_weight_zero(gamma: float | None) -> None:
    weights, finite = clip_factors(torch.tensor([math.nan, math.inf, -1.0, 0.0]), 1.0, gamma)
    assert finite.tolist() == [False, False, True, True]
    assert weights[:2].tolist() == [0, 0]
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("gamma", [1e-4, 0.05])
def test_every_record_of_a_run_is_scaled(gamma: float) -> None:
    """Against one autograd pass per record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(6, 4) * torch.logspace(-3, 1, 6)[:, None], torch.randint(2, (6,))
    want = []
    for row in range(6):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        g = torch.cat([p.grad.flatten() for p in model.parameters()])
        want.append(0.7 * g / (g.norm() + gamma))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = dpkfc.make_private(
        model, optimizer, TensorDataset(x, y),
        noise_multiplier=0.0, delta=0.1, steps=1, batch_size=6,
        clip=dpkfc.AutomaticClipping(norm=0.7, gamma=gamma), geometry=dpkfc.Identity(),
        loss=dpkfc.losses.cross_entropy,
    )  # fmt: skip
    for a, b in run.loader:
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, torch.stack(want).mean(0), rtol=1e-4, atol=1e-6)
    assert run.plan.noise_scale == 0 and "norm +" in str(run.plan)


def perceptron(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def auto_run(model: nn.Module, geometry: Any, **settings: Any) -> dpkfc.PrivateRun:
    data = TensorDataset(torch.zeros(30, 4), torch.zeros(30, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "steps": 4,
        "batch_size": 5,
        "clip": "auto",
    } | settings
    return dpkfc.make_private(
        model, optimizer, data, geometry=geometry, loss=dpkfc.losses.cross_entropy, **settings
    )


def squares(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return (output - 1).square().sum(1)


def geometries() -> dict[str, Any]:
    probe = dpkfc.probes.Tabular(features=4, classes=2)
    return {
        "kfc": dpkfc.KFC(probe=probe, probes=64, loss=squares),
        "adadps": dpkfc.Diagonal(source=probe, probes=64, loss=squares),
    }


@pytest.mark.parametrize("kind", ["kfc", "adadps"])
def test_a_clip_from_probes_is_their_median_mapped_norm(kind: str) -> None:
    """Against one autograd pass per probe, mapped by the geometry's own maps."""
    model, geometry = perceptron(0), geometries()[kind]
    run = auto_run(model, geometry)
    generator = geometry._probing.generator(0, "clip")
    probes = dpkfc.probes.Tabular(features=4, classes=2).draw(64, generator)
    norms = []
    for row in range(64):
        model_ = perceptron(0)
        squares(model_(probes.inputs[row : row + 1])).sum().backward()
        total = 0.0
        for layer in ("0", "2"):
            grads = [model_.get_parameter(f"{layer}.{name}").grad for name in ("weight", "bias")]
            mapped = geometry.map_of((f"{layer}.weight", f"{layer}.bias")).apply(grads)
            total += float(sum(part.square().sum() for part in mapped))
        norms.append(math.sqrt(total))
    assert run.plan.clip == pytest.approx(float(torch.tensor(norms).median()), rel=1e-3)


def test_a_clip_from_probes_does_not_see_the_data_and_survives_a_resume(tmp_path: Any) -> None:
    first = auto_run(perceptron(0), geometries()["kfc"])
    first.save(tmp_path / "kept")
    again = auto_run(perceptron(1), geometries()["kfc"])  # other first weights, and so another clip
    assert again.plan.clip != first.plan.clip
    again.load(tmp_path / "kept")
    assert again.plan == first.plan


def test_a_clip_from_probes_needs_probes() -> None:
    with pytest.raises(ValueError, match="this one has none"):
        auto_run(perceptron(0), None)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (dpkfc.AutomaticClipping(norm=0.0), "clip=0.0"),
        (dpkfc.AutomaticClipping(gamma=-1.0), "gamma=-1.0"),
        (dpkfc.AutomaticClipping(gamma=0.0), "at least 0.0001"),
        (dpkfc.AutomaticClipping(gamma=math.nan), "gamma=nan"),
        (math.inf, "clip=inf"),
    ],
)
def test_wrong_clips_are_refused(clip: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpkfc.Plan.make(
            records=100, batch_size=10, steps=3, clip=clip, noise_multiplier=1.0, delta=1e-3
        )
