"""Tables that print as plain text everywhere, and in colour where rich is installed.

Results of the library build a `TextTable`. `str` renders it without any dependency; `rich` finds
`__rich__` and draws the same table in a terminal.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

NARROWEST = 8  # columns are not wrapped to fewer characters than this
GAP = "  "  # between the columns of a table without a border

Row = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """How one column is shown. Line breaks in `heading` are kept."""

    heading: str = ""
    align: Literal["left", "right"] = "left"
    wrap: bool = False  # long cells continue on the next line
    bold: bool = False  # in colour terminals only


@dataclass
class TextTable:
    """Rows of text under optional headings. An empty row `()` separates two sections.

    Args:
        title: printed above the table.
        columns: headings, alignment and wrapping. Without any heading there is no header line.
        rows: one string per column.
        caption: printed below the table.
        warning: print the caption in red where there is colour.
        border: draw lines around the cells; otherwise only a line under the headings.
        width: longest line of the plain text, if wrapping can achieve it.

    >>> table = TextTable("Layers", [Column("layer"), Column("rank", "right")], border=False)
    >>> table.add_row("conv", "9")
    >>> table.add_row("linear", "128")
    >>> print(table)
    Layers
    <BLANKLINE>
      layer   rank
     ──────────────
      conv       9
      linear   128
    """

    title: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)
    caption: str = ""
    warning: bool = False
    border: bool = True
    width: int = 100

    @classmethod
    def statement(cls, title: str, pairs: Iterable[tuple[str, str]]) -> TextTable:
        """A table of names and what they mean, without headings; long values are wrapped.

        >>> print(TextTable.statement("Plan", [("clip", "1"), ("steps", "200")]))
        Plan
        ┌──────┬────┐
        │clip  │ 1  │
        │steps │ 200│
        └──────┴────┘
        """
        return cls(title, [Column(bold=True), Column(wrap=True)], list(pairs))

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def add_section(self) -> None:
        """Separate the following rows from the ones above."""
        self.rows.append(())

    @property
    def has_header(self) -> bool:
        return any(column.heading for column in self.columns)

    @property
    def natural_width(self) -> int:
        """Width of the table itself if no cell is wrapped."""
        return sum(self._natural_widths()) + self._overhead

    def __str__(self) -> str:
        widths = self._fitted_widths()
        body = self._with_border(widths) if self.border else self._without_border(widths)
        lines = [self.title, *body, *self.caption.splitlines()]
        return "\n".join(line.rstrip() for line in lines).strip("\n")

    def __rich__(self) -> Table:
        from rich.box import HEAVY_HEAD, SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            caption=Text(self.caption, "bold red" if self.warning else ""),
            caption_justify="left",
            box=HEAVY_HEAD if self.border else SIMPLE_HEAD,
            show_header=self.has_header,
            pad_edge=not self.border,
            collapse_padding=not self.border,
        )
        for column in self.columns:
            table.add_column(
                Text(column.heading),
                justify=column.align,
                style="bold" if column.bold else None,
                no_wrap=not column.wrap,
                overflow="fold" if column.wrap else "ellipsis",
            )
        for row in self.rows:
            if row:
                table.add_row(*map(Text, row))
            else:
                table.add_section()
        return table

    @property
    def _headings(self) -> Row:
        return tuple(column.heading for column in self.columns)

    @property
    def _overhead(self) -> int:
        """Characters of a line outside its cells: borders and padding."""
        count = len(self.columns)
        return (count + 1) + 2 * (count - 1) if self.border else len(GAP) * (count + 1)

    def _natural_widths(self) -> list[int]:
        rows = [self._headings, *filter(None, self.rows)]
        return [max(map(_longest_line, cells)) for cells in zip(*rows, strict=True)]

    def _fitted_widths(self) -> list[int]:
        """Widths at which the table fits: the widest column that may wrap shrinks first."""
        widths = self._natural_widths()
        last = len(widths) - 1

        def with_padding(k: int) -> int:
            return widths[k] + (k > 0) + (k < last)

        for _ in range(sum(widths) + self._overhead - self.width):
            candidates = [k for k, c in enumerate(self.columns) if c.wrap and widths[k] > NARROWEST]
            if not candidates:
                break
            widths[max(candidates, key=with_padding)] -= 1
        return widths

    def _with_border(self, widths: list[int]) -> list[str]:
        lines = [_rule("┌─┬┐", widths)]
        if self.has_header:
            heading = [_framed("┃", cells) for cells in self._heading_lines(widths)]
            lines = [_rule("┏━┳┓", widths), *heading, _rule("┡━╇┩", widths)]
        for row in self.rows:
            if row:
                lines += [_framed("│", cells) for cells in self._lines(row, widths)]
            else:
                lines.append(_rule("├─┼┤", widths))
        return [*lines, _rule("└─┴┘", widths)]

    def _without_border(self, widths: list[int]) -> list[str]:
        lines = [""]
        if self.has_header:
            lines += [GAP + GAP.join(cells) for cells in self._heading_lines(widths)]
            lines.append(" " + "─" * (sum(widths) + self._overhead - len(GAP)))
        for row in self.rows:
            lines += [GAP + GAP.join(cells) for cells in self._lines(row, widths)] if row else [""]
        return [*lines, ""]

    def _heading_lines(self, widths: list[int]) -> list[list[str]]:
        """The lines of the header; shorter headings stand on the last line."""
        height = max(len(_wrap(h, width)) for h, width in zip(self._headings, widths, strict=True))
        padded = tuple(
            "\n" * (height - len(_wrap(h, width))) + h
            for h, width in zip(self._headings, widths, strict=True)
        )
        return self._lines(padded, widths)

    def _lines(self, row: Row, widths: list[int]) -> list[list[str]]:
        """The lines of one row; each line has one cell per column, padded to its width."""
        wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        return [
            [
                cell.rjust(width) if column.align == "right" else cell.ljust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            ]
            for cells in zip_longest(*wrapped, fillvalue="")
        ]


class ShownAsTable(ABC):
    """Prints as the table that `table` builds, as plain text and in rich."""

    @abstractmethod
    def table(self) -> TextTable:
        """The object as a table."""

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> TextTable:
        return self.table()


def _longest_line(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _wrap(cell: str, width: int) -> list[str]:
    lines = []
    for line in cell.split("\n"):
        lines += textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    return lines


def _framed(side: str, cells: list[str]) -> str:
    return side + f" {side} ".join(cells) + side


def _rule(shape: str, widths: list[int]) -> str:
    """A horizontal line; `shape` holds its left end, stroke, crossings and right end."""
    left, stroke, crossing, right = list(shape)
    return left + (stroke + crossing + stroke).join(stroke * width for width in widths) + right
