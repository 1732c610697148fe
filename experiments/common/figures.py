"""What the diagnostic figures do with results: keep them, judge the paper's statements by them, write and draw them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rich.console import Console
from rich.table import Table

from dpkfc.app.reports.progress import bar
from dpkfc.app.reports.text import markdown_table
from dpkfc.app.workflow.run_folder import write_whole
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Setting = TypeVar("Setting")
OnStep = Callable[[int, int], None]  # steps done, of how many


def evaluate(
    settings: Sequence[Setting],
    measure: Callable[[Setting, OnStep], Any],
    file: Path,
    console: Console,
) -> dict[Setting, Any]:
    """The results of all settings. Those in the file are taken from it, the others are written to it as they come.

    A setting is a frozen dataclass of all that its result depends on besides the data.
    """
    kept = _read(file)
    with bar(console) as progress:
        overall, current = (
            progress.add_task("runs", total=len(settings)),
            progress.add_task("steps", total=None),
        )

        def on_step(done: int, of: int) -> None:
            progress.update(current, completed=done, total=of)

        for setting in settings:
            key = key_of(setting)
            if key not in kept:
                progress.reset(current, total=None)
                row = {
                    "key": key,
                    "setting": asdict(cast(Any, setting)),
                    "result": measure(setting, on_step),
                }
                kept[key] = json.loads(json.dumps(row))
                _write(file, kept.values())
            progress.advance(overall)
    return {setting: kept[key_of(setting)]["result"] for setting in settings}


def by_inputs(found: Mapping[Any, Any]) -> dict[str, dict[Any, Any]]:
    """The results apart by `setting.inputs`."""
    names = dict.fromkeys(setting.inputs for setting in found)
    return {
        name: {setting: found[setting] for setting in found if setting.inputs == name}
        for name in names
    }


def key_of(setting: Any) -> str:
    """A hash of the contents."""
    return hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by key; none if it does not exist yet."""
    if not file.exists():
        return {}
    try:
        rows = json.loads(file.read_text())
        return {
            row["key"]: {name: row[name] for name in ("key", "setting", "result")} for row in rows
        }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PrivacyError(
            f"{file} does not hold results of a figure: remove it, or name another --out"
        ) from error


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """At once or not at all, so that an interrupted run leaves a file that can be read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
    write_whole(file, lambda fresh: fresh.write_text(text))


@dataclass(frozen=True)
class Claim:
    """What the paper says, what is checked for it, what was measured, and in which of the places looked at it holds."""

    paper: str
    checked: str
    measured: str
    where: Sequence[bool]

    @property
    def holds(self) -> bool:
        return all(self.where)

    @property
    def verdict(self) -> str:
        """
        >>> Claim("", "", "", [True, False]).verdict
        'holds in 1 of 2'
        """
        in_part = f"holds in {sum(self.where)} of {len(self.where)}"
        return "holds" if self.holds else in_part if any(self.where) else "does not hold"


Claims = Mapping[str, Sequence[Claim]]  # the same ones, by what was measured


def claim_cells(claims: Claims) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; every finding begins with the verdict."""
    rows = [
        [
            same[0].paper,
            same[0].checked,
            *(f"{one.verdict}: {one.measured}" for one in same),
        ]
        for same in zip(*claims.values(), strict=True)
    ]
    return ["the paper", "checked here", *claims], rows


def verdicts(claims: Claims) -> str:
    """
    >>> verdicts({"measured": [Claim("", "", "", [True]), Claim("", "", "", [True, False])]})
    'of 2 statements 1 holds, 1 in part (measured)'
    """
    parts = []
    for name, found in claims.items():
        whole, some = (
            sum(one.holds for one in found),
            sum(any(one.where) and not one.holds for one in found),
        )
        parts.append(
            f"of {len(found)} statements {whole} {'holds' if whole == 1 else 'hold'}, {some} in part ({name})"
        )
    return "; ".join(parts)


def claim_table(claims: Claims) -> Table:
    headings, rows = claim_cells(claims)
    table = Table(*headings, title=verdicts(claims), title_justify="left", show_lines=True)
    for cells in rows:
        table.add_row(*cells)
    return table


def write_page(
    file: Path, title: str, command: str, about: Sequence[str], claims: Claims, rest: Sequence[str]
) -> None:
    """A Markdown page: how it was made, what was asked, the paper's statements beside what was found, and the rest."""
    headings, rows = claim_cells(claims)
    table = markdown_table(headings, rows, left=len(headings))
    parts = [
        f"# {title}",
        f"    {command}",
        *about,
        "## What the paper states, and what was measured",
    ]
    parts += [f"{verdicts(claims).capitalize()}.", table, *rest]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean ± standard deviation.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def along(places: Sequence[tuple[str, Any]], values: Sequence[float], form: str = ".2f") -> str:
    """Values at (model, time), in their order.

    >>> along([("MLP", 0), ("MLP", 1), ("CNN", 0), ("CNN", 1)], [0.1, 0.2, 0.3, 0.4])
    'MLP 0.10 → 0.20, CNN 0.30 → 0.40'
    """
    models: dict[str, list[str]] = {}
    for (model, _), value in zip(places, values, strict=True):
        models.setdefault(model, []).append(f"{value:{form}}")
    return ", ".join(f"{model} {' → '.join(texts)}" for model, texts in models.items())


def about_runs(found: Mapping[Any, Any]) -> str:
    """How many images and seeds, and what the training reached: of settings with `run`, `inputs` and `images`."""
    setting = next(iter(found))
    reached: dict[str, list[float]] = {}
    for one, looks in found.items():
        reached.setdefault(f"{one.run.model}, {one.inputs}", []).append(
            100 * list(looks.values())[-1]["accuracy"]
        )
    ends = "; ".join(f"{name}: {spread(values, '.1f')} %" for name, values in reached.items())
    return (
        f"{setting.images} images of each source; {len({one.run.seed for one in found})} seeds (± one standard "
        f"deviation). Training: {setting.run.looks[-1]} private steps of {setting.run.method} at epsilon = "
        f"{setting.run.epsilon:g}, batch {setting.run.batch_size}. Test accuracy after it: {ends}."
    )


def text_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right")
    for cells in rows:
        table.add_row(*cells)
    return table


def can_draw(console: Console) -> bool:
    if find_spec("matplotlib"):
        return True
    console.print("no pictures: pip install matplotlib")
    return False


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


def plain_ticks(panel: Axes) -> None:
    """0.1, 1, 10 up a logarithmic axis, with 2 and 5 between where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def draw_range(
    panel: Axes,
    places: Sequence[float],
    logs: Sequence[Sequence[float]],
    label: str,
    style: Mapping[str, Any],
) -> None:
    """Lines of log10 values, one for each seed: their mean, and from the least to the most as a band."""
    columns = list(zip(*logs, strict=True))
    low, middle, high = (
        [10 ** function(values) for values in columns] for function in (min, fmean, max)
    )
    panel.plot(places, middle, label=label, **style)
    panel.fill_between(places, low, high, color=style["color"], alpha=0.12, linewidth=0)
    panel.set(xscale="log", yscale="log")
