"""One run: it is reproducible, spends its budget, and works with every kind of method."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from experiments.common import setting as experiment
from experiments.common.setting import StudySetting, fitted, split, train
from experiments.geometry import experiment as geometry

# One step on 60 records.
TINY: dict[str, Any] = {"batch_size": 8, "epochs": 0.1, "epsilon": 3.0, "validation": 20}
SETTING = StudySetting("mnist", "dp-sgd", 0.1, **TINY)


@pytest.fixture
def load(folder: Path) -> experiment.Load:
    return lambda dataset, scaling: experiment.scaled(
        experiment.DATASETS[dataset][1](folder), scaling
    )


def test_a_run_spends_its_budget_and_is_reproducible(load: experiment.Load) -> None:
    seen: list[tuple[int, int]] = []
    first = train(SETTING, load, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)] and first.steps == 1
    assert 0 < first.epsilon <= SETTING.epsilon
    assert 0 <= first.last <= 1 and first.average is not None and first.seconds > 0
    again = train(SETTING, load)
    assert replace(again, seconds=first.seconds) == first
    assert train(replace(SETTING, ema=0.0), load).average is None


def test_the_average_follows_the_iterates(
    load: experiment.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a decay of nearly 1 the average is the mean of the iterates so far."""
    weights: list[torch.Tensor] = []

    def remember(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return 0.0

    monkeypatch.setattr(experiment, "accuracy", remember)
    # The same noise for one step and for two.
    monkeypatch.setattr("dpkfc.planning.plan._calibrated", lambda *run: 1.0)
    for epochs in (0.1, 0.2):
        train(replace(SETTING, epochs=epochs, ema=1 - 1e-9), load)
    first, mean_of_one, second, mean_of_two = weights
    assert torch.equal(first, mean_of_one) and not torch.equal(first, second)
    torch.testing.assert_close(mean_of_two, (first + second) / 2)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0]), ("linear", [1, 0.5, 0])],
)
def test_schedules_start_at_the_given_rate(schedule: str, rates: list[float]) -> None:
    assert [experiment.SCHEDULES[schedule](done) for done in (0, 0.5, 1)] == pytest.approx(rates)


def test_tries_do_not_use_the_test_set() -> None:
    """The held-out records are the last of the training set, and are not trained on."""
    records = TensorDataset(torch.arange(10.0), torch.arange(10))
    test = TensorDataset(torch.arange(100.0, 104.0), torch.arange(4))
    kept, held_out = split((records, test), 3)
    assert kept.tensors[0].tolist() == list(range(7)) and held_out.tensors[0].tolist() == [7, 8, 9]
    assert split((records, test), 0) == (records, test)
    with pytest.raises(ValueError, match="has 10 records"):
        split((records, test), 10)


def test_the_key_covers_every_field() -> None:
    kfc = replace(SETTING, geometry={"probe": {"alpha": 2.0}})
    others = [
        kfc,
        replace(kfc, geometry={"probe": {"alpha": 1.0}}),
        replace(SETTING, seed=1),
        replace(SETTING, ema=0.0),
        replace(SETTING, noise={"name": "BandedToeplitz", "bands": 4}),
        replace(SETTING, noise={"name": "BandedToeplitz", "bands": 8}),
    ]
    assert len({setting.key for setting in [SETTING, *others]}) == 7
    assert StudySetting(**json.loads(json.dumps(asdict(kfc)))).key == kfc.key


BEST = geometry.grid("mnist")["dp-kfc (best)"][0]["geometry"]


@pytest.mark.parametrize("options", [experiment.PAPER, BEST], ids=["paper", "best"])
def test_kfc_runs_through_the_same_loop(load: experiment.Load, options: dict[str, Any]) -> None:
    result = train(replace(SETTING, geometry={**options, "probes": 16}), load)
    assert result.steps == 1 and 0 < result.epsilon <= SETTING.epsilon


@pytest.mark.parametrize("name", ["BandedSquareRoot", "BandedToeplitz"])
def test_correlated_noise_runs_through_the_same_loop(load: experiment.Load, name: str) -> None:
    result = train(replace(SETTING, epochs=0.5, noise={"name": name, "bands": 3}), load)
    assert result.steps == 4 and 0 < result.epsilon <= SETTING.epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "Adam"}},
        {"optimizer": {"name": "AdamW", "weight_decay": 0.1}},
        {"optimizer": {"name": "DPAdamBC"}},
        {"optimizer": {"name": "DiSK", "kappa": 0.7}},
        {"geometry": {"kind": "Diagonal", "probe": {"alpha": 2.0}, "probes": 16}},
        {"geometry": {"probe": {"public": "fashion-mnist"}, "probes": 16}},
    ],
    ids=str,
)
def test_other_optimizers_and_adadps_run_through_the_same_loop(
    load: experiment.Load, changes: dict[str, Any]
) -> None:
    setting = replace(SETTING, epochs=0.3, **changes)
    result = train(setting, load)
    assert 0 < result.epsilon <= SETTING.epsilon and result.average is not None
    assert setting.key != replace(SETTING, epochs=0.3).key


@pytest.mark.parametrize("model", ["mlp", "vit", "linear"])
def test_other_models_run_through_the_same_loop(load: experiment.Load, model: str) -> None:
    result = train(replace(SETTING, model=model), load)
    assert result.steps == 1 and result.epsilon == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(
    "probe",
    [{"sparse": {"nonzeros": 3}}, {"pool": "noise"}, {"public": "noise"}],
    ids=lambda probe: next(iter(probe)),
)
def test_probes_for_features(monkeypatch: pytest.MonkeyPatch, probe: dict[str, Any]) -> None:
    """Records are rows of features; probes are sparse rows, or rows of the same features."""
    generator = torch.Generator().manual_seed(0)
    rows, others = (
        TensorDataset(
            torch.rand(80, 12, generator=generator), torch.randint(2, (80,), generator=generator)
        )
        for _ in range(2)
    )
    monkeypatch.setitem(experiment.DATASETS, "rows", (("no", "yes"), lambda data_dir: (rows, rows)))
    setting = replace(
        SETTING, dataset="rows", model="linear", geometry={"probe": probe, "probes": 16}
    )
    found = train(
        setting, lambda dataset, scaling: (rows, rows) if dataset == "rows" else (others, others)
    )
    assert found.epsilon == pytest.approx(3.0, abs=0.01)
    narrow = TensorDataset(rows.tensors[0][:, :5], rows.tensors[1])
    if "sparse" not in probe:
        with pytest.raises(ValueError, match=r"\(5,\) are no probes for records of \(12,\)"):
            train(
                setting,
                lambda dataset, scaling: (rows, rows) if dataset == "rows" else (narrow, narrow),
            )


def test_the_geometry_of_the_private_records_is_not_private(load: experiment.Load) -> None:
    setting = replace(SETTING, geometry={"probe": {"oracle": "records"}, "probes": 16})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(setting, load).epsilon == float("inf")
    assert StudySetting(**json.loads(json.dumps(asdict(setting)))).key == setting.key


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (3, 32, 32), (1, 7, 14)])
@pytest.mark.parametrize("channels", [1, 3])
def test_public_images_get_the_shape_of_the_records(channels: int, shape: tuple[int, ...]) -> None:
    """A constant image stays constant; images that fit already are not copied."""
    images = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, channels, 28, 28)
    torch.testing.assert_close(
        fitted(images, shape), torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, *shape)
    )
    assert fitted(images, (channels, 28, 28)) is images
