"""Experiments use the seeds and the device of their options."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.workflow import demo
from experiments.clip_and_rate import experiment as clip_and_rate
from experiments.common import digits, setting, sources
from experiments.common.options import ReproduceOptions
from experiments.common.setting import StudySetting
from experiments.common.study import Study, finals, with_options
from experiments.noise_length import experiment as noise_length
from experiments.preset import experiment as preset

DEVICE = "cuda:7"
RECORDS = TensorDataset(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
TINY = StudySetting("mnist", "dp-sgd", 0.1, batch_size=8, epochs=0.2, epsilon=3.0, validation=0)


def test_a_study_uses_the_given_seeds(tmp_path: Path) -> None:
    grid = {"a": [{"lr": 1.0}]}
    study = Study(
        "",
        "",
        "",
        {"x": {"dataset": "mnist"}, "y": {"dataset": "mnist", "epsilon": 2.0}},
        lambda task: grid,
    )
    study = with_options(
        Study(**{**vars(study), "seeds_of": {"y": (5, 6)}}), ReproduceOptions(tmp_path, seed=100)
    )
    tried = {
        "setting": vars(StudySetting("mnist", "a", 1.0)),
        "result": {"last": 0.5, "average": None},
    }
    assert [setting.seed for setting in finals(study, [tried], "x", ["a"])] == [100, 101, 102]
    assert study.seeds_of == {"y": (100, 101)}


def observe_training() -> None:
    run = sources.TrainingRun("MLP", 0, 0.1, (1,), batch_size=8)
    sources.observe_training(
        run, sources.initial_model(run, DEVICE), RECORDS, dpkfc.Identity(), lambda model, plan: None
    )


def preset_run() -> None:
    features = TensorDataset(torch.rand(40, 5), RECORDS.tensors[1])
    probe: Any = dpkfc.probes.Tabular(5, classes=10)
    preset.train(
        preset.PresetRun("mnist", 3.0, 0, 0, 1.0, 2.0), (features, features), probe, device=DEVICE
    )


@pytest.mark.parametrize(
    ("module", "run"),
    [
        (
            setting,
            lambda: setting.train(TINY, lambda dataset, scaling: (RECORDS, RECORDS), device=DEVICE),
        ),
        (sources, observe_training),
        (preset, preset_run),
        (demo, lambda: demo.run_demo(3.0, 1e-5, 0.3, 0, Console(file=io.StringIO()), DEVICE)),
        (
            digits,
            lambda: clip_and_rate.train(
                clip_and_rate.GridRun("DP-SGD", 1.0, 0.1, 0, steps=1), DEVICE
            ),
        ),
        (
            digits,
            lambda: noise_length.train(
                noise_length.NoiseLengthRun("linear", 3.0, 2.0, 0, epochs=0.3), DEVICE
            ),
        ),
    ],
    ids=["setting", "sources", "preset", "demo", "clip and rate", "noise length"],
)
def test_model_and_records_go_to_the_device(
    module: Any, run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no such device: transfers to it are recorded, and not made."""
    models, records, to = [], [], nn.Module.to

    def model_to(model: nn.Module, *given: Any, **options: Any) -> nn.Module:
        if given == (DEVICE,):
            models.append(model)
            return model
        return to(model, *given, **options)

    def data_to(data: TensorDataset, device: object) -> TensorDataset:
        records.append((data, device))
        return data

    monkeypatch.setattr(nn.Module, "to", model_to)
    monkeypatch.setattr(module, "on_device", data_to)
    trained: list[TensorDataset] = []
    private = dpkfc.make_private
    monkeypatch.setattr(
        dpkfc,
        "make_private",
        lambda model, optimizer, data, **options: (
            trained.append(data) or private(model, optimizer, data, **options)
        ),
    )
    run()
    where = DEVICE if module in (setting, preset, demo) else next(models[0].parameters()).device
    assert len(models) == len(records) == len(trained)
    for (moved, device), used in zip(records, trained, strict=True):
        assert moved is used and device == where
