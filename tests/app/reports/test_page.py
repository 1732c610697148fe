"""A page is one escaped file that loads nothing, and works in a browser, dark and narrow."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dpkfc.app.reports.page import Code, Facts, Grid, Marked, Picture, Section, Text, page, picture

PNG = bytes.fromhex(  # one grey pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6368000000820081"
    "77cd72b60000000049454e44ae426082"
)
WIDE = Grid([f"column {i}" for i in range(30)], [["1.5"] * 30])
SAMPLE = page(
    "Run & <result>",
    "what it was",
    [
        Section(
            "Privacy", [Text(["One.", "Two."]), Facts([("epsilon", "1.5"), ("what", "x" * 300)])]
        ),
        Section(
            "Layers",
            [
                Grid(["layer", "rank"], [["conv<1>", "9"], ["fc", "1,234"]]),
                Picture(PNG, "a 'dot'", "1"),
            ],
        ),
        Section(
            "Wide",
            [
                WIDE,
                Code("a < b  # " + "x" * 300),
                Marked(["`if a < b` is **code <&>**, `**this**` too"]),
            ],
        ),
    ],
)


class Seen(HTMLParser):
    """The unclosed tags, and all addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_is_well_formed_escaped_and_loads_nothing() -> None:
    seen = Seen()
    seen.feed(SAMPLE)
    assert seen.open == []
    assert (
        all(address.startswith("data:") for address in seen.addresses) and len(seen.addresses) == 2
    )
    assert not re.search(r"https?:|@import|url\(|<script", SAMPLE)
    for text in ("Run & <result>", "conv<1>", "1,234", "column 29"):
        assert text in seen.text


def test_columns_of_numbers_are_to_the_right() -> None:
    table = Grid(["layer", "rank"], [["1", "9"], ["fc", "12"]]).html()
    assert (
        "<th>layer</th><th class='number'>rank</th>" in table
        and "<td>1</td><td class='number'>9</td>" in table
    )
    assert "<th>layer</th>" in Grid(["layer"], []).html()


def test_columns_to_the_right_can_be_said() -> None:
    table = Grid(["layer", "rank"], [["1", "9*"]], right=[False, True]).html()
    assert "<td>1</td><td class='number'>9*</td>" in table


def test_code_and_bold_words_are_the_only_marks() -> None:
    found = Marked(["`if a < b` is **code <&>**, `**this**` too", "2 * 3 ** 4 and a lone `"]).html()
    assert found == (
        "<p><code>if a &lt; b</code> is <strong>code &lt;&amp;&gt;</strong>, "
        "<code>**this**</code> too</p>"
        "<p>2 * 3 ** 4 and a lone `</p>"
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError):
        Grid(["a", "b"], [["1", "2"], ["3"]]).html()


def test_a_figure_becomes_a_picture_and_is_closed() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    before = len(plt.get_fignums())
    assert picture(figure, "a line").png.startswith(b"\x89PNG")
    assert len(plt.get_fignums()) == before - 1


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_real_browser(
    browser: Any, shown_well: Callable[..., None], tmp_path: Path, scheme: str, width: int
) -> None:
    file = tmp_path / "page.html"
    file.write_text(SAMPLE)
    shown_well(browser, file, width, scheme=scheme)
    ink, paper = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (brightness[0] < brightness[1]) == (scheme == "light") and abs(
        brightness[0] - brightness[1]
    ) > 400
