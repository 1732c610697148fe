"""The progress of a tuning in a terminal, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dpkfc.tuning import search


@contextmanager
def tuning_bar() -> Iterator[search.Progress]:
    """A progress bar; yields the function that advances it, for `dpkfc.tune(on_progress=...)`."""
    counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with _progress(TextColumn("{task.description}"), *counts) as progress:
        task = progress.add_task("tuning", total=None)

        def advance(finished: int, tries: int, best: float | None) -> None:
            description = "tuning" if best is None else f"best {best:.4g}"
            progress.update(task, completed=finished, total=tries, description=description)

        yield advance


@contextmanager
def elapsed_time() -> Iterator[None]:
    """A spinner and the elapsed time. A private tuning must not show how many tries it makes."""
    columns = (SpinnerColumn(), TextColumn("tuning privately"), TimeElapsedColumn())
    with _progress(*columns) as progress:
        progress.add_task("", total=None)
        yield


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
