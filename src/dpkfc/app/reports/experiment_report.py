"""The report of an experiment: one HTML file of the tables, figures and settings in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from rich.console import Console

from dpkfc.app.reports.page import (
    Code,
    Facts,
    Grid,
    Marked,
    Part,
    Picture,
    Section,
    flat,
    write_page,
)

# Kinds of Markdown lines, by how they begin. The first match counts.
KINDS = {
    "code": r" {4}|\t",
    "blank": r"\s*$",
    "heading": r"#{1,6} ",
    "table": r"\|",
    "picture": r"!\[[^]]*\]\([^)]+\)\s*$",
    "text": r"",
}
LONGEST_SETTING = 12  # numbers in a list; longer lists are results
QUICK = "**Quick:** a small part of the experiment, to see that it works. Its numbers mean nothing."


def publish(
    results: Path,
    text: str,
    console: Console,
    plot: Callable[[Path], None] | None = None,
    quick: bool = False,
) -> None:
    """Write the Markdown and the figure of an experiment beside its results; print the Markdown.

    Args:
        results: the file of the results. The others have the same name.
        plot: draws the figure into a file.
        quick: mark the text as a quick run.
    """
    if quick:
        heading, _, rest = text.partition("\n")
        text = f"{heading}\n\n{QUICK}\n{rest}"
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if plot is not None and find_spec("matplotlib"):
        plot(results.with_suffix(".png"))
    elif plot is not None:
        console.print("matplotlib is not installed: no figure")


def is_experiment(folder: Path) -> bool:
    """Whether the folder holds tables or figures."""
    return any(_files(folder, "md")) or any(_files(folder, "png"))


def title_of(folder: Path) -> str:
    """The heading of the only Markdown file; otherwise the name of the folder."""
    files = list(_files(folder, "md"))
    headings = (
        re.findall(r"(?m)^# (.+)$", files[0].read_text(encoding="utf-8")) if len(files) == 1 else []
    )
    return str(headings[0]) if headings else folder.resolve().name


def write_experiment_report(folder: Path, title: str) -> Path:
    """Write `report.html` into the folder of an experiment: its tables, figures and settings."""
    if not is_experiment(folder):
        raise ValueError(
            f"{folder} holds no tables and no figures: run `dpkfc reproduce NAME --out {folder}` "
            "first"
        )
    pictures = {file.name: file for file in _files(folder, "png")}
    sections: list[Section] = []
    for file in _files(folder, "md"):
        sections += read_markdown(file.read_text(encoding="utf-8"), pictures, title)
        if (same_name := pictures.pop(f"{file.stem}.png", None)) is not None:
            sections.append(Section("", [_picture(same_name)]))
    if pictures:
        sections.append(Section("Figures", [*map(_picture, pictures.values())]))
    for file in _files(folder, "json", "jsonl"):
        if facts := _settings(file):
            sections.append(Section(f"Settings in {file.name}", [Facts(facts)]))
    parts = [part for section in sections for part in section.parts]
    tables = sum(isinstance(part, Grid) for part in parts)
    figures = sum(isinstance(part, Picture) for part in parts)
    lead = f"The results of an experiment: {_count(tables, 'table')}, {_count(figures, 'figure')}."
    return write_page(folder, title, lead, sections)


def read_markdown(text: str, pictures: dict[str, Path], title: str = "") -> list[Section]:
    """Parse headings, paragraphs, pipe tables, code and pictures. Anything else is text.

    Links become their text, and the heading that equals the title of the page is omitted.

    Args:
        pictures: files by name. Those that the text shows are removed.
    """
    text = re.sub(
        r"(?ms)^```[^\n]*\n(.*?)^```[^\n]*$",
        lambda fenced: indent(fenced[1], "    ", lambda _: True),
        text,
    )
    parts: list[Part] = []
    sections = [Section("", parts)]
    # A text without the title of the page is one level below its heading.
    offset = 0 if f"# {title}" in text.splitlines() else 1
    for kind, lines in groupby(text.splitlines(), _kind):
        if kind == "heading":
            for line in lines:
                marks, _, heading = line.partition(" ")
                name = "" if heading == title else _plain(heading)
                parts = []
                sections.append(Section(name, parts, min(offset + len(marks), 6)))
        elif kind == "code":
            parts.append(Code(dedent("\n".join(lines)).strip("\n")))
        elif kind == "table":
            parts.append(_table(list(lines)))
        elif kind == "picture":
            parts += [_shown(line, pictures) for line in lines]
        elif kind == "text":
            parts.append(Marked([*_paragraphs(lines)]))
    return [section for section in sections if section.parts or section.title]


def _kind(line: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, line))


def _table(lines: Sequence[str]) -> Part:
    rows = [
        [_plain(cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        for line in lines
    ]
    if len(rows) < 2 or not all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
        return Marked(lines)
    headings, rule, *body = rows
    width = len(headings)
    filled = [(row + [""] * width)[:width] for row in body]
    return Grid(headings, filled, [cell.endswith(":") for cell in (rule + [""] * width)[:width]])


def _shown(line: str, pictures: dict[str, Path]) -> Part:
    alt, name = re.findall(r"!\[(.*)\]\((.+)\)", line)[0]
    file = pictures.pop(name, None)
    return Marked([f"{alt} (no picture {name} here)"]) if file is None else _picture(file, alt)


def _picture(file: Path, alt: str = "") -> Picture:
    return Picture(file.read_bytes(), alt or file.stem, alt or file.stem)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Joined lines; each item of a list is a paragraph."""
    items = re.split(r"(?m)^\s*[-*] ", "\n".join(lines))
    for number, item in enumerate(items):
        if item.strip():
            yield ("• " if number else "") + _links(" ".join(item.split()))


def _links(text: str) -> str:
    """
    >>> _links("see [the page](page.md)")
    'see the page'
    """
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)


def _plain(text: str) -> str:
    """Text without bold and code marks.

    >>> _plain(r"**a** \\| `b`")
    'a | b'
    """
    return re.sub(r"\*\*(.+?)\*\*|`([^`]+)`", r"\1\2", _links(text)).replace(r"\|", "|")


def _settings(file: Path) -> list[tuple[str, str]]:
    """The settings of one object; or the number of results, and the settings they share."""
    try:
        text = file.read_text(encoding="utf-8")
        content = (
            [json.loads(line) for line in text.splitlines()]
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except ValueError as problem:
        return [("damaged", str(problem))]
    if isinstance(content, Mapping):
        return flat(_small(content))
    if not isinstance(content, list):
        return []
    rows = [dict(flat(_small(row))) for row in content if isinstance(row, Mapping)]
    if not rows:
        return []
    common = [
        (name, value)
        for name, value in rows[0].items()
        if all(row.get(name) == value for row in rows)
    ]
    return [("results", f"{len(rows):,}"), *(common if len(rows) > 1 else [])]


def _small(content: Mapping[str, Any], depth: int = 2) -> dict[str, Any]:
    """Numbers, words and short lists, also one level down. Anything deeper is a result."""
    small: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            if depth > 1 and (inside := _small(value, depth - 1)):
                small[name] = inside
        elif not isinstance(value, list) or (
            len(value) <= LONGEST_SETTING and not any(map(_is_nested, value))
        ):
            small[name] = value
    return small


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | Mapping)


def _files(folder: Path, *endings: str) -> Iterator[Path]:
    yield from sorted(file for ending in endings for file in folder.glob(f"*.{ending}"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
