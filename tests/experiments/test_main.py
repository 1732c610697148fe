"""`python -m experiments NAME`: names, options, errors, and the files that it writes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules

import pytest
from typer.testing import CliRunner

import experiments
from experiments.__main__ import EXPERIMENTS, app
from experiments.bsr_error import experiment as bsr_error
from experiments.common.options import ReproduceOptions
from experiments.demo import experiment as demo

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_every_experiment_has_a_name() -> None:
    """Every folder but `common` holds an experiment with `reproduce(options)` and has a name."""
    folders = {module.name for module in iter_modules(experiments.__path__) if module.ispkg}
    assert folders - {"common"} == {entry.folder for entry in EXPERIMENTS.values()}
    for folder in folders - {"common"}:
        module = import_module(f"experiments.{folder}.experiment")
        assert next(iter(signature(module.reproduce).parameters)) == "options"
        assert "dpkfc reproduce" in (import_module(f"experiments.{folder}").__doc__ or "")


def test_names_match_folders() -> None:
    for name, entry in EXPERIMENTS.items():
        own = entry.folder == name.replace("-", "_")
        assert own or entry.about == f"the same as {entry.folder}"


def test_help_lists_every_name() -> None:
    code, output, _ = run("--help")
    assert code == 0 and "dpkfc reproduce bsr-error" in output
    for name, entry in EXPERIMENTS.items():
        assert f"{name:15} {entry.about}" in output


def test_options_reach_the_experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[ReproduceOptions] = []

    def fake(options: ReproduceOptions) -> None:
        called.append(options)
        options.out.mkdir(parents=True)
        (options.out / "bsr-error.md").write_text("# Found\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bsr_error, "reproduce", fake)
    code, output, _ = run("bsr-error")
    assert code == 0 and "report.html" in output
    assert run("bsr-error", "--quick", "--out", "here", "--seed", 3)[0] == 0
    assert [(options.out, options.quick, options.seed) for options in called] == [
        (Path("results/bsr-error"), False, None),
        (Path("here"), True, 3),
    ]


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    code, _, errors = run("bsr")
    assert code == 2
    assert errors.startswith("dpkfc: 'bsr' is not an experiment: choose from table1, ")
    assert "bsr-error" in errors and len(errors.splitlines()) == 1
    assert run("tabel1")[2].endswith(". Did you mean table1?\n")


def test_an_interrupted_experiment_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(options: ReproduceOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "reproduce", interrupted)
    code, output, _ = run("demo", "--out", tmp_path)
    assert code == 130 and f"what is done is in {tmp_path}" in output


def test_a_device_that_is_not_there_is_refused() -> None:
    code, _, errors = run("demo", "--device", "cuda:7")
    assert code == 2 and "--device cuda:7 cannot be used" in errors and "choose from cpu" in errors


def test_missing_data_is_reported_in_one_line(tmp_path: Path) -> None:
    code, _, errors = run("fig2", "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "is missing" in errors and "Traceback" not in errors


@pytest.mark.parametrize("folder", ["geometry", "table7"])
def test_a_folder_has_its_own_command_line(folder: str) -> None:
    command = [sys.executable, "-m", f"experiments.{folder}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"usage: python -m experiments.{folder}" in done.stdout
