"""A ledger as tables: one for each data set, and below it what all its runs come to together."""

from __future__ import annotations

import math
from functools import cache

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
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
        table = Table(title=Text(f"{dataset} ({title})"), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        table.add_column("run", overflow="fold", min_width=12)
        table.add_column("started\n(UTC)", min_width=10)
        for heading in ("steps", "sampling\nrate", "noise\nmultiplier", "epsilon"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for run in own:
            table.add_row(
                Text(run.run_id),
                run.started[:16].replace("T", " "),
                f"{run.charged}/{run.mechanism.steps}",
                f"{run.mechanism.sampling_rate:.4g}" + _turns(run.mechanism),
                f"{run.mechanism.noise_multiplier:.4g}",
                epsilon((run.spent,)),
                ("closed" if run.closed else "open") + _selection(run.mechanism),
            )
        total = epsilon(tuple(run.spent for run in own))
        line = f"all runs composed: epsilon = {total} at delta = {at:g}, add-or-remove-one\n"
        parts += [table, Text(line, style="bold")]
    return Group(*parts or [Text("the ledger holds no runs yet")])


def upper(epsilon: float) -> str:
    """Three decimals, rounded up: what is printed is still an upper bound."""
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}" if math.isfinite(epsilon) else "inf"


def _selection(mechanism: Mechanism) -> str:
    return "" if mechanism.best_of is None else f"\nbest of {mechanism.best_of.mean:g}"


def _turns(mechanism: Mechanism) -> str:
    return f"\nevery {mechanism.cycle}" if mechanism.cycle > 1 else ""
