"""The report of an experiment: the Markdown it reads, and that it omits no file."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpkfc.app.reports.experiment_report import (
    publish,
    read_markdown,
    title_of,
    write_experiment_report,
)
from dpkfc.app.reports.page import Code, Grid, Marked, Picture
from dpkfc.app.reports.run_report import write_report

RESULTS = Path(__file__).parents[3] / "docs" / "results"
FOLDERS = sorted(folder for folder in RESULTS.glob("*") if list(folder.glob("*.md")))
PNG = bytes.fromhex(  # one grey pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6368000000820081"
    "77cd72b60000000049454e44ae426082"
)
MARKDOWN = """# The <title>

    dpkfc reproduce this

Two lines, `code` and **bold**,
and a [link](other.md).

![a "dot"](dot.png)

## Part
| name | value % |
| --- | ---: |
| a \\| b | 1.5* |
| `c` |

- one item
  goes on
- another

```console
$ dpkfc # is not a heading

$ more
```

> something else
| no | table |
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "found.md").write_text(MARKDOWN)
    for name in ("dot.png", "found.png", "other.png"):
        (tmp_path / name).write_bytes(PNG)
    rows = [
        {"setting": {"lr": lr, "epsilon": 3.0, "geometry": {"rank": 2}}, "result": {"last": lr}}
        for lr in (1, 2)
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "one.json").write_text(
        json.dumps({"run": {"steps": 700}, "seeds": [0, 1], "all": list(range(99))})
    )
    return tmp_path


def test_every_part_of_markdown(folder: Path) -> None:
    pictures = {"dot.png": folder / "dot.png"}
    first, part = read_markdown(MARKDOWN, pictures)
    assert (first.title, first.level, part.title, part.level) == (
        "The <title>",
        2,
        "Part",
        3,
    ) and not pictures
    assert first.parts == [
        Code("dpkfc reproduce this"),
        Marked(["Two lines, `code` and **bold**, and a link."]),
        Picture(PNG, 'a "dot"', 'a "dot"'),
    ]
    assert part.parts == [
        Grid(["name", "value %"], [["a | b", "1.5*"], ["c", ""]], [False, True]),
        Marked(["• one item goes on", "• another"]),
        Code("$ dpkfc # is not a heading\n\n$ more"),
        Marked(["> something else"]),
        Marked(["| no | table |"]),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![a dot](none.png)", "a dot (no picture none.png here)"),
        ("![a dot](../dot.png)", "a dot (no picture ../dot.png here)"),
        ("words ![a dot](dot.png) within", "words a dot within"),
        ("**unfinished `marks", "**unfinished `marks"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    ],
)
def test_what_is_not_known_is_text(text: str, shown: str) -> None:
    (section,) = read_markdown(text, {})
    assert section.parts == [Marked([shown])]
    assert html.escape(shown) in section.html() and "<script" not in section.html()


def test_the_report_has_all_of_the_folder(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert (
        "<h1>The &lt;title&gt;</h1>" in text and text.count("The &lt;title&gt;") == 2
    )  # and the window's title
    assert text.count("data:image/png") == 3 and "1 table, 3 figures" in text
    assert text.index("alt='found'") < text.index("alt='other'"), (
        "a picture stands with the text of its name"
    )
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert facts == {
        "results": "2",
        "setting.epsilon": "3.0",
        "run.steps": "700",
        "seeds": "[0, 1]",
    }


def test_damaged_settings_are_named_and_the_rest_is_shown(folder: Path) -> None:
    (folder / "runs.jsonl").write_text('{"setting": {"lr"')
    text = write_report(folder).read_text()
    assert "<dt>damaged</dt>" in text and "run.steps" in text


def test_titles(folder: Path) -> None:
    assert title_of(folder) == "The <title>"
    (folder / "second.md").write_text("# Another\n")
    assert title_of(folder) == folder.name
    text = write_experiment_report(folder, "Both").read_text()
    assert (
        "<h1>Both</h1>" in text
        and "<h2>The &lt;title&gt;</h2>" in text
        and "<h2>Another</h2>" in text
    )


def test_a_folder_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tables and no figures.*dpkfc reproduce"):
        write_experiment_report(tmp_path, "nothing")
    with pytest.raises(FileNotFoundError, match="dpkfc train.*dpkfc reproduce"):
        write_report(tmp_path)


@pytest.mark.parametrize("quick", [False, True])
def test_what_was_found_is_written_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    results = tmp_path / "runs.jsonl"
    publish(
        results, "# Title\n\nText\n", Console(), lambda file: file.write_bytes(PNG) and None, quick
    )
    written = (tmp_path / "runs.md").read_text()
    assert (
        written.startswith("# Title\n\n")
        and written.endswith("\n\nText\n")
        and ("Quick" in written) == quick
    )
    assert "Text" in capsys.readouterr().out and (tmp_path / "runs.png").read_bytes() == PNG
    monkeypatch.setattr("dpkfc.app.reports.experiment_report.find_spec", lambda name: None)
    (tmp_path / "runs.png").unlink()
    publish(results, "# Title\n", Console(), lambda file: file.write_bytes(PNG) and None, quick)
    assert "no figure" in capsys.readouterr().out and not (tmp_path / "runs.png").exists()


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of published results, without a report of its own."""
    for file in request.param.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("copied", FOLDERS, ids=lambda folder: folder.name, indirect=True)
def test_every_table_and_picture_of_published_results(copied: Path) -> None:
    text = write_report(copied).read_text()
    lines = [line for file in copied.glob("*.md") for line in file.read_text().splitlines()]
    rules = [line for line in lines if re.fullmatch(r"[|: -]*-[|: -]*", line)]
    assert text.count("<table>") == len(rules)
    for line in lines:
        if line.startswith("|") and line not in rules:
            for cell in line.strip("|").split(" | "):
                plain = re.sub(r"\*\*(.+?)\*\*", r"\1", cell.strip())  # cells have no marks
                assert f">{html.escape(plain)}</t" in text
        elif line.startswith("#"):
            assert f">{html.escape(line.lstrip('# '))}</h" in text
    for picture in copied.glob("*.png"):
        assert text.count(base64.b64encode(picture.read_bytes()).decode()) == 1


@pytest.mark.parametrize(("width", "media"), [(360, "screen"), (1200, "screen"), (718, "print")])
@pytest.mark.parametrize("copied", FOLDERS, ids=lambda folder: folder.name, indirect=True)
def test_in_a_real_browser(
    browser: Any, shown_well: Callable[..., None], copied: Path, width: int, media: str
) -> None:
    shown_well(browser, write_report(copied), width, media=media)
