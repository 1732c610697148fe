"""Options that several commands share, and the functions that turn them into arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from dpkfc.app.readers.sources import Loaded

# Panels of `--help`. Options without a panel are the common ones and are shown first.
READING = "Reading the data"
TRAINING = "Training"
PRIVACY = "Privacy"
COMPUTING = "Computing"

Source = Annotated[
    str,
    typer.Argument(
        help="A .csv, .tsv, .parquet or .npz file; a folder of idx files; a folder with one "
        "subfolder of images or .txt files per class; a Hugging Face data set, saved in a folder "
        "or as hf:NAME; or a known name: see dpkfc data.",
        show_default=False,
    ),
]
Epsilon = Annotated[float, typer.Option(help="The privacy budget.", show_default=False)]
Target = Annotated[str | None, typer.Option(help="The column of a table that holds the class.")]
SchemaFile = Annotated[
    Path | None,
    typer.Option(
        "--schema", help="JSON file with the range or the categories of each column of a table."
    ),
]
TextColumn = Annotated[
    str | None, typer.Option("--text", help="The column that holds the text, to learn from text.")
]
Classes = Annotated[
    str | None,
    typer.Option(help="The class names, as in no,yes; or their number, for labels 0, 1, ..."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="linear, mlp, cnn or scattering; frozen:PATH, lora:PATH or full:PATH for a "
        "pretrained model of transformers (timm/NAME of timm); or FILE.py:function, called with "
        "(shape, classes).",
        show_default="scattering or cnn for images, else linear",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the run.", show_default="runs/SOURCE's name"),
]

Test = Annotated[
    str,
    typer.Option(
        "--test",
        help="The share of the records kept for the test, or a file or folder of test records.",
        rich_help_panel=READING,
    ),
]
Limits = Annotated[
    str | None,
    typer.Option(
        "--range",
        metavar="LOW,HIGH",
        help="The range of arrays that are not bytes, as in 0,1.",
        rich_help_panel=READING,
    ),
]
Size = Annotated[
    int,
    typer.Option(help="Image files are resized to SIZE x SIZE pixels.", rich_help_panel=READING),
]
Grey = Annotated[
    bool, typer.Option("--grey", help="Read image files in greyscale.", rich_help_panel=READING)
]
TextFeatures = Annotated[
    int, typer.Option(help="Number of features of hashed words.", rich_help_panel=READING)
]
Indicators = Annotated[
    bool,
    typer.Option(
        "--indicators",
        help="Add one feature per numeric column that says where the number is missing.",
        rich_help_panel=READING,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder of the data sets that are known by name.",
        show_default="$DPKFC_DATA",
        rich_help_panel=READING,
    ),
]

BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Expected number of records per step.",
        show_default="gives 800 steps",
        rich_help_panel=TRAINING,
    ),
]
Method = Annotated[
    Literal["kfc", "sgd"],
    typer.Option(help="DP-KFC, or plain DP-SGD.", rich_help_panel=TRAINING),
]
NoiseKind = Annotated[
    Literal["auto", "independent"],
    typer.Option(
        help="auto: correlated noise if it leaves less noise in the weights.",
        rich_help_panel=TRAINING,
    ),
]

Delta = Annotated[
    float | None,
    typer.Option(
        help="The probability with which epsilon may fail to hold.",
        show_default="0.1 / records",
        rich_help_panel=PRIVACY,
    ),
]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        help="Charge every step to this ledger before its result can be seen.",
        rich_help_panel=PRIVACY,
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="The name of the data set in the ledger. Use one name for all data about the same "
        "people.",
        show_default="SOURCE's name",
        rich_help_panel=PRIVACY,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="EPSILON[,DELTA]",
        help="The cap for all runs on this data set together, as in 8,1e-5. The ledger keeps it "
        "and refuses a run that would exceed it. DELTA is that of the run by default.",
        show_default="none, or the one in the ledger",
        rich_help_panel=PRIVACY,
    ),
]
RecordCount = Annotated[
    int | None,
    typer.Option(
        "--records",
        help="The number of training records, stated as public. Batch size, steps and noise are "
        "computed from it, and the true number stays private.",
        show_default="the true number, treated as public",
        rich_help_panel=PRIVACY,
    ),
]

PhysicalBatchSize = Annotated[
    int, typer.Option(help="Records in memory at once.", rich_help_panel=COMPUTING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Makes a run reproducible, for experiments only. Whoever knows the seed can remove "
        "the noise.",
        show_default="none: the noise is secret",
        rich_help_panel=COMPUTING,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=COMPUTING)]


def run_name(source: str) -> str:
    """The default name of a run on `source`.

    >>> run_name("data/people.csv.gz")
    'people'
    """
    return Path(source).name.split(".")[0] or "data"


def load_arguments(
    *,
    target: str | None,
    text: str | None,
    schema: Path | None,
    classes: str | None,
    test: str,
    limits: str | None,
    size: int,
    grey: bool,
    text_features: int,
    indicators: bool,
    data_dir: Path | None,
    model: str | None = None,
) -> dict[str, Any]:
    """The options as keyword arguments of `dpkfc.app.readers.sources.load`."""
    from dpkfc.app.models import backbone
    from dpkfc.app.readers.tables import read_schema

    pretrained = backbone.parse(model or "")
    return {
        "target": target,
        "text": text,
        "schema": None if schema is None else read_schema(schema),
        "classes": None if classes is None else _parse_classes(classes),
        "test": test,
        "limits": None if limits is None else _parse_range(limits),
        "size": size,
        "grey": grey,
        "features": text_features,
        "indicators": indicators,
        "data_dir": data_dir,
        **({"tokenizer": pretrained[1]} if pretrained else {}),
    }


def load_source(source: str, arguments: dict[str, Any], console: Console) -> Loaded:
    """Read the records. If a known data set is not there, say how to fetch it."""
    from dpkfc.app.readers.download import KNOWN
    from dpkfc.app.readers.sources import load

    try:
        with console.status("reading the data"):
            return load(source, **arguments)
    except OSError as problem:
        if source in KNOWN and isinstance(problem.__cause__, FileNotFoundError):
            raise OSError(
                f"{problem}. Or fetch it: dpkfc data fetch {source} --data-dir DIR"
            ) from problem
        raise


def show_remarks(
    loaded: Loaded, seed: int | None, console: Console, records: int | None = None
) -> None:
    """Print what is treated as public, and a warning if the noise comes from a seed."""
    for remark in loaded.all_remarks(records):
        console.print(Text(f"- {remark}"), soft_wrap=True)
    if seed is not None:
        console.print(
            Text(
                "- the noise comes from a seed, and whoever knows it can remove the noise: "
                "for experiments only"
            ),
            soft_wrap=True,
        )


def _parse_classes(text: str) -> tuple[str, ...]:
    from dpkfc.app.readers.images import MOST_CLASSES

    names = tuple(name.strip() for name in text.split(","))
    if len(names) > 1 or not names[0].isdecimal():
        return names
    if int(names[0]) > MOST_CLASSES:
        raise ValueError(
            f"--classes {text}: a number of classes is at most {MOST_CLASSES}; or give their names"
        )
    return tuple(map(str, range(int(names[0]))))


def _parse_range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"--range {text}: give two numbers separated by a comma, as in --range 0,1"
        ) from None
    return low, high
