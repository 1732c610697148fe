"""What the paper's diagnostic figures share: the private task, the sources of geometry, the models and their training.

The private task is MNIST. A geometry is known from the private images themselves (the oracle), from public images, or
from noise; three more sources are controls (see `ABOUT`). Scale and brightness of the inputs decide much, so all is
measured twice: on inputs standardised as in the paper's code, and on pixels in [0, 1].
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.data.cifar import cifar10
from dpkfc.data.idx import CLASSES, SIDE, idx_images
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry
from dpkfc.geometry.probes.probe import Probe
from dpkfc.models import mlp, paper_cnn, tiny_vit
from dpkfc.plan import Plan
from dpkfc.report.text import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORACLE, OTHERS, UNLABELLED = "oracle", "other private images", "private images, random labels"
MATCHED, MISMATCHED = "matched public", "mismatched public"  # FashionMNIST, CIFAR-10
SYNTHETIC, BRIGHT, WHITE = "synthetic", "synthetic, bright", "white noise"  # pink noise, pink noise, and what it says
LOOKED_AT = (OTHERS, UNLABELLED, MATCHED, MISMATCHED, SYNTHETIC, BRIGHT, WHITE)
STANDARDISED, PIXELS = "standardised inputs", "pixels in [0, 1]"
INPUTS = {STANDARDISED: "", PIXELS: "-pixels"}  # and how files about them end
ABOUT = (
    "Private task: MNIST. Matched public: FashionMNIST; mismatched public: CIFAR-10, grey, at 28 x 28; synthetic: pink "
    "noise with power 1/f² and mean 0; bright: pink noise about as bright as pixels are (mean 0.3, standard deviation "
    "0.3 on the scale of pixels); white noise: a flat spectrum. Images have their own labels, noise has uniform ones. "
    "Controls: other private images with their labels show what the sample alone accounts for, private images with "
    "random labels what the labels do, and white noise what does not depend on the inputs' spectrum.",
    "Inputs are scaled in two ways. *Standardised*: (x - 0.1307) / 0.3081 for MNIST and FashionMNIST, (x - 0.5) / 0.5 "
    "for CIFAR-10, as in the paper's code, and noise of standard deviation 1, as in its text. (The first are "
    "statistics of the private records, for which no budget pays.) *Pixels in [0, 1]*: images as they are, noise of "
    "standard deviation 0.5.",
)
STYLES: dict[str, dict[str, Any]] = {  # Okabe and Ito's colours: told apart by all eyes
    ORACLE: {"color": "black", "linestyle": "--", "linewidth": 1.8, "zorder": 5},
    OTHERS: {"color": "0.45", "linestyle": ":", "linewidth": 1.6},
    UNLABELLED: {"color": "0.45", "linestyle": "-.", "linewidth": 1.2},
    MATCHED: {"color": "#0072B2", "linewidth": 1.5},
    MISMATCHED: {"color": "#AA4499", "linewidth": 1.5},
    SYNTHETIC: {"color": "#E69F00", "linewidth": 2.0},
    BRIGHT: {"color": "#D55E00", "linestyle": (0, (5, 1.5)), "linewidth": 1.2},
    WHITE: {"color": "#009E73", "linestyle": (0, (1, 1)), "linewidth": 1.5},
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: mlp([SIDE * SIDE, 256, 128, CLASSES]),
    "CNN": paper_cnn,
    "ViT": lambda: tiny_vit(image=SIDE, patch=7, channels=1, classes=CLASSES, width=64, depth=2, heads=4),
}
RATES = {"MLP": 0.1, "CNN": 0.08, "ViT": 0.3}  # learning rates of DP-KFC at which a short run learns
BLOCKS = (1, 2)
LAYERS: dict[str, dict[str, str]] = {  # those with Kronecker factors: what the model calls them, and what they are
    "MLP": {"1": "fc1", "3": "fc2", "5": "fc3"},
    "CNN": {name: name for name in ("conv1", "conv2", "fc1", "fc2")},
    "ViT": {"0.project": "patches"}
    | {f"{b}.attention.{part}": f"{part} {b}" for b in BLOCKS for part in ("query", "key", "value", "out")}
    | {f"{b}.mlp.{place}": f"mlp {b} {end}" for b in BLOCKS for place, end in ((0, "in"), (2, "out"))}
    | {"5": "head"},
}
SEEDS = (0, 1, 2)
DELTA = 1e-5
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels
PUBLIC = 10_000  # public images that there are
LUMINANCE = (0.299, 0.587, 0.114)

Found = TypeVar("Found")
Setting = TypeVar("Setting")
OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Run:
    """A private training run, and the steps after which one looks at its weights."""

    model: str
    seed: int
    lr: float
    looks: tuple[int, ...]  # 0: at the initial weights; the last: at the end
    method: str = "DP-KFC"  # or "DP-SGD"
    epsilon: float = 1.0
    batch_size: int = 256
    clip: float = 1.0
    momentum: float = 0.9


@dataclass(frozen=True)
class Task:
    """The private records, the test set, and the sources by name."""

    records: TensorDataset
    test: TensorDataset
    sources: Mapping[str, Probe]


def load(data_dir: Path | None) -> dict[str, Task]:
    """MNIST with all sources, by the scaling of the inputs.

    Data that is missing or broken is a `PrivacyError` that says what to fetch.
    """
    try:
        (records, test), (fashion, _) = (idx_images(name, data_dir) for name in ("mnist", "fashion-mnist"))
        natural, classes = cifar10(data_dir)[0][:PUBLIC]
    except (OSError, ValueError) as error:
        raise PrivacyError(str(error)) from error
    cifar = grey_images(natural), classes

    def scaled(images: Tensor, mean: float = MEAN, std: float = STD) -> Tensor:
        return (images - mean) / std

    mnist, tests, dressed = ((scaled(data.tensors[0]), data.tensors[1]) for data in (records, test, fashion))
    return {
        STANDARDISED: Task(
            TensorDataset(*mnist),
            TensorDataset(*tests),
            _private(*mnist)
            | _others(dressed, (scaled(cifar[0], 0.5, 0.5), classes), 1.0, ((0.3 - MEAN) / STD, 0.3 / STD)),
        ),
        PIXELS: Task(records, test, _private(*records.tensors) | _others(fashion.tensors, cifar, 0.5, (0.3, 0.3))),
    }


def _private(images: Tensor, labels: Tensor) -> dict[str, Probe]:
    return {
        ORACLE: oracle(images[::2], labels[::2]),
        OTHERS: oracle(images[1::2], labels[1::2]),
        UNLABELLED: oracle(images[1::2]),
    }


def oracle(images: Tensor, labels: Tensor | None = None) -> dpkfc.Oracle:
    """Private images as a source, with their labels if there are any. That it is not private is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Oracle builds the geometry", UserWarning)
        return dpkfc.Oracle(images) if labels is None else dpkfc.Oracle((images, labels), labels=True)


