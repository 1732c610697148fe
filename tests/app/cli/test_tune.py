"""`dpkfc tune`: tries, output, charges and files, on public and on private data."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from click.testing import Result
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from rich.console import Console
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import dpkfc
from dpkfc.accounting.ledger import read
from dpkfc.app.cli import tune as cli_tune
from dpkfc.app.cli.main import app
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.workflow import release, tuning_job
from dpkfc.app.workflow.predict import restore
from dpkfc.app.workflow.run_folder import locked
from dpkfc.app.workflow.search_space import Interval
from dpkfc.app.workflow.settings import Settings
from dpkfc.app.workflow.tune_privately import priced_recipe
from dpkfc.app.workflow.tuning_job import hold_out

pytest.importorskip("optuna")

EPSILON = cache(dpkfc.Plan.epsilon)
QUICK = (
    "--range",
    "0,1",
    "--epsilon",
    3,
    "--delta",
    "1e-3",
    "--noise",
    "independent",
    "--seed",
    1,
    "--test",
    0,
)
WHOLE = (
    "--batch-size",
    100,
    "--validation",
    "public.npz",
)  # all records in every step: quick to account for
PRIVATE = ("tune", "a.npz", *QUICK, *WHOLE, "--epochs", 3, "--tries", 2, "--out", "run")
PUBLIC = ("tune", "a.npz", *QUICK, *WHOLE, "--epochs", "2,4", "--public", "--out", "run")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two .npz files whose first feature determines the class."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(dpkfc.Plan, "epsilon", EPSILON)  # the same few plans again and again
    monkeypatch.setattr(release, "draw_figures", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("a", 100), ("public", 40)):
        x = rng.random((count, 3))
        np.savez(f"{name}.npz", x=x, y=(x[:, 0] > 0.5).astype(int))
    return tmp_path


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The noise length of each try. There are 3 tries, with the score 30 - |noise length - 2|."""
    found: list[float] = []
    run = tuning_job.TuningJob.run

    def spied(self: tuning_job.TuningJob, recipe: Any, number: int) -> Any:
        found.append(recipe.noise_length)
        return run(self, recipe, number)

    monkeypatch.setattr(tuning_job.TuningJob, "run", spied)
    monkeypatch.setattr(
        tuning_job.TuningJob, "count_correct", lambda self, run: 30 - abs(found[-1] - 2)
    )
    monkeypatch.setattr(dpkfc.tuning.BestOf, "draw", lambda self, generator: 3)
    return found


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def some(records: int) -> Loaded:
    x, y = (
        torch.rand(records, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(records) % 2,
    )
    x[10], y[10] = x[11], y[11]  # two are alike
    return Loaded(
        TensorDataset(x, y), None, "tabular", (3,), 2, ("0", "1"), (), dpkfc.probes.Tabular(3)
    )


# On public data


def test_every_try_on_public_data_is_shown_and_more_can_follow(tried: list[float]) -> None:
    done = run(*PUBLIC, "--tries", 2)
    assert done.exit_code == 0, done.output
    assert len(tried) == 2 and "2 tries, the best first" in done.stdout
    more = run(*PUBLIC, "--tries", 3)
    assert len(tried) == 3 and "3 tries, the best first" in more.stdout
    best = min(tried, key=lambda rho: abs(rho - 2))
    found = json.loads(Path("run/best.json").read_text())
    assert found["rho"] == pytest.approx(best) and 2 <= found["epochs"] <= 4
    assert found["accuracy"] == pytest.approx((30 - abs(best - 2)) / found["records"])
    assert f"dpkfc train SOURCE --epsilon 3 --rho {best:.3g} --epochs" in more.stdout
    text = Path("run/tries.md").read_text()
    assert all(f"| {rho:.3g} |" in text for rho in tried) and "treated as public" in text
    assert "<h1>Tuning on public data: run</h1>" in Path("run/report.html").read_text()
    run(*PUBLIC, "--tries", 1, "--clip", "0.5,2")
    assert len(tried) == 4, "another command has tries of its own"


# On private data


def test_only_the_best_private_try_is_left(tried: list[float]) -> None:
    done = run(*PRIVATE, "--ledger", "privacy.db")
    assert done.exit_code == 0, done.output
    best = min(tried, key=lambda rho: abs(rho - 2))
    result = json.loads(Path("run/result.json").read_text())
    assert len(tried) == 3 and result["selection"]["settings"] == {"rho": pytest.approx(best)}
    files = {file.name for file in Path("run").iterdir()}
    assert files == {"config.json", "plan.json", "result.json", "model.safetensors", "report.html"}
    everything = done.output + "".join(
        Path("run", name).read_text() for name in files - {"model.safetensors"}
    )
    for other in set(tried) - {best}:
        assert f"{other:.3g}" not in everything and f"{30 - abs(other - 2):.1f}" not in everything
    assert (
        "rho " + f"{best:.3g}" in done.stdout
        and f"{30 - abs(best - 2):.1f} right of 40 public" in done.stdout
    )
    (charged,) = read(Path("privacy.db"))
    assert charged.closed and charged.charged == charged.mechanism.steps == result["steps"]
    assert charged.mechanism.best_of == dpkfc.tuning.BestOf(2)
    again = run(*PRIVATE, "--ledger", "privacy.db")
    assert again.exit_code == 0 and "this tuning is finished" in again.stdout and len(tried) == 3
    assert len(read(Path("privacy.db"))) == 1
    other = run("train", "a.npz", *QUICK, "--batch-size", 100, "--epochs", 3, "--out", "run")
    assert other.exit_code == 2 and "another" in other.stderr and "tuning" in other.stderr


def test_a_budget_caps_the_tunings_of_a_data_set(tried: list[float]) -> None:
    first = run(*PRIVATE, "--ledger", "privacy.db", "--budget", "3.5,1e-3")
    assert first.exit_code == 0, first.output
    (charged,) = read(Path("privacy.db"))
    assert charged.delta == json.loads(Path("run/plan.json").read_text())["delta"] == 1e-3
    assert json.loads(Path("run/result.json").read_text())["run"] == charged.run_id
    assert "is wrong" not in Path("run/report.html").read_text()
    second = run(*PRIVATE, "--ledger", "privacy.db", "--out", "second")
    assert (
        second.exit_code == 2 and "3.5 is allowed" in second.stderr and not Path("second").exists()
    )
    for options, message in (
        ((*PRIVATE, "--budget", 8), "give --ledger FILE too"),
        ((*PRIVATE, "--ledger", "other.db", "--budget", "x"), "--budget x: give EPSILON"),
        ((*PUBLIC, "--budget", 8), "omit --ledger, --budget"),
    ):
        refused = run(*options)
        assert refused.exit_code == 2 and message in refused.stderr
    assert not Path("other.db").exists()


def test_the_released_weights_are_those_of_the_best_try(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[float, dict[str, torch.Tensor]] = {}
    run_ = tuning_job.TuningJob.run

    def keeping(self: tuning_job.TuningJob, recipe: Any, number: int) -> Any:
        private = run_(self, recipe, number)
        kept[tried[-1]] = {
            name: value.clone() for name, value in private.model.state_dict().items()
        }
        return private

    monkeypatch.setattr(tuning_job.TuningJob, "run", keeping)
    assert run(*PRIVATE).exit_code == 0
    best = min(tried, key=lambda rho: abs(rho - 2))
    model = restore(Path("run"), some(20)).model
    assert all(torch.equal(value, kept[best][name]) for name, value in model.state_dict().items())
    assert len({tuple(weights["1.weight"].flatten().tolist()) for weights in kept.values()}) == 3


def test_epsilon_is_the_price_of_the_whole_by_another_accountant(tried: list[float]) -> None:
    """Held-out private records: the price includes the noise on the score."""
    held_out = run(
        *PRIVATE, "--batch-size", 20, "--epochs", 1, "--validation", "0.3", "--score-noise", 20
    )
    assert held_out.exit_code == 0, held_out.output
    result, plan = (
        json.loads(Path("run", f"{name}.json").read_text()) for name in ("result", "plan")
    )
    rate = plan["batch_size"] / plan["records"]
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(plan["noise_multiplier"]))
    one = dp.ComposedDpEvent(
        [dp.SelfComposedDpEvent(step, plan["steps"]), dp.GaussianDpEvent(20.0)]
    )
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(RepeatAndSelectDpEvent(one, 2.0, 1.0))
    assert (
        result["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
        and result["epsilon"] <= 3
    )
    assert "plus noise of 20, priced in" in held_out.stdout
    assert "nearly random" in held_out.stdout, "20 is much beside some 30 records"
    assert 50 <= plan["records"] <= 90, "70 are expected, without those of the validation"


def test_the_learning_rate_is_that_of_the_noise_which_there_is() -> None:
    """ρ = lr · clip · rmse · √(parameters / units), with momentum .9, computed independently."""
    settings = Settings(epsilon=3.0, delta=1e-3, epochs=3, batch_size=100, noise="independent")
    held_out = hold_out(some(100), "public.npz", lambda path: some(20))
    work = tuning_job.prepare(held_out, settings, {"rho": Interval(1, 4)}, Console(quiet=True))
    found, plan = priced_recipe(work, dpkfc.tuning.BestOf(2))
    ways = [
        sum(sum(0.9**k for k in range(j)) ** 2 for j in range(1, t + 1))
        for t in range(1, plan.steps + 1)
    ]
    rmse = plan.noise_multiplier / 100 * math.sqrt(sum(ways) / plan.steps)
    assert found.lr * rmse * math.sqrt(8 / 2) == pytest.approx(2.0, rel=1e-3)
    assert plan.noise_multiplier > dpkfc.Plan.make(**_single(plan)).noise_multiplier, (
        "a choice costs more than a run"
    )
    assert (
        found.arguments["options"].best_of == dpkfc.tuning.BestOf(2)
        and found.arguments["epsilon"] == 3.0
    )


def _single(plan: dpkfc.Plan) -> dict[str, Any]:
    return {
        name: getattr(plan, name) for name in ("records", "batch_size", "steps", "clip", "delta")
    } | {"epsilon": 3.0}


def test_an_interrupted_tuning_goes_on_and_pays_once(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    spied = tuning_job.TuningJob.run

    def interrupted(self: tuning_job.TuningJob, recipe: Any, number: int) -> Any:
        if len(tried) == 2:
            raise KeyboardInterrupt
        return spied(self, recipe, number)

    command = (*PRIVATE, "--ledger", "privacy.db")
    with monkeypatch.context() as patch:
        patch.setattr(tuning_job.TuningJob, "run", interrupted)
        stopped = run(*command)
    assert (
        stopped.exit_code == 130
        and "The same command resumes" in stopped.stdout
        and len(tried) == 2
    )
    assert not Path("run/result.json").exists() and Path("run/secret").stat().st_mode & 0o077 == 0
    other = run(*command, "--rho", "1,2")
    assert other.exit_code == 2 and "another tuning" in other.stderr
    rows = dict(np.load("a.npz"))
    np.savez("a.npz", x=1 - rows["x"], y=rows["y"])
    changed = run(*command)
    assert changed.exit_code == 2 and "records are not those" in changed.stderr
    np.savez("a.npz", **rows)
    done = run(*command)
    assert done.exit_code == 0 and len(tried) == 3
    assert len(read(Path("privacy.db"))) == 1 and not Path("run/secret").exists()


def test_a_budget_that_does_not_suffice_leaves_nothing_behind(tried: list[float]) -> None:
    with closing(dpkfc.Ledger("privacy.db", "a", budget=(1.0, 1e-3))):
        pass
    refused = run(*PRIVATE, "--ledger", "privacy.db")
    assert refused.exit_code == 2 and "does not fit" in refused.stderr
    assert not tried and not Path("run").exists()
    assert {file.name for file in Path().iterdir()} == {"a.npz", "public.npz", "privacy.db"}


def test_an_interrupted_release_is_repeated(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*PRIVATE, "--ledger", "privacy.db", "--test", "public.npz")

    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release, "count_correct", interrupted)
        stopped = run(*command)
    assert stopped.exit_code == 130 and len(tried) == 3
    weights = Path("run/model.safetensors").read_bytes()
    done = run(*command)
    assert done.exit_code == 0 and len(tried) == 3, done.output  # no further try
    assert Path("run/model.safetensors").read_bytes() == weights and not Path("run/secret").exists()


@pytest.mark.parametrize("command", [PRIVATE, PUBLIC])
def test_the_largest_seed(tried: list[float], command: tuple[object, ...]) -> None:
    done = run(*command, "--seed", 2**63 - 1, "--tries", 2)
    assert done.exit_code == 0 and tried, done.output


@pytest.mark.parametrize("command", [PRIVATE, PUBLIC])
def test_a_file_is_no_folder(tried: list[float], command: tuple[object, ...]) -> None:
    refused = run(*command[:-1], "a.npz")
    assert refused.exit_code == 2 and "--out a.npz: a.npz is a file" in refused.stderr and not tried


@pytest.mark.parametrize("command", [PRIVATE, PUBLIC])
def test_a_folder_is_for_one_process(tried: list[float], command: tuple[object, ...]) -> None:
    with locked(Path("run")):
        refused = run(*command)
    assert (
        refused.exit_code == 2
        and "another process is training in run" in refused.stderr
        and not tried
    )


# What is held out


def test_one_record_less_moves_no_other() -> None:
    whole = some(200)
    parts = hold_out(whole, "0.25", lambda path: whole)
    assert not parts.public and len(parts.loaded.train) + len(parts.validation) == 200
    assert 25 <= len(parts.validation) <= 75  # 50 expected, six standard deviations

    def members(found: tuning_job.HeldOut) -> Counter[tuple[Any, ...]]:
        parts = {"train": found.loaded.train, "validation": found.validation}
        return Counter((name, *x.tolist(), int(y)) for name, part in parts.items() for x, y in part)

    for gone in (0, 10, 199):
        rest = [place for place in range(200) if place != gone]
        smaller = replace(
            whole, train=TensorDataset(*(tensor[rest] for tensor in whole.train.tensors))
        )
        before, after = members(parts), members(hold_out(smaller, "0.25", lambda path: whole))
        assert not after - before and (before - after).total() == 1


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rho", "2"), "there is nothing to choose"),
        (("--rho", "4,1"), "--rho 4,1"),
        (("--rho", "1,2,3"), "--rho 1,2,3"),
        (("--clip", "a,b"), "--clip a,b"),
        (("--clip", "0,1"), "--clip 0,1"),
        (("--rho", "1,2", "--lr", "1,2"), "give one of them"),
        (("--epochs", "1,2"), "fixed number of steps"),
        (("--public", "--ledger", "privacy.db"), "--public"),
        (("--public", "--tries", "2.5"), "--tries 2.5"),
        (("--tries", "0.5"), "--tries 0.5"),
        (("--validation", "1.5"), "--validation 1.5"),
        (("--validation", "nowhere.npz"), "there is no nowhere.npz"),
        (("--validation", "other.npz"), "they must agree"),
        (("--score-noise", "3"), "needs no noise"),
        (("--device", "toaster"), "choose from cpu"),
        (("--epsilon", "-1"), "--epsilon -1"),
    ],
)
def test_an_error_is_one_line_and_spends_nothing(arguments: tuple[str, ...], message: str) -> None:
    np.savez("other.npz", x=np.random.default_rng(0).random((20, 5)), y=np.arange(20) % 2)
    done = run(*PRIVATE, *arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith("dpkfc: ") and message in done.stderr
    assert not Path("run").exists()


def test_without_optuna_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_tune, "find_spec", lambda name: None)
    done = run(*PRIVATE)
    assert done.exit_code == 2 and "pip install 'dpkfc[tune]'" in done.stderr


def test_help_has_examples() -> None:
    done = run("tune", "--help")
    assert done.exit_code == 0 and "Examples" in done.stdout and "dpkfc tune" in done.stdout
