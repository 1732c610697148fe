"""What the site takes from elsewhere when it is built: the command line's own help, and the list of results.

Formulas become MathML, which browsers draw by themselves, so that no script has to be loaded. Examples in docstrings
become blocks of code.
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
    """Every page of results is in the navigation."""
    section = next(entry["Results"] for entry in config.nav if "Results" in entry)
    section += [{title: f"results/{path}"} for title, path in result_pages()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "cli.md":
        return markdown + "\n\n".join(command_line())
    if page.file.src_uri == "results/index.md":
        return markdown + "".join(f"- [{title}]({path})\n" for title, path in result_pages())
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(lambda found: as_mathml(found[2], block=found[1] == "div"), content)


def as_mathml(formula: str, block: bool) -> str:
    written = convert(html.unescape(formula).strip(), display="block" if block else "inline")
    return f'<div class="formula">{written}</div>' if block else written


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def result_pages() -> list[tuple[str, str]]:
    """Title and path of every page in the folders: that of the folder, or of the page where there are several."""
    pages = sorted(RESULTS.glob("*/*.md"))
    folders = [page.parent for page in pages]
    names = [page.stem if folders.count(page.parent) > 1 else page.parent.name for page in pages]
    return [
        (name.replace("-", " "), f"{p.parent.name}/{p.name}")
        for name, p in zip(names, pages, strict=True)
    ]


def command_line() -> list[str]:
    """Paragraphs of Markdown: the help of every command."""
    group: Any = get_command(app)
    parent = typer.Context(group, info_name="dpkfc")
    written = [prose(group.help)]
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=name, parent=parent)
        rows = [option(parameter, context) for parameter in command.get_params(context)]
        called = " ".join(["$", context.command_path, *command.collect_usage_pieces(context)])
        written += [
            f"## dpkfc {name}",
            f"```console\n{called}\n```",
            prose(command.help),
            "\n".join(rows),
        ]
    return written


def prose(text: str) -> str:
    """Rich's markup as Markdown; successive examples make one block."""
    marked = EXAMPLE.sub(
        lambda found: f"    $ {found[1]}" + (f"   # {found[2]}" if found[2] else ""), text
    )
    joined = re.sub(r"(?m)(^    \$ .*)\n\n(?=    \$ )", r"\1\n", marked)
    return joined.replace("[bold]", "**").replace("[/bold]", "**")


def option(parameter: Any, context: Any) -> str:
    names, meaning = parameter.get_help_record(context)
    return f"- `{names}` {meaning}".replace("$", r"\$")
