"""Probes differ in one property; the effects are computed from the runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dpkfc
from dpkfc.app.readers.idx import Scaling
from experiments.common.setting import StudyResult, StudySetting
from experiments.common.study import Row, finals, tries
from experiments.probe_spectrum.experiment import KINDS, QUESTIONS, STUDY, answers, probe, report


def drawn(kind: str, alpha: float, scaling: Scaling, channels: int = 3) -> torch.Tensor:
    noise = dpkfc.probes.PinkNoise(
        shape=(channels, 16, 16), classes=10, **probe(kind, alpha, scaling)
    )
    inputs = noise.draw(256, torch.Generator().manual_seed(0)).inputs
    assert isinstance(inputs, torch.Tensor)
    return inputs


@pytest.mark.parametrize("scaling", ["unit", "centred"])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_kinds_have_equal_size_and_differ_in_brightness(scaling: Scaling, alpha: float) -> None:
    images = {kind: drawn(kind, alpha, scaling) for kind in ("dark", "bright", "varying", "colour")}
    brightness = {kind: x.mean((1, 2, 3)) for kind, x in images.items()}
    sizes = {kind: float(x.square().mean().sqrt()) for kind, x in images.items()}
    assert all(size == pytest.approx(sizes["bright"], rel=1e-3) for size in sizes.values())
    mean = 0.3 if scaling == "unit" else -0.4
    for kind, expected in (("dark", 0.0), ("bright", mean), ("colour", mean)):
        torch.testing.assert_close(
            brightness[kind], torch.full((256,), expected), atol=1e-5, rtol=0
        )
    assert brightness["varying"].std() > (0.1 if alpha else 0.01) * sizes["bright"]


def test_only_colour_has_correlated_channels() -> None:
    for kind, expected in (("bright", 0.0), ("colour", 0.9)):
        x = drawn(kind, 0.0, "centred").transpose(0, 1).flatten(1)
        assert float(torch.corrcoef(x)[0, 1]) == pytest.approx(expected, abs=0.03)


def test_arms_of_a_task_differ_only_in_the_probe() -> None:
    for task, kinds in KINDS.items():
        settings = tries(STUDY, task, STUDY.arms)
        assert len(settings) == 2 + sum(map(len, kinds.values()))
        assert len({setting.lr for setting in settings}) == 1
        assert len({json.dumps({**s.geometry, "probe": 0}) for s in settings if s.geometry}) == 1
        assert all(setting.arm in STUDY.arms for setting in settings)
    assert "colour 2" not in STUDY.grid("mnist mlp")


def test_every_question_can_be_answered_somewhere() -> None:
    for _, own, other in QUESTIONS:
        assert any({own, other} <= set(STUDY.grid(task)) for task in STUDY.tasks)


def rows_of(task: str) -> list[Row]:
    """Make runs of accuracy .8, plus .04 if pink, .02 if bright, .01 with correlated channels.

    Later seeds have less.
    """

    def row(setting: StudySetting, accuracy: float) -> Row:
        result = StudyResult(accuracy, None, 1.0, 0.8, 10, 1.0)
        return json.loads(
            json.dumps({"key": setting.key, "setting": asdict(setting), "result": asdict(result)})
        )

    def outcome(arm: str) -> float:
        kind, _, alpha = arm.partition(" ")
        effect = {"bright": 0.02, "colour": 0.03, "oracle": 0.1, "dp-sgd": -0.1}.get(kind, 0.0)
        return 0.8 + effect + (0.02 * min(float(alpha), 2.0) if alpha else 0.0)

    arms = STUDY.grid(task)
    rows = [row(setting, 0.5) for setting in tries(STUDY, task, arms)]
    return rows + [
        row(s, outcome(s.arm) - 0.01 * s.seed) for s in finals(STUDY, rows, task, STUDY.arms)
    ]


def test_the_effects_are_computed(tmp_path: Path) -> None:
    rows = rows_of("mnist mlp") + rows_of("cifar-10 cnn")
    found = {name: difference.mean for name, difference in answers(STUDY, rows).items()}
    assert found["mnist mlp", "pink, not white"] == pytest.approx(4)
    assert found["mnist mlp", "brightness"] == pytest.approx(2)
    assert found["mnist mlp", "varying brightness"] == pytest.approx(0)
    assert found["mnist mlp", "private records"] == pytest.approx(4)
    assert found["cifar-10 cnn", "channels alike"] == pytest.approx(1)
    assert ("mnist mlp", "channels alike") not in found
    report(STUDY, rows, tmp_path, Console(quiet=True))
    text = (tmp_path / "probe-spectrum.md").read_text()
    assert "| mnist mlp | dark | 78.00 ± 1.00 (3) | 79.00 ± 1.00 (3) | 80.00 ± 1.00 (3) |" in text
    assert "- pink, not white: +4.0 to +4.0 points, material on mnist mlp, cifar-10 cnn" in text
    assert "- varying brightness: +0.0 to +0.0 points, nowhere material" in text
    assert "fashion-mnist" not in text
    assert (tmp_path / "probe-spectrum.png").exists() == bool(find_spec("matplotlib"))
