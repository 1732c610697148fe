"""The command line: `dpkfc COMMAND`, or `python -m dpkfc COMMAND`.

The modules of this package import only typer, rich and light modules at the top, and everything
else inside the commands: `dpkfc --help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dpkfc.app.cli.data import data
from dpkfc.app.cli.demo import demo
from dpkfc.app.cli.doctor import doctor
from dpkfc.app.cli.errors import CommandGroup
from dpkfc.app.cli.ledger import ledger
from dpkfc.app.cli.plan import plan
from dpkfc.app.cli.predict import predict
from dpkfc.app.cli.report import report
from dpkfc.app.cli.reproduce import reproduce
from dpkfc.app.cli.train import train
from dpkfc.app.cli.tune import tune
from dpkfc.app.reports.plain_warnings import plainly_warned

COMMANDS = (train, predict, tune, plan, ledger, report, data, demo, doctor, reproduce)


def help_text(command: Callable[..., Any]) -> str:
    """The docstring with each paragraph on one line: the terminal decides where lines break."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.splitlines()) for paragraph in paragraphs)


def dpkfc(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of every error.")
    ] = False,
) -> None:
    """Differentially private training for PyTorch.

    Gradients are preconditioned before clipping and noise.

    [bold]Examples[/bold]

    [cyan]dpkfc demo[/cyan]                          a small private model, in about a minute

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3[/cyan]

    [cyan]dpkfc predict runs/people new.csv[/cyan]   the classes of new records

    [cyan]dpkfc plan 60000[/cyan]                    the noise of a run, before any data is read

    [cyan]dpkfc ledger privacy.db[/cyan]             the epsilon spent on each data set
    """


# Tracebacks without local variables: these may hold private records.
app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.callback(help=help_text(dpkfc))(dpkfc)
for command in COMMANDS:
    app.command(help=help_text(command))(plainly_warned(command))
