"""Figures with several panels and one legend."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(
    rows: int, columns: int, width: float, height: float
) -> tuple[Figure, list[list[Axes]]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    for panel in panels.flat:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, [list(row) for row in panels]


def finish(figure: Figure, panel: Axes, file: Path, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    import matplotlib.pyplot as plt
    from PIL import Image  # which matplotlib needs as well

    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )
    with io.BytesIO() as drawn:
        figure.savefig(drawn, dpi=150)
        Image.open(drawn).convert("RGB").quantize(128).save(
            file, optimize=True
        )  # a third of the size
    plt.close(figure)
