"""`dpkfc data`: describe a source of data, draft its schema, or fetch a public data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpkfc.app.cli import options

if TYPE_CHECKING:
    from dpkfc.app.readers.sources import Loaded

NOT_COVERED = (
    "This schema was read from the records themselves. No epsilon covers that: ranges and lists "
    "reveal something about single records. Let a person who knows the domain check and edit it "
    "before you train with it."
)


def data(
    source: Annotated[
        str | None,
        typer.Argument(
            help="As in dpkfc train; or the word fetch, to download the data set NAME.",
            show_default="list the known names",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="After fetch: the data set.", show_default=False)
    ] = None,
    target: options.Target = None,
    schema: options.SchemaFile = None,
    text: options.TextColumn = None,
    classes: options.Classes = None,
    suggest_schema: Annotated[
        Path | None,
        typer.Option(help="Write a draft of a table's schema to this file, for you to check."),
    ] = None,
    test: options.Test = "0.2",
    limits: options.Limits = None,
    size: options.Size = 32,
    grey: options.Grey = False,
    text_features: options.TextFeatures = 4096,
    indicators: options.Indicators = False,
    data_dir: options.DataDir = None,
) -> None:
    """Describe a source of data and what is treated as public, or fetch a public data set.

    Without a source, the data sets that are known by name are listed.

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
            raise ValueError(
                "--suggest-schema is for a table and needs --target, the column with the class"
            )
        return _suggest(Path(source), target, text, suggest_schema, console)
    if is_table and schema is None and text is None:
        return _show_columns(Path(source), console)
    arguments = options.load_arguments(
        target=target,
        text=text,
        schema=schema,
        classes=classes,
        test=test,
        limits=limits,
        size=size,
        grey=grey,
        text_features=text_features,
        indicators=indicators,
        data_dir=data_dir,
    )
    _describe(source, options.load_source(source, arguments, console), console)
    if is_table and text is None and target is not None:
        _show_misfits(Path(source), target, arguments["schema"], console)


def _list_known(data_dir: Path | None, console: Console) -> None:
    from dpkfc.app.readers.download import KNOWN, is_present

    folder = _data_folder(data_dir)
    where = (
        "no data directory: give --data-dir, or set DPKFC_DATA"
        if folder is None
        else f"in {folder}"
    )
    table = Table(
        "name",
        "content",
        "megabytes",
        "state",
        title=Text(f"Data sets ({where})"),
        title_justify="left",
    )
    table.add_row("digits", "1,797 handwritten digits, 8 x 8", "", "comes with scikit-learn")
    for name, known in KNOWN.items():
        present = folder is not None and is_present(name, folder)
        state = "present" if present else f"dpkfc data fetch {name}"
        table.add_row(name, known.content, str(known.megabytes), state)
    console.print(table)


def _fetch(word: str, name: str | None, data_dir: Path | None, console: Console) -> None:
    from dpkfc.app.readers.download import KNOWN, fetch

    folder = _data_folder(data_dir)
    if word != "fetch" or name is None:
        raise ValueError(
            f"give one source, or write dpkfc data fetch NAME, with a name of {', '.join(KNOWN)}"
        )
    if folder is None:
        raise ValueError("no folder to download to: give --data-dir DIR, or set DPKFC_DATA")
    fetch(name, folder, console)


def _data_folder(data_dir: Path | None) -> Path | None:
    from dpkfc.app.readers.directory import data_directory

    try:
        return data_directory(data_dir)
    except FileNotFoundError:
        return None


def _suggest(source: Path, target: str, text: str | None, file: Path, console: Console) -> None:
    from dpkfc.app.readers.schema_draft import suggest_schema

    if file.exists():
        raise FileExistsError(
            f"{file} exists, and somebody may have edited it: remove it first, or choose another "
            "name"
        )
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"--suggest-schema {file}: there is no folder {file.parent}: create it, or choose "
            "another"
        )
    schema, omitted = suggest_schema(source, target, text)
    body = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in schema.items()
    )
    file.write_text(f"{{\n{body}\n}}\n")
    console.print(
        Text(f"wrote {file}: {len(schema)} of {len(schema) + len(omitted)} columns"),
        soft_wrap=True,
    )
    if omitted:
        console.print(
            Text(f"omitted (one value, many words, or not needed): {', '.join(omitted)}"),
            soft_wrap=True,
        )
    console.print(Text(NOT_COVERED, style="bold yellow"), soft_wrap=True)


def _show_columns(source: Path, console: Console) -> None:
    from dpkfc.app.readers.tables import read_table

    table = read_table(source)
    lines = (
        f"{source}: {len(table.rows):,} records",
        f"columns: {', '.join(table.header)}",
        f"next: dpkfc data {source} --target COLUMN --suggest-schema schema.json, check the "
        "schema, then dpkfc train",
    )
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _describe(source: str, loaded: Loaded, console: Console) -> None:
    from dpkfc.app.models.default import default_model

    table = Table(title=Text(source), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    test = 0 if loaded.test is None else len(loaded.test)
    table.add_row("kind", loaded.kind)
    table.add_row("records", f"{len(loaded.train):,} for training, {test:,} for the test")
    table.add_row("shape", " x ".join(map(str, loaded.shape)))
    table.add_row("classes", Text(f"{loaded.classes}: {', '.join(loaded.names)}"))
    table.add_row("default model", default_model(loaded.kind, loaded.shape))
    for remark in loaded.all_remarks():
        table.add_row("note", Text(remark))
    counts = loaded.train.tensors[1].bincount(minlength=loaded.classes).tolist()
    shown = ", ".join(f"{name} {count:,}" for name, count in zip(loaded.names, counts, strict=True))
    table.add_row("not private", Text(f"training records per class, for your eyes only: {shown}"))
    console.print(table)


def _show_misfits(source: Path, target: str, schema: dict[str, Any], console: Console) -> None:
    from dpkfc.app.readers.tables import count_misfits, declared_columns, read_table

    columns = count_misfits(read_table(source), declared_columns(schema, target))
    title = "Cells that do not fit the schema (not private: for your eyes only)"
    table = Table("column", title=title, title_justify="left", pad_edge=False)
    for heading in ("unknown category", "missing", "outside the range"):
        table.add_column(heading, justify="right")
    for column in columns:
        counts = (column.unknown, column.missing, column.clamped)
        table.add_row(Text(column.name), *(f"{count:,}" for count in counts))
    console.print(table)
    for column in columns:
        if column.unknown and column.unknown + column.missing == column.cells:
            line = (
                f"{column.name}: no cell is a category of the schema, so nothing can be learned "
                "from this column: compare the spelling"
            )
            console.print(Text(line, style="bold yellow"), soft_wrap=True)
