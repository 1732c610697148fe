"""Widths and slopes of known grids; a tiny grid from end to end; wrong use."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments.clip_and_rate import experiment
from experiments.clip_and_rate.experiment import (
    GridFinding,
    GridRun,
    find,
    level_set,
    train,
    verdict,
)
from experiments.common.digits import DigitsResult
from experiments.common.options import ReproduceOptions

FEW = {"steps": 3, "batch_size": 300}
CLIPS, RATES = (0.1, 1.0, 10.0), (0.001, 0.01, 0.1, 1.0, 10.0)
# Best at lr · clip = .1, or at lr = .1 for every clip; 10 points worse per decade.
DIAGONAL = GridFinding(
    CLIPS,
    RATES,
    np.array([[0.9 - 0.1 * abs(math.log10(10 * c * r)) for r in RATES] for c in CLIPS]),
)
RECTANGLE = GridFinding(
    CLIPS, RATES, np.array([[0.9 - 0.1 * abs(math.log10(10 * r)) for r in RATES] for _ in CLIPS])
)


def result(accuracy: float) -> DigitsResult:
    return DigitsResult(accuracy, None, 3.0, "independent Gaussian", 1.0, 1, 0.1)


@pytest.mark.parametrize(
    ("ys", "level", "expected"),
    [
        ([0.0, 1.0, 0.0], 0.5, (1.0, 0.0)),
        ([1.0, 1.0, 0.0], 0.5, (1.5, -0.25)),
        ([1.0, 0.0, 1.0], 0.5, (1.0, 0.0)),  # in two parts
        ([1.0, 1.0, 1.0], 0.5, (2.0, 0.0)),
        ([0.0, 0.2, 0.4], 0.5, (0.0, 1.0)),  # nowhere: at the best point
    ],
)
def test_the_level_set_by_hand(
    ys: list[float], level: float, expected: tuple[float, float]
) -> None:
    assert level_set([0.1, 1.0, 10.0], ys, level) == pytest.approx(expected)


def test_a_diagonal_and_a_rectangle_are_distinguished() -> None:
    assert DIAGONAL.slope == pytest.approx(-1)
    assert RECTANGLE.slope == pytest.approx(0)
    assert DIAGONAL.good == pytest.approx(3 / 15) and RECTANGLE.good == pytest.approx(3 / 15)
    # 2 points are a fifth of a decade, to either side.
    assert DIAGONAL.widths_in_rate == pytest.approx([0.4] * 3)
    # At the edges half of it is outside.
    assert DIAGONAL.widths_in_clip == pytest.approx([0, 0.2, 0.4, 0.2, 0])
    assert RECTANGLE.widths_in_clip == pytest.approx([0, 0, 2, 0, 0])
    assert replace(DIAGONAL, within=0.05).widths_in_rate == pytest.approx([1.0] * 3)


def test_a_clip_that_is_never_good_does_not_change_the_slope() -> None:
    grid = DIAGONAL.grid.copy()
    grid[2] = 0.1
    spoilt = replace(DIAGONAL, grid=grid)
    assert spoilt.usable == [0, 1]
    assert spoilt.slope == pytest.approx(-1)
    grid[1] = 0.1
    assert math.isnan(spoilt.slope)
    assert "cannot be judged" in verdict({"DP-SGD": DIAGONAL, "DP-KFC": spoilt})


def test_the_verdict_follows_the_slope() -> None:
    assert "does not hold here" in verdict({"DP-SGD": DIAGONAL, "DP-KFC": DIAGONAL})
    assert "claim holds here" in verdict({"DP-SGD": DIAGONAL, "DP-KFC": RECTANGLE})
    assert "-1.00 with DP-SGD and 0.00 with DP-KFC" in verdict(
        {"DP-SGD": DIAGONAL, "DP-KFC": RECTANGLE}
    )


def test_cells_are_means_over_the_seeds_of_their_method() -> None:
    runs = [
        GridRun(method, clip, lr, seed)
        for method in ("DP-SGD", "DP-KFC")
        for clip in (1, 3)
        for lr in (2, 5)
        for seed in (1, 2)
    ]
    found = find(
        {
            run: result(run.clip + run.lr / 10 + run.seed / 100 + (run.method == "DP-KFC"))
            for run in runs
        },
        "DP-KFC",
    )
    assert found.clips == (1, 3) and found.rates == (2, 5)
    assert found.grid == pytest.approx(np.array([[2.215, 2.515], [4.215, 4.515]]))


def test_where_every_gradient_is_clipped_only_the_product_matters() -> None:
    """Check the formula in the module for both methods."""
    for method in experiment.METHODS:
        results = [train(GridRun(method, clip, 0.1 / clip, 1, **FEW)) for clip in (1e-3, 1e-2)]
        assert len({result.last for result in results}) == 1


def test_from_end_to_end_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[GridRun] = []

    def few_steps(run: GridRun, device: str) -> DigitsResult:
        trained.append(run)
        return train(replace(run, **FEW))

    monkeypatch.setattr(experiment, "CLIPS", (0.3, 3.0))
    monkeypatch.setattr(experiment, "RATES", (0.01, 0.1))
    monkeypatch.setattr(experiment, "SEEDS", (1,))
    monkeypatch.setattr(experiment, "train", few_steps)
    out = tmp_path / "new" / "grid.jsonl"
    experiment.main(["--out", str(out)])
    lines = out.read_text().splitlines()
    assert len(trained) == len(lines) == 8
    assert json.loads(lines[0])["setting"] | {"method": ""} == {
        "method": "",
        "clip": 0.3,
        "lr": 0.01,
        "seed": 1,
        "epsilon": 3.0,
        "steps": 100,
        "batch_size": 96,
    }
    text = out.with_suffix(".md").read_text()
    assert "claim" in text and "| DP-KFC, best" in text and "](grid.png)" in text
    assert out.with_suffix(".png").stat().st_size > 10_000
    out.write_text("\n".join(lines[:6]) + "\n")
    experiment.main(["--out", str(out)])
    assert len(trained) == 10 and sorted(out.read_text().splitlines()) == sorted(lines), (
        "only what is missing is run"
    )


def test_reproduced_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[GridRun] = []

    def untrained(run: GridRun, device: str) -> DigitsResult:
        trained.append(run)
        return result(0.1)

    monkeypatch.setattr(experiment, "train", untrained)
    monkeypatch.setattr(experiment, "plot", lambda findings, file: file.touch())
    experiment.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    text = (tmp_path / "quick.md").read_text()
    assert (
        len(trained) == 18 and {run.steps for run in trained} == {20} and "20 steps of 96" in text
    )
    assert "**Quick:**" in text and "claim" not in text, "no verdict on a few cells"
    experiment.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=False))
    assert (
        len(trained) == 18 + 2 * 2 * 8 * 12
        and "100 steps of 96" in (tmp_path / "clip-and-rate.md").read_text()
    )
    (tmp_path / "quick.jsonl").write_text("{")
    with pytest.raises(ValueError, match="cut off"):
        experiment.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))


def test_wrong_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiment.main(["--out", str(tmp_path / "grid.md")])
    assert "must end in .jsonl" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"setting": {"model": "mlp"}, "result": {}}) + "\n")
    with pytest.raises(SystemExit, match="does not hold results of this experiment"):
        experiment.main(["--out", str(other)])
    other.write_text('{"setting": {"mod')
    with pytest.raises(SystemExit, match="line 1 is cut off"):
        experiment.main(["--out", str(other)])
