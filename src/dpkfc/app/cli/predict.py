"""`dpkfc predict`: the classes of new records, by the model of a finished run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from dpkfc.app.workflow.predict import Prediction


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    source: Annotated[
        str,
        typer.Argument(
            help="Records of the same kind as the training records: a .csv, .tsv, .parquet or "
            ".npz file, an image, a .txt file, or a folder of them. They need no class.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the predictions to this CSV file.", show_default="print them"),
    ] = None,
) -> None:
    """Predict the classes of new records.

    The schema, the columns and everything else about how to read the records come from the run's
    config.json. The output has one row per record: its file or row number, the class, and the
    probability of the class according to the model. Noise in the weights makes the model
    overconfident. Predictions are post-processing: they cost no budget, however many you make.
    But the accuracy on the training records is not covered by epsilon: do not publish it.

    [bold]Examples[/bold]

    [cyan]dpkfc predict runs/people new-people.csv --out predictions.csv[/cyan]

    [cyan]dpkfc predict runs/photos holidays/ --out predictions.csv[/cyan]

    [cyan]dpkfc predict runs/letters letter.txt[/cyan]
    """
    from dpkfc.app.workflow.predict import predict as predict_classes

    predictions = predict_classes(run, source)
    if out is None:
        _write(predictions, sys.stdout)
        return
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            _write(predictions, file)
    except OSError as problem:
        raise OSError(
            f"--out {out} cannot be written ({problem.strerror}): choose another file"
        ) from problem
    Console().print(Text(f"wrote {out}: {len(predictions):,} predictions"), soft_wrap=True)


def _write(predictions: Sequence[Prediction], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("record", "predicted", "probability"))
    writer.writerows((row.name, row.label, f"{row.probability:.6f}") for row in predictions)
