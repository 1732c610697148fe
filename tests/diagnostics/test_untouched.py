"""Diagnostics change neither the model nor a private run, and say whether they are public."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.diagnostics import (
    clip_effect,
    factor_alignment,
    hessian_density,
    kronecker_spectrum,
    layer_snr,
)


class Network(nn.Module):
    """Dropout, a buffer changed by every forward, modes, a frozen layer, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(1, 8))
        self.drop, self.quiet = nn.Dropout(0.5), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.frozen.requires_grad_(False)
        self.quiet.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.drop(torch.tanh(self.first(x) + self.shift))
        return self.last(self.quiet(torch.tanh(self.frozen(x))))


class Scale(nn.Module):
    """A module without a fast path: it runs under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class DiagonalMap(nn.Module):
    """A layer, a bare parameter and a module under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(6, 8), Scale(), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.scale(self.first(x) + self.shift)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)


GEOMETRY = dpkfc.KFC(dpkfc.probes.Tabular(6, count=16))
STEP = {"clip": "median", "geometry": GEOMETRY}
NOISE = {"noise_multiplier": 1.0, "batch_size": 8}
PROBE = dpkfc.probes.Tabular(6, count=16)
CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "snr of records": lambda model: layer_snr(model, batch(), loss=loss, **NOISE, **STEP),
    "snr of probes": lambda model: layer_snr(model, PROBE, **NOISE, **STEP),
    "clip": lambda model: clip_effect(model, batch(), loss=loss, **STEP),
    "spectrum": lambda model: kronecker_spectrum(model, PROBE),
    "alignment": lambda model: factor_alignment(
        model, PROBE, {"wide": dpkfc.probes.Tabular(6, std=3.0, count=16)}
    ),
    "hessian": lambda model: hessian_density(model, batch(), loss=loss, steps=3, vectors=1),
    "ggn of probes": lambda model: hessian_density(model, PROBE, matrix="ggn", steps=3, vectors=1),
}


def everything(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: x.clone() for name, x in model.state_dict().items()},
        "grads": {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        },
        "wanted": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                "forward" in vars(module),
            )
            for name, module in model.named_modules()
        },
        "generator": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_model_is_untouched_and_the_result_repeatable(call: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model = Network()
    loss(model, batch()).backward()
    before = everything(model)
    first = call(model)
    assert same(before, everything(model))
    torch.rand(1)  # the global generator has no part in it
    assert call(model).to_json() == first.to_json()
    assert GEOMETRY._maps == {} and GEOMETRY.spectra == {}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_private_run_does_not_notice(call: Callable[[nn.Module], Any]) -> None:
    """Called between forward, backward and step: the run releases bit-identical gradients."""

    def gradients(look: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = DiagonalMap()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(30, 6), torch.randint(3, (30,)))
        run = dpkfc.make_private(
            model,
            optimizer,
            data,
            steps=2,
            delta=1e-3,
            seed=1,
            geometry=dpkfc.KFC(dpkfc.probes.Tabular(6, count=16), every=1),
            loss=dpkfc.losses.cross_entropy,
            **NOISE,
        )
        grads = []
        for x, y in run.loader:
            value = F.cross_entropy(model(x), y)
            look(model)
            value.backward()
            look(model)
            optimizer.step()
            grads += [p.grad.clone() for p in model.parameters()]
        assert len(grads) == 12
        return grads

    assert all(map(torch.equal, gradients(lambda model: None), gradients(call)))


def test_results_say_whether_they_are_private() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = dpkfc.probes.Oracle(x, labels=True, count=12)
    public = "public: probes and weights only"
    records = "not private: computed from the given records"
    private = "not private: computed from the private records of an Oracle"
    step, lanczos = {"clip": 1.0, "geometry": dpkfc.KFC(PROBE)}, {"steps": 2, "vectors": 1}
    seen = {"clip": 1.0, "geometry": dpkfc.KFC(oracle)}
    assert layer_snr(model, PROBE, **NOISE, **step).privacy == public
    assert layer_snr(model, x, loss=loss, **NOISE, **step).privacy == records
    assert layer_snr(model, oracle, **NOISE, **step).privacy == private
    assert layer_snr(model, PROBE, **NOISE, **seen).privacy == private
    assert clip_effect(model, PROBE, **step).privacy == public
    assert clip_effect(model, x, loss=loss, **step).privacy == records
    assert clip_effect(model, PROBE, **seen).privacy == private
    assert kronecker_spectrum(model, PROBE).privacy == public
    both = kronecker_spectrum(model, {"oracle": oracle, "synthetic": PROBE})
    assert both.privacy == private and both.private_sources == ("oracle",)
    assert factor_alignment(model, PROBE, PROBE).privacy == public
    assert factor_alignment(model, oracle, PROBE).privacy == private
    assert factor_alignment(model, PROBE, oracle).privacy == private
    assert hessian_density(model, PROBE, **lanczos).privacy == public
    assert hessian_density(model, x, loss=loss, **lanczos).privacy == records
    assert hessian_density(model, {"a": oracle, "b": PROBE}, **lanczos).private_sources == ("a",)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(6, 3)
    model.kept = model.weight * 2  # a tensor with a graph
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="Linear cannot be copied"):
        kronecker_spectrum(model, PROBE)
