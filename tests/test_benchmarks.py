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

import dpkfc

ROOT = Path(__file__).parents[1]


sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks import (  # noqa: E402
    device,
    distributed,
    growth,
    planning,
    sampling,
    scaling_model,
    speed,
)
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
    known = "mlp, cnn, resnet, vgg, vit, minilm, gpt2"
    assert f"'lstm' is not known: choose from {known}" in done.stderr


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


def test_distributed_has_overheads_and_bytes_for_every_layout(tmp_path: Path) -> None:
    file = tmp_path / "distributed.json"
    done = bench("--json", str(file), "--quick", "--workloads", "mlp", module="distributed")
    assert done.returncode == 0, done.stderr
    assert "≤ 1.1?" in done.stdout
    saved = json.loads(file.read_text())
    assert set(saved) == {"workloads", "settings"}
    assert list(saved["workloads"]["mlp"]) == ["ddp", "fsdp"]
    model = WORKLOADS["mlp"].build()
    size = 4 * sum(p.numel() for p in model.parameters())
    # one all-reduce; two all-gathers and a reduce-scatter; of half of the bytes on two ranks
    expected = {"ddp": 2 * size / 2, "fsdp": 3 * size / 2}
    for layout, methods in saved["workloads"]["mlp"].items():
        assert list(methods) == list(distributed.METHODS)
        for method, by_processes in methods.items():
            alone, two = by_processes["1"], by_processes["2"]
            assert alone["bytes"] == alone["control_bytes"] == 0
            assert two["bytes"] == expected[layout], (layout, method)
            assert two["control_bytes"] == (0 if method == "ordinary" else 40)
            assert method != "ordinary" or (alone["overhead"], two["overhead"]) == (1, 1)
            assert two["overhead"] > 0


def test_bytes_of_collectives() -> None:
    """Of a whole tensor of 120 bytes on three ranks, of which a rank has 40."""
    once = 80
    assert distributed.sent_bytes("allreduce_", 120, 3) == pytest.approx(2 * once)
    assert distributed.sent_bytes("_allgather_base_", 160, 3) == pytest.approx(once)
    assert distributed.sent_bytes("_reduce_scatter_base_", 160, 3) == pytest.approx(once)
    assert distributed.sent_bytes("all_gather_into_tensor", 40, 3) == pytest.approx(once)
    assert distributed.sent_bytes("reduce_scatter_tensor", 120, 3) == pytest.approx(once)
    with pytest.raises(NotImplementedError, match="alltoall_base_"):
        distributed.sent_bytes("alltoall_base_", 120, 3)


def test_overheads_are_medians_over_rounds_of_ratios_within_a_round() -> None:
    private = [{"seconds": s, "refresh": 50.0} for s in (1.0, 20.0, 3.0)]
    ordinary = [{"seconds": s, "refresh": 0.0} for s in (1.0, 10.0, 1.0)]
    figures = distributed.overhead(private, ordinary)
    assert figures["overhead"] == pytest.approx(2.1)  # of 2, 2.1 and 4
    assert figures["overhead_without_refresh"] == 2.0
    assert figures["refresh_in_steps"] == 50.0


def test_the_cost_model_counts_the_shapes_of_a_real_model() -> None:
    """A small model of the same kind, built."""
    transformers = pytest.importorskip("transformers")
    shape = scaling_model.Transformer("small", 100, 32, 48, 16, 3)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert sorted((x.outputs, x.inputs) for x in shape.linears()) == sorted(
        (m.out_features, m.in_features) for m in linears
    )
    entering: dict[int, torch.Tensor] = {}  # all are kept, so that no id is used again
    for layer in linears:
        layer.register_forward_pre_hook(lambda _, args: entering.update({id(args[0]): args[0]}))
    model(torch.zeros(1, 2, dtype=torch.long))
    assert shape.inputs() == sum(x.shape[-1] for x in entering.values())


def test_the_cost_model_has_the_operations_of_the_noise_and_the_defaults_of_kfc() -> None:
    integer, _ = device.operations_per_normal()
    assert integer == scaling_model.INTEGER_OPERATIONS
    geometry = dpkfc.KFC()
    assert geometry.max_factor == scaling_model.MAX_FACTOR
    assert scaling_model.Setting.rank == geometry.rank
    assert geometry.every == scaling_model.EVERY
    tokens = dpkfc.probes.Tokens(1000, scaling_model.Setting.tokens)
    assert tokens.count == scaling_model.PROBES


def test_the_cost_model_counts_the_buffers_of_correlated_noise() -> None:
    bands = scaling_model.Setting.bands
    factorization = dpkfc.noise.BandedToeplitz(bands).factorize(
        dpkfc.noise.Workload.sgd(momentum=0.9), 40, 20
    )
    stream = factorization.stream([range(7)], torch.device("cpu"))
    held = stream.state_dict()["past"]
    small = scaling_model.Transformer("small", 100, 32, 48, 16, 3)
    cost = scaling_model.Cost(small, 4, sharded=True)
    assert held.numel() == 7 * (bands - 1)
    assert cost.correlated() == 4 * (bands - 1) * small.parameters() / 4
