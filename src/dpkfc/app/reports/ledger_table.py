"""A ledger as tables: one per data set, with the epsilon of all its runs together below it.

In a narrow terminal the values of a run are shown below each other, so that none is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

DELTA = 1e-5  # if neither a run nor the user states one
COLUMNS = (
    "run",
    "started\n(UTC)",
    "steps",
    "sampling\nrate",
    "noise\nmultiplier",
    "epsilon\nat delta",
    "state",
)
EpsilonSpent = Callable[[Sequence[Mechanism], float], float]


def ledger_tables(
    runs: list[LedgerRun], delta: float | None, epsilon_of: EpsilonSpent = epsilon_spent
) -> Group:
    """The runs by data set, with the epsilon of each run alone and of all runs composed.

    Args:
        delta: at which the total is stated; by default the smallest delta of the data set's runs.
            A run is shown at its own delta, or at this one if it has none.
        epsilon_of: computes the epsilon of mechanisms at a delta.
    """

    @cache
    def epsilon(mechanisms: tuple[Mechanism, ...], delta: float) -> str:
        return round_up(epsilon_of(mechanisms, delta))

    parts: list[RenderableType] = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        members = [run for run in runs if run.dataset == dataset]
        total_delta = _delta_of_total(members) if delta is None else delta
        rows = []
        for run in members:
            run_delta = run.delta or total_delta
            rows.append(_row(run, run_delta, epsilon((run.spent,), run_delta)))
        total = epsilon(tuple(run.spent for run in members), total_delta)
        line = f"all runs composed: epsilon = {total} at delta = {total_delta:g}, add-or-remove-one"
        if delta is None and not any(run.delta for run in members):
            line += " (delta is assumed: choose with --delta)"
        notes = [
            Text(f"{run.run_id}: {NOT_CHECKED.get(key, key)}")  # type: ignore[call-overload]
            for run in members
            for key in run.unchecked
        ]
        parts += [RunTable(dataset, rows), *notes, Text(f"{line}\n", style="bold")]
    return Group(*parts or [Text("the ledger holds no runs yet")])


def _delta_of_total(runs: list[LedgerRun]) -> float:
    return min((run.delta for run in runs if run.delta is not None), default=DELTA)


def _row(run: LedgerRun, delta: float, epsilon: str) -> tuple[str, ...]:
    return (
        run.run_id,
        run.started[:16].replace("T", " "),
        f"{run.charged}/{run.mechanism.steps}",
        f"{run.mechanism.sampling_rate:.4g}" + _cycle(run.mechanism),
        f"{run.mechanism.noise_multiplier:.4g}",
        f"{epsilon}\nat {delta:g}",
        ("closed" if run.closed else "open") + _selection(run.mechanism),
    )


@dataclass(frozen=True)
class RunTable:
    """One row per run if the terminal is wide enough, else one line per value."""

    title: str
    rows: list[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Without the names of the runs, which may be folded.
        values = _wide("", [("", *row[1:]) for row in self.rows])
        needed = Measurement.get(console, options.update(width=1000), values).minimum
        yield (_wide if needed <= options.max_width else _narrow)(self.title, self.rows)


def _wide(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column(COLUMNS[0], overflow="fold", min_width=12)
    table.add_column(COLUMNS[1], min_width=10)
    for heading in COLUMNS[2:6]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(COLUMNS[6], no_wrap=True)
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
    for row in rows:
        for heading, value in zip(COLUMNS, row, strict=True):
            table.add_row(
                heading.replace("\n", " "),
                Text(value.replace("\nat", " at").replace("\n", ", ")),
                end_section=heading == COLUMNS[-1],
            )
    return table


def _selection(mechanism: Mechanism) -> str:
    return "" if mechanism.best_of is None else f"\nbest of {mechanism.best_of.mean:g}"


def _cycle(mechanism: Mechanism) -> str:
    return f"\nevery {mechanism.cycle}" if mechanism.cycle > 1 else ""