def _others(
    matched: tuple[Tensor, ...], mismatched: tuple[Tensor, ...], std: float, bright: tuple[float, float]
) -> dict[str, Probe]:
    """Public images, and noise of standard deviation `std`; for bright noise mean and standard deviation are given."""
    noise: dict[str, Any] = {"shape": (1, SIDE, SIDE), "classes": CLASSES}
    return {
        MATCHED: dpkfc.PublicData(tuple(part[:PUBLIC] for part in matched), labels=True),
        MISMATCHED: dpkfc.PublicData(mismatched, labels=True),
        SYNTHETIC: dpkfc.PinkNoise(**noise, std=std),
        BRIGHT: dpkfc.PinkNoise(**noise, mean=bright[0], std=bright[1]),
        WHITE: dpkfc.PinkNoise(**noise, alpha=0.0, std=std),
    }


def grey_images(images: Tensor) -> Tensor:
    """Colour images [n, 3, h, w] as [n, 1, 28, 28]: their luminance, resized."""
    weights = torch.tensor(LUMINANCE).view(1, 3, 1, 1)
    grey = (images * weights).sum(1, keepdim=True)
    return F.interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)


def fresh(run: Run) -> nn.Module:
    """The model of a run at its initial weights."""
    torch.manual_seed(run.seed)
    return MODELS[run.model]()


