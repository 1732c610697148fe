"""What the command lines of experiments and benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path

from dpkfc.errors import PrivacyError

# Missing data, files, packages or wrong arguments: shown as one line, without a traceback.
EXPECTED_ERRORS = (PrivacyError, ImportError, OSError, ValueError)


def names_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of "A,B", a list of known names, for argparse's `type`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is not known: choose from {', '.join(known)}"
                    + suggestion(name, known)
                )
        return names

    return parse


def suggestion(name: str, known: Collection[str]) -> str:
    """Return a sentence with the known name that is most similar to a mistyped one, if any is.

    >>> suggestion("tabel1", ["table1", "fig1"])
    '. Did you mean table1?'
    """
    nearest = get_close_matches(name, known, n=1)
    return f". Did you mean {nearest[0]}?" if nearest else ""


def results_file(text: str) -> Path:
    """Parse the path of a .jsonl file; its table and picture get the same name."""
    file = Path(text)
    if file.suffix != ".jsonl":
        raise argparse.ArgumentTypeError(
            f"{text!r} must end in .jsonl: the .md and the .png are written beside it"
        )
    return file
