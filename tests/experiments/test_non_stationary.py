"""Changed images have the stated properties; the finding says where geometry breaks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import TensorDataset

import dpkfc
from experiments.common import setting as experiment
from experiments.common.data.changes import CHANGES
from experiments.common.setting import StudyResult, StudySetting, changed, train
from experiments.common.study import Row, finals, tries
from experiments.non_stationary.experiment import GEOMETRIES, INPUTS, STUDY, report

IMAGES = torch.rand(6, 2, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_one_linear_map_whatever_the_batch(name: str) -> None:
    change = CHANGES[name]
    whole = change(IMAGES)
    assert whole.shape == IMAGES.shape and whole.dtype == IMAGES.dtype
    torch.testing.assert_close(torch.cat([change(IMAGES[:1]), change(IMAGES[1:])]), whole)
    torch.testing.assert_close(
        change(2 * IMAGES[:3] - IMAGES[3:]), 2 * whole[:3] - whole[3:], atol=1e-4, rtol=1e-4
    )


def test_permuted_pixels_have_the_same_values() -> None:
    numbered = torch.arange(784.0).view(1, 1, 28, 28)
    order = CHANGES["permuted"](numbered).flatten()
    assert order.sort().values.tolist() == list(range(784))
    assert (order[1:] - order[:-1]).abs().eq(1).sum() < 20, "few neighbours are left"


def test_cornered_images_are_zero_elsewhere() -> None:
    found = CHANGES["cornered"](torch.ones(1, 1, 28, 28))[0, 0]
    torch.testing.assert_close(found[:14, :14], torch.ones(14, 14))
    assert not found[14:].any() and not found[:, 14:].any()


def test_scales_have_a_range_of_a_hundred() -> None:
    ones = torch.ones(1, 1, 28, 28)
    ramp, mask = CHANGES["ramped"](ones)[0, 0], CHANGES["scaled at random"](ones)[0, 0]
    np.testing.assert_allclose(ramp.numpy(), np.tile(np.geomspace(10, 0.1, 28), (28, 1)), rtol=1e-5)
    assert 0.1 <= mask.min() < 0.11 and 9 < mask.max() <= 10
    assert float(mask.log10().mean()) == pytest.approx(0, abs=0.05)


def test_blue_images_have_the_inverse_of_a_natural_spectrum() -> None:
    """Pink noise of power 1/f² is mapped to power f²."""
    pink = dpkfc.probes.PinkNoise(shape=(1, 28, 28), classes=10, alpha=2.0)
    inputs = pink.draw(512, torch.Generator().manual_seed(0)).inputs
    assert isinstance(inputs, torch.Tensor)
    power = (np.abs(np.fft.fft2(CHANGES["blue"](inputs)[:, 0].numpy())) ** 2).mean(0)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(28), np.fft.fftfreq(28)))
    here = frequency > 0
    slope = np.polyfit(np.log(frequency[here]), np.log(power[here]), 1)[0]
    assert slope == pytest.approx(2, abs=0.05)
    assert power[0, 0] == pytest.approx(0, abs=1e-6)


def test_a_run_trains_and_measures_on_changed_images(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(60) % 10
    images = torch.rand(60, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, labels), TensorDataset(images[:20], labels[:20])
    parts = changed(data, "blue")
    for part, original in zip(parts, data, strict=True):
        torch.testing.assert_close(part.tensors[0], CHANGES["blue"](original.tensors[0]))
        assert torch.equal(part.tensors[1], original.tensors[1])
    assert changed(data, None) is data
    setting = StudySetting(
        "mnist", "x", 0.5, epochs=0.5, batch_size=10, epsilon=8.0, validation=0, model="linear"
    )
    measured: list[torch.Tensor] = []
    monkeypatch.setattr(experiment, "accuracy", lambda model, x, y: measured.append(x) or 0.0)
    train(replace(setting, change="blue", ema=0.0), lambda dataset, scaling: data)
    torch.testing.assert_close(measured[0], CHANGES["blue"](images[:20]))
    assert replace(setting, change="blue").key != setting.key


def test_all_changes_are_used_and_arms_differ_only_in_the_geometry() -> None:
    assert {kind for kinds in INPUTS.values() for kind in kinds} == {"natural", *CHANGES}
    for task in STUDY.tasks:
        settings = tries(STUDY, task, STUDY.arms)
        assert len({replace(s, arm="", lr=0.0, geometry=None).key for s in settings}) == 1
        assert {s.change or "natural" for s in settings} == {task.rsplit(" ", 1)[0]}
        assert len({sum(s.arm == arm for s in settings) for arm in GEOMETRIES}) == 1
        assert {(s.model or "cnn") for s in settings} == {task.rsplit(" ", 1)[1]}


def rows_of(task: str, outcomes: Mapping[str, float]) -> list[Row]:
    def row(setting: StudySetting, accuracy: float) -> Row:
        result = StudyResult(accuracy, None, 1.0, 0.8, 10, 1.0)
        return json.loads(
            json.dumps({"key": setting.key, "setting": asdict(setting), "result": asdict(result)})
        )

    rows = [row(setting, 0.5) for setting in tries(STUDY, task, outcomes)]
    return rows + [
        row(s, outcomes[s.arm] + 0.01 * s.seed) for s in finals(STUDY, rows, task, outcomes)
    ]


def test_the_finding_says_where_geometry_breaks(tmp_path: Path) -> None:
    rows = rows_of(
        "natural mlp", {"dp-sgd": 0.7, "synthetic": 0.75, "white noise": 0.7, "oracle": 0.75}
    )
    rows += rows_of(
        "blue mlp", {"dp-sgd": 0.7, "synthetic": 0.65, "white noise": 0.7, "oracle": 0.8}
    )
    report(STUDY, rows, tmp_path, Console(quiet=True))
    text = (tmp_path / "non-stationary.md").read_text()
    assert "loses most to the oracle on blue mlp: -15.00 (-15.00 to -15.00, 3 seeds)" in text
    assert "Materially worse than the oracle: blue mlp." in text
    assert "Materially worse than DP-SGD: blue mlp." in text
    assert "Materially better than DP-SGD: natural mlp." in text
    low, high = "72.00 ± 1.00 (3)", "77.00 ± 1.00 (3)"
    assert f"| natural mlp | {low} | {high} | {low} | {high} |" in text
    assert "permuted" not in text
    assert (tmp_path / "non-stationary.png").exists() == bool(find_spec("matplotlib"))


def test_too_few_runs_give_no_finding(tmp_path: Path) -> None:
    report(STUDY, rows_of("blue mlp", {"dp-sgd": 0.7}), tmp_path, Console(quiet=True))
    text = (tmp_path / "non-stationary.md").read_text()
    assert "Too few runs" in text and "| blue mlp | too few runs |  | too few runs |  |" in text
