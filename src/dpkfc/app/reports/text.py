"""Tables as plain text, and as Markdown."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, RenderableType


def as_text(shown: RenderableType, width: int = 100) -> str:
    """What a terminal of that width would show."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are text, the others numbers.

    >>> print(markdown_table(["layer", "rank"], [["conv", "9"]]))
    | layer | rank |
    | --- | ---: |
    | conv | 9 |
    """
    rule = ["---" if number < left else "---:" for number in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))
