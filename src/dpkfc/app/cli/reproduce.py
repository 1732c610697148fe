"""`dpkfc reproduce`: run an experiment of the source checkout.

Experiments are not part of the installed package. They are the package `experiments` at the top of
the source, and run in a process of their own: `python -m experiments NAME`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import dpkfc
from dpkfc.app.cli import options

NO_CHECKOUT = (
    "experiments are not part of the installed package: get the source of dpkfc (git clone), and "
    "run dpkfc reproduce, or python -m experiments, in its top folder"
)


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="The experiment.", show_default="list the names"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small part of it, in seconds or minutes.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data sets: see dpkfc data.", show_default="$DPKFC_DATA"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for results.", show_default="results/NAME")
    ] = None,
    device: options.Device = "cpu",
    seed: Annotated[
        int | None,
        typer.Option(
            help="The first seed, for other random numbers.",
            show_default="as published",
            rich_help_panel=options.COMPUTING,
        ),
    ] = None,
) -> None:
    """Repeat a published comparison: print and write its tables, figures and a report.

    This needs a checkout of the source. An interrupted experiment resumes with the same command.
    table1 to table7 and fig1 to fig11 are those of the paper.

    [bold]Examples[/bold]

    [cyan]dpkfc reproduce[/cyan]                          list the experiments

    [cyan]dpkfc reproduce bsr-error --quick[/cyan]        a small part, in seconds

    [cyan]dpkfc reproduce fig2 --data-dir DATA[/cyan]     spectra of the factors: minutes

    [cyan]dpkfc reproduce table1 --data-dir DATA[/cyan]   private optimizers on MNIST: many hours
    """
    given = {"--data-dir": data_dir, "--out": out, "--seed": seed}
    if name is None:
        raise typer.Exit(run_experiments(["--help"]))  # it lists the names
    arguments = [name, "--device", device] + ["--quick"] * quick
    for option, value in given.items():
        if value is not None:
            arguments += [option, str(value)]
    raise typer.Exit(run_experiments(arguments))


def run_experiments(arguments: list[str]) -> int:
    """Run `python -m experiments` of the checkout in this folder; returns its exit code."""
    checkout = find_checkout()
    if checkout is None:
        raise FileNotFoundError(NO_CHECKOUT)
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: a folder `experiments` in the working directory must not shadow that of the checkout.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "experiments", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # A terminal sends Ctrl-C to both processes: the experiment stops in its own time.
            continue
        return code if code >= 0 else 128 - code  # a signal N ends a process with -N


def find_checkout() -> Path | None:
    """The folder above dpkfc's own files that holds the experiments, or the working directory."""
    # a folder `experiments` of another project is not run
    needed = "experiments/__main__.py", "src/dpkfc/__init__.py"
    places = (*Path(dpkfc.__file__).resolve().parents, Path.cwd())
    return next((p for p in places if all((p / name).is_file() for name in needed)), None)
