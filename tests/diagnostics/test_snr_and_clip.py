"""Signal, noise and clip statistics against per-sample gradients from torch.func."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import Fixed, mapped
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import dpkfc
from dpkfc.diagnostics import clip_effect, layer_snr
from dpkfc.per_sample.capture import GradientCapture

LAYERS = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias"), "4": ("4.weight", "4.bias")}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def batch(rows: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6) * torch.linspace(0.1, 3, rows)[:, None], torch.randint(3, (rows,))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """One gradient per sample, by torch.func."""

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, y)
    return [{name: g[i].double() for name, g in each.items()} for i in range(len(x))]


def geometry() -> dpkfc.KFC:
    return dpkfc.KFC(dpkfc.probes.Tabular(6, std=2.0), factors="AG", damping=0.1, probes=64)


def by_hand(name: str, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Mapped gradients: unchanged for DP-SGD, else under the maps of a separate geometry."""
    model = network()
    grads = gradients(model, x, y)
    if name == "DP-SGD":
        return grads
    built, capture = geometry(), GradientCapture(model)
    built.prepare(model, capture)
    built.refresh(model, capture, 0)
    capture.remove()
    return mapped(built, model, grads)


def flat(one: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.cat([one[name].flatten() for name in names])


def stacked(grads: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([flat(one, tuple(one)) for one in grads])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [0.7, "median", dpkfc.AutomaticClipping(0.5, gamma=0.1)], ids=str)
def test_snr_of_records(clip: Any, reduction: Any) -> None:
    x, y = batch()

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (len(x) if reduction == "sum" else 1)

    found = layer_snr(
        network(),
        (x, y),
        noise_multiplier=1.5,
        batch_size=64,
        clip=clip,
        geometry=geometry(),
        loss=scaled,
        loss_reduction=reduction,
    )
    assert list(found.geometries) == ["DP-SGD", "DP-KFC"]
    for name, rows in found.geometries.items():
        grads = by_hand(name, x, y)
        norms = stacked(grads).norm(dim=1)
        norm = (
            float(norms.median())
            if clip == "median"
            else clip.norm
            if isinstance(clip, dpkfc.AutomaticClipping)
            else clip
        )
        weights = (
            norm / (norms + 0.1)
            if isinstance(clip, dpkfc.AutomaticClipping)
            else (norm / norms).clamp(max=1)
        )
        assert found.clips[name] == pytest.approx(norm, rel=1e-4)
        for row, (layer, names) in zip(rows, LAYERS.items(), strict=True):
            mean = sum(w * flat(one, names) for w, one in zip(weights, grads, strict=True)) / len(x)
            assert row.layer == layer and row.parameters == len(mean)
            assert row.signal == pytest.approx(float(mean.norm()), rel=1e-4)
            assert row.noise == pytest.approx(1.5 * norm * math.sqrt(len(mean)) / 64, rel=1e-4)
        together = found.whole(name)
        assert together.signal**2 == pytest.approx(sum(row.signal**2 for row in rows))
        assert together.ratio == pytest.approx(together.signal / together.noise)


@pytest.mark.parametrize("clip", [1.0, "median"])
def test_clip_statistics_of_records(clip: Any) -> None:
    x, y = batch()
    found = clip_effect(network(), (x, y), clip=clip, geometry=geometry(), loss=loss)
    for name, effect in found.geometries.items():
        grads = stacked(by_hand(name, x, y))
        norms = grads.norm(dim=1)
        norm = float(norms.median()) if clip == "median" else clip
        weights = (norm / norms).clamp(max=1)
        plain, clipped = grads.mean(0), (weights[:, None] * grads).mean(0)
        wanted = torch.quantile(norms, torch.linspace(0, 1, 101, dtype=torch.float64))
        torch.testing.assert_close(
            torch.tensor(effect.percentiles, dtype=torch.float64), wanted, rtol=1e-4, atol=1e-6
        )
        assert effect.clipped == pytest.approx(
            float((norms > norm * (1 - 1e-5)).double().mean()), abs=0.051
        )
        assert effect.mean_weight == pytest.approx(float(weights.mean()), rel=1e-4)
        assert effect.cosine == pytest.approx(
            float(F.cosine_similarity(plain, clipped, dim=0)), rel=1e-4
        )
        assert effect.length == pytest.approx(float(clipped.norm() / plain.norm()), rel=1e-4)
        assert sum(effect.shares.values()) == pytest.approx(1, rel=1e-4) and effect.not_finite == 0
        begin = 0
        for layer, names in LAYERS.items():
            end = begin + sum(dict(network().named_parameters())[name].numel() for name in names)
            share = (grads[:, begin:end].square().sum(1) / norms.square()).mean()
            assert effect.shares[layer] == pytest.approx(float(share), rel=1e-4)
            begin = end


def test_probes_count_as_records_with_the_probe_loss() -> None:
    """In four passes for a probe and one for records: the sums are the same."""
    x, y = batch()
    options = {"clip": 0.5, "geometry": dpkfc.Identity(), "noise_multiplier": 1.0, "batch_size": 8}
    of_records = layer_snr(network(), (x, y), loss=loss, **options)
    of_probes = layer_snr(network(), Fixed(x, y), **options)
    assert list(of_probes.geometries) == [
        "DP-SGD"
    ] and of_probes.examples == of_records.examples == len(x)
    for one, other in zip(
        of_probes.geometries["DP-SGD"], of_records.geometries["DP-SGD"], strict=True
    ):
        assert one.signal == pytest.approx(other.signal, rel=1e-4)


def test_a_record_that_is_not_finite_counts_as_zero() -> None:
    x, y = batch()
    broken = x.clone()
    broken[3] = math.nan
    keep = torch.arange(len(x)) != 3
    options = {"clip": 0.5, "geometry": dpkfc.Identity(), "loss": loss}
    effect = clip_effect(network(), (broken, y), **options).geometries["DP-SGD"]
    others = clip_effect(network(), (x[keep], y[keep]), **options).geometries["DP-SGD"]
    assert effect.not_finite == 1 and others.not_finite == 0
    assert effect.cosine == pytest.approx(others.cosine) and effect.percentiles == pytest.approx(
        others.percentiles
    )
    with pytest.raises(ValueError, match="no example has a finite gradient"):
        clip_effect(network(), (broken * math.nan, y), **options)


def test_an_unused_layer_has_noise_and_no_signal() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    found = layer_snr(
        Spare(),
        batch(),
        clip=1.0,
        geometry=dpkfc.Identity(),
        noise_multiplier=1.0,
        batch_size=4,
        loss=loss,
    )
    used, spare = found.geometries["DP-SGD"]
    assert (
        spare.layer == "spare"
        and spare.signal == 0
        and spare.noise == pytest.approx(math.sqrt(6) / 4)
    )
    assert used.signal > 0


def test_shown_as_table_plot_and_json(tmp_path: Path) -> None:
    options = {
        "clip": "median",
        "geometry": {"KFC": geometry(), "AdaDPS": dpkfc.Diagonal(dpkfc.probes.Tabular(6))},
    }
    for found in (
        layer_snr(network(), batch(), noise_multiplier=1.0, batch_size=8, loss=loss, **options),
        clip_effect(network(), batch(), loss=loss, **options),
    ):
        text = str(found)
        assert "DP-SGD" in text and "AdaDPS" in text and "not private" in text
        assert json.loads(json.dumps(found.to_json()))["privacy"] == found.privacy
        found.plot(tmp_path / "it.png")
        assert (tmp_path / "it.png").stat().st_size > 10_000


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"geometry": nn.Linear(1, 1)}, "is Linear: give a geometry"),
    ({"loss": "cross_entropy"}, "is for probes"),
    ({"loss_reduction": "none"}, "loss_reduction='none'"),
    (
        {"loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")},
        "scalar tensor",
    ),
    ({"loss": lambda model, batch: torch.ones((), requires_grad=True)}, "did not run the model"),
    ({"probes": 0, "source": dpkfc.probes.Tabular(6), "loss": "cross_entropy"}, "probes=0"),
    ({"model": nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))}, "BatchNorm1d"),
    ({"model": "model"}, "must be a torch.nn.Module"),
    ({"vmap_modules": ["nowhere"]}, "vmap_modules names no module"),
    (
        {
            "loss": lambda model, batch: (
                loss(model, batch) + loss(model, [part[:2] for part in batch])
            )
        },
        "batches of",
    ),
]


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [(-1.0, ValueError, "clip=-1.0"), ("auto", TypeError, "clip='auto'")],
)
def test_wrong_clips_are_refused(clip: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        clip_effect(network(), batch(), clip=clip, geometry=dpkfc.Identity(), loss=loss)
    step = {"noise_multiplier": 1.0, "batch_size": 8, "geometry": dpkfc.Identity()}
    with pytest.raises(error, match=message):
        layer_snr(network(), batch(), clip=clip, loss=loss, **step)


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "model": network(),
        "source": batch(),
        "loss": loss,
        "clip": 1.0,
        "noise_multiplier": 1.0,
        "batch_size": 8,
        "geometry": dpkfc.Identity(),
    }
    given |= changed
    error = dpkfc.PrivacyError if message == "BatchNorm1d" else (TypeError, ValueError)
    with pytest.raises(error, match=message):
        layer_snr(given.pop("model"), given.pop("source"), **given)
