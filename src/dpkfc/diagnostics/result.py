"""What all results share: whether they may be shown, and their form as a table, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dpkfc.tables import Column, ShownAsTable, TextTable

PUBLIC = "public: probes and weights only"
FROM_RECORDS = "not private: computed from the given records"
FROM_ORACLE = "not private: computed from the private records of an Oracle"


class Result(ShownAsTable):
    """A frozen dataclass that prints as a table."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = as_json(self)
        return found


def is_probe(source: Any) -> bool:
    """A probe draws its examples; anything else is a batch of records."""
    return hasattr(source, "draw")


def privacy_of(sources: Iterable[Any], geometries: Iterable[Any] = ()) -> str:
    """What may be said of a result. "public" presumes what a private run grants: that its weights are public."""
    sources = list(sources)
    if not all(is_probe(source) for source in sources):
        return FROM_RECORDS
    return PUBLIC if all(one.public for one in [*sources, *geometries]) else FROM_ORACLE


def is_public(privacy: str) -> bool:
    return privacy == PUBLIC


def empty_table(
    title: str, privacy: str, names: Iterable[str], figures: Iterable[str]
) -> TextTable:
    """A table without rows: columns of names, columns of figures, the privacy statement below."""
    columns = [*map(Column, names), *(Column(heading, "right") for heading in figures)]
    return TextTable(
        title, columns, caption=privacy, warning=not is_public(privacy), border=False, width=160
    )


def as_json(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, and numbers that JSON does not have as None."""
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
