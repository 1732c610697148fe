"""Warnings as a person reads them: one plain line, once, without the file and line of the code that gave it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rich.console import Console
from rich.text import Text

P = ParamSpec("P")
T = TypeVar("T")


def plainly_warned(command: Callable[P, T]) -> Callable[P, T]:
    """The same command; what it warns of is shown as one line on stderr, and once if it is said again."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        said: set[str] = set()

        def show(message: Warning | str, *about: Any, **more: Any) -> None:
            if str(message) not in said:
                said.add(str(message))
                Console(stderr=True).print(
                    Text(f"dpkfc: {message}", style="yellow"), soft_wrap=True
                )

        with warnings.catch_warnings():
            warnings.showwarning = show
            return command(*arguments, **options)

    return run
