"""Rows of a CSV or Parquet file as features, by ranges and categories that were declared: the schema.

    {"age": [0, 120], "sex": ["f", "m"], "diagnosis": ["healthy", "ill"]}

Two numbers are a range, anything else is a list of categories; the entry of the target is the list of classes. A
number is mapped from its range to [-1, 1], a category to one 0 or 1 for each that is declared. Values outside the range
are clamped to it, an unknown category is all zeros, a missing number is the middle of the range. So the features of a
record depend on that record and on the schema, never on other records. `misfits` counts such cells.
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

from dpkfc.app.readers.records import Read, Records, distinct, mark, numbered, some
from dpkfc.app.readers.texts import Encoding
from dpkfc.errors import PrivacyError
from dpkfc.probes.tabular import Tabular

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
MANY = 50  # distinct words in a column, above which a suggested schema leaves it out
SEPARATORS = ",;\t|"
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells as text, whatever they came from; an empty one is missing."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[str]  # where each row is, for errors

    def column(self, name: str, role: str) -> list[str]:
        if name not in self.header:
            raise PrivacyError(
                f"{self.path} has no column {name!r} ({role}): it has {some(self.header)}"
            )
        place = self.header.index(name)
        return [row[place] for row in self.rows]


@dataclass(frozen=True)
class Range:
    """A number between two declared ones."""

    low: float
    high: float


def read_table(path: Path) -> Table:
    table = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    if not table.rows:
        raise PrivacyError(f"{path} has a header but no records")
    if len(set(table.header)) != len(table.header):
        raise PrivacyError(
            f"{path}: two columns have the same name: rename one of {some(table.header)}"
        )
    return table


def _csv(path: Path) -> Table:
    csv.field_size_limit(2**31 - 1)  # texts may be long
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(SEPARATORS, key=first.count))
            header = [name.strip() for name in next(reader, [])]
            rows, lines = [], []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise PrivacyError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but the header names {len(header)} columns"
                    )
                rows.append([cell.strip() for cell in row])
                lines.append(f"{path}, line {reader.line_num}")
        except (UnicodeDecodeError, csv.Error) as problem:
            raise PrivacyError(
                f"{path} is not a CSV file in UTF-8 ({problem}): convert it"
            ) from problem
    if not header:
        raise PrivacyError(f"{path} is empty: the first line must name the columns")
    return Table(path, header, rows, lines)


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError:
        raise PrivacyError(
            f"{path}: Parquet needs pyarrow: pip install 'dpkfc[data]', or save it as CSV"
        ) from None
    try:
        columns = parquet.read_table(path).to_pydict()
    except Exception as problem:
        raise PrivacyError(
            f"{path} is not a readable Parquet file ({str(problem).splitlines()[0]})"
        ) from problem
    return from_columns(columns, path)


def from_columns(columns: Mapping[str, Sequence[Any]], where: Path) -> Table:
    """Values of any kind as cells; an error will name `where` and the row."""
    rows = [[_as_text(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return Table(
        where, list(columns), rows, [f"{where}, row {place}" for place in range(1, len(rows) + 1)]
    )


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return (
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    )


def read_schema(path: Path) -> Schema:
    """The JSON document, as it is written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise PrivacyError(
            f"the schema {path} cannot be read ({problem.strerror}): check the path"
        ) from problem
    except ValueError as problem:
        raise PrivacyError(f"the schema {path} is not JSON ({problem}): correct it") from problem
    if not isinstance(found, dict):
        raise PrivacyError(
            f'the schema {path} must be an object, such as {{"age": [0, 120], "sex": ["f", "m"]}}'
        )
    return found


def target_classes(schema: Schema, target: str) -> tuple[str, ...]:
    """The declared classes: whatever is listed for the target, also if it is two numbers."""
    if target not in schema:
        raise PrivacyError(
            f'the classes of {target!r} are not declared: add "{target}": [...] to the schema, or give --classes; '
            "a list read off the records would tell something of them"
        )
    return _listed(schema[target], f"schema, {target!r}")


