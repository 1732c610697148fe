"""Rows of a CSV or Parquet file as features, by declared ranges and categories: the schema.

    {"age": [0, 120], "sex": ["f", "m"], "diagnosis": ["healthy", "ill"]}

Two numbers are a range, anything else is a list of categories; the entry of the target is the list
of classes. A number is mapped from its range to [-1, 1]. A category is one-hot encoded. Values
outside the range are clamped, an unknown category is all zeros, a missing number is the middle of
the range. So the features of a record depend on that record and on the schema, never on other
records. `count_misfits` counts such cells.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.app.readers.records import (
    ParsedSource,
    Records,
    check_distinct,
    class_numbers,
    content_digest,
    preview,
)
from dpkfc.app.readers.texts import Encoding
from dpkfc.app.suggestions import did_you_mean
from dpkfc.probes.tabular import Tabular

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
SEPARATORS = ",;\t|"
UNIFORM_STD = 3**-0.5  # of the uniform distribution on [-1, 1]
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells as text, from any format; an empty cell is missing."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[str]  # where each row is, for error messages

    def column(self, name: str, role: str) -> list[str]:
        if name not in self.header:
            raise ValueError(
                f"{self.path} has no column {name!r} ({role})"
                f"{did_you_mean(name, self.header)}: it has {preview(self.header)}"
            )
        index = self.header.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True)
class Range:
    """The declared range of a number."""

    low: float
    high: float


Columns = Mapping[str, Range | tuple[str, ...]]  # the range or the categories of each column


# Files


def read_table(path: Path) -> Table:
    """Read a CSV, TSV or Parquet file."""
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    if not table.rows:
        raise ValueError(f"{path} has a header but no records")
    if len(set(table.header)) != len(table.header):
        raise ValueError(
            f"{path}: two columns have the same name: rename one of {preview(table.header)}"
        )
    return table


def _read_csv(path: Path) -> Table:
    csv.field_size_limit(2**31 - 1)  # texts may be long
    rows, lines = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first_line = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(SEPARATORS, key=first_line.count))
            header = [name.strip() for name in next(reader, [])]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but the header names "
                        f"{len(header)} columns"
                    )
                rows.append([cell.strip() for cell in row])
                lines.append(f"{path}, line {reader.line_num}")
        except (UnicodeDecodeError, csv.Error) as problem:
            raise ValueError(
                f"{path} is not a CSV file in UTF-8 ({problem}): convert it"
            ) from problem
    if not header:
        raise ValueError(f"{path} is empty: the first line must name the columns")
    return Table(path, header, rows, lines)


def _read_parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(
            f"{path}: Parquet needs pyarrow: pip install 'dpkfc[data]', or save it as CSV"
        ) from None
    try:
        columns = parquet.read_table(path).to_pydict()
    except Exception as problem:
        raise ValueError(
            f"{path} is not a readable Parquet file ({str(problem).splitlines()[0]})"
        ) from problem
    return from_columns(columns, path)


def from_columns(columns: Mapping[str, Sequence[Any]], where: Path) -> Table:
    """A table of values of any kind. Error messages name `where` and the row."""
    rows = [[_as_text(value) for value in row] for row in zip(*columns.values(), strict=True)]
    lines = [f"{where}, row {number}" for number in range(1, len(rows) + 1)]
    return Table(where, list(columns), rows, lines)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


# The schema


def read_schema(path: Path) -> Schema:
    """Read the JSON document."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise OSError(
            f"the schema {path} cannot be read ({problem.strerror}): check the path"
        ) from problem
    except ValueError as problem:
        raise ValueError(f"the schema {path} is not JSON ({problem}): correct it") from problem
    if not isinstance(schema, dict):
        raise ValueError(
            f'the schema {path} must be an object, such as {{"age": [0, 120], "sex": ["f", "m"]}}'
        )
    return schema


def target_classes(schema: Schema, target: str) -> tuple[str, ...]:
    """The declared classes: the list of the target, also if it has two numbers."""
    if target not in schema:
        raise ValueError(
            f'the classes of {target!r} are not declared: add "{target}": [...] to the schema, or '
            "give --classes; a list read from the records would not be private"
        )
    return _listed(schema[target], f"schema, {target!r}")


def declared_columns(schema: Schema, target: str) -> dict[str, Range | tuple[str, ...]]:
    """The declaration of each column except the target."""
    columns = {
        name: _declaration(values, f"schema, {name!r}")
        for name, values in schema.items()
        if name != target
    }
    if not columns:
        raise ValueError(
            f"the schema declares no column but the target {target!r}: add those to learn from"
        )
    return columns


def _declaration(values: Any, where: str) -> Range | tuple[str, ...]:
    if isinstance(values, list) and len(values) == 2 and all(_is_number(value) for value in values):
        low, high = map(float, values)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(
                f"{where}: [{low:g}, {high:g}] is not a range: give two numbers, the smaller first"
            )
        return Range(low, high)
    return _listed(
        values, f'{where} (a range is two numbers, categories are texts such as ["f", "m"])'
    )


