"""The demo over several seeds resumes, and is written as a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from dpkfc.app.workflow.demo import METHODS, Outcome
from experiments.common.options import ReproduceOptions
from experiments.demo import experiment as demo


def test_over_seeds_resumed_and_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_run: list[int] = []

    def quickly(
        epsilon: float, delta: float, epochs: float, seed: int, console: Console, device: str
    ) -> list[Outcome]:
        seeds_run.append(seed)
        course = [(100, 0.5), (225, 0.9 + seed / 100)]
        return [
            Outcome(method.name, course[-1][1], epsilon, 1.0, 225, 1.0, course)
            for method in METHODS
        ]

    monkeypatch.setattr(demo, "run_demo", quickly)
    demo.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=False))
    text = (tmp_path / "demo.md").read_text()
    assert "| DP-KFC | 92.00 ± 1.58 (5) | 90.0, 91.0, 92.0, 93.0, 94.0 | 225 |" in text
    lines = (tmp_path / "demo.jsonl").read_text().splitlines()
    (tmp_path / "demo.jsonl").write_text("\n".join(lines[1:]) + "\n")
    demo.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=False))
    assert seeds_run == [0, 1, 2, 3, 4, 0], "only the missing seed is run"
    demo.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    assert "**Quick:**" in (tmp_path / "quick.md").read_text()
    assert (tmp_path / "demo.md").read_text() == text
    (tmp_path / "demo.jsonl").write_text('{"seed": 1')
    with pytest.raises(ValueError, match="cut off"):
        demo.reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=False))
