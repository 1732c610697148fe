"""The ledger on terminals of any width: nothing that matters is cut off."""

from __future__ import annotations

import pytest
from rich.console import Console

from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import LedgerRun
from dpkfc.report.ledger_table import ledger_tables, upper

PLAN = Mechanism(0.5, 16.0, 10_000)
RUN = LedgerRun("0123456789abcdef0123456789abcdef", "people", PLAN, 10_000, "2025-01-02T03:04:05+00:00", True)


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
def test_no_width_cuts_a_value_off(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(ledger_tables([RUN], None))
    shown = capture.get()
    values = ("10000/10000", "0.5", "16", upper(epsilon_spent([PLAN], 1e-5)), "closed", "2025-01-02", "03:04")
    assert "…" not in shown and all(value in shown.split() for value in values)
    assert max(map(len, shown.splitlines())) <= width
    assert ("noise multiplier" in shown) == (width < 80)
