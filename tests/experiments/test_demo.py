"""The demo trains both methods at one budget and shows them side by side."""

from __future__ import annotations

import io

from rich.console import Console

from dpkfc.experiments.demo import METHODS, run_demo


def test_both_methods_are_shown_at_the_same_budget() -> None:
    console = Console(file=io.StringIO(), width=120)
    outcomes = run_demo(epsilon=3.0, delta=1e-5, epochs=6.0, seed=0, console=console)
    shown = console.file.getvalue()
    assert [row.method for row in outcomes] == [method.name for method in METHODS] == ["DP-SGD", "DP-KFC"]
    first, second = outcomes
    assert (first.epsilon, first.noise_multiplier, first.steps) == (
        second.epsilon,
        second.noise_multiplier,
        second.steps,
    )
    for row in outcomes:
        assert f"{row.accuracy:.1%}" in shown
        assert row.accuracy > 0.3, "after six epochs either method knows more than chance (0.1)"
