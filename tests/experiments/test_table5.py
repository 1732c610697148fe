"""Table 5: arms of a task are tuned alike, MNIST is shared with Table 1, the report is right."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from experiments.common import study
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Load, StudyResult, StudySetting
from experiments.common.study import tries
from experiments.table1 import experiment as table1
from experiments.table5 import experiment as table5
from experiments.table5.experiment import SEEDS, STUDY, TASKS, adopt, task_name, without_privacy
from experiments.table5.report import Panel, Point, panel_markdown, plot_panels


def row(setting: StudySetting, accuracy: float) -> study.Row:
    return {
        "key": setting.key,
        "setting": asdict(setting),
        "result": asdict(StudyResult(accuracy, None, 1.0, 1.0, 1, 1.0)),
    }


def write(file: Path, rows: list[study.Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[StudySetting]:
    """Record the settings that are trained; test accuracy is epsilon / 20 + seed / 1000."""
    calls: list[StudySetting] = []

    def fake(setting: StudySetting, load: Load, on_step: Any, device: str) -> StudyResult:
        calls.append(setting)
        accuracy = (
            setting.lr / 100 if setting.validation else setting.epsilon / 20 + setting.seed / 1000
        )
        return StudyResult(accuracy, None, setting.epsilon, 1.0, 1, 1.0)

    monkeypatch.setattr(study, "train", fake)
    monkeypatch.setattr(table5, "noise_multiplier", lambda task, epsilon: 1 / epsilon)
    monkeypatch.setattr(
        table5,
        "without_privacy",
        lambda task, data, device: {"lr": 0.1, "validation": 0.9, "tests": [0.9, 0.92]},
    )
    known = {task.common["dataset"] for task in TASKS.values()}
    monkeypatch.setattr(
        table5, "DATASETS", {dataset: ((), lambda data_dir: None) for dataset in known}
    )
    return calls


@pytest.mark.parametrize("task", TASKS)
def test_arms_of_a_task_are_tuned_alike(task: str) -> None:
    settings = tries(STUDY, task_name(task, 1.0), STUDY.arms)
    arms = TASKS[task].arms
    assert {setting.arm for setting in settings} == set(arms)
    assert all(
        len([s for s in settings if s.arm == arm]) == len(settings) // len(arms) >= 3
        for arm in arms
    )
    for field in (
        "dataset",
        "model",
        "epochs",
        "batch_size",
        "epsilon",
        "delta",
        "ema",
        "label_smoothing",
        "schedule",
    ):
        assert len({getattr(setting, field) for setting in settings}) == 1, field
    for setting in settings:
        assert ("kfc" in setting.arm) == (setting.geometry is not None)
        assert ("public" in setting.arm) == ("public" in (setting.geometry or {}).get("probe", {}))
        assert ("adam" in setting.arm) == (setting.optimizer is not None)


@pytest.mark.parametrize("task", TASKS)
def test_every_epsilon_of_the_paper_is_there(task: str) -> None:
    wanted = (0.5, 1, 1.5, 2.8, 8) if task == "imdb" else (0.5, 1, 2, 3, 5, 8, 10)
    for epsilon in wanted:
        assert STUDY.tasks[task_name(task, epsilon)]["epsilon"] == epsilon
        assert (task_name(task, epsilon) in STUDY.follows) == (epsilon != 1)
    assert STUDY.published[task_name("imdb", 2.8), "dp-kfc"] == 85.9
    assert STUDY.published[task_name("cifar-100", 10), "public dp-kfc"] == 62.9
    assert STUDY.published[task_name("stackoverflow", 0.5), "dp-adam"] == 78.9


def test_learning_rates_follow_the_noise_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table5, "noise_multiplier", lambda task, epsilon: 2 / epsilon)
    follow = STUDY.follows[task_name("stackoverflow", 8.0)]
    assert (follow.task, follow.factor("dp-sgd"), follow.factor("dp-adam")) == (
        task_name("stackoverflow", 1.0),
        8.0,
        1.0,
    )


def test_mnist_is_the_same_as_in_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings also agree at other epsilons, where rates follow the noise: runs are shared."""

    def plan(
        *, records: int, batch_size: int, epochs: float, clip: float, epsilon: float, delta: float
    ) -> Any:
        return SimpleNamespace(
            noise_multiplier=records * batch_size * epochs * clip / epsilon * delta
        )

    for module in (table5, table1):
        monkeypatch.setattr(module, "noise_multiplier", module.noise_multiplier.__wrapped__)
        monkeypatch.setattr(module, "Plan", SimpleNamespace(make=plan))
    for arm in TASKS["mnist"].arms:
        ours, theirs = task_name("mnist", 1.0), table1.task_name("plain", 1.0)
        keys = [setting.key for setting in tries(STUDY, ours, [arm])]
        assert keys == [setting.key for setting in tries(table1.STUDY, theirs, [arm])]
    rows = [
        row(setting, setting.lr) for setting in tries(STUDY, task_name("mnist", 1.0), ["dp-kfc"])
    ]
    found = study.finals(STUDY, rows, task_name("mnist", 8.0), ["dp-kfc"])
    expected = study.finals(table1.STUDY, rows, table1.task_name("plain", 8.0), ["dp-kfc"])
    assert [setting.key for setting in found] == [setting.key for setting in expected]


