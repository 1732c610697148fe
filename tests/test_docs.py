"""Tests of the README and of the documentation site.

Every Python block runs, and prints what the page says it prints. Both sides of every diff block
run. Accuracies on the summary pages are those of the recorded tables. The site builds without
warnings, contains every page and loads nothing from other hosts.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.main import get_command
from typer.testing import CliRunner

import dpkfc
import dpkfc.features
from dpkfc.app.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Flower has an environment of its own: tests/integrations/flower/test_page.py runs its blocks.
RUN_HERE = [page for page in PAGES if page != DOCS / "how-to" / "flower.md"]
WITH_CODE = [page for page in RUN_HERE if "```python" in page.read_text()]
WITH_DIFF = [page for page in RUN_HERE if "```diff" in page.read_text()]
# Pages outside docs/results that repeat recorded accuracies.
SUMMARIES = [
    README,
    *(DOCS / name for name in ("accuracy.md", "geometry.md", "correlated-noise.md", "recipe.md")),
    *(DOCS / "how-to" / name for name in ("trainer.md", "flower.md")),
]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
ACCURACY = re.compile(r"\d+\.\d\d ± \d\.\d\d")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words(text: str) -> list[str]:
    return re.sub(r"[\u2500-\u257f]", " ", NUMBER.sub("#", text)).split()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    namespace: dict[str, object] = {"__name__": page.stem}
    for code, shown in blocks:
        exec(compile(code, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        if shown:
            assert words(printed) == words(shown)
            # Other machines round differently.
            assert numbers(printed) == pytest.approx(numbers(shown), rel=0.05)


@pytest.mark.parametrize("removed", ["-", "+"], ids=["private", "ordinary"])
@pytest.mark.parametrize("page", WITH_DIFF, ids=name_of)
def test_both_sides_of_a_diff_run(
    page: Path, removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given what the page's first code block defines; without one, images to classify."""
    monkeypatch.chdir(tmp_path)
    for diff in DIFF.findall(page.read_text()):
        torch.manual_seed(0)
        namespace = images_to_classify()
        for code, _ in BLOCK.findall(page.read_text())[:1]:
            exec(compile(code, str(page), "exec"), namespace)
        model = namespace["model"]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(removed)]
        exec(compile("\n".join(lines), str(page), "exec"), namespace)
        after = list(model.parameters())
        assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        if removed == "-":
            # the run itself, or an attribute of the framework's object
            holders = [namespace.get("run"), *(vars(v).get("run") for v in objects(namespace))]
            (run,) = {id(r): r for r in holders if isinstance(r, dpkfc.PrivateRun)}.values()
            target = run.plan.target_epsilon
            assert run.steps == run.plan.steps and run.epsilon() == pytest.approx(target, rel=1e-3)


def images_to_classify() -> dict[str, Any]:
    """What the diff of the README is given, for images of 28 x 28 pixels."""
    data = TensorDataset(torch.rand(200, 1, 28, 28), torch.randint(10, (200,)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    model.input_shape = (1, 28, 28)
    return {
        "F": F,
        "dpkfc": dpkfc,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=50, shuffle=True),
    }


def objects(namespace: dict[str, Any]) -> list[Any]:
    return [
        value
        for value in namespace.values()
        if hasattr(value, "__dict__") and not isinstance(value, ModuleType | type)
    ]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 500


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def recorded_tables() -> str:
    return " ".join(page.read_text() for page in DOCS.glob("results/*/*.md"))


def test_figures_of_the_overview_are_those_of_the_tables() -> None:
    tables = recorded_tables()
    figures = re.findall(r"(?<![\w.])\d+\.\d+", (DOCS / "results" / "index.md").read_text())
    assert figures
    assert [
        figure
        for figure in figures
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", tables)
    ] == []


@pytest.mark.parametrize("page", SUMMARIES, ids=name_of)
def test_accuracies_of_summary_pages_are_those_of_the_tables(page: Path) -> None:
    tables = set(ACCURACY.findall(recorded_tables()))
    accuracies = set(ACCURACY.findall(page.read_text()))
    assert accuracies
    assert accuracies - tables == set()


def test_the_picture_of_accuracies_shows_the_recorded_table(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "figures" / "accuracy_against_epsilon.py"))
    runs = script["recorded_runs"]()
    rows = (DOCS / "results" / "optimizers" / "accuracy.md").read_text().splitlines()
    for method in script["METHODS"]:
        row = next(line for line in rows if line.startswith(f"| {method} |"))
        drawn = [
            f"{mean:.2f} ± {deviation:.2f}"
            for smoothing in script["LOSSES"].values()
            for mean, deviation in script["accuracies"](runs, method, smoothing).values()
        ]
        assert drawn == ACCURACY.findall(row)
    script["draw"](runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "module",
    [
        dpkfc,
        dpkfc.probes,
        dpkfc.noise,
        dpkfc.losses,
        dpkfc.optim,
        dpkfc.tuning,
        dpkfc.diagnostics,
        dpkfc.features,
    ],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    reference = " ".join(page.read_text() for page in DOCS.glob("api/*.md"))
    shown = set(re.findall(r"^(?:::: | +heading: )(\S+)", reference, re.MULTILINE))
    # The tuning functions are documented by their names at the top level.
    shown |= {name.replace("dpkfc.", "dpkfc.tuning.", 1) for name in shown if ".tune" in name}
    names = {f"{module.__name__}.{name}" for name in public_names(module)}
    assert names
    assert names - shown == set()


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    return [
        name
        for name in listed
        if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)
    ]


