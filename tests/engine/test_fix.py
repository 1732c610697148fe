"""`fix` replaces what mixes records, keeps scale and shift, and shows what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.tables import TextTable


def test_batch_norm_becomes_group_norm_everywhere() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3),
        nn.BatchNorm2d(48),
        nn.Sequential(nn.BatchNorm2d(48, affine=False)),
        nn.InstanceNorm2d(48, track_running_stats=True),
    )
    nn.init.normal_(model[1].weight)
    weight = model[1].weight.detach().clone()
    shown: list[TextTable] = []
    fixed = dpkfc.fix(model, show=shown.append)
    assert fixed is model
    assert (
        isinstance(model[1], nn.GroupNorm)
        and model[1].num_groups == 16
        and torch.equal(model[1].weight, weight)
    )
    assert isinstance(model[2][0], nn.GroupNorm) and not model[2][0].affine
    assert model[3].running_mean is None
    for word in ("BatchNorm2d(48", "GroupNorm(16, 48", "2.0"):
        assert word in str(shown[0])
    data = TensorDataset(torch.randn(6, 3, 5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = dpkfc.make_private(
        model, optimizer, data, noise_multiplier=1.0, delta=1e-3, steps=1, batch_size=6,
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )  # fmt: skip
    for (x,) in run.loader:
        model(x).square().mean().backward()
        optimizer.step()


def test_a_model_that_is_a_batch_norm_is_replaced() -> None:
    assert isinstance(dpkfc.fix(nn.BatchNorm1d(7), show=lambda table: None), nn.GroupNorm)


def test_nothing_to_fix_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    dpkfc.fix(nn.Linear(3, 3))
    assert "nothing to replace" in capsys.readouterr().out


def test_fixing_after_building_the_optimizer_is_caught() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dpkfc.fix(model, show=lambda table: None)
    with pytest.raises(ValueError, match="missing from the optimizer"):
        dpkfc.make_private(
            model,
            optimizer,
            TensorDataset(torch.randn(6, 3, 5)),
            noise_multiplier=1.0,
            delta=1e-3,
            steps=1,
            batch_size=6,
            loss=lambda model, batch: model(batch[0]).square().mean(),
        )
