"""Tables as plain text."""

import pytest
from rich.table import Table
from rich.text import Text

from dpkfc.app.reports.text import as_text


def test_text_has_no_colours_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert as_text(Text("not private", style="bold red")) == "not private"


def test_no_line_ends_in_spaces() -> None:
    table = Table("name", "figure", box=None)
    table.add_row("a long name", "1")
    table.add_row("b", "")
    lines = as_text(table).splitlines()
    assert len(lines) == 3
    assert lines == [line.rstrip() for line in lines]
