"""`dpkfc report`: one HTML file about a run or an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="The folder of dpkfc train, tune, demo or reproduce.", show_default=False
        ),
    ],
) -> None:
    """Write the report of a run as one HTML file: its privacy in plain words, accuracy, settings.

    For an experiment, the report holds its tables and figures.

    [bold]Examples[/bold]

    [cyan]dpkfc report runs/digits[/cyan]

    [cyan]dpkfc report results/table1[/cyan]
    """
    from dpkfc.app.reports.run_report import write_report

    Console().print(str(write_report(folder)), soft_wrap=True, highlight=False)
