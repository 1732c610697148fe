"""Probes after a fixed transform: the same draws, and a geometry of the features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.public import Hybrid, Oracle
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.transformed import TransformedProbe

PINK = PinkNoise((1, 4, 4), classes=3, count=40)


def features(images: Any) -> Tensor:
    flat = images.flatten(1)
    return torch.cat([flat, flat.square()], 1)


def test_it_is_the_source_transformed() -> None:
    source, seen = (
        probe.draw(5, torch.Generator().manual_seed(1)).inputs
        for probe in (PINK, TransformedProbe(PINK, features))
    )
    assert torch.equal(features(source), seen)
    assert (TransformedProbe(PINK, features).count, TransformedProbe(PINK, features).name) == (
        40,
        "pink noise, transformed",
    )


def test_private_records_stay_private_through_a_transform() -> None:
    with pytest.warns(UserWarning, match="PRIVATE"):
        oracle = Oracle(torch.randn(10, 1, 4, 4))
    assert TransformedProbe(PINK, features).public and not TransformedProbe(oracle, features).public


def test_the_transform_keeps_no_graph() -> None:
    layer = nn.Linear(16, 2)
    probes = TransformedProbe(PINK, lambda images: layer(images.flatten(1))).draw(
        3, torch.Generator().manual_seed(0)
    )
    assert not probes.inputs.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "transform", "message"),
    [
        (Hybrid(PINK, PINK), features, "single probe"),
        ("pink", features, "single probe"),
        (PINK, None, "a function"),
    ],
)
def test_wrong_arguments(source: Any, transform: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TransformedProbe(source, transform)


def test_a_transform_returns_one_record_per_probe() -> None:
    with pytest.raises(ValueError, match="it must return one per probe"):
        TransformedProbe(PINK, lambda images: images.flatten()).draw(
            3, torch.Generator().manual_seed(0)
        )


def test_the_geometry_is_that_of_the_transformed_probes() -> None:
    """KFC on features: the same maps as with a probe that draws the features directly."""
    data = TensorDataset(torch.randn(50, 32), torch.randint(3, (50,)))

    class Direct(Tabular):
        def draw(self, count: int, generator: torch.Generator) -> Any:
            return TransformedProbe(PINK, features).draw(count, generator)

    found = []
    for probe in (TransformedProbe(PINK, features), Direct(32, count=40)):
        torch.manual_seed(0)
        model = nn.Linear(32, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = dpkfc.make_private(
            model, optimizer, data,
            noise_multiplier=1.0, delta=1e-3, steps=1, batch_size=10, seed=0,
            geometry=dpkfc.KFC(probe=probe), loss=dpkfc.losses.cross_entropy,
        )  # fmt: skip
        for x, y in run.loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(model.weight.detach().clone())
        run.detach()
    assert torch.equal(*found)
