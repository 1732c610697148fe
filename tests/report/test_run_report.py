"""The report of a run: what it says of privacy, that it says it in bounds, and what it needs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy.stats import binomtest

from dpkfc.errors import PrivacyError
from dpkfc.plan import Plan
from dpkfc.report.run_report import in_plain_words, wilson, write_report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = Plan.make(records=1000, batch_size=100, steps=20, clip=1.0, epsilon=2.0, delta=1e-4)
    files = {
        "plan.json": plan.to_json(),
        "config.json": {"settings": {"epsilon": 2.0, "lr": None, "seed": 3}, "source": {"path": "a<b>.csv"}},
        "result.json": {
            "epsilon": plan.epsilon(),
            "delta": 1e-4,
            "records": 1000,
            "model": "linear",
            "parameters": 1234,
            "recipe": [["learning rate", "0.5", "the noise"]],
            "remarks": ["The classes are public."],
            "test": {"accuracy": 0.75, "records": 400, "note": "exact"},
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    lines = [{"step": step, "epsilon": plan.epsilon(step), "seconds": 1.0} for step in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_it_says_what_is_protected_and_what_was_found(folder: Path) -> None:
    text = write_report(folder).read_text()
    for expected in (
        "add or remove one record",
        "privacy loss distribution",
        "Poisson",
        "hyperparameters",  # what is not covered
        "75.00 % of 400 test records",
        "learning rate",
        "The classes are public.",
        "a&lt;b&gt;.csv",
        "settings.seed",
        "data:image/png;base64,",
    ):
        assert expected in text
    assert "settings.lr" not in text  # what was not asked for
    assert "http" not in text


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 2.3456, 8.0])
def test_plain_words_are_still_bounds(epsilon: float) -> None:
    said = in_plain_words(epsilon, 1e-5)[1]
    odds = float(said.split("at most ")[1].split("-fold")[0])
    even = float(said.split("right at most ")[1].split(" %")[0])
    assert math.exp(epsilon) <= odds <= 1.02 * math.exp(epsilon)
    assert 100 / (1 + math.exp(-epsilon)) <= even < 100 / (1 + math.exp(-epsilon)) + 1.3


def test_a_run_without_a_guarantee_says_so() -> None:
    assert "NOT private" in in_plain_words(math.inf, 1e-5)[0]


@pytest.mark.parametrize(("share", "count"), [(0.0, 10), (0.5, 40), (0.97, 1000), (1.0, 7)])
def test_the_interval_is_wilsons(share: float, count: int) -> None:
    expected = binomtest(round(share * count), count).proportion_ci(0.95, "wilson")
    assert wilson(share, count) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_without_test_records_metrics_or_seed(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "test": None, "remarks": []}))
    (folder / "metrics.jsonl").unlink()
    text = write_report(folder).read_text()
    assert "no test records" in text and "data:image" not in text


@pytest.mark.parametrize("name", ["plan.json", "config.json", "result.json"])
def test_what_is_missing_or_damaged_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(PrivacyError, match=f"{name} is damaged"):
        write_report(folder)
    (folder / name).unlink()
    with pytest.raises(PrivacyError, match=f"{name} is missing.*dpkfc train"):
        write_report(folder)
