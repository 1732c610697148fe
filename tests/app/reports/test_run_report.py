"""The report of a run: its statements about privacy are bounds; missing files are named."""

from __future__ import annotations

import html
import io
import json
import math
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_model
from scipy.stats import binomtest
from torch import nn

import dpkfc
from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED
from dpkfc.app.reports.run_figures import draw_figures
from dpkfc.app.reports.run_report import result_table, write_report
from dpkfc.app.reports.statements import in_plain_words, not_charged, wilson
from dpkfc.planning.plan import Plan

EPSILON = cache(Plan.epsilon)
PNG = bytes.fromhex(  # one grey pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6368000000820081"
    "77cd72b60000000049454e44ae426082"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Plan, "epsilon", EPSILON)  # the same plan again and again
    plan = Plan.make(records=1000, batch_size=100, steps=20, clip=1.0, epsilon=2.0, delta=1e-4)
    files = {
        "plan.json": plan.to_json(),
        "config.json": {
            "settings": {"epsilon": 2.0, "lr": None, "seed": 3},
            "source": {"path": "a<b>.csv"},
        },
        "result.json": {
            "epsilon": plan.epsilon(),
            "delta": 1e-4,
            "steps": 20,
            "batch_size": 100,
            "noise": "independent",
            "noise_multiplier": 1.0,
            "geometry": "DP-KFC",
            "lr": 0.5,
            "records": 1000,
            "model": "linear",
            "parameters": 1234,
            "recipe": [["learning rate", "0.5", "the noise"]],
            "remarks": ["The classes are public."],
            "test": {"accuracy": 0.75, "majority": 0.7025, "records": 400, "note": "exact"},
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    lines = [{"step": step, "epsilon": plan.epsilon(step), "seconds": 1.0} for step in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def edit(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def told(folder: Path) -> tuple[str, str]:
    """The page and the table for the terminal."""
    console = Console(file=io.StringIO(), width=300)
    console.print(result_table(folder, folder / "report.html"))
    return write_report(folder).read_text(), console.file.getvalue()  # type: ignore[attr-defined]


def keep_weights(folder: Path, steps: int) -> None:
    save_model(nn.Linear(2, 2), str(folder / "model.safetensors"), metadata={"steps": str(steps)})


def true_epsilon(folder: Path, steps: int = 20) -> float:
    return Plan.from_json(json.loads((folder / "plan.json").read_text())).epsilon(steps)


def shows(folder: Path, epsilon: float, delta: str = "0.0001") -> None:
    page, table = told(folder)
    assert f"epsilon {round_up(epsilon)} at delta {delta}" in page  # the lead
    assert f"(epsilon = {round_up(epsilon)})" in page  # in plain words
    assert f"{round_up(epsilon)} at delta = {delta}" in table


def test_what_agrees_is_told_without_a_remark(folder: Path) -> None:
    keep_weights(folder, 20)
    shows(folder, true_epsilon(folder))
    assert not any("is wrong" in text for text in told(folder))


@pytest.mark.parametrize("factor", [0.99, 0.5, 0.0])
def test_an_epsilon_that_was_edited_is_not_believed(folder: Path, factor: float) -> None:
    epsilon = true_epsilon(folder)
    edit(folder, "result.json", epsilon=factor * epsilon)
    shows(folder, epsilon)
    for text in told(folder):
        assert text.count("the file was changed or is wrong") == 1 and f"{factor * epsilon}" in text


@pytest.mark.parametrize("epsilon", [None, "0.1", True, math.nan])
def test_an_epsilon_that_is_none_is_not_believed(folder: Path, epsilon: Any) -> None:
    expected = true_epsilon(folder)
    edit(folder, "result.json", epsilon=epsilon)
    shows(folder, expected)
    assert all("result.json has no epsilon" in text for text in told(folder))


def test_a_larger_epsilon_is_kept_and_the_disagreement_told(folder: Path) -> None:
    """plan.json may have been edited instead: nobody can tell, so the larger epsilon counts."""
    epsilon = true_epsilon(folder)
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    edit(folder, "plan.json", noise_multiplier=1.5 * plan.noise_multiplier)
    shows(folder, epsilon)
    assert all("one of the files was changed or is wrong" in text for text in told(folder))


@pytest.mark.parametrize("steps", [1, 10, -5, "20", None])
@pytest.mark.parametrize("source", ["weights", "metrics"])
def test_steps_that_were_edited_are_not_believed(folder: Path, steps: Any, source: str) -> None:
    epsilon = true_epsilon(folder)
    if source == "weights":
        (folder / "metrics.jsonl").unlink()
        keep_weights(folder, 20)
    edit(folder, "result.json", steps=steps, batch_size=100, epsilon=0.1)
    page = write_report(folder).read_text()
    assert f"epsilon {round_up(epsilon)} at delta" in page and "changed or is wrong" in page


def test_lost_steps_count(folder: Path) -> None:
    edit(folder, "plan.json", steps=40)
    edit(folder, "result.json", lost_steps=5, epsilon=true_epsilon(folder, 25))
    shows(folder, true_epsilon(folder, 25))
    assert not any("is wrong" in text for text in told(folder))


def test_weights_that_cannot_be_read_cost_the_whole_plan(folder: Path) -> None:
    edit(folder, "plan.json", steps=40)
    (folder / "model.safetensors").write_bytes(b"damaged")
    shows(folder, true_epsilon(folder, 40))
    assert all("all planned steps are counted" in text for text in told(folder))


def test_more_steps_than_planned_are_told(folder: Path) -> None:
    epsilon = true_epsilon(folder)
    edit(folder, "plan.json", steps=5)
    shows(folder, epsilon)
    assert all("plan.json plans 5 steps, but 20 were taken" in text for text in told(folder))


def test_a_larger_delta_is_not_believed(folder: Path) -> None:
    epsilon = true_epsilon(folder)
    edit(folder, "plan.json", delta=0.01)
    shows(folder, epsilon)
    assert all("disagree about delta (0.01, 0.0001)" in text for text in told(folder))


@pytest.fixture
def ledger(folder: Path) -> Path:
    """A ledger that charged 30 of 40 steps to the run in the folder."""
    edit(folder, "plan.json", steps=40)
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    path = folder / "privacy.db"
    with closing(Ledger(path, "people")) as ledger:
        ledger.open_run("one", plan.mechanism, delta=plan.delta)
        ledger.charge("one", 30)
        ledger.open_run("another", plan.mechanism, delta=plan.delta)
        ledger.charge("another", 40)
    edit(folder, "config.json", settings={"epsilon": 2.0, "ledger": str(path), "dataset": "people"})
    edit(folder, "result.json", run="one")
    return path


def test_what_the_ledger_has_charged_counts(folder: Path, ledger: Path) -> None:
    shows(folder, true_epsilon(folder, 30))
    assert all("result.json says 20 steps, but 30 were taken" in text for text in told(folder))


def test_a_plan_that_the_ledger_contradicts_is_not_believed(folder: Path, ledger: Path) -> None:
    epsilon = true_epsilon(folder, 30)
    edit(folder, "plan.json", noise_multiplier=9.0, delta=0.01)
    edit(folder, "result.json", noise_multiplier=9.0, delta=0.01, epsilon=0.1)
    shows(folder, epsilon)
    assert all("plan.json and the ledger disagree about this run" in text for text in told(folder))


@pytest.mark.parametrize("trouble", ["gone", "no ledger", "unknown", "no run"])
def test_without_its_ledger_the_folder_has_to_do(folder: Path, ledger: Path, trouble: str) -> None:
    if trouble == "gone":
        ledger.unlink()
    elif trouble == "no ledger":
        ledger.write_bytes(b"something else")
    elif trouble == "unknown":
        edit(folder, "result.json", run="three")
    else:
        edit(folder, "result.json", run=None)
    edit(folder, "result.json", epsilon=true_epsilon(folder, 20))
    shows(folder, true_epsilon(folder, 20))
    remarks = {"no ledger": "was not consulted", "unknown": "does not know this run"}
    assert all(remarks.get(trouble, "") in text for text in told(folder))


def test_what_nobody_checked_is_told_once(folder: Path) -> None:
    edit(folder, "plan.json", unchecked=["loss", "seed", "ledger", "records", "model"])
    text = write_report(folder).read_text().split("What was not charged")[1].split("<h2")[0]
    for what in ("loss", "model"):
        assert text.count(html.escape(NOT_CHECKED[what])) == 1  # type: ignore[index]
    assert text.count("seed") == 2 and NOT_CHECKED["seed"] not in text  # in one sentence
    assert text.count("ledger") == 1 and text.count("number of records") == 1


def test_it_says_what_is_protected_and_what_was_found(folder: Path) -> None:
    text = write_report(folder).read_text()
    for expected in (
        "add or remove one record",
        "privacy loss distribution",
        "Poisson",
        "hyperparameters",  # what is not covered
        "75.00 % of 400 test records",
        "70.25 % by always predicting the most frequent class",
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


@pytest.mark.parametrize("epsilon", [20.1, 709.0, 710.0, 1e300])
def test_so_large_an_epsilon_promises_nothing(epsilon: float) -> None:
    (said,) = in_plain_words(epsilon, 1e-5)
    assert f"({round_up(epsilon)}) promises nothing" in said


def test_a_run_without_a_guarantee_says_so() -> None:
    assert "NOT private" in in_plain_words(math.inf, 1e-5)[0]


@pytest.mark.parametrize(("share", "count"), [(0.0, 10), (0.5, 40), (0.97, 1000), (1.0, 7)])
def test_the_interval_is_wilsons(share: float, count: int) -> None:
    expected = binomtest(round(share * count), count).proportion_ci(0.95, "wilson")
    assert wilson(share, count) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_a_run_of_an_older_version_says_less(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    del result["test"]["majority"]
    (folder / "result.json").write_text(json.dumps(result))
    assert "75.00 % of 400" in write_report(folder).read_text()
    assert result_table(folder, folder / "report.html").row_count == 8


def test_without_test_records_metrics_or_seed(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "test": None, "remarks": []}))
    (folder / "metrics.jsonl").unlink()
    text = write_report(folder).read_text()
    assert "no test records" in text and "data:image" not in text


def test_pictures_are_shown_where_they_are(folder: Path) -> None:
    assert "seen on probes" not in write_report(folder).read_text()
    (folder / "snr.png").write_bytes(PNG)
    (folder / "clipping.png").write_bytes(PNG)
    text = write_report(folder).read_text()
    assert text.count("data:image/png") == 3 and text.count("from synthetic probes") == 1


@pytest.mark.parametrize("geometry", [dpkfc.KFC(dpkfc.probes.Tabular(4)), dpkfc.Identity()])
def test_pictures_come_from_probes_and_leave_the_model_alone(tmp_path: Path, geometry: Any) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan.make(
        records=100, batch_size=10, steps=2, clip=1.0, noise_multiplier=1.0, delta=1e-4
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draw_figures(tmp_path, model, geometry, dpkfc.probes.Tabular(4), plan)
    assert (tmp_path / "snr.png").stat().st_size > 5000 and (
        tmp_path / "clipping.png"
    ).stat().st_size > 5000
    assert (tmp_path / "geometry.png").exists() == isinstance(geometry, dpkfc.KFC)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_one_layer_has_no_profile(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan.make(
        records=100, batch_size=10, steps=2, clip=1.0, noise_multiplier=1.0, delta=1e-4
    )
    draw_figures(tmp_path, nn.Linear(4, 2), dpkfc.Identity(), dpkfc.probes.Tabular(4), plan)
    assert [file.name for file in tmp_path.iterdir()] == ["clipping.png"]


def test_what_private_records_made_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan.make(
        records=100, batch_size=10, steps=2, clip=1.0, noise_multiplier=1.0, delta=1e-4
    )
    oracle = dpkfc.probes.Oracle(
        torch.utils.data.TensorDataset(torch.rand(20, 4), torch.arange(20) % 2), labels=True
    )
    draw_figures(tmp_path, nn.Linear(4, 2), dpkfc.Identity(), oracle, plan)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "test", "selection", "said", "unsaid"),
    [
        (
            {},
            None,
            None,
            ["no record", "in no ledger"],
            ["by hand (", "seed", "Accuracy", "tuning"],
        ),
        (
            {"lr": 0.1, "clip": 2.0, "seed": 0},
            {"accuracy": 1},
            None,
            ["by hand (lr, clip)", "seed", "exact"],
            [],
        ),
        (
            {"ledger": "privacy.db", "dataset": "people"},
            None,
            None,
            ["privacy.db, as people"],
            ["in no ledger"],
        ),
        ({}, None, {"settings": {}}, ["epsilon covers the whole tuning"], []),
    ],
)
def test_what_was_not_charged(
    settings: dict[str, Any], test: Any, selection: Any, said: list[str], unsaid: list[str]
) -> None:
    text = " ".join(not_charged({"test": test, "selection": selection}, settings))
    assert all(part in text for part in said) and not any(part in text for part in unsaid)


def test_the_table_for_the_terminal(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    result["selection"] = {"settings": {"rho": 1.23456, "clip": 2.0}, "score": "151.2 of 200"}
    (folder / "result.json").write_text(json.dumps(result))
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table(folder, folder / "report.html"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "75.00% of 400 records (95 % interval 70.5% to 79.0%)",
        "rho 1.23, clip 2",
        "151.2 of 200",
    ):
        assert expected in shown
    assert "70.25% by always predicting the most frequent class" in shown
    assert "rho 1.23, clip 2" in write_report(folder).read_text()


def test_steps_that_were_paid_for_in_vain_are_told(folder: Path) -> None:
    assert "last checkpoint" not in write_report(folder).read_text()
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "lost_steps": 1234}))
    (folder / "metrics.jsonl").unlink()
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table(folder, folder / "report.html"))
    # type: ignore[attr-defined]
    for text in (write_report(folder).read_text(), console.file.getvalue()):
        assert "1,234 steps after the last checkpoint were charged, and the result was lost" in text


@pytest.mark.parametrize("name", ["plan.json", "config.json", "result.json"])
def test_what_is_missing_or_damaged_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        write_report(folder)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing.*dpkfc train"):
        write_report(folder)
