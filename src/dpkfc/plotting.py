"""What all plots share: colours, figures without a display, ticks and files.

matplotlib is imported when a plot is drawn, never when this module is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
RED = "#B00000"  # titles of plots that must not be published


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its panels, [rows][columns]."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    return figure, panels


def save_figure(figure: Any, file: Path) -> None:
    """Write the figure and free its memory."""
    import matplotlib.pyplot as plt

    figure.savefig(file, dpi=150)
    plt.close(figure)


def plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis 1, 10, 100 instead of powers; a short axis also has 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_minor_formatter(NullFormatter())
    if low > 1e-3 and high < 1e5:
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))


def add_legend(figure: Any, handles: Any, labels: Any, columns: int) -> None:
    """One legend for the whole figure, below its panels."""
    place = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles, labels, ncols=columns, **place)


def light_grid(panel: Axes, **options: Any) -> None:
    panel.grid(alpha=0.25, **options)
