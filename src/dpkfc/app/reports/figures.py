"""Figures with a common look: light grid, no frame, one legend below."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 128  # a palette makes the files a third of their size


def new_figure(
    rows: int, columns: int, width: float, height: float
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `width` x `height` inches with `rows` x `columns` panels."""
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
    """Add the legend of one panel below all panels, write the PNG, and close the figure."""
    import matplotlib.pyplot as plt
    from PIL import Image  # a dependency of matplotlib

    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )
    with io.BytesIO() as png:
        figure.savefig(png, dpi=150)
        Image.open(png).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    plt.close(figure)
