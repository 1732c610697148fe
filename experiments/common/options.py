"""The options of `dpkfc reproduce`, which are the same for every experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True)
class ReproduceOptions:
    """Where an experiment writes its results, how much of it runs, and on which device.

    Args:
        out: The folder for results.
        console: Receives tables and progress.
        quick: Run a small part of the experiment, to see that it works.
        data_dir: The folder with the data sets; $DPKFC_DATA by default.
        seed: The first seed of the final runs; None uses the published seeds.
        device: A torch device.
    """

    out: Path
    console: Console = field(default_factory=Console)
    quick: bool = False
    data_dir: Path | None = None
    seed: int | None = None
    device: str = "cpu"

    def seeds(self, published: tuple[int, ...]) -> tuple[int, ...]:
        """Return the published seeds, shifted so that they start at `seed`; one seed if quick.

        >>> ReproduceOptions(Path(), seed=10).seeds((1, 2, 3))
        (10, 11, 12)
        >>> ReproduceOptions(Path(), quick=True).seeds((1, 2, 3))
        (1,)
        """
        shift = 0 if self.seed is None else self.seed - published[0]
        return tuple(seed + shift for seed in published[: 1 if self.quick else None])

    def command(self, name: str) -> str:
        """Return the command that repeats the results of the experiment `name`.

        >>> ReproduceOptions(Path(), quick=True, seed=10).command("fig1")
        'dpkfc reproduce fig1 --quick --seed 10'
        """
        parts = [f"dpkfc reproduce {name}"] + ["--quick"] * self.quick
        return " ".join(parts if self.seed is None else [*parts, f"--seed {self.seed}"])
