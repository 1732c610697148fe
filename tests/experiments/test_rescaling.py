"""Noise on its way to the parameters: as predicted with SGD, worse than independent once it is rescaled at random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.common.options import ReproduceOptions
from experiments.rescaling.experiment import NOISES, RUN, WAYS, error
from experiments.rescaling.experiment import experiment as rescaling
from rich.console import Console

import dpkfc
from dpkfc.planning.choose_noise import evaluate

WAY = {way[0]: way for way in WAYS}


@pytest.mark.parametrize("name", [name for name in NOISES if name != "independent"])
def test_with_sgd_the_error_is_the_predicted_one(name: str) -> None:
    """The plan's prediction, from matrices, and a simulation of the stream and the optimizer."""
    workload = dpkfc.noise.Workload.sgd(momentum=0.9)
    predicted = (
        evaluate(NOISES[name], workload, **RUN).rmse
        / evaluate(NOISES["independent"], workload, **RUN).rmse
    )
    way = WAY["SGD with momentum"]
    measured = error(NOISES[name], way, 0) / error(NOISES["independent"], way, 0)
    assert measured == pytest.approx(predicted, rel=0.05)


def test_rescaling_every_step_undoes_the_cancellation() -> None:
    noise, way = NOISES["optimised, 16 bands"], WAY["SGD, coordinates rescaled every step"]
    assert error(noise, way, 0) > 3 * error(NOISES["independent"], way, 0)


def test_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rescaling,
        "error",
        lambda noise, way, seed: 2.0 if noise == dpkfc.noise.Independent() else 1.0,
    )
    rescaling.run(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    assert json.loads((tmp_path / "rescaling.json").read_text())["ratios"]["Adam"][
        "buffered, 2 buffers"
    ] == [0.5]
    assert "| Adam | 0.50 to 0.50 |" in (tmp_path / "rescaling.md").read_text()