def through_training(
    run: Run,
    model: nn.Module,
    records: TensorDataset,
    geometry: Geometry,
    look: Callable[[nn.Module, Plan], Found],
    on_step: OnStep = lambda done, of: None,
) -> dict[str, Found]:
    """What `look` finds after each of the steps `run.looks` of private training by SGD, by the number of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    private = dpkfc.make_private(
        model,
        optimizer,
        records,
        epsilon=run.epsilon,
        delta=DELTA,
        steps=max(run.looks),
        batch_size=run.batch_size,
        clip=run.clip,
        geometry=geometry,
        seed=run.seed,
    )
    found = {"0": look(model, private.plan)} if 0 in run.looks else {}
    for images, labels in private.loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(private.steps, private.plan.steps)
        if private.steps in run.looks:
            found[str(private.steps)] = look(model, private.plan)
    private.detach()
    return found


def evaluate(
    settings: Sequence[Setting], measure: Callable[[Setting, OnStep], Any], file: Path, console: Console
) -> dict[Setting, Any]:
    """The results of all settings. Those in the file are taken from it, the others are written to it as they come.

    A setting is a frozen dataclass of all that its result depends on besides the data.
    """
    kept = _read(file)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        overall, current = progress.add_task("runs", total=len(settings)), progress.add_task("steps", total=None)

        def on_step(done: int, of: int) -> None:
            progress.update(current, completed=done, total=of)

        for setting in settings:
            key = key_of(setting)
            if key not in kept:
                progress.reset(current, total=None)
                row = {"key": key, "setting": asdict(cast(Any, setting)), "result": measure(setting, on_step)}
                kept[key] = json.loads(json.dumps(row))
                _write(file, kept.values())
            progress.advance(overall)
    return {setting: kept[key_of(setting)]["result"] for setting in settings}


def by_inputs(found: Mapping[Any, Any]) -> dict[str, dict[Any, Any]]:
    """The results apart by `setting.inputs`."""
    names = dict.fromkeys(setting.inputs for setting in found)
    return {name: {setting: found[setting] for setting in found if setting.inputs == name} for name in names}


def key_of(setting: Any) -> str:
    """A hash of the contents."""
    return hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by key; none if it does not exist yet."""
    if not file.exists():
        return {}
    try:
        rows = json.loads(file.read_text())
        return {row["key"]: {name: row[name] for name in ("key", "setting", "result")} for row in rows}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PrivacyError(f"{file} does not hold results of a figure: remove it, or name another --out") from error


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """At once or not at all, so that an interrupted run leaves a file that can be read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
    draft.replace(file)


@dataclass(frozen=True)
class Claim:
    """What the paper says, what is checked for it, what was found, and whether that agrees."""

    paper: str
    checked: str
    measured: str
    holds: bool


Claims = Mapping[str, Sequence[Claim]]  # the same ones, by what was measured


def claim_cells(claims: Claims) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; each column of findings begins with whether the claim holds."""
    rows = [
        [
            same[0].paper,
            same[0].checked,
            *(f"{'holds' if one.holds else 'does not hold'}: {one.measured}" for one in same),
        ]
        for same in zip(*claims.values(), strict=True)
    ]
    return ["the paper", "checked here", *claims], rows


def verdicts(claims: Claims) -> str:
    counts = (f"{sum(one.holds for one in found)} of {len(found)} ({name})" for name, found in claims.items())
    return "statements that hold here: " + ", ".join(counts)


def claim_table(claims: Claims) -> Table:
    headings, rows = claim_cells(claims)
    table = Table(*headings, title=verdicts(claims), title_justify="left", show_lines=True)
    for cells in rows:
        table.add_row(*cells)
    return table


def write_page(file: Path, title: str, command: str, about: Sequence[str], claims: Claims, rest: Sequence[str]) -> None:
    """A Markdown page: how it was made, what was asked, the paper's statements beside what was found, and the rest."""
    headings, rows = claim_cells(claims)
    table = markdown_table(headings, rows, left=len(headings))
    parts = [f"# {title}", f"    {command}", *about, "## What the paper states, and what was measured"]
    parts += [f"{verdicts(claims).capitalize()}.", table, *rest]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean ± standard deviation.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def about_runs(found: Mapping[Any, Any]) -> str:
    """How many images and seeds, and what the training reached: of settings with `run`, `inputs` and `images`."""
    setting = next(iter(found))
    reached: dict[str, list[float]] = {}
    for one, looks in found.items():
        reached.setdefault(f"{one.run.model}, {one.inputs}", []).append(100 * list(looks.values())[-1]["accuracy"])
    ends = "; ".join(f"{name}: {spread(values, '.1f')} %" for name, values in reached.items())
    return (
        f"{setting.images} images of each source; {len({one.run.seed for one in found})} seeds (± one standard "
        f"deviation). Training: {setting.run.looks[-1]} private steps of {setting.run.method} at epsilon = "
        f"{setting.run.epsilon:g}, batch {setting.run.batch_size}. Test accuracy after it: {ends}."
    )


def text_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
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


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    for panel in panels.flat:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, [list(row) for row in panels]


def finish(figure: Figure, panel: Axes, file: Path, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    import matplotlib.pyplot as plt

    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def plain_ticks(panel: Axes) -> None:
    """0.1, 1, 10 up a logarithmic axis, with 2 and 5 between where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def draw_range(panel: Axes, places: Sequence[float], logs: Sequence[Sequence[float]], source: str) -> None:
    """Lines of log10 values, one for each seed: their mean, and from the least to the most as a band."""
    style, columns = STYLES[source], list(zip(*logs, strict=True))
    low, middle, high = ([10 ** function(values) for values in columns] for function in (min, fmean, max))
    panel.plot(places, middle, label=source, **style)
    panel.fill_between(places, low, high, color=style["color"], alpha=0.12, linewidth=0)
    panel.set(xscale="log", yscale="log")
