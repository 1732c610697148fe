"""The commands for people with data of their own: `dpkfc train`, `dpkfc data`, `dpkfc doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpkfc.app.cli import predict as cli_predict
from dpkfc.app.reports.plain_warnings import plainly_warned
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from dpkfc.app.readers.sources import Loaded

NOT_COVERED = (
    "This schema was read off the records themselves. That is NOT covered by any epsilon: the ranges and lists tell "
    "something of single records. Let a person who knows the domain check and edit it before you train with it."
)

Source = Annotated[
    str,
    typer.Argument(
        help="A .csv, .tsv, .parquet or .npz file; a folder of idx files, or with a subfolder of images or .txt files "
        "for each class; a data set of Hugging Face, saved in a folder or as hf:NAME; or a known name: see dpkfc data.",
        show_default=False,
    ),
]
Target = Annotated[str | None, typer.Option(help="The column with the class, in a table.")]
TextColumn = Annotated[
    str | None, typer.Option("--text", help="The column with the text, to learn from text.")
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", help="JSON: ranges and categories of the columns, and the classes."),
]
Classes = Annotated[
    str | None,
    typer.Option(help="The classes, as in no,yes; or their number, for labels 0, 1, ..."),
]
Test = Annotated[
    str,
    typer.Option(
        "--test", help="The share kept for the test, or a file or folder of test records."
    ),
]
Limits = Annotated[
    str | None, typer.Option("--range", help="LOW,HIGH of arrays that are not bytes, as in 0,1.")
]
Size = Annotated[int, typer.Option(help="Side of the square that image files are brought to.")]
Grey = Annotated[bool, typer.Option("--grey", help="Read image files in shades of grey.")]
TextFeatures = Annotated[int, typer.Option(help="Features that words are hashed into.")]
Indicators = Annotated[
    bool, typer.Option("--indicators", help="Features that say where a number is missing.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data sets are that go by a name.", show_default="$DPKFC_DATA"),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="linear, mlp, cnn, scattering; frozen:PATH, lora:PATH or full:PATH for a pretrained model of "
        "transformers (timm/NAME of timm); or FILE.py:function, called with (shape, classes).",
        show_default="scattering or cnn for images, else linear",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        help="The probability with which epsilon may fail.", show_default="a tenth of 1 / records"
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Records a step is expected to draw.", show_default="what makes 800 steps"),
]
Method = Annotated[Literal["kfc", "sgd"], typer.Option(help="DP-KFC, or plain DP-SGD.")]
NoiseKind = Annotated[
    Literal["auto", "independent"],
    typer.Option(help="auto: correlated noise where it leaves less in the weights."),
]
PhysicalBatchSize = Annotated[int, typer.Option(help="Records in memory at once.")]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="Charge every step here, before its result is seen.")
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="The name of these people's data in the ledger.",
        show_default="SOURCE's name",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="EPSILON[,DELTA]",
        help="The cap for all runs on these people's data together, as in 8,1e-5. It is kept in the ledger, and a run "
        "that would exceed it is refused. DELTA is the run's if left out.",
        show_default="none, or what the ledger keeps",
    ),
]
RecordCount = Annotated[
    int | None,
    typer.Option(
        "--records",
        help="The number of training records, stated as public: batch size, steps and noise follow from it, and the "
        "true number stays private.",
        show_default="the true number, taken as public",
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="The folder of the run.", show_default="runs/SOURCE's name")
]
Seed = Annotated[int | None, typer.Option(help="For experiments only: by default noise is secret.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module, and after them `dpkfc predict`."""
    for command in (train, data, doctor):
        app.command()(plainly_warned(command))
    cli_predict.register(app)


