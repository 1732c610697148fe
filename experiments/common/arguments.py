"""Arguments of command lines of experiments and benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reads "A,B", a list of known names; for argparse's `type`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is not known: choose from {', '.join(known)}"
                )
        return names

    return parse
