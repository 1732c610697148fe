"""`dpkfc demo`: DP-SGD and DP-KFC on handwritten digits, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpkfc.app.cli import options


def demo(
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 3.0,
    delta: Annotated[
        float, typer.Option(help="The probability with which epsilon may fail to hold.")
    ] = 1e-5,
    epochs: Annotated[float, typer.Option(help="Expected passes over the data.")] = 40.0,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the table, a figure and a report.")
    ] = None,
    device: options.Device = "cpu",
    seed: options.Seed = None,
) -> None:
    """Train a small CNN privately on scikit-learn's handwritten digits, and show what it costs.

    [bold]Examples[/bold]

    [cyan]dpkfc demo[/cyan]

    [cyan]dpkfc demo --epsilon 1 --epochs 20 --seed 0 --out runs/demo[/cyan]
    """
    from dpkfc.app.workflow.demo import run_demo, save_report
    from dpkfc.app.workflow.run_folder import check_folder
    from dpkfc.app.workflow.settings import check_device, check_seed

    check_device(device)
    check_seed(seed)
    if out is not None:
        check_folder(out)
    console = Console()
    outcomes = run_demo(epsilon, delta, epochs, seed, console, device)
    if out is not None:
        console.print(str(save_report(outcomes, delta, out)), soft_wrap=True, highlight=False)