def test_runs_of_table_1_are_copied_once(tmp_path: Path) -> None:
    ours = tries(STUDY, task_name("mnist", 1.0), ["dp-sgd"])
    others = [
        replace(ours[0], label_smoothing=0.3),
        replace(ours[0], arm="disk"),
        replace(ours[0], dataset="imdb"),
    ]
    write(
        tmp_path / "optimizers" / "results.jsonl",
        [row(setting, 0.9) for setting in [*ours, *others]],
    )
    write(tmp_path / "table5" / "results.jsonl", [row(ours[0], 0.8)])
    assert adopt(tmp_path / "table5") == len(ours) - 1
    assert adopt(tmp_path / "table5") == 0
    found = study.read(tmp_path / "table5" / "results.jsonl")
    assert [row["key"] for row in found] == [setting.key for setting in ours]
    assert adopt(tmp_path / "alone" / "table5") == 0


def test_without_privacy_the_best_rate_is_chosen_on_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A linear model starts with the two classes exchanged; only the larger rate corrects it."""
    model = torch.nn.Linear(4, 2)
    model.weight.data = torch.tensor([[0.1], [-0.1]]).expand(2, 4).clone()
    monkeypatch.setitem(table5.MODELS, "linear", lambda shape, classes: copy.deepcopy(model))
    monkeypatch.setitem(table5.PLAIN, "rates", (1e-9, 0.1))
    monkeypatch.setitem(table5.PLAIN, "epochs", 5)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (400,), generator=generator)
    rows = torch.randn(400, 4, generator=generator) + 3 * (2 * labels[:, None] - 1)
    records = TensorDataset(rows[:300], labels[:300])
    monkeypatch.setitem(
        TASKS, "imdb", replace(TASKS["imdb"], common={**TASKS["imdb"].common, "validation": 100})
    )
    found = without_privacy("imdb", (records, TensorDataset(rows[300:], labels[300:])))
    assert found["lr"] == 0.1 and found["validation"] > 0.95
    assert len(found["tests"]) == len(SEEDS) and min(found["tests"]) > 0.95


def test_the_command_runs_resumes_and_reports(
    tmp_path: Path, trained: list[StudySetting], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--task", "imdb"]
    table5.main(command)
    arms = TASKS["imdb"].arms
    assert len(trained) == len(arms) * (5 + 5 * len(SEEDS))
    assert {s.lr for s in trained if s.arm == "dp-sgd" and s.epsilon == 8 and not s.validation} == {
        32.0
    }
    table5.main(command)
    assert len(trained) == len(arms) * (5 + 5 * len(SEEDS)), "nothing is repeated"
    markdown = (tmp_path / "out" / "accuracy.md").read_text()
    assert "| 8 | 40.20 ± 0.10 (3) [83.2] | 40.20 ± 0.10 (3) [86.0] |" in markdown
    assert "Without privacy: 91.00 ± 1.41 (2) [88.0]" in markdown
    assert "StackOverflow" not in markdown
    assert (tmp_path / "out" / "figure5.png").exists() == bool(find_spec("matplotlib"))
    assert not (tmp_path / "out" / "figure4.png").exists()
    (tmp_path / "out" / "accuracy.md").unlink()
    table5.main(["--out", str(tmp_path / "out"), "--only-show"])
    assert (tmp_path / "out" / "accuracy.md").read_text() == markdown


def test_a_quick_run_is_short(tmp_path: Path, trained: list[StudySetting]) -> None:
    table5.reproduce(ReproduceOptions(tmp_path, Console(), True, tmp_path))
    assert {(s.epochs, s.epsilon) for s in trained} == {(0.1, 1.0)}
    assert len(trained) == 2 * sum(len(task.arms) for task in TASKS.values())
    assert (tmp_path / "quick.jsonl").exists() and not (tmp_path / "reference.json").exists()


def test_wrong_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="holds no results"):
        table5.main(["--out", str(tmp_path), "--only-show"])
    with pytest.raises(SystemExit, match=r"imdb\.csv is missing|sst-2\.csv is missing"):
        table5.main(["--out", str(tmp_path / "out"), "--data-dir", str(tmp_path), "--task", "imdb"])
    with pytest.raises(FileNotFoundError, match="is missing"):
        table5.reproduce(ReproduceOptions(tmp_path / "out", Console(), False, tmp_path))
    with pytest.raises(SystemExit):
        table5.main(["--out", str(tmp_path), "--task", "svhn"])
    assert "'svhn' is not known" in capsys.readouterr().err


POINTS = (
    Point("dp-sgd", 8.0, (0.8, 0.9), 83.2),
    Point("dp-sgd", 1.0, (0.7,), None),
    Point("dp-kfc", 1.0, (), 85.1),
)


def test_a_table_has_one_line_per_epsilon() -> None:
    lines = panel_markdown(Panel("A task", "What it is.", POINTS, (), 88.0)).splitlines()
    assert lines[6:10] == [
        "| epsilon | dp-sgd | dp-kfc |",
        "| ---: | --- | --- |",
        "| 1 | 70.00 (1) | not run [85.1] |",
        "| 8 | 85.00 ± 7.07 (2) [83.2] |  |",
    ]


def test_figures_have_one_panel_per_task(tmp_path: Path) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    panel = Panel("A task", "", POINTS, (0.9,), 88.0)
    plot_panels([panel, panel], tmp_path / "figure.png")
    height, width = plt.imread(tmp_path / "figure.png").shape[:2]
    assert width > 1.5 * height
