"""A draft of a table's schema, read from the records. NOT private: a person must check it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dpkfc.app.readers.tables import MISSING, parse_number, read_table

MANY = 50  # distinct words in a column, above which the draft omits it


def suggest_schema(
    path: Path, target: str, text: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The draft, and the columns that it omits.

    Args:
        text: the column to learn from. If given, only the target is needed in the schema.
    """
    table = read_table(path)
    table.column(target, "the target")
    schema: dict[str, Any] = {}
    omitted = []
    for name in table.header:
        cells = [cell for cell in table.column(name, "") if cell.lower() not in MISSING]
        if name == target:
            schema[name] = _suggest_classes(cells, path, target)
        elif text is None and (declaration := _suggest_declaration(cells)):
            schema[name] = declaration
        elif name != text:
            omitted.append(name)
    return schema, omitted


def _suggest_classes(cells: list[str], path: Path, target: str) -> list[str]:
    values = sorted(set(cells))
    numbers = _finite_numbers(cells)
    if len(numbers) == len(cells):
        whole = all(number.is_integer() for number in numbers)
        most = max(MANY, len(cells) / 10) if whole else MANY
        if len(values) > most:
            raise ValueError(
                f"{path}: the target {target!r} has {len(values)} different numbers. That looks "
                "like regression, and dpkfc train learns classes: make a column of a few classes "
                "from it, such as low,high"
            )
    return sorted(values, key=_by_number)


def _suggest_declaration(cells: list[str]) -> list[Any] | None:
    """A range or the categories of a column; None for one value or too many words."""
    values = sorted(set(cells))
    numbers = _finite_numbers(cells)
    if len(values) < 2:
        return None
    if len(numbers) == len(cells):
        low, high = min(numbers), max(numbers)
        return None if low == high else _round_range(low, high)
    return values if len(values) <= MANY else None


def _finite_numbers(cells: list[str]) -> list[float]:
    numbers = [parse_number(cell) for cell in cells]
    return [number for number in numbers if number is not None and math.isfinite(number)]


def _round_range(low: float, high: float) -> list[float]:
    """Round numbers around the two."""
    unit = 10 ** math.floor(math.log10(high - low))
    ends = (math.floor(low / unit) * unit, math.ceil(high / unit) * unit)
    return [int(end) if float(end).is_integer() else float(f"{end:.6g}") for end in ends]


def _by_number(value: str) -> tuple[float, str]:
    number = parse_number(value)
    return (math.inf if number is None else number), value
