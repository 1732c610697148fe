"""A ledger as tables: one for each data set, and below it what all its runs come to together.

Where the terminal is too narrow for a row, the values of a run stand below each other, so that none is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import LedgerRun
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED

DELTA = 1e-5  # where neither a run nor the user says one


def ledger_tables(runs: list[LedgerRun], delta: float | None) -> Group:
    """The runs by data set, with the epsilon of each alone and of all composed.

    Each run is shown at its own delta. The total is stated at `delta`, by default at the smallest delta of the data
    set's runs; so is a run that was entered without one.
    """

    @cache
    def epsilon(mechanisms: tuple[Mechanism, ...], at: float) -> str:
        return round_up(epsilon_spent(mechanisms, at))

    parts: list[RenderableType] = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        own = [run for run in runs if run.dataset == dataset]
        at = _delta_of_total(own) if delta is None else delta
        rows = [_row(run, run.delta or at, epsilon((run.spent,), run.delta or at)) for run in own]
        total = epsilon(tuple(run.spent for run in own), at)
        line = f"all runs composed: epsilon = {total} at delta = {at:g}, add-or-remove-one\n"
        if delta is None and not any(run.delta for run in own):
            line = f"{line.rstrip()} (delta is assumed: choose with --delta)\n"
        notes = [
            Text(f"{run.run_id}: {NOT_CHECKED.get(what, what)}")
            for run in own
            for what in run.unchecked
        ]  # type: ignore[call-overload]
        parts += [Fitting(dataset, rows), *notes, Text(line, style="bold")]
    return Group(*parts or [Text("the ledger holds no runs yet")])


def _delta_of_total(runs: list[LedgerRun]) -> float:
    return min((run.delta for run in runs if run.delta is not None), default=DELTA)


def _row(run: LedgerRun, delta: float, epsilon: str) -> tuple[str, ...]:
    return (
        run.run_id,
        run.started[:16].replace("T", " "),
        f"{run.charged}/{run.mechanism.steps}",
        f"{run.mechanism.sampling_rate:.4g}" + _turns(run.mechanism),
        f"{run.mechanism.noise_multiplier:.4g}",
        f"{epsilon}\nat {delta:g}",
        ("closed" if run.closed else "open") + _selection(run.mechanism),
    )


@dataclass(frozen=True)
class Fitting:
    """A row for each run where there is room for it, else a line for each value."""

    title: str
    rows: list[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        short = _wide("", [("", *row[1:]) for row in self.rows])  # the name of a run may be folded
        needed = Measurement.get(console, options.update(width=1000), short).minimum
        yield (_wide if needed <= options.max_width else _narrow)(self.title, self.rows)


def _wide(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("run", overflow="fold", min_width=12)
    table.add_column("started\n(UTC)", min_width=10)
    for heading in ("steps", "sampling\nrate", "noise\nmultiplier", "epsilon\nat delta"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _narrow(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(
        title=Text(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    names = (
        "run",
        "started (UTC)",
        "steps",
        "sampling rate",
        "noise multiplier",
        "epsilon at delta",
        "state",
    )
    for row in rows:
        for name, value in zip(names, row, strict=True):
            table.add_row(
                name,
                Text(value.replace("\nat", " at").replace("\n", ", ")),
                end_section=name == names[-1],
            )
    return table


def _selection(mechanism: Mechanism) -> str:
    return "" if mechanism.best_of is None else f"\nbest of {mechanism.best_of.mean:g}"


def _turns(mechanism: Mechanism) -> str:
    return f"\nevery {mechanism.cycle}" if mechanism.cycle > 1 else ""
