"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are text, the others numbers.

    >>> print(markdown_table(["layer", "rank"], [["conv", "9"]]))
    | layer | rank |
    | --- | ---: |
    | conv | 9 |
    """
    rule = ["---" if number < left else "---:" for number in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))
