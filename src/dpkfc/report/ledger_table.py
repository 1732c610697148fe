"""A ledger as tables: one for each data set, and below it what all its runs come to together.

Where the terminal is too narrow for a row, the values of a run stand below each other, so that none is cut off.
"""

from __future__ import annotations

import math
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

DELTA = 1e-5


def ledger_tables(runs: list[LedgerRun], delta: float | None) -> Group:
    """The runs by data set, with the epsilon of each alone and of all composed; `delta=None` means 1e-5."""
    at = DELTA if delta is None else delta
    title = f"at delta = {at:g}" + (", assumed: choose with --delta" if delta is None else "")

    @cache
    def epsilon(mechanisms: tuple[Mechanism, ...]) -> str:
        return upper(epsilon_spent(mechanisms, at))

    parts: list[RenderableType] = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        own = [run for run in runs if run.dataset == dataset]
        rows: list[tuple[str, ...]] = [
            (
                run.run_id,
                run.started[:16].replace("T", " "),
                f"{run.charged}/{run.mechanism.steps}",
                f"{run.mechanism.sampling_rate:.4g}" + _turns(run.mechanism),
                f"{run.mechanism.noise_multiplier:.4g}",
                epsilon((run.spent,)),
                ("closed" if run.closed else "open") + _selection(run.mechanism),
            )
            for run in own
        ]
        total = epsilon(tuple(run.spent for run in own))
        line = f"all runs composed: epsilon = {total} at delta = {at:g}, add-or-remove-one\n"
        parts += [Fitting(f"{dataset} ({title})", rows), Text(line, style="bold")]
    return Group(*parts or [Text("the ledger holds no runs yet")])


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
    for heading in ("steps", "sampling\nrate", "noise\nmultiplier", "epsilon"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _narrow(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    names = ("run", "started (UTC)", "steps", "sampling rate", "noise multiplier", "epsilon", "state")
    for row in rows:
        for name, value in zip(names, row, strict=True):
            table.add_row(name, Text(value.replace("\n", ", ")), end_section=name == names[-1])
    return table


def upper(epsilon: float) -> str:
    """Three decimals, rounded up: what is printed is still an upper bound."""
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}" if math.isfinite(epsilon) else "inf"


def _selection(mechanism: Mechanism) -> str:
    return "" if mechanism.best_of is None else f"\nbest of {mechanism.best_of.mean:g}"


def _turns(mechanism: Mechanism) -> str:
    return f"\nevery {mechanism.cycle}" if mechanism.cycle > 1 else ""
