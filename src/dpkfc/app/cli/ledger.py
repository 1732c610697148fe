"""`dpkfc ledger`: the runs in a ledger and the epsilon that they add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def ledger(
    path: Annotated[Path, typer.Argument(help="The file of the ledger.", show_default=False)],
    delta: Annotated[
        float | None,
        typer.Option(
            help="The delta at which the total is stated.",
            show_default="the smallest of the data set's runs",
        ),
    ] = None,
) -> None:
    """Show every run in a ledger, and the epsilon of all runs on each data set together.

    Each run is shown at its own delta. Notes below the table say what was not checked. The ledger
    is only read, also while other processes use it.

    [bold]Examples[/bold]

    [cyan]dpkfc ledger privacy.db[/cyan]

    [cyan]dpkfc ledger privacy.db --delta 1e-6[/cyan]
    """
    from dpkfc.accounting.ledger import read
    from dpkfc.app.reports.epsilon_cache import EpsilonCache
    from dpkfc.app.reports.ledger_table import ledger_tables

    console = Console()
    with console.status("composing the runs"):
        tables = ledger_tables(read(path), delta, EpsilonCache().epsilon)
    console.print(tables)
