"""Imports stay cheap: scipy and dp-accounting take as long to load as torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("dp_accounting", "scipy.optimize", "scipy.signal", "scipy.stats")


def loaded_by(code: str) -> set[str]:
    """The modules in memory after `code` has run in a new process."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("module", ["ledger", "rounding", "events", "selection", "calibrate"])
def test_accounting_is_imported_without_torch_scipy_and_dp_accounting(module: str) -> None:
    loaded = loaded_by(f"import dpkfc.accounting.{module}")
    assert not {"torch", "numpy", "scipy", *SLOW} & loaded


def test_a_ledger_is_written_and_read_without_torch_scipy_and_dp_accounting(tmp_path: Path) -> None:
    path = str(tmp_path / "privacy.db")
    loaded = loaded_by(
        "from dpkfc.accounting.events import Mechanism\n"
        "from dpkfc.accounting.ledger import Ledger, read\n"
        f"ledger = Ledger({path!r}, 'patients')\n"
        "ledger.open_run('first', Mechanism(0.01, 1.0, steps=10))\n"
        "ledger.charge('first', 1)\n"
        f"assert read({path!r})[0].charged == 1\n"
    )
    assert not {"torch", "numpy", "scipy", *SLOW} & loaded


def test_an_epsilon_is_computed_without_torch() -> None:
    loaded = loaded_by(
        "from dpkfc.accounting.calibrate import epsilon_spent\n"
        "from dpkfc.accounting.events import Mechanism\n"
        "assert epsilon_spent([Mechanism(1.0, 5.0, steps=1)], 1e-5) > 0\n"
    )
    assert "torch" not in loaded


@pytest.mark.parametrize("name", ["make_private", "KFC", "Ledger", "Plan", "noise", "probes"])
def test_public_names_do_not_load_scipy_and_dp_accounting(name: str) -> None:
    assert not set(SLOW) & loaded_by(f"import dpkfc\ndpkfc.{name}")
