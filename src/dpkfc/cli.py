"""The command line: `dpkfc COMMAND`, or `python -m dpkfc COMMAND`.

A command imports what it needs when it runs, so that `--help` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from dpkfc.errors import PrivacyError


class Commands(TyperGroup):
    """Shows a `PrivacyError` of any command as one red line, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PrivacyError as error:
            Console(stderr=True).print(Text(f"dpkfc: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)


@app.callback()
def dpkfc() -> None:
    """Differentially private training for PyTorch: the geometry put right before the noise.

    [bold]Examples[/bold]

    [cyan]dpkfc ledger privacy.db[/cyan]    what was spent on which data set
    """


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="The ledger's file.", show_default=False)],
    delta: Annotated[
        float | None, typer.Option(help="The delta at which epsilon is stated.", show_default="1e-5")
    ] = None,
) -> None:
    """Show every run in a ledger, and the epsilon that all runs on a data set come to together.

    The ledger is only read, and may be in use.

    [bold]Examples[/bold]

    [cyan]dpkfc ledger privacy.db[/cyan]

    [cyan]dpkfc ledger privacy.db --delta 1e-6[/cyan]
    """
    from dpkfc.accounting.ledger import read
    from dpkfc.report.ledger_table import ledger_tables

    Console().print(ledger_tables(read(path), delta))
