"""Noise in the parameters: as predicted with SGD, worse than independent if rescaled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import dpkfc
from dpkfc.planning.choose_noise import evaluate
from experiments.common.options import ReproduceOptions
from experiments.rescaling import experiment as rescaling
from experiments.rescaling.experiment import NOISES, PIPELINES, RUN, error

PIPELINE = {pipeline.name: pipeline for pipeline in PIPELINES}


@pytest.mark.parametrize("name", [name for name in NOISES if name != "independent"])
def test_with_sgd_the_error_is_the_predicted_one(name: str) -> None:
    """The plan's prediction, from matrices, equals a simulation of stream and optimizer."""
    workload = dpkfc.noise.Workload.sgd(momentum=0.9)
    predicted = (
        evaluate(NOISES[name], workload, **RUN).rmse
        / evaluate(NOISES["independent"], workload, **RUN).rmse
    )
    sgd = PIPELINE["SGD with momentum"]
    measured = error(NOISES[name], sgd, 0) / error(NOISES["independent"], sgd, 0)
    assert measured == pytest.approx(predicted, rel=0.05)


def test_rescaling_every_step_undoes_the_cancellation() -> None:
    noise = NOISES["optimised, 16 bands"]
    rescaled = PIPELINE["SGD, coordinates rescaled every step"]
    assert error(noise, rescaled, 0) > 3 * error(NOISES["independent"], rescaled, 0)


def test_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rescaling,
        "error",
        lambda noise, pipeline, seed: 2.0 if noise == dpkfc.noise.Independent() else 1.0,
    )
    rescaling.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    assert json.loads((tmp_path / "rescaling.json").read_text())["ratios"]["Adam"][
        "buffered, 2 buffers"
    ] == [0.5]
    assert "| Adam | 0.50 to 0.50 |" in (tmp_path / "rescaling.md").read_text()
