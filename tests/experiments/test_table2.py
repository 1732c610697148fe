"""Table 2: arms are tuned alike, missing data is skipped, the measured order is reported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiments.common import study as experiment
from experiments.common.differences import PairedDifference
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Load, StudyResult, StudySetting
from experiments.common.study import Follow, Row, finals, reproduce_study, tries
from experiments.table2.experiment import ORACLE, PUBLIC, STUDY, SYNTHETIC, paper_order, report

TASK = "pneumonia <- mnist"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[StudySetting]:
    """Record the settings that are trained, if their data is there."""
    calls: list[StudySetting] = []

    def fake(setting: StudySetting, load: Load, on_step: Any, device: str) -> StudyResult:
        load(setting.dataset, setting.scaling)
        calls.append(setting)
        return StudyResult(setting.lr, None, 1.0, 1.0, 1, 1.0)

    monkeypatch.setattr(experiment, "train", fake)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write PneumoniaMNIST only."""
    rng = np.random.default_rng(0)
    parts = {
        f"{part}_{what}": rng.integers(0, top, (20, *shape)).astype(np.uint8)
        for part in ("train", "test")
        for what, top, shape in (("images", 256, (28, 28)), ("labels", 2, (1,)))
    }
    np.savez(tmp_path / "pneumoniamnist.npz", **parts)
    return tmp_path


def rows_of(outcomes: Mapping[str, float]) -> list[Row]:
    def row(setting: StudySetting, accuracy: float) -> Row:
        result = StudyResult(accuracy, None, 1.0, 0.8, 10, 1.0)
        return json.loads(
            json.dumps({"key": setting.key, "setting": asdict(setting), "result": asdict(result)})
        )

    rows = [row(setting, 0.5) for setting in tries(STUDY, TASK, outcomes)]
    return rows + [
        row(s, outcomes[s.arm] + 0.01 * s.seed) for s in finals(STUDY, rows, TASK, outcomes)
    ]


@pytest.mark.parametrize("task", STUDY.tasks)
def test_every_arm_has_three_tries_and_differs_only_in_its_geometry(task: str) -> None:
    settings = tries(STUDY, task, STUDY.arms)
    assert len({setting.key for setting in settings}) == 3 * len(STUDY.arms) == 18
    for arm in STUDY.arms:
        own = [setting for setting in settings if setting.arm == arm]
        low, middle, high = sorted(setting.lr for setting in own)
        assert low < own[0].lr == middle < high
        geometry = own[0].geometry or {}
        assert ("public" in geometry.get("probe", {})) == ("public" in arm)
        assert ("oracle" in geometry.get("probe", {})) == (arm == ORACLE)
        assert (geometry.get("kind") == "Diagonal") == arm.startswith("adadps")
        assert bool(geometry) == (arm != "dp-sgd")
    for setting in settings:
        assert (setting.epsilon, setting.delta, setting.batch_size, setting.momentum) == (
            1.0,
            1e-5,
            256,
            0.9,
        )
        assert setting.epochs == {"pneumonia <- mnist": 10, "cifar-10 <- mnist": 2}.get(task, 5)


def test_the_figures_of_the_paper_are_included() -> None:
    assert STUDY.published["path <- mnist", SYNTHETIC] - STUDY.published[
        "path <- mnist", PUBLIC
    ] == pytest.approx(4.8)
    assert len(STUDY.published) == 12


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 1.0, "holds, clearly"),
        (-0.5, 0.7, "holds, within chance"),
        (-0.9, 0.1, "is reversed, within chance"),
        (-1.0, -0.1, "is reversed, clearly"),
    ],
)
def test_the_measured_order_is_reported(low: float, high: float, expected: str) -> None:
    assert paper_order(PairedDifference((low + high) / 2, low, high, 3)) == expected


@pytest.mark.parametrize(
    ("synthetic", "expected"), [(0.8, "holds, clearly"), (0.6, "is reversed, clearly")]
)
def test_the_report_names_tasks_that_were_not_run(
    tmp_path: Path, synthetic: float, expected: str
) -> None:
    rows = rows_of({PUBLIC: 0.7, SYNTHETIC: synthetic})
    report(STUDY, rows, tmp_path, Console(quiet=True))
    text = (tmp_path / "table2.md").read_text()
    gap = f"{100 * (synthetic - 0.7):+.2f}"
    assert (
        f"| {TASK} | {gap} ({gap} to {gap}, 5 seeds) | too few runs | too few runs | {expected} |"
        in text
    )
    assert "Not run: fashion <- mnist, path <- mnist, cifar-10 <- mnist." in text


def test_a_task_without_its_data_is_skipped(folder: Path, trained: list[StudySetting]) -> None:
    shown = StringIO()
    reproduce_study(
        STUDY, ReproduceOptions(folder / "out", Console(file=shown, width=200), False, folder)
    )
    assert {setting.dataset for setting in trained} == {"pneumoniamnist"}
    assert len(trained) == 6 * (3 + 5), "five seeds, because it is small"
    assert (
        "path <- mnist is skipped" in shown.getvalue()
        and "pathmnist.npz is missing" in shown.getvalue()
    )
    assert TASK in (folder / "out" / "accuracy.md").read_text()
    assert (
        "Not run: fashion <- mnist, path <- mnist, cifar-10 <- mnist."
        in (folder / "out" / "table2.md").read_text()
    )


def test_a_quick_run_has_one_seed(folder: Path, trained: list[StudySetting]) -> None:
    reproduce_study(STUDY, ReproduceOptions(folder / "out", Console(quiet=True), True, folder))
    assert len(trained) == 6 * 2 and {setting.epochs for setting in trained} == {0.1}


def test_if_all_data_is_missing_that_is_an_error(
    tmp_path: Path, trained: list[StudySetting]
) -> None:
    with pytest.raises(FileNotFoundError, match="fashion-mnist"):
        reproduce_study(
            STUDY, ReproduceOptions(tmp_path / "out", Console(quiet=True), False, tmp_path)
        )


def test_a_task_that_follows_one_without_data_is_skipped_too(
    folder: Path, trained: list[StudySetting]
) -> None:
    tasks = {**STUDY.tasks, "follower": {**STUDY.tasks["path <- mnist"], "epsilon": 8.0}}
    follows = {"follower": Follow("path <- mnist", lambda arm: 1.0)}
    shown = StringIO()
    study = replace(STUDY, tasks=tasks, follows=follows, report=None)
    reproduce_study(
        study, ReproduceOptions(folder / "out", Console(file=shown, width=200), False, folder)
    )
    assert "follower is skipped" in shown.getvalue() and len(trained) == 6 * (3 + 5)
