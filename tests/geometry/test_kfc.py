"""How KFC and its diagonal rival behave.

When they refresh, what they probe with, what they refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import Fixed, cosine_loss, written_out
from test_layers import ALL, BATCH, Case, loss_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app import models
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot, LowRankRoot
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.per_sample.capture import GradientCapture
from oracle import private_sum, reference_grads, reference_norms, reference_sum


def build(model: nn.Module, geometry: Any) -> Any:
    """Refresh a geometry by hand."""
    capture = GradientCapture(model)
    geometry.prepare(model, capture)
    geometry.refresh(model, capture, 0)
    capture.remove()
    return geometry


def train(
    model: nn.Module, geometry: Any, steps: int = 5, noise: float = 0.0, lr: float = 0.1
) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(30, 6), torch.randint(3, (30,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {
        "noise_multiplier": noise,
        "delta": 1e-3,
        "steps": steps,
        "batch_size": 10,
        "seed": 1,
    }
    private = dpkfc.make_private(
        model, optimizer, data, geometry=geometry, loss=dpkfc.losses.cross_entropy, **settings
    )
    grads = []
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    private.detach()
    return grads


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", [dpkfc.KFC, dpkfc.Diagonal])
def test_the_maps_are_frozen_between_refreshes(kind: Any) -> None:
    geometry = kind(dpkfc.probes.Tabular(6), every=3)
    steps = []
    refresh = geometry.refresh
    geometry.refresh = lambda model, capture, step, ranks: (
        steps.append(step),
        refresh(model, capture, step, ranks),
    )
    train(mlp(), geometry, steps=8)
    assert steps == [0, 3, 6]


def test_a_map_after_the_noise_is_applied_to_the_noisy_gradient() -> None:
    """Both runs draw the same noise; the second maps what the first releases."""
    options = {"every": 1, "damping": 0.1, "rank": None}
    plain = train(
        mlp(), dpkfc.KFC(dpkfc.probes.Tabular(6, std=2.0), **options), steps=1, noise=1.0
    )[0]
    geometry = dpkfc.KFC(dpkfc.probes.Tabular(6, std=2.0), post=0.5, **options)
    (after,) = train(mlp(), geometry, steps=1, noise=1.0)
    for names, rule in geometry.after_noise().items():
        assert isinstance(rule, KroneckerMap) and rule.g_root is None
        joined = torch.cat([plain[names[0]], plain[names[1]][:, None]], 1).double()
        want = joined @ written_out(rule.a_root, 1, joined.shape[1])[0]
        torch.testing.assert_close(after[names[0]].double(), want[:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after[names[1]].double(), want[:, -1], rtol=1e-4, atol=1e-5)
    assert len(geometry.after_noise()) == 2


def test_other_parameters_are_as_large_as_the_mapped_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    for factors in ("A", "AG"):
        geometry = build(
            model, dpkfc.KFC(Fixed(x, y), factors=factors, damping=0.01, stability=0.0, chunk=64)
        )
        grads = reference_grads(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y), 64)
        means = {}
        for names, rule in geometry._maps.items():
            squares = [
                sum(g.square().sum() for g in rule.apply([one[name] for name in names]))
                for one in grads
            ]
            means[names] = (
                float(torch.stack(squares).mean()),
                sum(grads[0][name].numel() for name in names),
            )
        mapped = [
            means[names] for names, rule in geometry._maps.items() if isinstance(rule, KroneckerMap)
        ]
        target = sum(m for m, _ in mapped) / sum(n for _, n in mapped)
        others = [
            means[names] for names, rule in geometry._maps.items() if isinstance(rule, DiagonalMap)
        ]
        assert len(others) == 2
        for mean, entries in others:
            assert mean / entries == pytest.approx(target, rel=1e-3)


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_adadps_equals_naively_scaled_gradients(case: Case, power: float) -> None:
    """``g_j (v_j + π v̄ + γ)^(-power/2)`` with v from single-sample gradients of the probes."""
    torch.manual_seed(1)
    model, inputs, probes = (
        case.build().double(),
        *(x.double() if x.is_floating_point() else x for x in (case.inputs(), case.inputs())),
    )
    geometry = dpkfc.Diagonal(
        Fixed(probes), damping=0.1, stability=1e-4, power=power, loss=cosine_loss, chunk=3
    )
    private_sum(model, loss_of, inputs, BATCH, 1.0, geometry=geometry)
    of_probes = reference_grads(model, loss_of, probes, BATCH)
    slots = list(geometry._maps)
    grads = reference_grads(model, loss_of, inputs, BATCH)
    for names in slots:
        moments = {
            name: torch.stack([one[name] for one in of_probes]).square().mean(0) for name in names
        }
        mean = torch.cat([m.flatten() for m in moments.values()]).mean()
        for one in grads:
            for name in names:
                one[name] = one[name] * (moments[name] + 0.1 * mean + 1e-4) ** (-power / 2)
    clip = float(reference_norms(grads).median())
    want = reference_sum(grads, clip)
    got = private_sum(model, loss_of, inputs, BATCH, clip, 3, geometry)
    scale = torch.stack([w.norm() for w in want.values()]).norm()
    for name in want:
        assert (got[name] - want[name]).norm() < 3e-6 * scale, name


def test_hybrids_take_each_factor_from_its_own_source() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    one, other = torch.randn(40, 5), torch.randn(40, 5) * 7
    hybrid = build(
        model, dpkfc.KFC(dpkfc.probes.Hybrid(A=Fixed(one), G=Fixed(other)), factors="AG", rank=None)
    )
    only_a = build(model, dpkfc.KFC(Fixed(one), factors="AG", rank=None))
    (mixed,), (alone,) = hybrid._spectra.values(), only_a._spectra.values()
    torch.testing.assert_close(mixed[0].values, alone[0].values)
    assert not torch.allclose(mixed[1].values, alone[1].values)


def test_the_representation_follows_the_rank() -> None:
    model = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 3))
    geometry = build(model, dpkfc.KFC(dpkfc.probes.Tabular(300), probes=64, rank=None))
    wide, narrow = (rule.a_root for rule in geometry._maps.values())
    assert isinstance(wide, LowRankRoot) and wide.rank == 64, (
        "64 vectors span 64 directions: exact at that rank"
    )
    assert isinstance(narrow, FullRoot)
    cut = build(model, dpkfc.KFC(dpkfc.probes.Tabular(300), probes=1000, rank=10))
    assert {rule.a_root.rank for rule in cut._maps.values()} == {10}


def test_grouped_convolutions_have_a_block_for_each_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(50, 4, 4, 4)
    geometry = build(model, dpkfc.KFC(Fixed(x), factors="AG", rank=None))
    spectrum, _ = geometry._spectra["0.weight", "0.bias"]
    for group in range(2):
        patches = F.unfold(x[:, 2 * group : 2 * group + 2], 3).transpose(1, 2).reshape(-1, 18)
        patches = torch.cat([patches, torch.ones(len(patches), 1)], 1).double()
        want = torch.linalg.eigvalsh(patches.T @ patches / len(patches)).flip(0)
        torch.testing.assert_close(spectrum.values[group], want, rtol=1e-4, atol=1e-6)


def test_a_layer_that_the_model_does_not_use_is_left_as_it_is() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    geometry = dpkfc.KFC(dpkfc.probes.Tabular(6))
    grads = train(Partly(), geometry, steps=2, noise=1.0)
    assert set(geometry._maps) == {("used.weight", "used.bias")}
    assert all(g["unused.weight"].abs().sum() > 0 for g in grads), "it still gets its noise"


def test_layers_that_are_frozen_or_unfrozen_later_are_followed() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    geometry = build(model, dpkfc.KFC(dpkfc.probes.Tabular(6)))
    assert ("0.weight",) in geometry._maps and ("2.weight", "2.bias") in geometry._maps
    model[0].bias.requires_grad_(True)
    assert ("0.weight", "0.bias") in build(model, geometry)._maps


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [("mse", 1), ("bce", 4), ("cross_entropy", 4), (lambda out, probes, g: out.square().sum(1), 2)],
)
def test_any_loss(loss: Any, outputs: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
    geometry = build(
        model, dpkfc.KFC(dpkfc.probes.Tabular(6), factors="AG", damping=0.1, loss=loss)
    )
    assert all(rule.g_root is not None for rule in geometry._maps.values())


def test_weights_that_have_diverged_are_named() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.raises(dpkfc.PrivacyError, match=r"2.weight.*diverged|diverged.*"):
        build(model, dpkfc.KFC(dpkfc.probes.Tabular(6)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every=0"),
        ({"probes": 2.5}, "probes=2.5"),
        ({"rank": True}, "rank=True"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"power": float("inf")}, "power=inf"),
        ({"damping": 0.0, "stability": 0.0}, "divided by zero"),
        ({"factors": "G"}, "factors='G'"),
        ({"approx": "both"}, "approx='both'"),
        ({"others": "all"}, "others='all'"),
        ({"probe": "pink"}, "probe=str"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        dpkfc.KFC(**options)
    if options.keys() <= {"every", "probes", "damping", "stability", "power"}:
        with pytest.raises(ValueError, match=complaint):
            dpkfc.Diagonal(**options)


def test_a_probe_of_the_wrong_shape_is_refused_before_anything_is_spent() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(30, 6), torch.randint(3, (30,)))
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 2, "batch_size": 10}
    settings["loss"] = dpkfc.losses.cross_entropy
    with pytest.raises(ValueError, match=r"probe.*\[.*5\]"):
        dpkfc.make_private(
            model, optimizer, data, geometry=dpkfc.KFC(dpkfc.probes.Tabular(5)), **settings
        )
    with pytest.raises(ValueError, match="classes"):
        dpkfc.make_private(
            model,
            optimizer,
            data,
            geometry=dpkfc.KFC(dpkfc.probes.Tabular(6, classes=4)),
            **settings,
        )
    nothing_left = train(model, dpkfc.Identity(), steps=1)
    assert nothing_left, "the refused attempts left no hook behind"


@pytest.mark.parametrize(
    "build_model", [models.paper_cnn, models.digits_cnn, models.groupnorm_resnet, models.tiny_vit]
)
def test_kfc_with_nothing_named_works_for_a_model_that_declares_its_inputs(
    build_model: Any,
) -> None:
    torch.manual_seed(0)
    model = build_model()
    geometry = build(model, dpkfc.KFC(probes=4))
    assert (
        isinstance(geometry.probe, dpkfc.probes.PinkNoise)
        and geometry.probe.shape == model.input_shape
    )
    covered = {name for names in geometry._maps for name in names}
    assert covered == {name for name, _ in model.named_parameters()}
