"""Tables as plain text: equal to what rich draws, without rich."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import dpkfc
from dpkfc.tables import Column, TextTable

LONG = "a statement that is long enough to be continued on the next line, and the line after that"


def rich_text(table: TextTable) -> str:
    file = io.StringIO()
    Console(file=file, width=table.width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def numbers(border: bool, width: int = 100) -> TextTable:
    columns = [Column("layer"), Column("parameters", "right"), Column("DP-SGD\nR = 1", "right")]
    table = TextTable("Signal to noise", columns, border=border, caption="public", width=width)
    table.add_row("first", "1,234", "0.1")
    table.add_row("second", "5", "")
    table.add_section()
    table.add_row("all layers", "1,239", "0.25")
    return table


def wrapped(*widths: int) -> TextTable:
    columns = [Column("what"), Column("value", wrap=True), Column("why", wrap=True)]
    table = TextTable("Recipe", columns, width=70)
    table.add_row("geometry", LONG[: widths[0]], LONG[: widths[1]])
    table.add_row("clip", "1", LONG)
    return table


@pytest.mark.parametrize(
    "table",
    [
        numbers(border=True),
        numbers(border=False),
        TextTable.statement("Plan", [("clip", "1"), ("not covered", LONG), ("steps", "3")]),
        TextTable("Empty", [Column("a"), Column("b")]),
        wrapped(20, 30),
        wrapped(50, 80),
        wrapped(89, 89),
    ],
    ids=lambda table: f"{table.title}, {len(table.rows)} rows, border {table.border}",
)
def test_plain_text_equals_what_rich_draws(table: TextTable) -> None:
    assert str(table) == rich_text(table)


def test_text_has_no_colours_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = TextTable("", [Column()], [("x" * 20,)], caption="not private", warning=True)
    assert str(table) == rich_text(table) and "\x1b" not in str(table)
    assert str(table).endswith("\nnot private")


def test_no_line_ends_in_spaces() -> None:
    table = TextTable("", [Column("name"), Column("figure")], border=False)
    table.add_row("a long name", "1")
    table.add_row("b", "")
    lines = str(table).splitlines()
    assert len(lines) == 4  # the headings, the line below them, and the rows
    assert lines == [line.rstrip() for line in lines]


def test_square_brackets_are_not_markup() -> None:
    table = TextTable.statement("Plan [1]", [("shape", "[red]28[/red]")])
    assert "[red]28[/red]" in str(table) and "[red]28[/red]" in rich_text(table)


def test_what_cannot_be_wrapped_is_not_cut() -> None:
    table = TextTable("", [Column("name"), Column("value", wrap=True)], width=20)
    table.add_row("a name of thirty characters or so", "12345678 12345678")
    assert "a name of thirty characters or so" in str(table)
    assert str(table).count("12345678") == 2


def test_the_library_prints_without_rich_typer_matplotlib_and_scikit_learn() -> None:
    code = """
import sys
for name in ("rich", "typer", "matplotlib", "sklearn"):
    sys.modules[name] = None
import torch, dpkfc
names = [getattr(dpkfc, name) for name in dpkfc.__all__ if name != "register_layer"]
run = dict(records=1000, batch_size=100, steps=5, epsilon=1.0, delta=1e-5)
print(dpkfc.Plan.make(clip=1.0, **run))
model = dpkfc.fix(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))[:1]
probe = dpkfc.probes.Tabular(4)
print(dpkfc.recipe(model, records=1000, epsilon=1.0, epochs=1, batch_size=500, probe=probe))
print(dpkfc.diagnostics.kronecker_spectrum(model, probe))
assert not any(name.startswith("dpkfc.app") for name in sys.modules)
"""
    environment = {"PYTHONPATH": str(Path(dpkfc.__path__[0]).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    for word in ("Privacy plan", "GroupNorm", "Recipe", "Eigenvalues of A ⊗ G"):
        assert word in done.stdout
