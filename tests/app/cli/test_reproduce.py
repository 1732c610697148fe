"""`dpkfc reproduce` runs the experiments of a checkout, and says so where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpkfc
from dpkfc.app.cli import reproduce as cli_reproduce
from dpkfc.app.cli.main import app

EXPERIMENTS = """
import json, os, sys, time
import dpkfc
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd()}), flush=True)
if "wait" in sys.argv:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.5)  # it writes what is done
        print("stopped", flush=True)
        sys.exit(130)
sys.exit(3 if "bad" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with experiments, which dpkfc seems to be a part of."""
    folder = tmp_path / "checkout"
    package = folder / "experiments"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(EXPERIMENTS)
    monkeypatch.setattr(cli_reproduce, "find_checkout", lambda: folder)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def given(printed: str) -> dict[str, object]:
    first = printed.splitlines()[0]
    found: dict[str, object] = json.loads(first)
    return found


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], ["--help"]),
        (["fig1"], ["fig1", "--device", "cpu"]),
        (
            [
                "fig1",
                "--quick",
                "--data-dir",
                "D",
                "--out",
                "O",
                "--seed",
                "3",
                "--device",
                "cuda:1",
            ],
            [
                "fig1",
                "--device",
                "cuda:1",
                "--quick",
                "--data-dir",
                "D",
                "--out",
                "O",
                "--seed",
                "3",
            ],
        ),
    ],
)
def test_arguments_and_folder_are_passed_on(
    checkout: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], passed: list[str]
) -> None:
    (Path.cwd() / "experiments").mkdir()
    (Path.cwd() / "experiments" / "__init__.py").touch()  # another package of this name
    assert CliRunner().invoke(app, ["reproduce", *arguments]).exit_code == 0
    assert given(capfd.readouterr().out) == {"arguments": passed, "folder": str(Path.cwd())}


def test_the_exit_code_is_that_of_the_experiment(checkout: Path) -> None:
    assert CliRunner().invoke(app, ["reproduce", "bad"]).exit_code == 3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name == "nt", reason="needs signals of process groups")
def test_ctrl_c_stops_the_experiment_in_its_own_time(tmp_path: Path, checkout: Path) -> None:
    source = Path(dpkfc.__path__[0]).parent
    link = checkout / "src"
    link.symlink_to(source)  # found from the working directory
    process = subprocess.Popen(
        [sys.executable, "-m", "dpkfc", "reproduce", "wait"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(copied_package(tmp_path, source))},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert given(process.stdout.readline())["arguments"] == ["wait", "--device", "cpu"]
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.communicate(timeout=60)[0] == "stopped\n"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == 130


def copied_package(tmp_path: Path, source: Path) -> Path:
    """dpkfc as if it were installed: no checkout above it."""
    installed = tmp_path / "installed"
    installed.mkdir()
    subprocess.run(["cp", "-r", str(source / "dpkfc"), str(installed)], check=True)
    return installed


def test_an_installed_package_says_where_the_experiments_are(tmp_path: Path) -> None:
    source = Path(dpkfc.__path__[0]).parent
    environment = {**os.environ, "PYTHONPATH": str(copied_package(tmp_path, source))}
    command = [sys.executable, "-m", "dpkfc", "reproduce"]
    done = subprocess.run(
        [*command, "fig1"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("dpkfc: experiments are not part of the installed package")
    assert "python -m experiments" in done.stderr
    shown = subprocess.run(
        [*command, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0 and "--quick" in shown.stdout


def test_the_checkout_is_found_above_the_package_or_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dpkfc, "__file__", str(tmp_path / "top" / "src" / "dpkfc" / "__init__.py"))
    assert cli_reproduce.find_checkout() is None
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__main__.py").touch()
    assert cli_reproduce.find_checkout() is None, "experiments of another project"
    (tmp_path / "src" / "dpkfc").mkdir(parents=True)
    (tmp_path / "src" / "dpkfc" / "__init__.py").touch()
    assert cli_reproduce.find_checkout() == tmp_path
    for folder in ("experiments", "src/dpkfc"):
        (tmp_path / "top" / folder).mkdir(parents=True)
    (tmp_path / "top" / "experiments" / "__main__.py").touch()
    (tmp_path / "top" / "src" / "dpkfc" / "__init__.py").touch()
    assert cli_reproduce.find_checkout() == tmp_path / "top"
