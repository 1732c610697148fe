"""The arms differ only in the source of their factors; verdicts follow from the intervals."""

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
from scipy import stats
from torch.utils.data import TensorDataset

from experiments.common.differences import (
    PairedDifference,
    by_seed,
    differences_to,
    mean_accuracy,
    paired,
    verdict,
)
from experiments.common.setting import StudyResult, StudySetting, swapped, train
from experiments.common.study import Row, finals, tries
from experiments.falsify.experiment import STUDY, report

OUTCOMES = {"dp-sgd": 0.80, "synthetic": 0.90, "oracle": 0.92, "public": 0.92, "white noise": 0.85}


def rows_of(outcomes: Mapping[str, float], task: str = "mnist mlp") -> list[Row]:
    """Make a try and the final runs of every arm; seeds differ by more than arms do."""

    def row(setting: StudySetting, accuracy: float) -> Row:
        result = StudyResult(accuracy, None, 1.0, 0.8, 10, 1.0, (accuracy - 0.2, accuracy))
        return json.loads(
            json.dumps({"key": setting.key, "setting": asdict(setting), "result": asdict(result)})
        )

    rows = [row(setting, setting.lr) for setting in tries(STUDY, task, outcomes)]
    for setting in finals(STUDY, rows, task, outcomes):
        wobble = 0.03 * setting.seed + 0.0001 * (setting.seed % 2) * len(setting.arm)
        rows.append(row(setting, outcomes[setting.arm] - wobble))
    return rows


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_is_that_of_the_paired_t_test(count: int) -> None:
    rng = np.random.default_rng(count)
    own, other = rng.random(count), rng.random(count)
    found = paired(dict(enumerate(own)), dict(enumerate(other)))
    expected = stats.ttest_rel(own, other).confidence_interval(0.95)
    assert found is not None and found.seeds == count
    assert (found.low, found.high) == pytest.approx((100 * expected.low, 100 * expected.high))
    assert found.mean == pytest.approx(100 * (own - other).mean())


def test_only_common_seeds_are_compared() -> None:
    found = paired({1: 0.5, 2: 0.6, 3: 0.7}, {2: 0.5, 3: 0.6, 4: 0.1})
    assert found is not None and found.seeds == 2 and found.mean == pytest.approx(10)
    assert paired({1: 0.5, 2: 0.6}, {2: 0.5}) is None


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.6, 2.0, "materially better"),
        (-2.0, -0.6, "materially worse"),
        (-0.4, 0.4, "the same"),
        (0.1, 0.4, "the same"),
        (0.4, 0.8, "not decided"),
        (-0.8, 0.8, "not decided"),
        (-3.0, 0.1, "not decided"),
    ],
)
def test_the_verdict_follows_from_the_interval(low: float, high: float, outcome: str) -> None:
    assert verdict(PairedDifference((low + high) / 2, low, high, 5)) == outcome


@pytest.mark.parametrize("task", STUDY.tasks)
def test_arms_differ_in_the_source_of_their_factors_alone(task: str) -> None:
    settings = tries(STUDY, task, STUDY.arms)
    sources = {
        "oracle": {"oracle": "records"},
        "public": {"public": {"mnist": "fashion-mnist"}.get(task[:5], "mnist")},
    }
    rates: dict[str, list[float]] = {}
    for setting in settings:
        rates.setdefault(setting.arm, []).append(setting.lr)
        assert (setting.geometry is None) == (setting.arm == "dp-sgd")
        if setting.geometry:
            probe = setting.geometry["probe"]
            assert probe == sources.get(setting.arm, probe)
            assert setting.arm != "white noise" or probe["alpha"] == 0
            assert setting.arm != "synthetic" or probe["alpha"] == 2
        same = replace(setting, arm="", lr=0, geometry=None)
        assert same == replace(settings[0], arm="", lr=0, geometry=None)
    others = [{**setting.geometry, "probe": None} for setting in settings if setting.geometry]
    assert all(other == others[0] for other in others)
    assert len({tuple(found) for found in rates.values()}) == 1 and len(rates) == 5


def test_arms_are_compared_seed_by_seed() -> None:
    rows = rows_of(OUTCOMES)
    assert [*by_seed(STUDY, rows, "mnist mlp", "oracle")] == [1, 2, 3, 4, 5]
    final = differences_to(STUDY, rows, "oracle", STUDY.arms)
    assert {arm for _, arm in final} == set(OUTCOMES) - {"oracle"}
    assert final["mnist mlp", "synthetic"].mean == pytest.approx(-2, abs=0.05)
    assert final["mnist mlp", "synthetic"].high < -1.9  # though seeds differ by 12 points
    course = differences_to(STUDY, rows, "oracle", STUDY.arms, mean_accuracy)
    assert course["mnist mlp", "dp-sgd"].mean == pytest.approx(-12, abs=0.05)
    assert by_seed(STUDY, rows, "fashion-mnist mlp", "oracle") == {}


@pytest.mark.parametrize(
    ("synthetic", "expected"),
    [
        (
            0.90,
            "refuted in part.** Synthetic against the oracle is materially worse: "
            "mnist mlp at the end, mnist mlp during training",
        ),
        (
            0.92,
            "Not refuted: no difference is shown to be material.** "
            "Synthetic against the oracle is the same: mnist",
        ),
        (0.94, "at least as good as the oracle's.** It is materially better: mnist mlp at the end"),
    ],
)
def test_the_finding_is_computed(tmp_path: Path, synthetic: float, expected: str) -> None:
    report(STUDY, rows_of(OUTCOMES | {"synthetic": synthetic}), tmp_path, Console(quiet=True))
    text = (tmp_path / "falsify.md").read_text()
    assert expected in text and "| mnist mlp | dp-sgd | -12.0" in text
    assert ("Intervals that exclude zero: mnist mlp at the end" in text) == (synthetic != 0.92)
    assert (tmp_path / "falsify.png").exists() == bool(find_spec("matplotlib"))


def test_too_few_runs_give_no_finding(tmp_path: Path) -> None:
    one_seed = replace(STUDY, seeds=(1,))
    report(one_seed, rows_of(OUTCOMES), tmp_path, Console(quiet=True))
    assert "Too few runs" in (tmp_path / "falsify.md").read_text()


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_course_ends_with_the_run_and_does_not_change_it(ema: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(60, 1, 28, 28, generator=generator), torch.arange(60) % 10
    data = TensorDataset(images, labels), TensorDataset(images[:25], labels[:25])
    setting = StudySetting(
        "mnist",
        "x",
        0.5,
        epochs=1,
        batch_size=10,
        epsilon=8.0,
        validation=0,
        ema=ema,
        model="linear",
    )
    plain = train(setting, lambda dataset, scaling: data)
    watched = train(replace(setting, course=3), lambda dataset, scaling: data)
    assert plain.course is None and watched.course is not None and len(watched.course) == 3
    assert watched.course[-1] == (watched.average if ema else watched.last)
    assert replace(watched, seconds=plain.seconds, course=None) == plain
    assert len({setting.key, replace(setting, course=3).key}) == 2


def test_swapped_weights_are_restored() -> None:
    weights = [torch.ones(2, requires_grad=True)]
    with swapped(weights, [torch.zeros(2)]):
        assert weights[0].tolist() == [0, 0]
    assert weights[0].tolist() == [1, 1] and weights[0].requires_grad