def _listed(values: Any, where: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(
        isinstance(value, str | int | float) for value in values
    ):
        raise ValueError(
            f'{where}: give a list of values such as ["no", "yes"], not {json.dumps(values)}'
        )
    if len(values) < 1:
        raise ValueError(f"{where}: the list is empty")
    return check_distinct([str(value).strip() for value in values], where)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Features


def read_tabular(
    table: Table, target: str, schema: Schema, names: tuple[str, ...], indicators: bool
) -> ParsedSource:
    """The features of all columns of the schema except the target, in its order."""
    columns = declared_columns(schema, target)
    labels = table.column(target, "the target")
    x, mean, std = encode(table, columns, indicators)
    unused = [name for name in table.header if name not in schema and name != target]
    remarks = ["ranges and categories come from the schema, which is treated as public"]
    if unused:
        remarks.append(f"columns that the schema does not name are not used: {preview(unused)}")
    records = Records(x, class_numbers(labels, names, table.lines), _digests(table))
    probe = Tabular(x.shape[1], mean=mean, std=std)
    return ParsedSource("tabular", names, records, None, probe, tuple(remarks))


def read_text_column(
    table: Table, text: str, target: str, names: tuple[str, ...], encoding: Encoding
) -> ParsedSource:
    """The texts of one column."""
    texts = table.column(text, "the text")
    labels = table.column(target, "the target")
    records = Records(
        encoding.encode(texts), class_numbers(labels, names, table.lines), _digests(table)
    )
    return ParsedSource("text", names, records, None, encoding.probe)


def encode(table: Table, columns: Columns, indicators: bool) -> tuple[Tensor, ...]:
    """Features [N, F], and the mean and the standard deviation of each that the schema suggests.

    With `indicators`, every number is followed by a feature that is 1 where the number is missing.
    """
    parts: list[np.ndarray] = []
    expected: list[tuple[float, float]] = []  # mean and standard deviation
    for name, declared in columns.items():
        cells = table.column(name, "in the schema")
        if isinstance(declared, Range):
            values = _numbers(cells, table.lines, name)
            missing = np.isnan(values)
            position = np.clip(values, declared.low, declared.high) - declared.low
            scaled = 2 * position / (declared.high - declared.low)
            parts.append(np.where(missing, 0.0, scaled - 1)[:, None])
            expected.append((0.0, UNIFORM_STD))
            if indicators:
                parts.append(missing[:, None].astype(float))
                expected.append((0.1, 0.3))
        else:
            category = _categories(cells, declared)
            parts.append((category[:, None] == np.arange(len(declared))).astype(float))
            # All categories, and none of them, are equally frequent.
            share = 1 / (len(declared) + 1)
            expected += [(share, math.sqrt(share * (1 - share)))] * len(declared)
    mean, std = torch.tensor(expected, dtype=torch.float32).unbind(1)
    features = torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))
    return features, mean.clone(), std.clone()


def _categories(cells: Sequence[str], declared: tuple[str, ...]) -> np.ndarray:
    """The number of each cell's category, -1 if unknown.

    Numbers are compared by value: 1.0 is the category 1.
    """
    by_text = {value: number for number, value in enumerate(declared)}
    values = [parse_number(value) for value in declared]
    by_value = {
        value: number
        for number, value in enumerate(values)
        if value is not None and values.count(value) == 1
    }
    return np.array([by_text.get(cell, by_value.get(parse_number(cell), -1)) for cell in cells])  # type: ignore[arg-type]


def _numbers(cells: Sequence[str], lines: Sequence[str], name: str) -> np.ndarray:
    """The numbers of a column, NaN where one is missing."""
    numbers = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        if (value := parse_number(cell)) is not None:
            numbers[row] = value
        elif cell.lower() not in MISSING:
            raise ValueError(
                f"{lines[row]}, column {name!r}: {cell!r} is not a number: correct it or leave it "
                "empty"
            )
    return numbers


def parse_number(cell: str) -> float | None:
    """The number in a cell, or None."""
    try:
        return float(cell)
    except ValueError:
        return None


def _digests(table: Table) -> list[bytes]:
    return [content_digest(*(cell.encode(errors="replace") for cell in row)) for row in table.rows]


# Cells that do not fit


@dataclass(frozen=True)
class Misfits:
    """The number of cells of a column that do not fit its declaration. NOT private."""

    name: str
    cells: int
    unknown: int  # categories
    missing: int
    clamped: int  # numbers outside the range


def count_misfits(table: Table, columns: Columns) -> list[Misfits]:
    """Count the cells that `encode` silently replaces, for those who may see the records."""
    misfits = []
    for name, declared in columns.items():
        cells = table.column(name, "in the schema")
        if isinstance(declared, Range):
            values = _numbers(cells, table.lines, name)
            clamped = int(((values < declared.low) | (values > declared.high)).sum())
            misfits.append(Misfits(name, len(cells), 0, int(np.isnan(values).sum()), clamped))
        else:
            categories = _categories(cells, declared)
            others = [cell for cell, number in zip(cells, categories, strict=True) if number < 0]
            missing = sum(cell.lower() in MISSING for cell in others)
            misfits.append(Misfits(name, len(cells), len(others) - missing, missing, 0))
    return misfits
