"""Every Python block of the README and the docs runs as a reader would run it, and prints what the page says it prints.

The site builds without a warning, has every page, and loads nothing from elsewhere.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import dpkfc
import dpkfc.features
from dpkfc.app.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    names: dict[str, object] = {"__name__": page.stem}
    for code, shown in blocks:
        exec(compile(code, str(page), "exec"), names)
        printed = capsys.readouterr().out
        if shown:
            assert words(printed) == words(shown)
            assert numbers(printed) == pytest.approx(
                numbers(shown), rel=0.05
            )  # other machines round otherwise


def words(text: str) -> list[str]:
    return re.sub(r"[\u2500-\u257f]", " ", NUMBER.sub("#", text)).split()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_figures_of_the_overview_are_those_of_the_tables() -> None:
    tables = " ".join(page.read_text() for page in DOCS.glob("results/*/*.md"))
    figures = re.findall(r"(?<![\w.])\d+\.\d+", (DOCS / "results" / "index.md").read_text())
    assert figures
    assert [
        figure
        for figure in figures
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", tables)
    ] == []


@pytest.mark.parametrize(
    "module", [dpkfc, dpkfc.optim, dpkfc.diagnostics, dpkfc.features], ids=lambda m: m.__name__
)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    reference = " ".join(page.read_text() for page in DOCS.glob("api/*.md"))
    shown = set(re.findall(r"^(?:::: | +heading: )(\S+)", reference, re.MULTILINE))
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


class Page(HTMLParser):
    """What a page loads, and where its links lead."""

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

    build(
        load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    )  # any warning aborts

    pages = {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")}
    home = Page(tmp_path / "index.html")
    assert pages - home.links == set(), "not in the navigation"
    for name in pages:
        elsewhere = [
            found for found in Page(tmp_path / name).loaded if re.match(r"\w+:(?!image/)|//", found)
        ]
        assert elsewhere == [], name
        assert 'class="mermaid"' not in (tmp_path / name).read_text(), (
            f"{name}: its script would come from elsewhere"
        )
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", sheet.read_text()), sheet

    reference = (tmp_path / "cli.html").read_text()
    for name in get_command(app).commands:
        assert f'id="dpkfc-{name}"' in reference
        said = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert [
            option for option in re.findall(r"--[a-z-]+", said) if option not in reference
        ] == []
    formulas = (tmp_path / "formulas.html").read_text()
    assert formulas.count("<math") > 30 and "arithmatex" not in formulas
