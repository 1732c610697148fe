"""The nearest known name, for error messages about a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" if a known name resembles `name`, else an empty string.

    >>> did_you_mean("fashion-minst", ["mnist", "fashion-mnist"])
    " (did you mean 'fashion-mnist'?)"
    >>> did_you_mean("people", ["mnist", "fashion-mnist"])
    ''
    """
    spelling = {candidate.lower(): candidate for candidate in known}
    nearest = get_close_matches(name.lower(), spelling, n=1)
    return f" (did you mean {spelling[nearest[0]]!r}?)" if nearest else ""