def _listed(values: Any, where: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(
        isinstance(value, str | int | float) for value in values
    ):
        raise PrivacyError(
            f'{where}: give a list of values such as ["no", "yes"], not {json.dumps(values)}'
        )
    if len(values) < 1:
        raise PrivacyError(f"{where}: the list is empty")
    return distinct([str(value).strip() for value in values], where)


def _column(values: Any, where: str) -> Range | tuple[str, ...]:
    if isinstance(values, list) and len(values) == 2 and all(_is_number(value) for value in values):
        low, high = map(float, values)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise PrivacyError(
                f"{where}: [{low:g}, {high:g}] is not a range: give two numbers, the smaller first"
            )
        return Range(low, high)
    return _listed(
        values, f'{where} (a range is two numbers, categories are texts such as ["f", "m"])'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def declared_columns(schema: Schema, target: str) -> dict[str, Range | tuple[str, ...]]:
    """What the schema says of each column but the target."""
    columns = {
        name: _column(values, f"schema, {name!r}")
        for name, values in schema.items()
        if name != target
    }
    if not columns:
        raise PrivacyError(
            f"the schema declares no column but the target {target!r}: add those to learn from"
        )
    return columns


def read_tabular(
    table: Table, target: str, schema: Schema, names: tuple[str, ...], indicators: bool
) -> Read:
    """Features of all columns in the schema but the target, in its order."""
    columns = declared_columns(schema, target)
    labels = table.column(target, "the target")
    x, mean, std = encode(table, columns, indicators)
    unused = [name for name in table.header if name not in schema and name != target]
    remarks = ["ranges and categories come from the schema, which is taken as public"]
    if unused:
        remarks.append(f"columns that the schema does not name are not used: {some(unused)}")
    records = Records(x, numbered(labels, names, table.lines), _marks(table))
    probe = Tabular(x.shape[1], mean=mean, std=std)
    return Read("tabular", names, records, None, probe, tuple(remarks))


def encode(
    table: Table, columns: Mapping[str, Range | tuple[str, ...]], indicators: bool
) -> tuple[Tensor, ...]:
    """Features [N, F], and the mean and standard deviation that the schema lets one expect of each.

    With `indicators`, every number is followed by a feature that is 1 where it is missing.
    """
    parts: list[np.ndarray] = []
    expected: list[tuple[float, float]] = []
    for name, declared in columns.items():
        cells = table.column(name, "in the schema")
        if isinstance(declared, Range):
            values = _numbers(cells, table.lines, name)
            missing = np.isnan(values)
            scaled = (
                2
                * (np.clip(values, declared.low, declared.high) - declared.low)
                / (declared.high - declared.low)
            )
            parts.append(np.where(missing, 0.0, scaled - 1)[:, None])
            expected.append((0.0, 3**-0.5))  # uniform over the range
            if indicators:
                parts.append(missing[:, None].astype(float))
                expected.append((0.1, 0.3))
        else:
            chosen = _chosen(cells, declared)
            parts.append((chosen[:, None] == np.arange(len(declared))).astype(float))
            part = 1 / (len(declared) + 1)  # all alike, and as often none of them
            expected += [(part, math.sqrt(part * (1 - part)))] * len(declared)
    mean, std = torch.tensor(expected, dtype=torch.float32).unbind(1)
    return (
        torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32)),
        mean.clone(),
        std.clone(),
    )


def _chosen(cells: Sequence[str], declared: tuple[str, ...]) -> np.ndarray:
    """The place of each cell's category, -1 if it is unknown. Of numbers the value counts: 1.0 is the category 1."""
    place = {value: number for number, value in enumerate(declared)}
    values = [_number(value) for value in declared]
    by_value = {
        v: number for number, v in enumerate(values) if v is not None and values.count(v) == 1
    }
    return np.array([place.get(cell, by_value.get(_number(cell), -1)) for cell in cells])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Misfits:
    """How many cells of a column its declaration does not fit. NOT private."""

    name: str
    cells: int
    unknown: int  # categories
    missing: int
    clamped: int  # numbers outside the range