def train(
    source: Source,
    epsilon: Annotated[float, typer.Option(help="The privacy budget.", show_default=False)],
    target: Target = None,
    text: TextColumn = None,
    schema: SchemaFile = None,
    classes: Classes = None,
    test: Test = "0.2",
    limits: Limits = None,
    size: Size = 32,
    grey: Grey = False,
    text_features: TextFeatures = 4096,
    indicators: Indicators = False,
    data_dir: DataDir = None,
    model: Model = None,
    delta: Delta = None,
    epochs: Annotated[
        float | None, typer.Option(help="Expected passes over the data.", show_default="15")
    ] = None,
    batch_size: BatchSize = None,
    lr: Annotated[
        float | None, typer.Option(help="The learning rate.", show_default="by the noise")
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(
            help="The noise length that the learning rate is chosen by.", show_default="2"
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="The norm to which mapped gradients are clipped.", show_default="1"),
    ] = None,
    method: Method = "kfc",
    noise: NoiseKind = "auto",
    physical_batch_size: PhysicalBatchSize = 512,
    ledger: LedgerFile = None,
    dataset: DatasetName = None,
    budget: Budget = None,
    records: RecordCount = None,
    out: Out = None,
    seed: Seed = None,
    device: Device = "cpu",
) -> None:
    """Train a model privately on your own data.

    What is not given comes from a recipe that looks at no record. Ctrl-C stops the run after the step under way; the
    same command goes on, bit for bit. The weights are covered by epsilon; accuracy on the test part is not.

    [bold]Examples[/bold]

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3[/cyan]

    [cyan]dpkfc train reviews.csv --text review --target stars --classes 1,2,3,4,5 --epsilon 3[/cyan]

    [cyan]dpkfc train photos/ --size 32 --epsilon 3 --ledger privacy.db --dataset patients[/cyan]

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3 --ledger spent.db --budget 8,1e-6[/cyan]

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3 --records 10000[/cyan]

    [cyan]dpkfc train scans.npz --model net.py:network --epochs 30 --epsilon 1 --out runs/scans[/cyan]

    [cyan]dpkfc train reviews.csv --text review --target stars --classes 5 --model lora:models/minilm --epsilon 3[/cyan]
    """
    from dpkfc.app.workflow import fit as training
    from dpkfc.app.workflow.run_folder import check_folder

    console, name = Console(), name_of(source)
    options = options_of(
        target,
        text,
        schema,
        classes,
        test,
        limits,
        size,
        grey,
        text_features,
        indicators,
        data_dir,
        model,
    )
    settings = training.Settings(
        epsilon=epsilon,
        delta=delta,
        model=model,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        rho=rho,
        clip=clip,
        method=method,
        noise=noise,
        physical_batch_size=physical_batch_size,
        ledger=None if ledger is None else str(ledger),
        dataset=(dataset or name) if ledger is not None else None,
        budget=None if budget is None else training.read_budget(budget),
        records=records,
        seed=seed,
        device=device,
    )
    training.check(settings)
    out = out or Path("runs") / name
    check_folder(out)
    loaded = load_source(source, options, console)
    show_remarks(loaded, seed, console, records)
    try:
        done = training.fit(loaded, settings, out, console=console)
    except KeyboardInterrupt:  # a second Ctrl-C, or one before the first step or after the last
        done = False
    if not done:
        begun = (out / "config.json").exists()
        where = (
            f"everything is in {out}. The same command goes on from here"
            if begun
            else "nothing was begun or spent"
        )
        console.print(Text(f"stopped; {where}."), soft_wrap=True)
        raise typer.Exit(130)
    training.finish(out, console)


def data(
    source: Annotated[
        str | None,
        typer.Argument(
            help="As in dpkfc train; or fetch, to download the data set NAME.",
            show_default="list names",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="With fetch: the data set.", show_default=False)
    ] = None,
    target: Target = None,
    text: TextColumn = None,
    schema: SchemaFile = None,
    classes: Classes = None,
    test: Test = "0.2",
    limits: Limits = None,
    size: Size = 32,
    grey: Grey = False,
    text_features: TextFeatures = 4096,
    indicators: Indicators = False,
    data_dir: DataDir = None,
    suggest_schema: Annotated[
        Path | None,
        typer.Option(help="Write a draft of the schema of a table here, for a person to check."),
    ] = None,
) -> None:
    """Describe a source of data, and say what of it is taken as public; or fetch a public data set.

    Without a source, the data sets that go by a name are listed, and whether they are there.

    [bold]Examples[/bold]

    [cyan]dpkfc data people.csv[/cyan]

    [cyan]dpkfc data people.csv --target ill --suggest-schema schema.json[/cyan]

    [cyan]dpkfc data people.csv --target ill --schema schema.json[/cyan]

    [cyan]dpkfc data photos/[/cyan]

    [cyan]dpkfc data fetch fashion-mnist --data-dir DATA[/cyan]
    """
    from dpkfc.app.readers.sources import TABLES

    console = Console()
    if source is None:
        return _list_known(data_dir, console)
    if name is not None or (source == "fetch" and not Path(source).exists()):
        return _fetch(source, name, data_dir, console)
    is_table = Path(source).suffix.lower() in TABLES and Path(source).is_file()
    if suggest_schema is not None:
        if not is_table or target is None:
            raise PrivacyError(
                "--suggest-schema is for a table, and needs --target, the column with the class"
            )
        return _suggest(Path(source), target, text, suggest_schema, console)
    if is_table and schema is None and text is None:
        return _columns(Path(source), console)
    options = options_of(
        target, text, schema, classes, test, limits, size, grey, text_features, indicators, data_dir
    )
    _describe(source, load_source(source, options, console), console)
    if is_table and text is None and target is not None:
        _show_misfits(Path(source), target, options["schema"], console)


