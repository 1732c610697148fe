"""Every program in examples/ runs as its docstring says and prints what the docstring shows."""

from __future__ import annotations

import ast
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.integrations.launching import launch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


class Expected(NamedTuple):
    """What --quick prints. Accuracies vary: the noise of an example is secret."""

    results: int  # lines with an accuracy and an epsilon
    target_epsilon: float
    least_accuracy: float
    needs: tuple[str, ...]


EXPECTED = {
    "accelerate_loop": Expected(1, 3.0, 0.5, ("accelerate", "sklearn")),
    "correlated_noise": Expected(2, 8.0, 0.7, ("sklearn",)),
    "custom_layer": Expected(1, 3.0, 0.6, ("sklearn",)),
    "distributed_ddp": Expected(1, 3.0, 0.5, ("sklearn",)),
    "lightning_module": Expected(1, 3.0, 0.5, ("lightning", "sklearn")),
    "flower_app": Expected(2, 3.0, 0.2, ("sklearn", "flwr")),
    "lora_transformer": Expected(1, 3.0, 0.7, ("transformers", "peft")),
    "hugging_face_trainer": Expected(1, 3.0, 0.7, ("transformers", "accelerate")),
    "mnist_cnn": Expected(2, 3.0, 0.5, ("sklearn",)),
    "own_csv": Expected(1, 2.0, 0.75, ()),
    "public_tuning": Expected(1, 3.0, 0.5, ("sklearn", "optuna")),
    "sft_trainer": Expected(1, 8.0, 0.7, ("trl", "peft")),
}


def run_example(file: Path, folder: Path, *arguments: str) -> str:
    """Run an example in `folder`, from the sources of this checkout, and return what it prints."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What an example prints with --quick. Each one runs once."""

    @cache
    def output(name: str) -> str:
        for module in EXPECTED[name].needs:
            pytest.importorskip(module)
        folder = tmp_path_factory.mktemp(name)
        printed = run_example(ROOT / "examples" / f"{name}.py", folder, "--quick")
        # Examples may write to temporary folders of their own only.
        assert list(folder.iterdir()) == []
        return printed

    return output


def numbers_after(label: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{label} (\d+(?:\.\d+)?)", printed)]


def test_every_example_has_its_expectations() -> None:
    assert {file.stem for file in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_docstring_says_what_is_shown_how_to_run_it_and_what_it_prints(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert docstring is not None
    assert docstring.splitlines()[0].endswith(".")
    assert f"    python examples/{file.name}" in docstring
    assert re.search(r"^Prints\b.*?:\n\n    \S", docstring, re.MULTILINE | re.DOTALL)
    assert numbers_after("test accuracy", docstring)


@pytest.mark.parametrize("name", EXPECTED)
def test_example_keeps_its_budget_and_learns(name: str, quick: Callable[[str], str]) -> None:
    expected = EXPECTED[name]
    printed = quick(name)
    epsilons = numbers_after("(?:epsilon|epsilon of this run)", printed)
    accuracies = numbers_after("test accuracy", printed)
    assert len(epsilons) == len(accuracies) == expected.results
    target = expected.target_epsilon
    assert all(0.99 * target < epsilon <= target for epsilon in epsilons)
    assert all(expected.least_accuracy <= accuracy <= 1 for accuracy in accuracies)


def test_own_csv_charges_the_ledger_and_refuses_a_second_run(quick: Callable[[str], str]) -> None:
    printed = quick("own_csv")
    of_run = numbers_after("epsilon of this run", printed)
    of_ledger = numbers_after("epsilon of all runs in the ledger", printed)
    assert of_run == of_ledger
    # The plan shows the stated number of records; the number in the file is another.
    assert re.search(r"records\W+3000\b", printed)
    assert re.search(r"a second run is refused: .*'patients'.*\b2\.5\b", printed)


def test_auto_chooses_correlated_noise(quick: Callable[[str], str]) -> None:
    independent, auto = quick("correlated_noise").splitlines()
    assert "independent Gaussian" in independent
    assert auto.startswith("auto")
    assert "independent" not in auto


def test_lora_trains_a_small_part_of_the_model(quick: Callable[[str], str]) -> None:
    counts = re.search(r"([\d,]+) of ([\d,]+) parameters are trained", quick("lora_transformer"))
    assert counts is not None
    trained, all_parameters = (int(count.replace(",", "")) for count in counts.groups())
    assert 0 < trained < 0.1 * all_parameters


def test_a_resumed_accelerate_loop_takes_the_planned_steps(quick: Callable[[str], str]) -> None:
    assert "interrupted after 56 of 113 steps" in quick("accelerate_loop")


def test_two_ranks_take_the_steps_of_one(quick: Callable[[str], str]) -> None:
    pytest.importorskip("sklearn")
    file = ROOT / "examples" / "distributed_ddp.py"
    first, second = launch([sys.executable, str(file), "--quick"])
    assert second == ""
    alone = quick("distributed_ddp")
    assert first.splitlines()[0] == alone.splitlines()[0].replace("1 ranks", "2 ranks")
    assert numbers_after("epsilon", first) == numbers_after("epsilon", alone)
    (accuracy,) = numbers_after("test accuracy", first)
    assert accuracy >= EXPECTED["distributed_ddp"].least_accuracy


def write_idx(file: Path, values: np.ndarray) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    file.write_bytes(header + values.astype(np.uint8).tobytes())


def test_mnist_cnn_reads_idx_files(tmp_path: Path) -> None:
    """The digits, enlarged to the size of MNIST, in the place of its files."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    large = np.zeros((len(images), 28, 28))
    large[:, 2:26, 2:26] = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))) * 255 / 16
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for split, rows in (("train", slice(0, 600)), ("t10k", slice(600, 700))):
        write_idx(folder / f"{split}-images-idx3-ubyte", large[rows])
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels[rows])
    arguments = ("--data-dir", str(tmp_path / "data"), "--quick")
    printed = run_example(ROOT / "examples" / "mnist_cnn.py", tmp_path, *arguments)
    assert [line.split()[0] for line in printed.splitlines()] == ["DP-SGD", "DP-KFC"]
    assert all(epsilon <= 3 for epsilon in numbers_after("epsilon", printed))
