"""The ledger on terminals of any width: nothing is cut off; each run at its own delta."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import LedgerRun
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED
from dpkfc.app.reports.ledger_table import ledger_tables

PLAN = Mechanism(0.5, 16.0, 10_000)
RUN = LedgerRun(
    "0123456789abcdef0123456789abcdef", "people", PLAN, 10_000, "2025-01-02T03:04:05+00:00", True
)
GAUSSIAN = Mechanism(1.0, 16.0, 100)  # quickly analysed
SHORT = LedgerRun("first", "people", GAUSSIAN, 100, "2025-01-02T03:04:05+00:00", True)


def shown(runs: list[LedgerRun], delta: float | None = None, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(ledger_tables(runs, delta))
    return capture.get()


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
def test_no_width_cuts_a_value_off(width: int) -> None:
    text = shown([RUN], width=width)
    epsilon = round_up(epsilon_spent([PLAN], 1e-5))
    values = ("10000/10000", "0.5", "16", epsilon, "1e-05", "closed", "2025-01-02", "03:04")
    assert "…" not in text and all(value in text.split() for value in values)
    assert max(map(len, text.splitlines())) <= width
    assert ("noise multiplier" in text) == (width < 80)


@pytest.mark.parametrize(("given", "total"), [(None, 1e-7), (1e-3, 1e-3), (1e-9, 1e-9)])
def test_each_run_at_its_own_delta_and_the_total_at_the_smallest_or_the_given(
    given: float | None, total: float
) -> None:
    second = replace(SHORT, run_id="second", delta=1e-7)
    lines = shown([replace(SHORT, delta=1e-5), second], given).splitlines()
    for name, delta in (("first", 1e-5), ("second", 1e-7)):
        row = next(number for number, line in enumerate(lines) if line.strip().startswith(name))
        assert round_up(epsilon_spent([GAUSSIAN], delta)) in lines[row].split()
        assert f"at {delta:g}" in lines[row + 1]
    composed = round_up(epsilon_spent([GAUSSIAN, GAUSSIAN], total))
    assert (
        f"all runs composed: epsilon = {composed} at delta = {total:g}, add-or-remove-one" in lines
    )
    assert "assumed" not in "".join(lines)


def test_a_delta_that_nobody_said_is_assumed_and_said_so() -> None:
    text = shown([SHORT])
    assert f"epsilon = {round_up(epsilon_spent([GAUSSIAN], 1e-5))} at delta = 1e-05" in text
    assert "delta is assumed: choose with --delta" in text
    assert "assumed" not in shown([SHORT], 1e-4)


def test_a_run_without_a_delta_stands_at_that_of_the_total() -> None:
    text = shown([SHORT, replace(SHORT, run_id="second", delta=1e-7)])
    assert text.count("at 1e-07") == 2 and "1e-05" not in text


def test_the_smallest_delta_is_that_of_the_data_set() -> None:
    others = replace(SHORT, dataset="others", delta=1e-9)
    text = shown([replace(SHORT, delta=1e-5), others])
    assert "at delta = 1e-05" in text and "at delta = 1e-09" in text


def test_what_nobody_checked_is_said_in_words() -> None:
    second = replace(SHORT, run_id="second", unchecked=("seed", "something of a newer version"))
    lines = shown([replace(SHORT, unchecked=("loss",)), second]).splitlines()
    assert f"first: {NOT_CHECKED['loss']}" in lines
    assert f"second: {NOT_CHECKED['seed']}" in lines
    assert "second: something of a newer version" in lines
