"""What `dpkfc reproduce` is asked for: the same for every experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True)
class ReproduceOptions:
    """Where results go, how much is run, and on what."""

    out: Path  # a folder
    console: Console = field(default_factory=Console)
    quick: bool = False
    data_dir: Path | None = None
    seed: int | None = None  # the first one of the runs; None: as in the published results
    device: str = "cpu"

    def seeds(self, published: tuple[int, ...]) -> tuple[int, ...]:
        """As many as were published, or one if it is to be quick; beginning with `seed`.

        >>> Order(Path(), seed=10).seeds((1, 2, 3))
        (10, 11, 12)
        >>> Order(Path(), quick=True).seeds((1, 2, 3))
        (1,)
        """
        moved = 0 if self.seed is None else self.seed - published[0]
        return tuple(seed + moved for seed in published[: 1 if self.quick else None])

    def command(self, name: str) -> str:
        """What makes the same results again.

        >>> Order(Path(), quick=True, seed=10).command("fig1")
        'dpkfc reproduce fig1 --quick --seed 10'
        """
        parts = [f"dpkfc reproduce {name}"] + ["--quick"] * self.quick
        return " ".join(parts if self.seed is None else [*parts, f"--seed {self.seed}"])
