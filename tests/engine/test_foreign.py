from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpkfc.engine import foreign


class Changing:
    """A set from which the garbage collector removes something while it is first read."""

    def __init__(self) -> None:
        self.content, self.read = {1, 2, 3}, 0

    def __iter__(self) -> Iterator[int]:
        self.read += 1
        for number in self.content:
            if self.read == 1:
                self.content.discard(3)
            yield number


def test_runs_may_end_while_they_are_listed() -> None:
    runs: Any = Changing()
    assert sorted(foreign._snapshot(runs)) == [1, 2]
    assert runs.read == 2