def test_the_tables_of_the_cost_model_are_its_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling_model"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"(?:^\|.*\n)+", done.stdout, re.MULTILINE)
    assert len(printed) == 5
    page = (DOCS / "scaling.md").read_text()
    assert [table for table in printed if table not in page] == []


def test_the_table_of_overheads_is_that_of_the_recorded_run() -> None:
    recorded = json.loads((DOCS / "results" / "distributed.json").read_text())
    page = (DOCS / "scaling.md").read_text()
    rows = 0
    for name, layouts in recorded["workloads"].items():
        for layout, methods in layouts.items():
            for method in ("dp-sgd", "dp-kfc"):
                one, two = (methods[method][count] for count in ("1", "2"))
                overheads = [
                    f"{each['overhead']:.2f} ({each['quartiles'][0]:.2f} to "
                    f"{each['quartiles'][1]:.2f})"
                    for each in (one, two)
                ]
                figures = (
                    two["overhead"] / one["overhead"],
                    two["bytes"] / 1e6,
                    methods["ordinary"]["2"]["bytes"] / 1e6,
                )
                cells = [name, layout, method, *overheads, *(f"{x:.2f}" for x in figures)]
                assert f"| {' | '.join(cells)} |" in page
                rows += 1
    assert rows >= 8


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_the_script_for_several_devices_runs_under_torchrun(layout: str, tmp_path: Path) -> None:
    code, shown = BLOCK.findall((DOCS / "scaling.md").read_text())[0]
    (tmp_path / "train.py").write_text(code)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", *launch],
        cwd=tmp_path,
        env=os.environ | {"LAYOUT": layout, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


class Page(HTMLParser):
    """The files that a page loads, and the targets of its links."""

    LOADING = ("script", "link", "img", "iframe", "source", "video", "audio", "object", "embed")

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag in self.LOADING and name in ("src", "href", "srcset", "data") and value:
                self.loaded.append(value)
            if tag == "a" and name == "href" and value:
                self.links.add(value.split("#")[0])


def test_the_site_builds_is_complete_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    # With strict=True any warning aborts the build.
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))

    pages = {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")}
    home = Page(tmp_path / "index.html")
    assert pages - home.links == set(), "not in the navigation"
    for name in pages:
        loaded = Page(tmp_path / name).loaded
        assert [url for url in loaded if re.match(r"\w+:(?!image/)|//", url)] == [], name
        assert 'class="mermaid"' not in (tmp_path / name).read_text(), (
            f"{name}: mermaid would load its script from another host"
        )
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", sheet.read_text()), sheet

    reference = (tmp_path / "cli.html").read_text()
    for name in get_command(app).commands:
        assert f'id="dpkfc-{name}"' in reference
        output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        options = re.findall(r"--[a-z-]+", output)
        assert [option for option in options if option not in reference] == []
    formulas = (tmp_path / "formulas.html").read_text()
    assert formulas.count("<math") > 30 and "arithmatex" not in formulas
