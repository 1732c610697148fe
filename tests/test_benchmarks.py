"""The benchmarks run from the command line and save the documented figures."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks import device, growth, planning, sampling, speed  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402


def bench(*arguments: str, module: str = "speed") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("speed") / "speed.json"
    drawing = ["--plot", str(file.with_suffix(".png"))] if find_spec("matplotlib") else []
    small = [
        "--workloads",
        "mlp",
        "--arms",
        "sgd,opacus_hooks,dpkfc,dpkfc_kfc",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    done = bench("--json", str(file), *small, *drawing)
    assert done.returncode == 0, done.stderr
    assert "opacus_hooks" in done.stdout
    assert not drawing or file.with_suffix(".png").stat().st_size > 0
    saved: dict[str, Any] = json.loads(file.read_text())
    return saved


def test_every_arm_has_figures_or_an_error(result: dict[str, Any]) -> None:
    assert set(result) == {"workloads", "settings"}
    assert set(result["workloads"]) == {"mlp"}
    arms = result["workloads"]["mlp"]
    assert list(arms) == ["sgd", "opacus_hooks", "dpkfc", "dpkfc_kfc"]
    for arm, figures in arms.items():
        if "error" in figures:
            assert "\n" not in figures["error"]
        else:
            expected = {"seconds", "seconds_best", "peak_mb", "baseline_mb", "ratio"}
            if arm == "dpkfc_kfc":
                expected |= {"seconds_step", "seconds_refresh", "refresh_in_steps"}
            assert set(figures) == expected
            assert set(figures["ratio"]) == {"seconds", "peak_mb", "net_mb"}
            assert figures["seconds"] >= figures["seconds_best"] > 0
            assert figures["peak_mb"] > figures["baseline_mb"] > 0


def test_ratios_are_to_ordinary_training(result: dict[str, Any]) -> None:
    arms = result["workloads"]["mlp"]
    assert set(arms["sgd"]["ratio"].values()) == {1.0}
    pytest.importorskip("opacus")
    hooks = arms["opacus_hooks"]
    assert hooks["ratio"]["seconds"] == pytest.approx(hooks["seconds"] / arms["sgd"]["seconds"])
    assert hooks["ratio"]["net_mb"] > 2  # 256 gradients of 670 thousand weights


def test_the_share_of_a_refresh_is_in_the_time_of_a_step(result: dict[str, Any]) -> None:
    arms = result["workloads"]["mlp"]
    kfc = arms["dpkfc_kfc"]
    assert "error" not in kfc, kfc["error"]
    assert kfc["seconds"] == pytest.approx(kfc["seconds_step"] + kfc["seconds_refresh"] / 50)
    assert kfc["refresh_in_steps"] == pytest.approx(kfc["seconds_refresh"] / arms["sgd"]["seconds"])
    assert result["settings"]["refresh_every"] == 50


@pytest.fixture
def refreshed_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the steps at which DP-KFC is refreshed."""
    steps: list[int] = []
    refresh = speed.RefreshOnDemand.refresh

    def recorded(
        self: speed.RefreshOnDemand, model: Any, capture: Any, step: int, ranks: Any
    ) -> None:
        steps.append(step)
        refresh(self, model, capture, step, ranks)

    monkeypatch.setattr(speed.RefreshOnDemand, "refresh", recorded)
    return steps


