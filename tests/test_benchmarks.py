"""The speed benchmark runs from the command line and saves what it says it saves."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.speed", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("speed") / "speed.json"
    drawing = ["--plot", str(file.with_suffix(".png"))] if find_spec("matplotlib") else []
    small = ["--workloads", "mlp", "--arms", "sgd,opacus_hooks,dpkfc", "--rounds", "1", "--threads", "1"]
    done = bench("--json", str(file), *small, *drawing)
    assert done.returncode == 0, done.stderr
    assert "opacus_hooks" in done.stdout
    assert not drawing or file.with_suffix(".png").stat().st_size > 0
    saved: dict[str, Any] = json.loads(file.read_text())
    return saved


def test_every_arm_is_measured_or_says_why_not(result: dict[str, Any]) -> None:
    assert set(result) == {"workloads", "settings"}
    assert set(result["workloads"]) == {"mlp"}
    arms = result["workloads"]["mlp"]
    assert list(arms) == ["sgd", "opacus_hooks", "dpkfc"]
    for figures in arms.values():
        if "error" in figures:
            assert "\n" not in figures["error"]
        else:
            assert set(figures) == {"seconds", "seconds_best", "peak_mb", "baseline_mb", "ratio"}
            assert set(figures["ratio"]) == {"seconds", "peak_mb", "net_mb"}
            assert figures["seconds"] >= figures["seconds_best"] > 0
            assert figures["peak_mb"] > figures["baseline_mb"] > 0


def test_ratios_are_to_ordinary_training(result: dict[str, Any]) -> None:
    arms = result["workloads"]["mlp"]
    assert set(arms["sgd"]["ratio"].values()) == {1.0}
    pytest.importorskip("opacus")
    hooks = arms["opacus_hooks"]
    assert hooks["ratio"]["seconds"] == pytest.approx(hooks["seconds"] / arms["sgd"]["seconds"])
    assert hooks["ratio"]["net_mb"] > 2  # 256 gradients of 670 thousand weights are not free


def test_settings_describe_the_run(result: dict[str, Any]) -> None:
    settings = result["settings"]
    assert (settings["rounds"], settings["threads"]) == (1, 1)
    assert settings["batch_size"] == {"mlp": 256}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = bench("--json", "unused.json", "--workloads", "lstm")
    assert done.returncode == 2
    assert "'lstm' is not known: choose from mlp, cnn, resnet, vit, minilm, gpt2" in done.stderr
