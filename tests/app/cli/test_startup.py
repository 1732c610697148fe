"""The modules that the command line imports: help and the ledger do not load torch."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import dpkfc
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger
from dpkfc.app.cli.main import COMMANDS

RUN = """
import sys
from dpkfc.app.cli.main import app
try:
    app(sys.argv[1:], prog_name="dpkfc")
except SystemExit as end:
    assert not end.code, end.code
print("modules:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""
HEAVY = {"torch", "numpy", "scipy", "dp_accounting", "safetensors", "matplotlib", "sqlite3"}


def imported(*arguments: object) -> set[str]:
    """The top-level modules that are loaded after a command."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dpkfc.__path__[0]).parent)}
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "privacy.db"
    with closing(Ledger(path, "people")) as people:
        people.open_run("first", Mechanism(1.0, 16.0, 100))
        people.charge("first", 40)
    return path


@pytest.mark.parametrize(
    "arguments", [["--help"], *([command.__name__, "--help"] for command in COMMANDS)]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert not HEAVY & imported(*arguments)


def test_a_ledger_is_shown_without_torch(ledger: Path) -> None:
    modules = imported("ledger", ledger)
    assert "torch" not in modules
    assert "sqlite3" in modules, "the ledger was read"


def test_a_plan_is_made_without_torch() -> None:
    modules = imported("plan", 1000, "--batch-size", 100, "--epochs", 2, "--epsilon", 8)
    assert "torch" not in modules
    assert "dp_accounting" in modules, "the noise was calibrated"