def doctor() -> None:
    """Check the installation: versions, optional packages, threads, the noise, a private run of two steps.

    [bold]Examples[/bold]

    [cyan]dpkfc doctor[/cyan]
    """
    from dpkfc.app.workflow.doctor import show

    if not show(Console()):
        raise typer.Exit(1)


def _list_known(data_dir: Path | None, console: Console) -> None:
    from dpkfc.app.readers.download import KNOWN, is_present

    place = _place(data_dir)
    where = (
        "no data directory is named: give --data-dir, or set DPKFC_DATA"
        if place is None
        else f"in {place}"
    )
    table = Table(
        "name", "what", "megabytes", "", title=Text(f"Data sets ({where})"), title_justify="left"
    )
    table.add_row("digits", "1,797 written digits, 8 x 8", "", "comes with scikit-learn")
    for name, known in KNOWN.items():
        there = place is not None and is_present(name, place)
        table.add_row(
            name, known.what, str(known.megabytes), "there" if there else f"dpkfc data fetch {name}"
        )
    console.print(table)


def _fetch(word: str, name: str | None, data_dir: Path | None, console: Console) -> None:
    from dpkfc.app.readers.download import KNOWN, fetch

    place = _place(data_dir)
    if word != "fetch" or name is None:
        raise PrivacyError(
            f"give one source, or write dpkfc data fetch NAME, with a name of {', '.join(KNOWN)}"
        )
    if place is None:
        raise PrivacyError("where shall the data go? Give --data-dir DIR, or set DPKFC_DATA")
    fetch(name, place, console)


def _place(data_dir: Path | None) -> Path | None:
    from dpkfc.app.readers.directory import data_directory

    try:
        return data_directory(data_dir)
    except FileNotFoundError:
        return None


def name_of(source: str) -> str:
    """What the run of a source is called, if it is not said."""
    return Path(source).name.split(".")[0] or "data"


def show_remarks(
    loaded: Loaded, seed: int | None, console: Console, records: int | None = None
) -> None:
    for remark in loaded.all_remarks(records):
        console.print(Text(f"- {remark}"), soft_wrap=True)
    if seed is not None:
        console.print(
            Text("- with a seed whoever knows it can take the noise away: for experiments only")
        )


def options_of(
    target: str | None,
    text: str | None,
    schema: Path | None,
    classes: str | None,
    test: str,
    limits: str | None,
    size: int,
    grey: bool,
    features: int,
    indicators: bool,
    data_dir: Path | None,
    model: str | None = None,
) -> dict[str, Any]:
    """The arguments of `sources.load`."""
    from dpkfc.app.models import backbone
    from dpkfc.app.readers.tables import read_schema

    pretrained = backbone.parse(model or "")
    return {
        "target": target,
        "text": text,
        "schema": None if schema is None else read_schema(schema),
        "classes": None if classes is None else _classes(classes),
        "test": test,
        "limits": None if limits is None else _range(limits),
        "size": size,
        "grey": grey,
        "features": features,
        "indicators": indicators,
        "data_dir": data_dir,
        **({"tokenizer": pretrained[1]} if pretrained else {}),
    }


