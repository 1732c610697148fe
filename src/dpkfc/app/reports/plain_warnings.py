"""Warnings for people: one plain line, once, without the source line that caused it."""

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
    """The command, with each distinct warning shown once, as one line on stderr."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        shown: set[str] = set()

        def show(message: Warning | str, *location: Any, **more: Any) -> None:
            if str(message) not in shown:
                shown.add(str(message))
                Console(stderr=True).print(
                    Text(f"dpkfc: {message}", style="yellow"), soft_wrap=True
                )

        with warnings.catch_warnings():
            warnings.showwarning = show
            return command(*arguments, **options)

    return run
