"""Cached epsilons: used only for the same mechanisms, delta and code, and never in the way."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.app.reports import epsilon_cache
from dpkfc.app.reports.epsilon_cache import EpsilonCache

FIRST = Mechanism(1.0, 16.0, 40)
SECOND = Mechanism(1.0, 16.0, 41)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Mechanism], float]]:
    """Every call of the accountant."""
    calls: list[tuple[Sequence[Mechanism], float]] = []

    def spy(mechanisms: Sequence[Mechanism], delta: float) -> float:
        calls.append((mechanisms, delta))
        return epsilon_spent(mechanisms, delta)

    monkeypatch.setattr(epsilon_cache, "epsilon_spent", spy)
    return calls


def test_a_value_is_computed_once(
    tmp_path: Path, computed: list[tuple[Sequence[Mechanism], float]]
) -> None:
    file = tmp_path / "cache" / "epsilons.json"
    for _ in range(2):
        cache = EpsilonCache(file)
        assert cache.epsilon([FIRST], 1e-5) == epsilon_spent([FIRST], 1e-5)
    assert computed == [([FIRST], 1e-5)]
    cache.epsilon([FIRST], 1e-6)
    cache.epsilon([SECOND], 1e-5)
    cache.epsilon([FIRST, SECOND], 1e-5)
    assert len(computed) == 4
    assert EpsilonCache(file).epsilon([FIRST, SECOND], 1e-5) == epsilon_spent([FIRST, SECOND], 1e-5)
    assert len(computed) == 4
    assert [path.name for path in file.parent.iterdir()] == ["epsilons.json"]


@pytest.mark.parametrize("changed", ["a package", "the accounting"])
def test_other_code_computes_again(
    tmp_path: Path,
    computed: list[tuple[Sequence[Mechanism], float]],
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
) -> None:
    EpsilonCache(tmp_path / "e.json").epsilon([FIRST], 1e-5)
    if changed == "a package":
        monkeypatch.setattr(epsilon_cache, "version", lambda package: "99")
    else:
        (tmp_path / "code.py").write_text("# another accountant")
        monkeypatch.setattr("dpkfc.accounting.__path__", [str(tmp_path)])
    EpsilonCache(tmp_path / "e.json").epsilon([FIRST], 1e-5)
    assert len(computed) == 2


def test_what_is_not_private_is_not_cached(tmp_path: Path) -> None:
    cache = EpsilonCache(tmp_path / "e.json")
    assert cache.epsilon([Mechanism(0.5, 0.0, 3)], 1e-5) == math.inf
    assert not (tmp_path / "e.json").exists()


@pytest.mark.parametrize("content", ["{", "[]", "7", '{"key": 1}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "e.json").write_text(content)
    assert EpsilonCache(tmp_path / "e.json").epsilon([FIRST], 1e-5) == epsilon_spent([FIRST], 1e-5)


@pytest.mark.parametrize("value", ["null", "-1.0", "NaN", "Infinity", '"1"', "true"])
def test_a_value_that_no_epsilon_can_have_is_ignored(tmp_path: Path, value: str) -> None:
    file = tmp_path / "e.json"
    EpsilonCache(file).epsilon([FIRST], 1e-5)
    (key,) = json.loads(file.read_text())
    file.write_text(f'{{"{key}": {value}}}')
    assert EpsilonCache(file).epsilon([FIRST], 1e-5) == epsilon_spent([FIRST], 1e-5)


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = EpsilonCache(tmp_path / "file" / "e.json")
    assert cache.epsilon([FIRST], 1e-5) == epsilon_spent([FIRST], 1e-5)


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epsilon_cache, "MOST_ENTRIES", 2)
    cache = EpsilonCache(tmp_path / "e.json")
    for steps in (1, 2, 3):
        cache.epsilon([Mechanism(1.0, 16.0, steps)], 1e-5)
    assert len(json.loads((tmp_path / "e.json").read_text())) == 2


def test_it_lies_in_the_cache_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert epsilon_cache.cache_file() == Path("/somewhere/dpkfc/epsilons.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert epsilon_cache.cache_file() == Path.home() / ".cache/dpkfc/epsilons.json"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no owners of files")
def test_a_cache_that_others_may_write_is_ignored(tmp_path: Path) -> None:
    """Otherwise another user of the machine could make a ledger look cheaper than it is."""
    file = tmp_path / "epsilons.json"
    mechanism, delta = Mechanism(1.0, 16.0, 10), 1e-5
    truth = EpsilonCache(file).epsilon([mechanism], delta)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text(json.dumps({key: truth / 2 for key in json.loads(file.read_text())}))
    assert EpsilonCache(file).epsilon([mechanism], delta) == truth / 2, "the entry is the one used"
    file.chmod(0o622)
    assert EpsilonCache(file).epsilon([mechanism], delta) == truth
