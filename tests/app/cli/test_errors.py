"""Which errors are one line, and which keep their traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from dpkfc.app.cli import options
from dpkfc.app.cli.errors import CommandGroup, is_mistake
from dpkfc.app.cli.main import app
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.sources import load
from dpkfc.app.workflow import settings
from dpkfc.errors import PrivacyError


def command_that(action: Callable[[], Any]) -> typer.Typer:
    """A program with one command, which does this."""
    program = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False)

    @program.callback()
    def main(debug: bool = False) -> None:
        """So that there is a group."""

    @program.command()
    def act() -> None:
        action()

    return program


def refuse() -> None:
    raise PrivacyError("two\nlines")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: options._parse_range("1"), "--range 1: give two numbers"),
        (lambda: settings.check_seed(-1), "--seed -1"),
        (lambda: load("a.doc"), "there is no a.doc"),
        (lambda: Path("/nowhere/x").read_text(), "/nowhere/x: No such file or directory"),
        (refuse, "two"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_two(
    action: Callable[[], Any], message: str
) -> None:
    done = CliRunner().invoke(command_that(action), ["act"])
    assert done.exit_code == 2 and done.stderr.startswith("dpkfc: ") and message in done.stderr


def test_a_missing_package_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    done = CliRunner().invoke(command_that(digits), ["act"])
    assert done.exit_code == 2 and "pip install 'dpkfc[demo]'" in done.stderr


@pytest.mark.parametrize(
    "action",
    [
        lambda: int("x"),
        lambda: torch.zeros(2).view(3),
        lambda: settings.parse_budget(7),  # type: ignore[arg-type]
        lambda: settings.check_seed(),  # type: ignore[call-arg]
        lambda: settings.check_seed("1"),  # type: ignore[arg-type]
        lambda: {}["key"],
        lambda: __import__("no_such_module"),
    ],
)
def test_a_bug_keeps_its_traceback(action: Callable[[], Any]) -> None:
    done = CliRunner().invoke(command_that(action), ["act"])
    assert done.exit_code == 1 and done.stderr == ""
    assert isinstance(done.exception, Exception) and not isinstance(done.exception, SystemExit)


def test_an_assertion_is_a_bug() -> None:
    with pytest.raises(AssertionError) as caught:
        assert not options
    assert not is_mistake(caught.value)


def test_debug_shows_the_traceback_of_every_error() -> None:
    done = CliRunner().invoke(command_that(refuse), ["--debug", "act"])
    assert done.exit_code == 1 and isinstance(done.exception, PrivacyError)
    done = CliRunner().invoke(app, ["--debug", "plan", "0"])
    assert done.exit_code == 1 and "0 records" in str(done.exception)


def test_tracebacks_show_no_local_variables() -> None:
    """They may hold private records."""
    assert app.pretty_exceptions_show_locals is False
