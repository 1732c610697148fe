"""`dpkfc doctor`: check the installation."""

from __future__ import annotations

import typer
from rich.console import Console


def doctor() -> None:
    """Check the installation: versions, optional packages, threads, noise, a short private run.

    [bold]Examples[/bold]

    [cyan]dpkfc doctor[/cyan]
    """
    from dpkfc.app.workflow.doctor import show

    if not show(Console()):
        raise typer.Exit(1)
