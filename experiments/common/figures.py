"""What the diagnostic figures share: kept results, claims of the paper, pages and drawing."""

from __future__ import annotations

import hashlib
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A frozen dataclass of everything a result depends on besides the data.
FigureSetting = TypeVar("FigureSetting")
OnStep = Callable[[int, int], None]  # receives the steps done and their total


def evaluate(
    settings: Sequence[FigureSetting],
    measure: Callable[[FigureSetting, OnStep], Any],
    file: Path,
    console: Console,
) -> dict[FigureSetting, Any]:
    """Return the results of all settings; those that the file does not hold are measured first.

    The file is rewritten after every measurement, so that an interrupted run loses nothing.
    """
    rows = _read(file)
    with bar(console) as progress:
        overall = progress.add_task("runs", total=len(settings))
        current = progress.add_task("steps", total=None)

        def on_step(done: int, total: int) -> None:
            progress.update(current, completed=done, total=total)

        for setting in settings:
            key = key_of(setting)
            if key not in rows:
                progress.reset(current, total=None)
                row = {
                    "key": key,
                    "setting": asdict(cast(Any, setting)),
                    "result": measure(setting, on_step),
                }
                rows[key] = json.loads(json.dumps(row))
                _write(file, rows.values())
            progress.advance(overall)
    return {setting: rows[key_of(setting)]["result"] for setting in settings}


def by_inputs(results: Mapping[Any, Any]) -> dict[str, dict[Any, Any]]:
    """Group results by `setting.inputs`."""
    names = dict.fromkeys(setting.inputs for setting in results)
    return {
        name: {setting: results[setting] for setting in results if setting.inputs == name}
        for name in names
    }


def key_of(setting: Any) -> str:
    """Return a hash of the contents."""
    return hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by key; none if it does not exist yet."""
    if not file.exists():
        return {}
    try:
        rows = json.loads(file.read_text())
        return {
            row["key"]: {name: row[name] for name in ("key", "setting", "result")} for row in rows
        }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} does not hold results of a figure: remove it, or name another --out"
        ) from error


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the file atomically, so that an interrupted run leaves a readable one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
    write_whole(file, lambda fresh: fresh.write_text(text))


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and whether it holds.

    Args:
        paper: The statement.
        checked: The condition that is checked for it.
        measured: The measured values.
        where: Whether the condition holds, in each case that was examined.
    """

    paper: str
    checked: str
    measured: str
    where: Sequence[bool]

    @property
    def holds(self) -> bool:
        return all(self.where)

    @property
    def verdict(self) -> str:
        """Say whether the statement holds in all cases, in some, or in none.

        >>> Claim("", "", "", [True, False]).verdict
        'holds in 1 of 2'
        """
        in_part = f"holds in {sum(self.where)} of {len(self.where)}"
        return "holds" if self.holds else in_part if any(self.where) else "does not hold"


Claims = Mapping[str, Sequence[Claim]]  # the same statements, by the inputs of the measurement


def claim_cells(claims: Claims) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows; every finding begins with its verdict."""
    rows = [
        [
            same[0].paper,
            same[0].checked,
            *(f"{claim.verdict}: {claim.measured}" for claim in same),
        ]
        for same in zip(*claims.values(), strict=True)
    ]
    return ["the paper", "checked here", *claims], rows


def verdicts(claims: Claims) -> str:
    """Count the statements that hold.

    >>> verdicts({"measured": [Claim("", "", "", [True]), Claim("", "", "", [True, False])]})
    'of 2 statements 1 holds, 1 in part (measured)'
    """
    parts = []
    for name, statements in claims.items():
        whole = sum(claim.holds for claim in statements)
        in_part = sum(any(claim.where) and not claim.holds for claim in statements)
        verb = "holds" if whole == 1 else "hold"
        parts.append(f"of {len(statements)} statements {whole} {verb}, {in_part} in part ({name})")
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
    """Write a Markdown page: the command, the protocol, the paper's statements, and the rest."""
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
    """Format the mean ± the standard deviation.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def along(places: Sequence[tuple[str, Any]], values: Sequence[float], form: str = ".2f") -> str:
    """Format the values at each (model, time), in their order.

    >>> along([("MLP", 0), ("MLP", 1), ("CNN", 0), ("CNN", 1)], [0.1, 0.2, 0.3, 0.4])
    'MLP 0.10 → 0.20, CNN 0.30 → 0.40'
    """
    models: dict[str, list[str]] = {}
    for (model, _), value in zip(places, values, strict=True):
        models.setdefault(model, []).append(f"{value:{form}}")
    return ", ".join(f"{model} {' → '.join(texts)}" for model, texts in models.items())


def about_runs(results: Mapping[Any, Any]) -> str:
    """Describe the runs of settings that have `run`, `inputs` and `images`."""
    first = next(iter(results))
    accuracies: dict[str, list[float]] = {}
    for setting, looks in results.items():
        accuracies.setdefault(f"{setting.run.model}, {setting.inputs}", []).append(
            100 * list(looks.values())[-1]["accuracy"]
        )
    ends = "; ".join(f"{name}: {spread(values, '.1f')} %" for name, values in accuracies.items())
    seeds = {setting.run.seed for setting in results}
    return (
        f"{first.images} images of each source; {len(seeds)} seeds (± one standard deviation). "
        f"Training: {first.run.looks[-1]} private steps of {first.run.method} at epsilon = "
        f"{first.run.epsilon:g}, batch {first.run.batch_size}. Test accuracy after it: {ends}."
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


def plain_ticks(panel: Axes) -> None:
    """Label a logarithmic y axis 0.1, 1, 10, with 2 and 5 between them where it is short."""
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
    """Draw lines of log10 values, one per seed: their mean, and a band from least to most."""
    by_place = list(zip(*logs, strict=True))
    low, middle, high = (
        [10 ** function(values) for values in by_place] for function in (min, fmean, max)
    )
    panel.plot(places, middle, label=label, **style)
    panel.fill_between(places, low, high, color=style["color"], alpha=0.12, linewidth=0)
    panel.set(xscale="log", yscale="log")
