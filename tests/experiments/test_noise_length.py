"""The noise length and the sweeps; a tiny experiment from end to end; wrong use."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dpkfc
from experiments.common.digits import DigitsResult
from experiments.common.options import ReproduceOptions
from experiments.common.setting import StudySetting
from experiments.noise_length import experiment
from experiments.noise_length.experiment import (
    DIGITS,
    KFC,
    POST,
    SGD,
    NoiseLengthRun,
    RateSweep,
    SweepPoint,
    digits_sweeps,
    kind_of,
    length_per_rate,
    markdown,
    recorded_sweeps,
    summary,
    train,
)

TRY = StudySetting("mnist", "dp-sgd", 0.1, epsilon=3.0, batch_size=512)
STEPS = 20


def row(setting: StudySetting, last: float = 0.5, average: float | None = 0.4) -> dict[str, Any]:
    result = {
        "last": last,
        "average": average,
        "epsilon": 3.0,
        "noise_multiplier": 1.0,
        "steps": STEPS,
        "seconds": 1.0,
    }
    return {"key": setting.key, "setting": asdict(setting), "result": result}


def sweep(kind: str = KFC, *points: tuple[float, float, float]) -> RateSweep:
    return RateSweep(
        kind,
        "mnist, paper_cnn",
        "arm",
        1.0,
        256,
        100,
        tuple(SweepPoint(*point) for point in points),
    )


RISING = sweep(KFC, (0.1, 1.0, 0.5), (0.2, 2.0, 0.7), (0.4, 4.0, 0.8))
PEAKED = sweep(KFC, (1.0, 0.5, 0.5), (2.0, 1.0, 0.9), (8.0, 4.0, 0.7))


def test_the_noise_length() -> None:
    """With momentum .9, unit noise adds up to Σ_s (1 + .9 + … + .9^(t-s)) z_s until step t."""
    plan = dpkfc.Plan.make(
        records=55_000, batch_size=512, steps=STEPS, clip=1.0, epsilon=3.0, delta=1e-5
    )
    variances = [
        sum(sum(0.9**k for k in range(j)) ** 2 for j in range(1, t + 1))
        for t in range(1, STEPS + 1)
    ]
    rmse = plan.noise_multiplier / 512 * math.sqrt(sum(variances) / STEPS)
    parameters = (9 + 1) * 16 + (16 * 9 + 1) * 32 + (1568 + 1) * 128 + (128 + 1) * 10
    expected = rmse * math.sqrt(parameters / (16 + 32 + 128 + 10))
    assert length_per_rate(TRY, STEPS) == pytest.approx(expected, rel=2e-4), (
        "noise has a margin of 1e-4"
    )
    assert length_per_rate(replace(TRY, clip=0.1), STEPS) == pytest.approx(0.1 * expected, rel=2e-4)


def test_correlated_noise_has_its_own_length() -> None:
    banded = replace(TRY, noise={"name": "BandedToeplitz", "bands": 4})
    run = {
        "records": 55_000,
        "batch_size": 512,
        "steps": STEPS,
        "clip": 1.0,
        "epsilon": 3.0,
        "delta": 1e-5,
    }
    workload = dpkfc.noise.Workload.sgd(momentum=0.9)
    candidates = [
        experiment.evaluate(noise, workload, **run)
        for noise in (dpkfc.noise.BandedToeplitz(4), dpkfc.noise.Independent())
    ]
    ratio = length_per_rate(banded, STEPS) / length_per_rate(TRY, STEPS)
    assert ratio == pytest.approx(candidates[0].rmse / candidates[1].rmse)


def test_the_recipe_reaches_the_requested_length() -> None:
    """The formulas of the preset and of this module agree."""
    # The batch is too large for correlated noise.
    run = {"records": 55_000, "batch_size": 30_000, "epsilon": 3.0, "delta": 1e-5}
    recipe = dpkfc.recipe(experiment.paper_cnn(), **run, epochs=10, noise_length=4.0)
    per_rate = length_per_rate(replace(TRY, batch_size=30_000), recipe.arguments["steps"])
    assert recipe.lr * per_rate == pytest.approx(4.0)


def test_sweeps_are_tries_that_differ_only_in_the_learning_rate(tmp_path: Path) -> None:
    kfc, rates = {"probe": {}, "rank": 32, "post": 0.0}, (0.2, 0.1, 0.4)
    wanted = [
        *(row(replace(TRY, lr=lr), last=lr, average=lr / 2) for lr in rates),
        *(row(replace(TRY, lr=lr, clip=0.1), last=lr, average=None) for lr in rates),
        *(row(replace(TRY, lr=lr, geometry=kfc), last=lr / 2, average=lr) for lr in rates),
        *(
            row(replace(TRY, lr=lr, geometry=kfc | {"post": 0.5}, label_smoothing=0.3))
            for lr in rates
        ),
    ]
    unwanted = [
        *(row(replace(TRY, lr=lr, validation=0)) for lr in rates),
        *(row(replace(TRY, lr=lr, optimizer={"name": "Adam"})) for lr in rates),
        *(row(replace(TRY, lr=lr, schedule="cosine")) for lr in rates),
        *(row(replace(TRY, lr=lr, epsilon=1.0)) for lr in rates[:2]),
        *[row(replace(TRY, lr=0.1, epsilon=2.0))] * 3,
        {"setting": {"of": "another experiment"}, "result": {}},
    ]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(r) + "\n" for r in wanted[:5]))
    (tmp_path / "deeper" / "two.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in wanted[5:] + unwanted)
    )
    found = {sweep.arm + ", " + sweep.kind: sweep for sweep in recorded_sweeps(tmp_path)}
    assert set(found) == {
        "dp-sgd, dp-sgd",
        "dp-sgd, clip 0.1, dp-sgd",
        "dp-sgd, dp-kfc",
        "dp-sgd, smoothing 0.3, dp-kfc with post map",
    }
    per_rate = length_per_rate(TRY, STEPS)
    for name in ("dp-sgd, dp-sgd", "dp-sgd, dp-kfc"):
        assert found[name].points == tuple(
            SweepPoint(lr, pytest.approx(lr * per_rate), lr) for lr in sorted(rates)
        )
    assert found["dp-sgd, clip 0.1, dp-sgd"].best.length == pytest.approx(0.04 * per_rate)


def test_kinds_of_sweeps() -> None:
    assert kind_of(TRY) == SGD
    assert kind_of(replace(TRY, geometry={"post": 0.0})) == KFC
    assert kind_of(replace(TRY, geometry={"post": 0.5})) == POST
    assert kind_of(replace(TRY, geometry={"kind": "Diagonal"})) == "Diagonal"


def test_accuracy_at_a_length_is_interpolated_in_its_logarithm() -> None:
    assert RISING.best == SweepPoint(0.4, 4.0, 0.8) and RISING.at_edge
    assert PEAKED.best == SweepPoint(2.0, 1.0, 0.9) and not PEAKED.at_edge
    assert RISING.at(2.0) == pytest.approx(0.7) and RISING.loss == pytest.approx(0.1)
    assert PEAKED.at(2.0) == pytest.approx(0.8), "half way from 1 to 4"
    assert RISING.at(0.9) is None and RISING.at(4.1) is None
    assert sweep(KFC, (1.0, 3.0, 0.5), (2.0, 6.0, 0.6)).loss is None
    assert sweep(KFC, (1.0, 1.0, 0.6), (2.0, 2.0, 0.6)).best.lr == 1.0, "the smaller of equals"


def test_the_summary_and_the_table() -> None:
    sweeps = [RISING, PEAKED, sweep(SGD, (1.0, 3.0, 0.5), (2.0, 6.0, 0.6), (3.0, 9.0, 0.5))]
    lines = {line[0]: line[1:] for line in summary(sweeps)}
    assert lines["DP-KFC, recorded"] == [
        "2",
        "1",
        "0.4 to 2: × 5",
        "1 to 4: × 4",
        "10.0",
        "10.0",
        "0",
    ]
    assert lines["DP-KFC, recorded"] == lines["DP-KFC, all"]
    assert lines["DP-SGD"] == ["1", "0", "2 to 2: × 1", "6 to 6: × 1", "", "", "1"]
    assert "DP-KFC, digits" not in lines
    text = markdown(sweeps, "picture.png")
    assert (
        "| mnist, paper_cnn | arm | 1 | 256 | 100 | 3 | 0.4* | 4.00* | 80.0 | 70.0 | 10.0 |" in text
    )
    assert "| 2 | 6.00 | 60.0 | outside |  |" in text
    assert "](picture.png)" in text
    assert (
        "In 2 sweeps of DP-KFC" in text and "by a factor of 5, the best noise lengths by 4." in text
    )
    assert "ρ = 2 loses 10.0 points in the median and 10.0 at worst" in text


def test_sweeps_on_the_digits_are_means_over_the_seeds() -> None:
    def result(run: NoiseLengthRun) -> DigitsResult:
        mean = 0.5 + run.noise_length / 10 + (run.seed - 2) / 100
        return DigitsResult(
            0.0, mean, run.epsilon, "independent Gaussian", 1.0, 199, run.noise_length / run.epsilon
        )

    runs = [
        NoiseLengthRun("mlp", epsilon, length, seed)
        for epsilon in (1.0, 3.0)
        for length in (2.0, 1.0)
        for seed in (1, 2, 3)
    ]
    first, second = digits_sweeps({run: result(run) for run in runs})
    assert (first.kind, first.model, first.epsilon, second.epsilon) == (
        DIGITS,
        "digits, mlp",
        1.0,
        3.0,
    )
    assert first.points == (
        SweepPoint(1.0, 1.0, pytest.approx(0.6)),
        SweepPoint(2.0, 2.0, pytest.approx(0.7)),
    )
    assert second.points[1].lr == pytest.approx(2 / 3)


def test_from_end_to_end_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[NoiseLengthRun] = []

    def few_steps(run: NoiseLengthRun, device: str) -> DigitsResult:
        trained.append(run)
        return train(replace(run, epochs=1.0, batch_size=600))

    monkeypatch.setattr(experiment, "EPSILONS", (3.0,))
    monkeypatch.setattr(experiment, "LENGTHS", (1.0, 2.0))
    monkeypatch.setattr(experiment, "SEEDS", (1,))
    monkeypatch.setattr(experiment, "train", few_steps)
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    tries = [replace(TRY, lr=lr) for lr in (0.1, 0.2, 0.4)]
    (recorded / "mnist.jsonl").write_text(
        "".join(json.dumps(row(setting)) + "\n" for setting in tries)
    )
    out = tmp_path / "new" / "lengths.jsonl"
    experiment.main(["--results", str(recorded), "--out", str(out)])
    lines = out.read_text().splitlines()
    assert len(trained) == len(lines) == 6
    by_length = {
        (r["setting"]["model"], r["setting"]["noise_length"]): r["result"]
        for r in map(json.loads, lines)
    }
    assert by_length["mlp", 2.0]["lr"] == pytest.approx(2 * by_length["mlp", 1.0]["lr"])
    assert by_length["mlp", 2.0]["epsilon"] <= 3.0 and by_length["mlp", 2.0]["average"] is not None
    text = out.with_suffix(".md").read_text()
    assert (
        "| digits, linear | dp-kfc, " in text and "| mnist, paper_cnn | dp-sgd | 3 | 512 |" in text
    )
    assert out.with_suffix(".png").stat().st_size > 10_000
    out.write_text("\n".join(lines[1:]) + "\n")
    experiment.main(["--out", str(out)])
    assert len(trained) == 7 and sorted(out.read_text().splitlines()) == sorted(lines), (
        "only what is missing is run"
    )
    assert "paper_cnn" not in out.with_suffix(".md").read_text()


def test_reproduced_with_the_sweeps_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "SEEDS", (1,))
    monkeypatch.setattr(
        experiment, "train", lambda run, device: train(replace(run, epochs=1.0, batch_size=600))
    )
    experiment.reproduce(ReproduceOptions(tmp_path, Console(width=400), quick=True))
    shown = capsys.readouterr().out
    assert (
        f"`dpkfc reproduce geometry --out {tmp_path}/geometry`" in shown and "correlated" in shown
    )
    assert len((tmp_path / "quick.jsonl").read_text().splitlines()) == 3
    text = (tmp_path / "quick.md").read_text()
    assert (
        "**Quick:**" in text and "| digits, linear | dp-kfc, " in text and "paper_cnn" not in text
    )
    (tmp_path / "geometry").mkdir()
    tries = [replace(TRY, lr=lr) for lr in (0.1, 0.2, 0.4)]
    (tmp_path / "geometry" / "results.jsonl").write_text(
        "".join(json.dumps(row(setting)) + "\n" for setting in tries)
    )
    experiment.reproduce(ReproduceOptions(tmp_path, Console(width=400), quick=True))
    assert "dpkfc reproduce geometry" not in capsys.readouterr().out
    assert "| mnist, paper_cnn | dp-sgd | 3 | 512 |" in (tmp_path / "quick.md").read_text()
    (tmp_path / "quick.jsonl").write_text("{")
    with pytest.raises(ValueError, match="cut off"):
        experiment.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))


def test_wrong_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiment.main(["--out", str(tmp_path / "lengths.json")])
    assert "must end in .jsonl" in capsys.readouterr().err
    out = tmp_path / "lengths.jsonl"
    with pytest.raises(SystemExit, match="holds no sweep"):
        experiment.main(["--results", str(tmp_path), "--out", str(out)])
    out.write_text(json.dumps(row(TRY)) + "\n")
    with pytest.raises(SystemExit, match="does not hold results of this experiment"):
        experiment.main(["--out", str(out)])
