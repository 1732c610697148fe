"""DiSK: the recursion, one and two gradients per step, per-record combination before clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.optim import DiSK

SETTINGS = [(0.7, None), (0.6, 0.5), (0.4, 2.0), (1.0, None), (0.5, 1.0)]
MAKERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "adambc": lambda params: dpkfc.optim.DPAdamBC(params, lr=0.05),
}


def quadratic(x: torch.Tensor) -> torch.Tensor:
    scales = torch.tensor([1.0, 0.3, 3.0], dtype=torch.float64)
    return (scales * (x - 1) ** 2).sum() + 0.1 * (x**4).sum()


def gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(quadratic(x), x)[0]


@pytest.mark.parametrize(("kappa", "gamma"), SETTINGS)
def test_the_path_is_that_of_the_formulas(kappa: float, gamma: float | None) -> None:
    """The recursion of the paper with plain gradient steps."""
    far = (1 - kappa) / kappa if gamma is None else gamma
    share = (1 - kappa) / (kappa * far) if kappa < 1 else 0.0
    x = previous = torch.zeros(3, dtype=torch.float64)
    filtered = None
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    disk = DiSK(torch.optim.SGD([p], lr=0.05), kappa, gamma)
    assert disk.gradients_per_step == (2 if gamma in (0.5, 2.0) else 1)
    for _ in range(12):
        new = share * gradient(x + far * (x - previous)) + (1 - share) * gradient(x)
        filtered = new if filtered is None else (1 - kappa) * filtered + kappa * new
        x, previous = x - 0.05 * filtered, x
        disk.zero_grad()
        disk.backward(lambda: quadratic(p))
        disk.step()
        with disk.iterate():
            torch.testing.assert_close(p.detach(), x)
    if disk.gradients_per_step == 2:
        torch.testing.assert_close(p.detach(), x)


def test_a_filter_that_takes_everything_is_the_optimizer_itself() -> None:
    ours, theirs = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    disk, plain = DiSK(MAKERS["sgd"]([ours]), 1.0), MAKERS["sgd"]([theirs])
    for _ in range(5):
        for p, optimizer in ((ours, disk), (theirs, plain)):
            optimizer.zero_grad()
            quadratic(p).backward()
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.2, None), (0.2, 1.0)])
def test_the_filter_lowers_the_error_on_a_drifting_quadratic(
    kappa: float, gamma: float | None
) -> None:
    """Noisy gradients of ½|x - c_t|² for a slowly moving c: the filter reduces their error."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(2000))
    disk = DiSK(torch.optim.SGD([p], lr=0.02), kappa, gamma)
    centre, raw, filtered = torch.ones(2000), 0.0, 0.0
    for _ in range(150):
        centre = centre + 0.01
        noise = torch.randn(2000)
        disk.zero_grad()
        disk.backward(lambda c=centre, w=noise: 0.5 * (p - c).square().sum() + (w * p).sum())
        with disk.iterate():
            truth = (p - centre).detach().clone()
        disk.step()
        raw += float(noise.square().mean())
        filtered += float((disk.state[p]["filtered"] - truth).square().mean())
    assert filtered < 0.35 * raw


def run_with(
    maker: Any, kappa: float, gamma: float | None, **settings: Any
) -> tuple[nn.Module, DiSK, dpkfc.PrivateRun]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    disk = DiSK(maker(model.parameters()), kappa, gamma)
    data = TensorDataset(torch.randn(40, 1, 6), torch.randint(2, (40,)))
    settings = {
        "noise_multiplier": 1.0,
        "delta": 1e-4,
        "steps": 10,
        "batch_size": 8,
        "seed": 1,
    } | settings
    settings = {"loss": dpkfc.losses.cross_entropy, **settings}
    return model, disk, dpkfc.make_private(model, disk, data, **settings)