def test_every_turn_and_the_memory_run_end_with_a_refresh(
    refreshed_at: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    small = growth.wide(16, batch_size=4, steps=3)
    figures = speed.time_workload(small, ["dpkfc_kfc"], rounds=2, warmup=2)
    assert "error" not in figures["dpkfc_kfc"]
    # Two steps of warming up, then turns of three steps and one with a refresh.
    assert refreshed_at == [0, 5, 9]
    refreshed_at.clear()
    speed.report_memory("mlp", "dpkfc_kfc", steps=2, threads=torch.get_num_threads())
    assert refreshed_at == [0, 1]
    assert json.loads(capsys.readouterr().out)["peak_mb"] > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_have_the_shape_of_a_batch(name: str) -> None:
    workload = WORKLOADS[name]
    drawn = workload.probe.draw(workload.probe.count, torch.Generator().manual_seed(0)).inputs
    first = drawn["input_ids"] if isinstance(drawn, dict) else drawn
    record = workload.batch(workload.batch_size)[0]
    assert isinstance(first, torch.Tensor)
    assert (first.shape, first.dtype) == (record.shape, record.dtype)


def test_growth_has_a_ratio_for_every_size(tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    drawing = ["--plot", str(file.with_suffix(".png"))] if find_spec("matplotlib") else []
    done = bench("--json", str(file), "--quick", "--threads", "1", *drawing, module="growth")
    assert done.returncode == 0, done.stderr
    assert not drawing or file.with_suffix(".png").stat().st_size > 0
    saved = json.loads(file.read_text())
    assert set(saved) == {"sweeps", "settings"}
    assert {name: [int(size) for size in points] for name, points in saved["sweeps"].items()} == {
        name: list(sizes) for name, sizes in growth.QUICK.items()
    }
    for points in saved["sweeps"].values():
        for arms in points.values():
            assert list(arms) == ["sgd", "dpkfc", "dpkfc_kfc"]
            for figures in arms.values():
                assert figures["ratio"]["seconds"] == pytest.approx(
                    figures["seconds"] / arms["sgd"]["seconds"]
                )
            assert "refresh_in_steps" in arms["dpkfc_kfc"]


def test_planning_has_the_time_of_each_arm_and_its_ratio(tmp_path: Path) -> None:
    file = tmp_path / "planning.json"
    options = ["--quick", "--json", str(file), "--before", str(ROOT)]
    done = bench(*options, module="planning")
    assert done.returncode == 0, done.stderr
    saved = json.loads(file.read_text())
    assert set(saved) == {"arms", "phases"}
    assert list(saved["arms"]) == list(planning.QUICK)
    for figures in saved["arms"].values():
        assert set(figures) == {"now", "before", "ratio"}
        for key, ratio in figures["ratio"].items():
            assert ratio == pytest.approx(figures["now"][key] / figures["before"][key])
    assert "calibration of the contenders" in saved["phases"]
    assert min(saved["phases"].values()) > 0


def test_planning_measures_the_package_of_each_checkout(tmp_path: Path) -> None:
    other = tmp_path / "src" / "dpkfc"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the other checkout')")
    with pytest.raises(SystemExit, match="the other checkout"):
        planning.seconds_of(("-c", "import dpkfc"), tmp_path)
    figures = planning.seconds_of(("-c", "import dpkfc"), ROOT)
    assert set(figures) == {"seconds", "processor_seconds"} and min(figures.values()) > 0


def test_planning_refuses_a_folder_without_the_package(tmp_path: Path) -> None:
    done = bench("--before", str(tmp_path), module="planning")
    assert done.returncode == 2
    assert "there is no src/dpkfc in it" in done.stderr
def test_sampling_has_figures_for_every_number_of_records(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    small = ["--records", "1000000", "1000000000", "--draws", "2"]
    done = bench("--json", str(file), *small, module="sampling")
    assert done.returncode == 0, done.stderr
    assert "1e+09" in done.stdout
    saved = json.loads(file.read_text())
    assert list(saved) == list(sampling.ARMS)
    for sizes in saved.values():
        assert list(sizes) == ["1000000", "1000000000"]
        for figures in sizes.values():
            assert 800 < figures["drawn"] < 1200
            assert figures["ratio"] == figures["seconds"] / sizes["1000000"]["seconds"]
            # 10⁹ numbers, of one byte each, would be a thousand.
            assert 0 <= figures["peak_mb"] < 50


def test_settings_describe_the_run(result: dict[str, Any]) -> None:
    settings = result["settings"]
    assert (settings["rounds"], settings["threads"]) == (1, 1)
    assert settings["batch_size"] == {"mlp": 256}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = bench("--json", "unused.json", "--workloads", "lstm")
    assert done.returncode == 2
    assert "'lstm' is not known: choose from mlp, cnn, resnet, vit, minilm, gpt2" in done.stderr


def test_the_device_benchmark_counts_and_compares() -> None:
    small = ["--size", "40000", "--width", "32", "--turns", "1", "--no-compile"]
    done = bench(*small, module="device")
    assert done.returncode == 0, done.stderr
    for arm in ("as in a step", "torch normal_", "cipher, separate kernels", "with noise"):
        assert arm in done.stdout


def test_the_operations_of_the_cipher_are_counted() -> None:
    """Three blocks per 32 normals: 80 quarter rounds of 4 additions, 4 xors and 4 rotations each,
    a rotation being two shifts, a mask and an or; then 16 additions.
    """
    integer, floating = device.operations_per_normal()
    cipher = 3 * (80 * 4 * (1 + 1 + 4) + 16) / 32
    # beside the cipher, each word is split into two halves: a shift and two masks
    assert cipher <= integer <= cipher + 3 * 3 / 2 + 1
    assert 5 < floating < 40
