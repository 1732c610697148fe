"""Findings on searches with known truth; trials are kept apart, resumed, and without test data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import ttest_ind
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.readers.sources import NAMED
from experiments.common.options import ReproduceOptions
from experiments.common.setting import Load, StudyResult, StudySetting, train
from experiments.common.study import read
from experiments.table7 import experiment, findings, plots
from experiments.table7.experiment import Protocol, TrialStore, loaders
from experiments.table7.findings import (
    METHODS,
    SPACE,
    Array,
    Slope,
    Sweep,
    band,
    claims,
    clip_decades,
    importances,
    mean_difference,
    pink_over_white,
    ridge,
    smooth,
)
from experiments.table7.plots import surface
from experiments.table7.report import claims_table, table7

SMALL = Protocol(
    trials=10, records=60, validation=20, epochs=0.1, batch_size=8, probe_batch=4, epsilon=3.0
)
Truth = Callable[[dict[str, Any]], Any]


def sample(
    method: str, truth: Truth, count: int = 150, seed: int = 0, tests: tuple[float, ...] = ()
) -> Sweep:
    """Make trials at random places, each hyperparameter uniform on its scale."""
    unit, values = np.random.default_rng(seed).random((len(SPACE), count)), {}
    for (name, of), u in zip(SPACE.items(), unit, strict=True):
        at = of.low * (of.high / of.low) ** u if of.log else of.low + (of.high - of.low) * u
        values[name] = np.round(at) if of.integer else at
    return Sweep({name: values[name] for name in METHODS[method]}, np.asarray(truth(values)), tests)


def hill(slope: float, width: float = 0.4) -> Truth:
    """Return an accuracy from .1 to .9, highest where log lr = slope · log clip - 1.5."""
    return lambda v: (
        0.1
        + 0.8
        * np.exp(-(((np.log10(v["lr"]) - slope * np.log10(v["clip"]) + 1.5) / width) ** 2) / 2)
    )


@pytest.fixture
def no_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if scikit-learn were not installed, which is also faster."""
    monkeypatch.setattr(findings, "find_spec", lambda name: None)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide 80 training and 30 test records of noise under each name."""
    for dataset in experiment.SCALINGS:
        shape = (3, 32, 32) if dataset == "cifar-10" else (1, 28, 28)
        torch.manual_seed(0)
        parts = tuple(
            TensorDataset(torch.rand(n, *shape), torch.randint(10, (n,))) for n in (80, 30)
        )
        monkeypatch.setitem(
            NAMED, dataset, (NAMED[dataset][0], lambda data_dir, parts=parts: parts)
        )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[StudySetting]:
    """Record the settings that are trained; the best are at lr · clip = .05 and stability .01."""
    calls: list[StudySetting] = []

    def fake(setting: StudySetting, load: Load, device: str) -> StudyResult:
        records, test = load(setting.dataset, setting.scaling)
        assert len(records) == SMALL.records
        assert len(test) == (0 if setting.validation else 30), "trials must not see the test set"
        calls.append(setting)
        accuracy = 0.9 - 0.1 * abs(math.log10(setting.lr * setting.clip / 0.05))
        if setting.geometry is not None:
            accuracy += 0.05 - 0.02 * abs(math.log10(setting.geometry["stability"] / 0.01))
        return StudyResult(accuracy + setting.seed / 1000, None, 3.0, 1.0, 1, 1.0)

    monkeypatch.setattr(experiment, "train", fake)
    return calls


@pytest.mark.parametrize("slope", [-1.0, -0.5, 0.0, 0.5])
def test_the_slope_of_a_ridge_is_found(slope: float) -> None:
    found = ridge(sample("DP-SGD", hill(slope)))
    assert found.value == pytest.approx(slope, abs=0.1)
    assert found.low <= found.value + 0.05 and found.high >= found.value - 0.05


def test_the_slope_of_a_cliff_is_found_among_few_trials() -> None:
    """Noisy accuracy rises with lr · clip and collapses beyond .1."""

    def truth(v: dict[str, Array]) -> Array:
        step = np.log10(v["lr"] * v["clip"])
        return np.where(step > -1, 0.1, 0.9 + 0.2 * (step + 1)) + np.random.default_rng(1).normal(
            0, 0.01, len(step)
        )

    found = ridge(sample("DP-SGD", truth, count=40))
    assert found.low <= -1 <= found.high and found.value == pytest.approx(-1, abs=0.25)


def test_the_width_of_the_band_is_that_of_the_smoothed_hill() -> None:
    """A Gaussian hill averaged by a Gaussian kernel is a lower and wider Gaussian."""
    found = band(sample("DP-SGD", hill(-1, width=0.5), count=3000))
    width = math.hypot(0.5, findings.WIDTH)
    height = 0.8 * 0.5 / width
    level = (0.9 * (0.1 + height) - 0.1) / height
    assert found == pytest.approx(2 * width * math.sqrt(-2 * math.log(level)), rel=0.05)


def test_decades_of_clip() -> None:
    """The best trial is lr .1, clip 1.

    All but the fourth are near it in lr, the first and the fourth in lr · clip.
    """
    values = {"lr": np.array([0.1, 0.15, 0.06, 0.01]), "clip": np.array([1.0, 20.0, 0.1, 8.0])}
    sweep = Sweep(values, np.array([0.8, 0.75, 0.73, 0.74]))
    assert clip_decades(sweep, product=False) == pytest.approx(math.log10(200))
    assert clip_decades(sweep, product=True) == pytest.approx(math.log10(8))
    spoilt = replace(sweep, accuracy=np.array([0.8, 0.71, 0.73, 0.71]))
    assert clip_decades(spoilt, product=False) == pytest.approx(1)
    assert clip_decades(spoilt, product=True) == 0


def test_the_best_trial_and_the_share_of_equally_good_ones() -> None:
    sweep = Sweep({"lr": np.array([0.1, 0.2, 0.3, 0.4])}, np.array([0.5, 0.91, 0.92, 0.895]))
    assert sweep.best == {"lr": 0.3}
    assert sweep.equally_good == 0.5


def test_importances_are_shares_of_the_variance() -> None:
    """For 3 x - y with x and y uniform they are 9/10 and 1/10; correlations have the right sign."""
    truth = sample(
        "DP-KFC", lambda v: 0.1 * (3 * SPACE["lr"].to_unit(v["lr"]) - v["alpha"] / 2), count=80
    )
    found = importances(truth)
    assert found["lr"].variance == pytest.approx(0.9, abs=0.07)
    assert found["alpha"].variance == pytest.approx(0.1, abs=0.07)
    assert sum(of.variance for of in found.values()) == pytest.approx(1)
    assert found["lr"].correlation > 0.9 and found["alpha"].correlation < -0.15
    assert all(abs(found[name].correlation) < 0.25 for name in ("damping", "steps"))


@pytest.mark.usefixtures("no_forest")
def test_without_scikit_learn_the_ranking_is_the_same() -> None:
    found = importances(sample("DP-KFC", lambda v: SPACE["lr"].to_unit(v["lr"]), count=200))
    assert findings.evaluator_name() == "PED-ANOVA"
    assert max(found, key=lambda name: found[name].variance) == "lr"


@pytest.mark.usefixtures("no_forest")
def test_adjusting_for_lr_times_clip_reveals_small_effects() -> None:
    """α moves the accuracy by two points, lr · clip by eighty."""

    def truth(v: dict[str, Array]) -> Array:
        return np.asarray(hill(-1)(v) + 0.02 * (v["alpha"] > 1))

    sweep = sample("DP-KFC", truth, count=400)
    assert (
        abs(importances(sweep)["alpha"].correlation) < 0.15 < importances(sweep)["alpha"].adjusted
    )
    pink = pink_over_white(sweep, adjusted=True)
    assert pink.value == pytest.approx(0.02, abs=0.005)
    assert pink.verdict == findings.HOLDS
    assert pink_over_white(sweep, adjusted=False).verdict == findings.UNRESOLVED


def test_a_difference_has_the_standard_error_of_welch() -> None:
    ones, others = [0.95, 0.96, 0.94], [0.93, 0.925, 0.94, 0.92]
    found = mean_difference(ones, others)
    assert found.value / found.error == pytest.approx(
        ttest_ind(ones, others, equal_var=False).statistic
    )
    assert found.verdict == findings.HOLDS
    assert mean_difference(others, ones).verdict == findings.FAILS
    assert mean_difference(ones, [*ones, 0.951]).verdict == findings.UNRESOLVED
    assert (
        mean_difference([0.9], ones).verdict
        == mean_difference([], ones).verdict
        == findings.UNRESOLVED
    )


def test_too_few_trials_give_no_verdict() -> None:
    assert str(mean_difference([0.9], [0.8, 0.85])) == "+7.50"
    assert str(mean_difference([], [0.8, 0.85])) == "no such trials"
    assert Slope(-0.9, -1.5, 0.2).verdict == findings.UNRESOLVED
    assert [Slope(v, v - 0.1, v + 0.1).verdict for v in (-1.0, -0.5, 0.0)] == [
        findings.FAILS,
        findings.IN_PART,
        findings.HOLDS,
    ]


def test_the_kernel_mean() -> None:
    weight = math.exp(-0.5 * 2**2)
    found = smooth(np.array([[0.0], [1e6]]), np.array([[0.0], [2.0]]), np.array([1.0, 3.0]), 1.0)
    assert found == pytest.approx(
        [(1 + 3 * weight) / (1 + weight), 3.0]
    )  # far from all trials: the nearest one


def test_a_surface_lies_on_the_scale_of_its_parameters() -> None:
    x, y, field = surface(
        sample("DP-KFC", lambda v: SPACE["clip"].to_unit(v["clip"])), "clip", "alpha"
    )
    assert (x[0], x[-1], y[0], y[-1]) == pytest.approx((0.1, 50, 0, 2))
    middle = field[:, len(x) // 2].mean()
    assert (
        middle == pytest.approx(0.5, abs=0.05)
        and field[:, 0].mean() < 0.2
        and field[:, -1].mean() > 0.8
    )


def verdicts(sgd: Sweep, kfc: Sweep) -> dict[str, str]:
    return {claim.text.split(":")[0].split(" (")[0]: claim.verdict for claim in claims(sgd, kfc)}


@pytest.mark.usefixtures("no_forest")
def test_claims_hold_where_they_are_true() -> None:
    """DP-KFC has a wide rectangle with a step in α, DP-SGD a narrow diagonal."""

    def kfc(v: dict[str, Array]) -> Array:
        return np.asarray(hill(0, width=0.8)(v) + 0.2 * (v["alpha"] > 1))

    tests = (0.94, 0.942, 0.945), (0.97, 0.971, 0.969)
    found = verdicts(
        sample("DP-SGD", hill(-1, 0.2), tests=tests[0]),
        sample("DP-KFC", kfc, count=300, tests=tests[1]),
    )
    for text in ("DP-KFC is better than DP-SGD", "DP-KFC frees the learning rate from the clip"):
        assert found[text] == findings.HOLDS
    assert (
        found["the best α is that of pink to brown noise"]
        == found["so it is at equal lr · clip"]
        == findings.HOLDS
    )
    assert (
        found["damping hardly matters"]
        == found["the number of steps hardly matters"]
        == findings.HOLDS
    )
    assert (
        found["DP-KFC's band of lr · clip is wider than DP-SGD's, by a quarter at least"]
        == findings.HOLDS
    )


@pytest.mark.usefixtures("no_forest")
def test_claims_fail_where_they_are_false() -> None:
    """Both methods have the same diagonal; damping matters, and white noise is better."""

    def kfc(v: dict[str, Array]) -> Array:
        return np.asarray(
            hill(-1)(v) + 0.1 * SPACE["damping"].to_unit(v["damping"]) - 0.05 * v["alpha"]
        )

    tests = (0.97, 0.971, 0.969), (0.94, 0.942, 0.945)
    found = verdicts(
        sample("DP-SGD", hill(-1), tests=tests[0]), sample("DP-KFC", kfc, tests=tests[1])
    )
    for text in (
        "DP-KFC is better than DP-SGD",
        "DP-KFC frees the learning rate from the clip",
        "DP-KFC's band of lr · clip is wider than DP-SGD's, by a quarter at least",
        "damping hardly matters",
        "the best α is that of pink to brown noise",
        "so it is at equal lr · clip",
    ):
        assert found[text] == findings.FAILS, text
    assert found["the number of steps hardly matters"] == findings.HOLDS


@pytest.mark.usefixtures("no_forest")
def test_table_7_includes_the_papers_figures() -> None:
    pairs = {
        dataset: (
            sample("DP-SGD", hill(-1), tests=(0.5, 0.6)),
            sample("DP-KFC", hill(-1), tests=(0.7, 0.7 + gain)),
        )
        for dataset, gain in (("mnist", 0.0), ("fashion-mnist", 0.1), ("cifar-10", 0.05))
    }
    lines = table7(pairs).splitlines()
    best = pairs["fashion-mnist"][1].best["alpha"]
    assert lines[3] == (
        f"| fashion-mnist | 55.00 ± 7.07 (2) | 75.00 ± 7.07 (2) | +20.00 | {best:.2f} "
        "| 84.3 | 87.1 | +2.8 | 1.48 |"
    )
    last = claims_table(pairs).splitlines()[-1]
    assert last == (
        "| the gain is largest on CIFAR-10 | +8.6 | +15.00 | +20.00 | +17.50: **does not hold** |"
    )


def test_a_trial_uses_the_papers_parameters() -> None:
    params = {"lr": 0.1, "clip": 2.0, "damping": 3e-3, "alpha": 0.8, "steps": 7}
    protocol = Protocol(records=12_000, validation=2000, probe_batch=64)
    setting = protocol.setting("mnist", "DP-KFC", params, records=12_000)
    assert setting.geometry is not None and setting.geometry["probe"] == {"alpha": 1.6, "std": 0.5}
    assert {
        name: setting.geometry[name] for name in ("stability", "damping", "probes", "every")
    } == {
        "stability": 3e-3,
        "damping": 0.0,
        "probes": 7 * 64,
        "every": 39,  # 10,000 records in batches of 256
    }
    assert (setting.lr, setting.clip, setting.epsilon, setting.epochs, setting.ema) == (
        0.1,
        2.0,
        2.0,
        5,
        0.0,
    )
    plain = protocol.setting("mnist", "DP-SGD", {"lr": 0.1, "clip": 2.0}, records=12_000)
    assert plain == replace(setting, arm="DP-SGD", geometry=None)


@pytest.mark.usefixtures("data")
def test_a_real_trial_needs_no_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpkfc.planning.plan._calibrated", lambda *run: 2.0)
    without, with_test = loaders(SMALL, None)
    assert len(without("mnist", "unit")[1]) == 0 and len(with_test("mnist", "unit")[1]) == 30
    params = {"lr": 0.1, "clip": 2.0, "damping": 3e-3, "alpha": 0.8, "steps": 2}
    setting = SMALL.setting("mnist", "DP-KFC", params, records=60)
    result = train(setting, without)
    assert result.last * SMALL.validation == pytest.approx(round(result.last * SMALL.validation))
    assert result.steps == 1 and result.noise_multiplier == 2.0


@pytest.mark.usefixtures("data", "no_forest")
def test_from_end_to_end_and_again(
    tmp_path: Path,
    trained: list[StudySetting],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plots, "POINTS", 10)
    monkeypatch.setattr(plots, "DPI", 30)
    out = tmp_path / "new"
    arguments = [
        "--out",
        str(out),
        "--trials",
        "15",
        "--records",
        "60",
        "--validation",
        "20",
        "--datasets",
        "mnist",
    ]
    experiment.main(arguments)
    rows = read(out / "results.jsonl")
    assert len(trained) == len(rows) == 2 * (15 + 3)
    assert [row["setting"]["seed"] for row in rows if not row["setting"]["validation"]] == [
        1,
        2,
        3,
    ] * 2
    for method in METHODS:
        trials = [row for row in rows if row["method"] == method and row["setting"]["validation"]]
        finals = [
            row for row in rows if row["method"] == method and not row["setting"]["validation"]
        ]
        best = max(trials, key=lambda row: row["result"]["last"])
        assert abs(math.log10(best["setting"]["lr"] * best["setting"]["clip"] / 0.05)) < 0.4, (
            "the search finds the ridge"
        )
        assert len(trials) == 15 and all(row["params"] == best["params"] for row in finals)
        for row in trials:
            assert all(
                SPACE[name].low <= value <= SPACE[name].high
                for name, value in row["params"].items()
            )
    assert sorted(file.name for file in out.iterdir()) == [
        "fig10-mnist.png",
        "fig11-mnist.png",
        "results.jsonl",
        "table7.md",
    ]
    text = (out / "table7.md").read_text()
    assert text in capsys.readouterr().out
    command = "python -m experiments.table7 --trials 15 --records 60 --validation 20 --epochs 5"
    assert f"    {command} --probe-batch 256 --data-dir DATA --out FOLDER\n" in text
    assert (
        "15 trials" in text
        and "| mnist |" in text
        and "](fig10-mnist.png)" in text
        and "fashion" not in text
    )
    monkeypatch.setattr(experiment, "find_spec", lambda name: name == "optuna" or None)
    experiment.main(arguments)
    assert len(trained) == len(rows), "nothing is repeated"
    experiment.main([*arguments[:3], "16", *arguments[4:]])
    assert len(trained) >= len(rows) + 2, "more trials continue the same search"
    assert read(out / "results.jsonl")[: len(rows)] == rows


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    "database", [True, False], ids=["with its database", "from the results alone"]
)
def test_an_interruption_loses_no_trial(
    database: bool, tmp_path: Path, trained: list[StudySetting], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrialStore(tmp_path / "results.jsonl", SMALL)
    ordinary = experiment.train
    load = loaders(SMALL, None)[0]
    known: list[int] = []

    def interrupted(setting: StudySetting, load: Load, device: str) -> StudyResult:
        if len(trained) == 7:
            raise KeyboardInterrupt
        return ordinary(setting, load, device=device)

    monkeypatch.setattr(experiment, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment.search(store, "mnist", "DP-KFC", load, Console())
    before = store.trials("mnist", "DP-KFC")
    assert len(before) == 7 and (tmp_path / "results.db").exists()
    if not database:
        (tmp_path / "results.db").unlink()
    monkeypatch.setattr(experiment, "train", ordinary)
    real = dpkfc.tune
    monkeypatch.setattr(
        dpkfc,
        "tune",
        lambda *args, **options: known.append(_trials(options)) or real(*args, **options),
    )
    experiment.search(store, "mnist", "DP-KFC", load, Console())
    assert known == [7], "the search starts from the recorded trials"
    assert len(trained) == SMALL.trials
    assert store.trials("mnist", "DP-KFC")[:7] == before
    assert (
        len({json.dumps(row["params"]) for row in store.trials("mnist", "DP-KFC")}) == SMALL.trials
    )


def _trials(options: dict[str, Any]) -> int:
    import optuna

    return len(
        optuna.load_study(
            study_name=options["name"], storage=f"sqlite:///{options['storage']}"
        ).trials
    )


@pytest.mark.usefixtures("data")
def test_protocols_are_not_mixed(tmp_path: Path, trained: list[StudySetting]) -> None:
    file, load, console = tmp_path / "results.jsonl", loaders(SMALL, None)[0], Console()
    experiment.search(TrialStore(file, SMALL), "mnist", "DP-SGD", load, console)
    other = TrialStore(file, replace(SMALL, epochs=0.2))
    assert other.trials("mnist", "DP-SGD") == [] and other.protocol.key != SMALL.key
    experiment.search(other, "mnist", "DP-SGD", load, console)
    assert (
        len(other.trials("mnist", "DP-SGD"))
        == len(TrialStore(file, SMALL).trials("mnist", "DP-SGD"))
        == SMALL.trials
    )
    assert {row["protocol"]["epochs"] for row in other.trials("mnist", "DP-SGD")} == {0.2}
    assert (
        TrialStore(file, SMALL).trials("mnist", "DP-KFC")
        == TrialStore(file, SMALL).trials("cifar-10", "DP-SGD")
        == []
    )
    assert replace(SMALL, trials=99, seeds=(7,)).key == SMALL.key
    assert experiment.sweep_of(other, "mnist", "DP-SGD") is None, "there are no final runs yet"


@pytest.mark.usefixtures("data", "trained")
def test_quick_leaves_the_real_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "QUICK", replace(experiment.QUICK, records=60, validation=20))
    monkeypatch.setattr(
        experiment, "find_spec", lambda name: None if name == "matplotlib" else True
    )
    console = Console(record=True)
    experiment.reproduce(ReproduceOptions(tmp_path, console, True, None))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "quick-results.jsonl",
        "quick-table7.md",
    ]
    text = (tmp_path / "quick-table7.md").read_text()
    assert "**Quick:**" in text and "    dpkfc reproduce table7 --data-dir DATA --quick\n" in text
    assert "matplotlib is not installed" in console.export_text()


def test_wrong_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="trials=2"):
        experiment.main(["--out", str(tmp_path), "--trials", "2"])
    with pytest.raises(SystemExit, match="validation=5000: must be part of the 100 records"):
        experiment.main(["--out", str(tmp_path), "--records", "100"])
    with pytest.raises(FileNotFoundError, match="mnist"):
        experiment.reproduce(ReproduceOptions(tmp_path, Console(), True, tmp_path / "nothing here"))
    monkeypatch.setattr(experiment, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'dpkfc\\[tune\\]'"):
        experiment.reproduce(ReproduceOptions(tmp_path, Console(), True, None))


@pytest.mark.usefixtures("data")
def test_a_protocol_that_asks_for_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="has 80 training records, the protocol asks for 90"):
        loaders(replace(SMALL, records=90), None)[0]("mnist", "unit")
