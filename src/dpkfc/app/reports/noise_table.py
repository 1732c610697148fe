"""The table of `dpkfc plan`: candidates for the noise of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dpkfc.planning.choose_noise import Candidate
from dpkfc.planning.statement import SAMPLING_NAMES


def noise_table(candidates: Sequence[Candidate], chosen: Candidate, workload: str) -> Table:
    """One row per candidate, with its error relative to the first one, independent noise.

    The chosen candidate is marked.
    """
    title = f"Noise at the same epsilon, for {workload}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column("noise")
    table.add_column("sampling")
    for heading in ("multiplier", "sensitivity", "buffers", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for candidate in candidates:
        plan = candidate.plan
        table.add_row(
            ">" if candidate is chosen else "",
            plan.noise,
            SAMPLING_NAMES[plan.sampling],
            f"{plan.noise_multiplier:.4g}",
            f"{plan.noise_sensitivity:.4g}",
            str(candidate.factorization.buffers),
            f"{candidate.rmse / candidates[0].rmse:.3f}",
            style="bold green" if candidate is chosen else "",
        )
    table.caption = (
        "error: root mean square of the noise in a parameter over all steps, relative to "
        "independent noise"
    )
    table.caption_justify = "left"
    return table