def load_source(source: str, options: dict[str, Any], console: Console) -> Loaded:
    from dpkfc.app.readers.download import KNOWN
    from dpkfc.app.readers.sources import load

    try:
        with console.status("reading the data"):
            return load(source, **options)
    except PrivacyError as problem:
        if source in KNOWN and isinstance(problem.__cause__, FileNotFoundError):
            raise PrivacyError(
                f"{problem}. Or fetch it: dpkfc data fetch {source} --data-dir DIR"
            ) from problem
        raise


def _classes(given: str) -> tuple[str, ...]:
    from dpkfc.app.readers.images import MOST_CLASSES

    names = tuple(name.strip() for name in given.split(","))
    if len(names) == 1 and names[0].isdecimal():
        if int(names[0]) > MOST_CLASSES:
            raise PrivacyError(
                f"--classes {given}: a number of classes, at most {MOST_CLASSES}, or their names"
            )
        return tuple(map(str, range(int(names[0]))))
    return names


def _range(given: str) -> tuple[float, float]:
    try:
        low, high = map(float, given.split(","))
    except ValueError:
        raise PrivacyError(
            f"--range {given}: give two numbers with a comma between them, as in --range 0,1"
        ) from None
    return low, high


def _suggest(source: Path, target: str, text: str | None, file: Path, console: Console) -> None:
    from dpkfc.app.readers.tables import suggest_schema

    if file.exists():
        raise PrivacyError(
            f"{file} exists, and a person may have edited it: remove it first, or choose another name"
        )
    if not file.parent.is_dir():
        raise PrivacyError(
            f"--suggest-schema {file}: there is no folder {file.parent}: make it, or choose another"
        )
    schema, left_out = suggest_schema(source, target, text)
    body = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in schema.items()
    )
    file.write_text(f"{{\n{body}\n}}\n")
    console.print(
        Text(f"wrote {file}: {len(schema)} of {len(schema) + len(left_out)} columns"),
        soft_wrap=True,
    )
    if left_out:
        console.print(
            Text(f"left out (one value, many words, or not asked for): {', '.join(left_out)}"),
            soft_wrap=True,
        )
    console.print(Text(NOT_COVERED, style="bold yellow"), soft_wrap=True)


def _columns(source: Path, console: Console) -> None:
    from dpkfc.app.readers.tables import read_table

    table = read_table(source)
    console.print(Text(f"{source}: {len(table.rows):,} records"), soft_wrap=True)
    console.print(Text(f"columns: {', '.join(table.header)}"), soft_wrap=True)
    advice = f"next: dpkfc data {source} --target COLUMN --suggest-schema schema.json, check it, then dpkfc train"
    console.print(Text(advice), soft_wrap=True)


def _describe(source: str, loaded: Loaded, console: Console) -> None:
    from dpkfc.app.models.default import default_model

    table = Table(title=Text(source), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    test = 0 if loaded.test is None else len(loaded.test)
    table.add_row("kind", loaded.kind)
    table.add_row("records", f"{len(loaded.train):,} to train on, {test:,} to test on")
    table.add_row("shape", " x ".join(map(str, loaded.shape)))
    table.add_row("classes", Text(f"{loaded.classes}: {', '.join(loaded.names)}"))
    table.add_row("default model", default_model(loaded.kind, loaded.shape))
    for remark in loaded.all_remarks():
        table.add_row("note", Text(remark))
    counts = loaded.train.tensors[1].bincount(minlength=loaded.classes).tolist()
    shown = ", ".join(f"{name} {count:,}" for name, count in zip(loaded.names, counts, strict=True))
    table.add_row(
        "not private", Text(f"records of each class to train on, for your eyes only: {shown}")
    )
    console.print(table)


def _show_misfits(source: Path, target: str, schema: dict[str, Any], console: Console) -> None:
    from dpkfc.app.readers.tables import declared_columns, misfits, read_table

    found = misfits(read_table(source), declared_columns(schema, target))
    title = "Cells that the schema does not fit (not private: for your eyes only)"
    table = Table("column", title=title, title_justify="left", pad_edge=False)
    for heading in ("unknown category", "missing", "outside the range"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            Text(one.name), *(f"{count:,}" for count in (one.unknown, one.missing, one.clamped))
        )
    console.print(table)
    for one in found:
        if one.unknown and one.unknown + one.missing == one.cells:
            said = f"{one.name}: no cell is a category of the schema, so nothing is learned from it: compare the spelling"
            console.print(Text(said, style="bold yellow"), soft_wrap=True)
