"""The error of correlated noise: tables and a figure, without any training.

``E = sens(C) ‖A C⁻¹‖_F / √n`` is the root mean square of the noise in the models of SGD with decay
α and momentum β, at clip = σ = 1. There are three tables: a record takes part every b = 100 steps;
a record takes part once; methods that keep few vectors of the model's size in memory. The first is
also a figure.

AOF (the approximately optimal factorization) is optimised numerically, everything else is computed
at once. So the values of AOF are kept in bsr-error.json as they come, and a second run reads them
from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dpkfc.app.reports.text import markdown_table
from dpkfc.noise.banded import Banded
from dpkfc.noise.independent import Independent
from dpkfc.noise.sensitivity import Participation
from dpkfc.noise.toeplitz import (
    BandedSquareRoot,
    BandedToeplitz,
    BufferedToeplitz,
    InverseSquareRoot,
    LambdaCGD,
    OutputPerturbation,
)
from dpkfc.noise.workload import Workload
from dpkfc.planning.choose_noise import Noise
from experiments.common.options import ReproduceOptions

SETTINGS = ((1.0, 0.0), (1.0, 0.9), (0.999, 0.0), (0.999, 0.9))  # (α, β)
STEPS = (100, 200, 500, 1000, 2000)
QUICK = 500  # steps
SEPARATION = 100  # steps between participations, b; also the number of bands of BSR and AOF
FEW_BANDS = (2, 4, 16, 100)
TITLE = "The error of the banded square root and its alternatives"
REMARK = (
    "E = sens(C) ‖A C⁻¹‖_F / √n at clip = σ = 1, for SGD with decay α and momentum β. BSR: banded "
    "square root. AOF: approximately optimal factorization. Identity: independent noise on every "
    "gradient. A: independent noise on every model. BISR: banded inverse square root. BLT: "
    "buffered linear Toeplitz."
)
FIGURE = "![E by the number of steps, for four settings of SGD](bsr-error.png)"
STYLES: dict[str, dict[str, Any]] = {
    "A": {"color": "#D55E00", "linestyle": "-.", "marker": "^"},
    "identity": {"color": "#0072B2", "linestyle": ":", "marker": "D"},
    "AOF": {
        "color": "#E69F00",
        "linestyle": "--",
        "marker": "s",
        "markersize": 8,
        "markerfacecolor": "none",
    },
    "BSR": {"color": "black", "linestyle": "-", "marker": "o", "markersize": 4},
}

Row = dict[str, Any]  # a case and its result


@dataclass(frozen=True)
class Case:
    """A noise on n steps of SGD, where a record takes part every `separation` steps."""

    method: str
    noise: Noise
    alpha: float
    beta: float
    n: int
    separation: int

    @property
    def workload(self) -> Workload:
        return Workload.sgd(self.beta, 1 - self.alpha, coupled=False)

    @property
    def row(self) -> Row:
        setting = {"workload": self.workload.name, "alpha": self.alpha, "beta": self.beta}
        return {
            "method": self.method,
            "noise": repr(self.noise),
            **setting,
            "n": self.n,
            "b": self.separation,
        }


@dataclass(frozen=True)
class Sheet:
    """A table. Every row begins with the name of its section."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def repeated(steps: Sequence[int]) -> list[Case]:
    """Return the cases of the first table: repeated participation."""
    methods: dict[str, Noise] = {
        "BSR": BandedSquareRoot(SEPARATION),
        "AOF": Banded(SEPARATION),
        "identity": Independent(),
        "A": OutputPerturbation(),
    }
    return [
        Case(name, noise, *setting, n, SEPARATION)
        for setting in SETTINGS
        for name, noise in methods.items()
        for n in steps
    ]


def once(steps: Sequence[int], optimal: bool) -> list[Case]:
    """Return the cases of the second table: one participation, with all bands.

    AOF, which takes O(n³) time then, is included for the first setting, and only if `optimal`.
    """
    cases = []
    for setting in SETTINGS:
        cases += [Case("BSR", BandedSquareRoot(n), *setting, n, n) for n in steps]
        if optimal and setting == SETTINGS[0]:
            cases += [Case("AOF", Banded(n), *setting, n, n) for n in steps]
    return cases


def low_memory(n: int) -> list[Case]:
    """Return the cases of the third table: methods that keep few vectors."""
    methods: dict[str, Noise] = {f"BSR, p = {p}": BandedSquareRoot(p) for p in FEW_BANDS}
    methods |= {f"optimised Toeplitz, p = {p}": BandedToeplitz(p) for p in FEW_BANDS}
    methods |= {f"BISR, p = {p}": InverseSquareRoot(p) for p in FEW_BANDS}
    methods |= {"λ-CGD": LambdaCGD()}
    methods |= {
        f"BLT, {count} buffer{'s' if count > 1 else ''}": BufferedToeplitz(count)
        for count in (1, 2, 3)
    }
    return [
        Case(name, noise, *setting, n, SEPARATION)
        for name, noise in methods.items()
        for setting in SETTINGS[:2]
    ]


def measure(case: Case) -> Row:
    """Return the row of a case: its E, the vectors that it keeps, and for AOF the CPU time."""
    started = time.process_time()
    factorization = case.noise.factorize(case.workload, case.n, case.separation)
    seconds = time.process_time() - started
    participation = Participation.every(case.separation, case.n)
    sensitivity = factorization.sensitivity(case.n, participation).value
    row = case.row | {
        "error": sensitivity * factorization.error(case.workload, case.n),
        "buffers": factorization.buffers,
    }
    if isinstance(case.noise, Banded):
        row["cpu_seconds"] = round(seconds, 2)
    return row