def train(model: nn.Module, disk: DiSK, run: dpkfc.PrivateRun, steps: int = 10) -> None:
    for x, y in run.loader.take(steps):
        disk.backward(lambda x=x, y=y: F.cross_entropy(model(x), y))
        disk.step()
        disk.zero_grad()


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(
    "geometry", [None, dpkfc.KFC(probe=dpkfc.probes.PinkNoise(shape=(1, 6), classes=2), every=2)]
)
def test_two_gradients_are_combined_record_by_record_before_the_clip(
    geometry: Any, chunk: int | None
) -> None:
    """Against one autograd pass per record and point, without noise. The map is the run's."""
    kappa, gamma, clip = 0.6, 0.5, 0.05
    share = (1 - kappa) / (kappa * gamma)
    model, disk, run = run_with(
        lambda params: torch.optim.SGD(params, lr=0.5), kappa, gamma,
        noise_multiplier=0.0, clip=clip, geometry=geometry, max_physical_batch_size=chunk, steps=4,
    )  # fmt: skip
    names = [name for name, _ in model.named_parameters()]
    released: list[list[torch.Tensor]] = []

    def look(*_: Any) -> None:
        if model[0].weight.grad is not None:
            released.append([p.grad.clone() for p in model.parameters()])

    disk.register_step_pre_hook(look)
    sums: dict[int, list[list[torch.Tensor]]] = {}
    for x, y in run.loader:
        here = [p.detach().clone() for p in model.parameters()]
        ahead = [
            w + gamma * disk.state[p]["move"] if p in disk.state else w
            for p, w in zip(model.parameters(), here, strict=True)
        ]
        for row in range(len(x)):
            total = [torch.zeros_like(w) for w in here]
            for weights, part in ((here, 1 - share), (ahead, share)):
                twin = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
                twin.load_state_dict(dict(zip(names, weights, strict=True)))
                F.cross_entropy(twin(x[row : row + 1]), y[row : row + 1]).backward()
                total = [t + part * p.grad for t, p in zip(total, twin.parameters(), strict=True)]
            for slot in (("0.weight", "0.bias"), ("3.weight", "3.bias")):
                places = [names.index(name) for name in slot]
                mapped = run.geometry.map_of(slot).apply([total[i] for i in places])
                for i, part_ in zip(places, mapped, strict=True):
                    total[i] = part_
            norm = torch.sqrt(sum(t.square().sum() for t in total))
            sums.setdefault(run.steps, []).append(
                [t * min(1.0, clip / float(norm)) / 8 for t in total]
            )
        disk.backward(lambda x=x, y=y: F.cross_entropy(model(x), y))
        disk.step()
        disk.zero_grad()
    assert len(released) == 4
    for step, rows in sums.items():
        want = [torch.stack(parts).sum(0) for parts in zip(*rows, strict=True)]
        for got, expected in zip(released[step], want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-6)
    assert run.not_private.clipped > 0


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, None), (0.7, 1.0)])
def test_resuming_continues_bit_for_bit(
    maker: Any, kappa: float, gamma: float | None, tmp_path: Path
) -> None:
    model, disk, run = run_with(maker, kappa, gamma)
    train(model, disk, run, 10)
    first, first_disk, stopped = run_with(maker, kappa, gamma)
    train(first, first_disk, stopped, 4)
    stopped.save(tmp_path / "kept")
    again, second_disk, resumed = run_with(maker, kappa, gamma, seed=9)
    resumed.load(tmp_path / "kept")
    train(again, second_disk, resumed, 6)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_schedulers_reach_the_optimizer_inside_also_after_a_resume() -> None:
    model, disk, run = run_with(MAKERS["sgd"], 0.7, None)
    disk.load_state_dict(disk.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(disk, 1, 0.5)
    train(model, disk, run, 1)
    scheduler.step()
    assert disk.optimizer.param_groups[0]["lr"] == 0.05


def test_the_corrected_second_moment_knows_what_the_filter_leaves() -> None:
    """κ / (2-κ) of the variance of independent noise, once the filter has settled."""
    _, disk, run = run_with(MAKERS["adambc"], 0.5, None)
    noise = (run.plan.noise_scale / run.plan.batch_size) ** 2
    assert disk.param_groups[0]["noise_variance"] == pytest.approx(noise / 3)


@pytest.mark.parametrize(
    ("settings", "message"), [({"kappa": 0.0}, "kappa=0.0"), ({"gamma": -1.0}, "gamma=-1.0")]
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiSK(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), **settings)


def test_accumulating_passes_over_different_records_is_refused_before_anything_is_spent() -> None:
    """Two records in one row would be clipped as one and move the sum by more than the clip."""
    # "unchecked": the comparison with the loss would refuse it too
    settings = {"max_physical_batch_size": 2, "batch_size": 30, "loss": "unchecked"}
    model, _, run = run_with(MAKERS["sgd"], 0.7, None, **settings)
    batches = iter(run.loader)
    with run.accumulate_per_sample():
        for _ in range(2):
            x, y = next(batches)
            F.cross_entropy(model(x), y).backward()
    run.optimizer.step()
    with pytest.raises(dpkfc.PrivacyError, match="samples were drawn for this step but"):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            run.optimizer.step()
    assert run.charged == 0
