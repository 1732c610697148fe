"""`dpkfc predict`: the classes of new records, by the model of a finished run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from dpkfc.app.workflow.predict import Prediction


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(predict)


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    source: Annotated[
        str,
        typer.Argument(
            help="Records of the kind that the run was trained on: a .csv, .tsv, .parquet or .npz file, an image or a "
            ".txt file, or a folder of them. They need no class.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A CSV file to write.", show_default="shown")
    ] = None,
) -> None:
    """Predict the class of new records, and how probable it is by the model.

    The schema, the columns and all else about how to read them come from the run's config.json. There is a row for
    each record: its file or row, the class, and the probability, of which noise in the weights makes the model too
    sure. Predictions are post-processing: they cost no budget, however many are made. But how many of the records that
    were trained on are predicted rightly is not covered by epsilon: do not publish that.

    [bold]Examples[/bold]

    [cyan]dpkfc predict runs/people new-people.csv --out predictions.csv[/cyan]

    [cyan]dpkfc predict runs/photos holidays/ --out predictions.csv[/cyan]

    [cyan]dpkfc predict runs/letters letter.txt[/cyan]
    """
    from dpkfc.app.workflow.predict import predict as predicted

    found = predicted(run, source)
    if out is None:
        _write(found, sys.stdout)
        return
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            _write(found, file)
    except OSError as problem:
        raise PrivacyError(
            f"--out {out} cannot be written ({problem.strerror}): choose another place"
        ) from problem
    Console().print(Text(f"wrote {out}: {len(found):,} predictions"), soft_wrap=True)


def _write(found: list[Prediction], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("record", "predicted", "probability"))
    writer.writerows((one.name, one.label, f"{one.probability:.6f}") for one in found)
