"""What all results share: a privacy statement, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dpkfc.tables import Column, ShownAsTable, TextTable

PUBLIC = "public: probes and weights only"
FROM_RECORDS = "not private: computed from the given records"
FROM_ORACLE = "not private: computed from the private records of an Oracle"


class DiagnosticResult(ShownAsTable):
    """Base of the results: frozen dataclasses that print as tables."""

    def to_json(self) -> dict[str, Any]:
        converted: dict[str, Any] = as_json(self)
        return converted


def is_probe(source: Any) -> bool:
    """Whether `source` is a probe, which draws examples; anything else is a batch of records."""
    return hasattr(source, "draw")


def privacy_statement(sources: Iterable[Any], geometries: Iterable[Any] = ()) -> str:
    """Whether a result may be published.

    "public" assumes that the weights are public, as those of a private run are.
    """
    sources = list(sources)
    if not all(is_probe(source) for source in sources):
        return FROM_RECORDS
    public = all(source.public for source in [*sources, *geometries])
    return PUBLIC if public else FROM_ORACLE


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
    """Dataclasses as dicts, tuples as lists, and NaN and infinities, which JSON lacks, as None."""
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
