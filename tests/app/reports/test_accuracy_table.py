"""Accuracy tables: every arm on every data set, the values of the paper, an overview."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkfc.app.reports.accuracy_table import (
    Summary,
    accuracy_markdown,
    mean_and_spread,
    plot_accuracy,
)


def row(dataset: str, arm: str, *tests: float, paper: float | None = None) -> Summary:
    return Summary(dataset, arm, 3, "lr 1", 0.5, tests, paper)


@pytest.mark.parametrize(
    ("tests", "text"), [((), "not run"), ((0.5,), "50.00 (1)"), ((0.4, 0.6), "50.00 ± 14.14 (2)")]
)
def test_mean_and_spread(tests: tuple[float, ...], text: str) -> None:
    assert mean_and_spread(tests) == text


def test_an_overview_comes_first_when_there_are_many_data_sets() -> None:
    rows = [row(dataset, "sgd", 0.5, paper=49.0) for dataset in "abc"] + [row("b", "kfc", 0.6)]
    text = accuracy_markdown(rows, "Title", "Remark.")
    assert "| test % [paper] | a | b | c |\n| --- | --- | --- | --- |\n" in text
    assert (
        "| sgd | 50.00 (1) [49.0] | 50.00 (1) [49.0] | 50.00 (1) [49.0] |\n"
        "| kfc |  | 60.00 (1) |  |\n" in text
    )
    assert text.index("test % [paper]") < text.index("| data set |")
    assert "[paper]" not in accuracy_markdown(rows[:2], "Title", "Remark.")


def test_a_setting_that_was_chosen_elsewhere_has_no_validation() -> None:
    one = Summary("a", "sgd", 0, "lr 1", None, (0.5,))
    assert "| a | sgd | 0 | lr 1 |  | 50.00 (1) |  |" in accuracy_markdown([one], "Title", "")


def test_what_was_neither_tried_nor_run_is_in_the_overview_alone() -> None:
    untouched = Summary("c", "sgd", 0, "lr 1", None, ())
    text = accuracy_markdown([row("a", "sgd", 0.5), row("b", "sgd"), untouched], "Title", "")
    assert "| sgd | 50.00 (1) | not run | not run |" in text
    assert "| b | sgd | 3 |" in text and "| c | sgd |" not in text


def test_the_plot_takes_rows_without_results(tmp_path: Path) -> None:
    plot_accuracy([row("a", "sgd"), row("a", "kfc", 0.5, 0.6, paper=55.0)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
