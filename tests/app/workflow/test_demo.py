"""The demo trains both methods at one budget and shows them side by side."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dpkfc.app.workflow import demo
from dpkfc.app.workflow.demo import METHODS, Outcome, run_demo


def test_both_methods_are_shown_at_the_same_budget() -> None:
    console = Console(file=io.StringIO(), width=120)
    outcomes = run_demo(epsilon=3.0, delta=1e-5, epochs=6.0, seed=0, console=console)
    shown = console.file.getvalue()
    assert (
        [row.method for row in outcomes]
        == [method.name for method in METHODS]
        == ["DP-SGD", "DP-KFC"]
    )
    first, second = outcomes
    assert (first.epsilon, first.noise_multiplier, first.steps) == (
        second.epsilon,
        second.noise_multiplier,
        second.steps,
    )
    for row in outcomes:
        assert f"{row.accuracy:.1%}" in shown
        assert row.accuracy > 0.3, "after six epochs either method knows more than chance (0.1)"


def test_a_folder_holds_the_table_a_picture_and_the_report(tmp_path: Path) -> None:
    outcome = [
        Outcome(method.name, 0.95, 2.0, 1.0, 20, 1.0, [(10, 0.5), (20, 0.95)]) for method in METHODS
    ]
    report = demo.save_report(outcome, 1e-6, tmp_path / "runs" / "demo")
    text = (report.parent / "demo.md").read_text()
    assert "epsilon 2, delta 1e-06" in text and "| DP-SGD | 95.00 (1) | 95.0 | 20 |" in text
    assert (report.parent / "demo.png").read_bytes().startswith(
        b"\x89PNG"
    ) and "DP-KFC" in report.read_text()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="--out"):
        demo.save_report(outcome, 1e-6, tmp_path / "file")