def misfits(table: Table, columns: Mapping[str, Range | tuple[str, ...]]) -> list[Misfits]:
    """What `encode` passes over in silence, for the eyes of whoever may see the records."""
    found = []
    for name, declared in columns.items():
        cells = table.column(name, "in the schema")
        if isinstance(declared, Range):
            values = _numbers(cells, table.lines, name)
            clamped = int(((values < declared.low) | (values > declared.high)).sum())
            found.append(Misfits(name, len(cells), 0, int(np.isnan(values).sum()), clamped))
        else:
            others = [
                cell
                for cell, place in zip(cells, _chosen(cells, declared), strict=True)
                if place < 0
            ]
            missing = sum(cell.lower() in MISSING for cell in others)
            found.append(Misfits(name, len(cells), len(others) - missing, missing, 0))
    return found


def _numbers(cells: Sequence[str], lines: Sequence[str], name: str) -> np.ndarray:
    """NaN where a number is missing."""
    found = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        if (value := _number(cell)) is not None:
            found[row] = value
        elif cell.lower() not in MISSING:
            raise PrivacyError(
                f"{lines[row]}, column {name!r}: {cell!r} is not a number: correct it or leave it empty"
            )
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _marks(table: Table) -> list[bytes]:
    return [mark(*(cell.encode(errors="replace") for cell in row)) for row in table.rows]


def read_text_column(
    table: Table, text: str, target: str, names: tuple[str, ...], encoding: Encoding
) -> Read:
    """The texts of one column."""
    texts, labels = table.column(text, "the text"), table.column(target, "the target")
    records = Records(encoding.encode(texts), numbered(labels, names, table.lines), _marks(table))
    return Read("text", names, records, None, encoding.probe)


def suggest_schema(
    path: Path, target: str, text: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """A schema read off the records themselves, and the columns it leaves out. NOT private: a person must check it."""
    table = read_table(path)
    found: dict[str, Any] = {}
    left_out = []
    for name in table.header:
        cells = [cell for cell in table.column(name, "") if cell.lower() not in MISSING]
        values = sorted(set(cells))
        numbers = [
            number
            for cell in cells
            if (number := _number(cell)) is not None and math.isfinite(number)
        ]
        if name == target:
            whole = len(numbers) == len(cells) and all(number.is_integer() for number in numbers)
            if len(numbers) == len(cells) and len(values) > (
                max(MANY, len(cells) / 10) if whole else MANY
            ):
                raise PrivacyError(
                    f"{path}: the target {target!r} has {len(values)} different numbers. That looks like regression, "
                    "and dpkfc train learns classes: make a column of a few classes from it, as low,high"
                )
            found[name] = sorted(values, key=_by_number)
        elif (
            text is not None
            or len(values) < 2
            or (len(numbers) == len(cells) and min(numbers) == max(numbers))
        ):
            left_out.append(name)
        elif len(numbers) == len(cells):
            found[name] = _around(min(numbers), max(numbers))
        elif len(values) <= MANY:
            found[name] = values
        else:
            left_out.append(name)
    table.column(target, "the target")
    return found, [name for name in left_out if name != text]


def _around(low: float, high: float) -> list[float]:
    """A range of round numbers about the two."""
    unit = 10 ** math.floor(math.log10(high - low))
    ends = (math.floor(low / unit) * unit, math.ceil(high / unit) * unit)
    return [int(end) if float(end).is_integer() else float(f"{end:.6g}") for end in ends]


def _by_number(value: str) -> tuple[float, str]:
    number = _number(value)
    return (math.inf if number is None else number), value
