"""MkDocs hooks: command-line reference, list of results, formulas and docstring examples.

Formulas become MathML, which browsers render without a script. Doctests in docstrings become code
blocks.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import griffe
import typer
from latex2mathml.converter import convert
from typer.main import get_command

from dpkfc.app.cli.main import app

RESULTS = Path(__file__).parent / "results"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(r"\[cyan\](.*?)\[/cyan\] *(.*)")


def on_config(config: Any) -> Any:
    """Add every page of results to the navigation."""
    section = next(entry["Results"] for entry in config.nav if "Results" in entry)
    section += [{title: f"results/{path}"} for title, path in result_pages()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append generated parts to the pages that have them."""
    if page.file.src_uri == "cli.md":
        return markdown + "\n\n".join(command_line())
    if page.file.src_uri == "results/index.md":
        return markdown + "".join(f"- [{title}]({path})\n" for title, path in result_pages())
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas by MathML."""
    return FORMULA.sub(lambda match: to_mathml(match[2], block=match[1] == "div"), content)


def to_mathml(formula: str, block: bool) -> str:
    mathml = convert(html.unescape(formula).strip(), display="block" if block else "inline")
    return f'<div class="formula">{mathml}</div>' if block else mathml


class Doctests(griffe.Extension):
    """Wraps the doctest of a docstring in a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def result_pages() -> list[tuple[str, str]]:
    """Title and path of every page of results.

    The title is the name of the folder. The other pages of a folder that has several are titled
    "folder: page".
    """
    pages = []
    for page in sorted(RESULTS.glob("*/*.md")):
        folder = page.parent.name
        is_only = len(list(page.parent.glob("*.md"))) == 1
        title = folder if is_only or page.stem == folder else f"{folder}: {page.stem}"
        pages.append((title.replace("-", " "), f"{folder}/{page.name}"))
    return pages


def command_line() -> list[str]:
    """The help of every command, as paragraphs of Markdown."""
    group: Any = get_command(app)
    parent = typer.Context(group, info_name="dpkfc")
    paragraphs = [prose(group.help)]
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=name, parent=parent)
        rows = [option(parameter, context) for parameter in command.get_params(context)]
        usage = " ".join(["$", context.command_path, *command.collect_usage_pieces(context)])
        paragraphs += [
            f"## dpkfc {name}",
            f"```console\n{usage}\n```",
            prose(command.help),
            "\n".join(rows),
        ]
    return paragraphs


def prose(text: str) -> str:
    """Rich markup as Markdown. Consecutive examples become one code block."""
    marked = EXAMPLE.sub(
        lambda match: f"    $ {match[1]}" + (f"   # {match[2]}" if match[2] else ""), text
    )
    joined = re.sub(r"(?m)(^    \$ .*)\n\n(?=    \$ )", r"\1\n", marked)
    return joined.replace("[bold]", "**").replace("[/bold]", "**")


def option(parameter: Any, context: Any) -> str:
    names, meaning = parameter.get_help_record(context)
    return f"- `{names}` {meaning}".replace("$", r"\$")