def reproduce(options: ReproduceOptions, steps: Sequence[int] = STEPS) -> None:
    """Print the tables; write bsr-error.json, bsr-error.md and bsr-error.png.

    Nothing is random. Quick: at most 500 steps.
    """
    out = options.out
    console = options.console
    if not find_spec("matplotlib"):
        raise ImportError("the figure needs matplotlib: pip install matplotlib")
    steps = [n for n in steps if n <= QUICK] if options.quick else list(steps)
    tables = [repeated(steps), once(steps, optimal=not options.quick), low_memory(max(steps))]
    out.mkdir(parents=True, exist_ok=True)
    results = evaluate(
        [case for cases in tables for case in cases], out / "bsr-error.json", console
    )
    b = SEPARATION
    sheets = [
        by_steps(
            f"E, a record takes part every {b} steps; BSR and AOF with p = {b}",
            tables[0],
            steps,
            results,
        ),
        by_steps("E, a record takes part once; BSR and AOF with p = n", tables[1], steps, results),
        by_memory(f"E with little memory, n = {max(steps)}, b = {b}, α = 1", tables[2], results),
    ]
    for sheet in sheets:
        console.print(rich_table(sheet))
    console.print(REMARK, highlight=False)
    (out / "bsr-error.md").write_text(markdown(sheets, options.quick), encoding="utf-8")
    plot(tables[0], results, out / "bsr-error.png")


def evaluate(cases: Sequence[Case], file: Path, console: Console) -> dict[Case, Row]:
    """Return all results; those of AOF are read from the file, or written to it as they come."""
    rows = {_key(row): row for row in _read(file)}
    todo = [
        case for case in cases if not (isinstance(case.noise, Banded) and _key(case.row) in rows)
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=sum(map(_work, todo)))
        for case in todo:
            progress.update(
                task,
                description=f"{case.method}, α = {case.alpha:g}, β = {case.beta:g}, n = {case.n}",
            )
            rows[_key(case.row)] = measure(case)
            if isinstance(case.noise, Banded):
                _write(file, rows.values())
            progress.advance(task, _work(case))
        progress.update(task, description="done")
    _write(file, rows.values())
    return {case: rows[_key(case.row)] for case in cases}


def by_steps(
    title: str, cases: Sequence[Case], steps: Sequence[int], results: Mapping[Case, Row]
) -> Sheet:
    """Return one row per setting and method, one column per number of steps."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        name = (f"{case.alpha:g}, {case.beta:g}", case.method)
        rows.setdefault(name, []).append(f"{results[case]['error']:.3f}")
    headings = ("α, β", "method", *(f"n = {n}" for n in steps))
    return Sheet(title, headings, [(*name, *cells) for name, cells in rows.items()])


def by_memory(title: str, cases: Sequence[Case], results: Mapping[Case, Row]) -> Sheet:
    """Return one row per method, one column per momentum."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        family, _, size = case.method.partition(", ")
        name = (family, size, str(results[case]["buffers"]))
        rows.setdefault(name, []).append(f"{results[case]['error']:.2f}")
    betas = dict.fromkeys(f"β = {case.beta:g}" for case in cases)
    headings = ("method", "size", "vectors kept", *betas)
    return Sheet(title, headings, [(*name, *cells) for name, cells in rows.items()])


def rich_table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left")
    for number, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="left" if number < 2 else "right")
    before = None
    for section, *cells in sheet.rows:
        if section != before and before is not None:
            table.add_section()
        table.add_row("" if section == before else section, *cells)
        before = section
    return table


def markdown(sheets: Sequence[Sheet], quick: bool) -> str:
    parts = [
        f"# {TITLE}",
        f"    dpkfc reproduce bsr-error{' --quick' if quick else ''}",
        REMARK,
        FIGURE,
    ]
    for sheet in sheets:
        parts += [f"## {sheet.title}", markdown_table(sheet.headings, sheet.rows, left=2)]
    return "\n\n".join(parts) + "\n"


def plot(cases: Sequence[Case], results: Mapping[Case, Row], file: Path) -> None:
    """Draw one panel per setting: E by the number of steps.

    BSR and AOF, which nearly coincide, are repeated in an inset.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for panel, (alpha, beta) in zip(panels.flat, SETTINGS, strict=True):
        inset = panel.inset_axes((0.08, 0.58, 0.36, 0.37))
        for method, style in STYLES.items():
            shown = [
                case
                for case in cases
                if (case.alpha, case.beta, case.method) == (alpha, beta, method)
            ]
            for axes in (panel, inset) if method in ("BSR", "AOF") else (panel,):
                axes.plot(
                    [case.n for case in shown],
                    [results[case]["error"] for case in shown],
                    label=method,
                    **style,
                )
        for axes in (panel, inset):
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        inset.tick_params(labelsize=8)
        panel.set_title(f"α = {alpha:g}, β = {beta:g}, b = {SEPARATION}")
        panel.set_xlabel("n")
        panel.set_ylabel("E")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), ncols=len(STYLES), loc="outside upper center"
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("method", "noise", "workload", "alpha", "beta", "n", "b"))


def _work(case: Case) -> int:
    """Return a number roughly proportional to the time that a case takes."""
    return case.n * (20 if isinstance(case.noise, Banded) else 1)


def _read(file: Path) -> list[Row]:
    """Return the results in a file; none if it does not exist yet."""
    if not file.exists():
        return []
    try:
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
        for row in rows:
            _key(row)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} does not hold results of this experiment: remove it, or name another --out"
        ) from error
    return rows


def _write(file: Path, rows: Iterable[Row]) -> None:
    """Write the file atomically, so that an interrupted run leaves a readable one."""
    draft = file.with_suffix(".part")
    draft.write_text(
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n",
        encoding="utf-8",
    )
    draft.replace(file)
