"""A self-contained HTML page: text, tables and figures in one file that loads nothing else.

It follows the reader's light or dark setting, fits a phone, and can be printed. Text is escaped.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "report.html"
CLASS_NUMBER = " class='number'"


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    paragraphs: Sequence[str]

    def html(self) -> str:
        return "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in self.paragraphs)


@dataclass(frozen=True)
class Marked:
    """Paragraphs with `code` and **bold** words.

    >>> Marked(["**a < b** in `f(x)`"]).html()
    '<p><strong>a &lt; b</strong> in <code>f(x)</code></p>'
    """

    paragraphs: Sequence[str]

    def html(self) -> str:
        return "".join(f"<p>{self._words(paragraph)}</p>" for paragraph in self.paragraphs)

    @staticmethod
    def _words(paragraph: str) -> str:
        parts = re.split(r"`([^`]+)`", html.escape(paragraph))  # words, code, words, ...
        parts[::2] = [
            re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", words) for words in parts[::2]
        ]
        parts[1::2] = [f"<code>{code}</code>" for code in parts[1::2]]
        return "".join(parts)


@dataclass(frozen=True)
class Code:
    """Preformatted lines, such as a command."""

    text: str

    def html(self) -> str:
        return f"<pre><code>{html.escape(self.text)}</code></pre>"


@dataclass(frozen=True)
class Facts:
    """Names with their values."""

    rows: Sequence[tuple[str, str]]

    def html(self) -> str:
        rows = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in self.rows
        )
        return f"<dl>{rows}</dl>"


@dataclass(frozen=True)
class Grid:
    """A table. Columns of numbers are right-aligned, unless `right` says which columns are."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool] | None = None

    def html(self) -> str:
        columns = zip(*self.rows, strict=True)
        right = self.right or [all(map(_is_number, column)) for column in columns]
        right = right or [False] * len(self.headings)

        def line(cells: Sequence[str], tag: str) -> str:
            parts = [
                f"<{tag}{CLASS_NUMBER if numeric else ''}>{html.escape(text)}</{tag}>"
                for text, numeric in zip(cells, right, strict=True)
            ]
            return f"<tr>{''.join(parts)}</tr>"

        head = line(self.headings, "th")
        body = "".join(line(row, "td") for row in self.rows)
        return (
            f"<div class='scroll'><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Picture:
    """A PNG with a caption; `alt` describes it to readers who cannot see it."""

    png: bytes
    alt: str
    caption: str = ""

    def html(self) -> str:
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        caption = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        alt = html.escape(self.alt, quote=True)
        return f"<figure><img alt='{alt}' src='{source}'>{caption}</figure>"


Part = Text | Marked | Code | Facts | Grid | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    title: str  # "" for none
    parts: Sequence[Part] = field(default_factory=tuple)
    level: int = 2  # of the heading

    def html(self) -> str:
        heading = f"<h{self.level}>{html.escape(self.title)}</h{self.level}>" if self.title else ""
        return f"<section>{heading}{''.join(part.html() for part in self.parts)}</section>"


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole file.

    >>> sections = [Section("Privacy", [Facts([("epsilon", "1")])])]
    >>> "<h1>Run</h1>" in page("Run", "a summary", sections)
    True
    """
    body = "".join(section.html() for section in sections)
    style = resources.files(__package__).joinpath("page.css").read_text()
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{html.escape(title)}</h1>"
        f"<p class='lead'>{html.escape(lead)}</p>{body}</main></body></html>\n"
    )


def write_page(folder: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write the page as `report.html` into the folder."""
    file = folder / NAME
    file.write_text(page(title, lead, sections), encoding="utf-8")
    return file


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (name, value) pairs, without those that are None.

    >>> flat({"run": {"lr": 0.1, "seed": None}, "data": "mnist"})
    [('run.lr', '0.1'), ('data', 'mnist')]
    """
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        elif value is not None:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return rows


def picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A matplotlib figure as a picture; the figure is closed."""
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return Picture(file.getvalue(), alt, caption)


def _is_number(text: str) -> bool:
    """Whether the text is a number, also with a unit or a spread after it, or empty.

    >>> [_is_number(text) for text in ("1,234", "98.1 ± 0.2 (3)", "1e-5", "-3.5%", "", "conv1")]
    [True, True, True, True, True, False]
    """
    first = text.split(" ")[0].rstrip("%").replace(",", "")
    try:
        return not first or float(first) == float(first)
    except ValueError:
        return False
