"""How the command line shows errors: one line for a mistake of the user, a traceback for a bug.

A mistake is a `PrivacyError`, a file that cannot be used, or a bad argument. Bad arguments are
`ValueError`, `TypeError` or `ImportError`, which a bug can raise as well. What tells them apart is
where the error was raised: validation is a `raise` statement in dpkfc's own code. A `ValueError`
from torch, or from `int("x")` anywhere, is a bug and keeps its traceback.

`dpkfc --debug COMMAND` shows the traceback of every error.
"""

from __future__ import annotations

import dis
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import dpkfc
from dpkfc.errors import PrivacyError

PACKAGE = Path(dpkfc.__file__).parent
RAISE = dis.opmap["RAISE_VARARGS"]
EXIT_CODE = 2


class CommandGroup(TyperGroup):
    """The commands. A mistake of the user ends each of them with one red line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not is_mistake(error):
                raise
            Console(stderr=True).print(
                Text(f"dpkfc: {message_of(error)}", style="red"), soft_wrap=True
            )
            raise typer.Exit(EXIT_CODE) from None


def is_mistake(error: Exception) -> bool:
    """Whether the error tells the user what to change, so that its message is enough.

    >>> from dpkfc.app.cli.options import _parse_range
    >>> try:
    ...     _parse_range("1")
    ... except ValueError as error:
    ...     print(is_mistake(error))
    True
    >>> try:
    ...     int("x")
    ... except ValueError as error:
    ...     print(is_mistake(error))
    False
    """
    if isinstance(error, BrokenPipeError):  # `dpkfc ... | head`, which typer ends quietly
        return False
    if isinstance(error, PrivacyError | OSError):
        return True
    return isinstance(error, ValueError | TypeError | ImportError) and _raised_by_dpkfc(error)


def message_of(error: Exception) -> str:
    """The message of an error, with the file for errors of the operating system."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _raised_by_dpkfc(error: Exception) -> bool:
    """Whether the innermost frame is dpkfc's own and stopped at a `raise` statement."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return (
        Path(code.co_filename).is_relative_to(PACKAGE) and code.co_code[traceback.tb_lasti] == RAISE
    )
