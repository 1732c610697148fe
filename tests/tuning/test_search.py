"""Tuning: tries, counts, files and charges, also after interruptions, and refusals."""

from __future__ import annotations

import math
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc import Ledger, PrivacyError
from dpkfc.accounting.ledger import read
from dpkfc.accounting.selection import BestOf
from dpkfc.tuning.search import STATE_ATTRIBUTE, Selected, tune, tune_privately

RUN: dict[str, Any] = {
    "noise_multiplier": 2.0,
    "delta": 1e-3,
    "steps": 2,
    "batch_size": 8,
    "best_of": BestOf(5),
}
PLAN = dpkfc.Plan.make(records=8, clip=1.0, **RUN)
DATA = TensorDataset(torch.linspace(-1, 1, 16).reshape(8, 2))


def arguments_of(run: dict[str, Any]) -> dict[str, Any]:
    """Of `make_private`, from those of `Plan.make`."""
    others = {name: value for name, value in run.items() if name != "best_of"}
    return {**others, "options": dpkfc.Options(best_of=run["best_of"])}


def output(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()  # type: ignore[no-any-return]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.db", "people")) as opened:
        yield opened


def trial_states(storage: Path, name: str) -> list[str]:
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{storage}")
    return [trial.state.name for trial in study.trials]


# On public data


def hill(trial: optuna.Trial) -> float:
    """1 at its top, x = 0.7, y = 0.001."""
    x, y = trial.suggest_float("x", 0, 1), trial.suggest_float("y", 1e-5, 1, log=True)
    return 1 - (x - 0.7) ** 2 - (math.log10(y) + 3) ** 2 / 25


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_top_of_a_hill_is_found_by_learning_from_earlier_tries(direction: Any) -> None:
    sign = 1 if direction == "maximize" else -1
    found = tune(lambda trial: sign * hill(trial), tries=60, seed=0, direction=direction)
    at_random = max(
        sign * trial.value for trial in found.study.trials[:10]
    )  # before TPE has anything to learn from
    assert at_random < 0.99 < sign * found.score
    assert found.settings["x"] == pytest.approx(0.7, abs=0.1)
    assert math.log10(found.settings["y"]) == pytest.approx(-3, abs=0.5)


def test_a_seed_gives_the_same_tries_again() -> None:
    tries = [
        [trial.params for trial in tune(hill, tries=12, seed=seed).study.trials]
        for seed in (1, 1, 2)
    ]
    assert tries[0] == tries[1] != tries[2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_same_call_goes_on_until_all_tries_are_complete(
    storage: Path, error: type[BaseException]
) -> None:
    seen: list[float] = []

    def objective(trial: optuna.Trial) -> float:
        seen.append(trial.suggest_float("x", 0, 1))
        if len(seen) == 3:
            raise error
        return seen[-1]

    with pytest.raises(error):
        tune(objective, tries=5, storage=storage, seed=0)
    found = tune(objective, tries=5, storage=storage, seed=0)
    assert len(seen) == 6 and trial_states(storage, "tuning").count("COMPLETE") == 5
    assert len(set(seen)) == 6, "a seed must not begin anew"
    assert found.score == max(x for k, x in enumerate(seen) if k != 2) == found.settings["x"]
    again = tune(objective, tries=5, storage=storage)
    assert len(seen) == 6 and again.settings == found.settings
    tune(objective, tries=7, storage=storage)
    assert len(seen) == 8


def test_progress_is_reported_before_the_first_try_and_after_every_try(storage: Path) -> None:
    reported: list[tuple[int, int, float | None]] = []

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise optuna.TrialPruned
        return float(trial.number)

    def report(finished: int, tries: int, best: float | None) -> None:
        reported.append((finished, tries, best))

    tune(objective, tries=3, storage=storage, on_progress=report)
    assert reported == [(0, 3, None), (1, 3, 0.0), (2, 3, 0.0), (3, 3, 2.0)]
    reported.clear()
    tune(objective, tries=4, storage=storage, on_progress=report)
    assert reported == [(3, 4, 2.0), (4, 4, 3.0)]


def test_a_score_that_is_no_number_is_the_worst_and_a_pruned_try_counts() -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 2:
            raise optuna.TrialPruned
        return math.nan if trial.number % 2 else -5.0 - trial.number

    found = tune(objective, tries=6)
    assert len(found.study.trials) == 6 and found.score == -5.0
    assert (
        tune(lambda trial: math.nan if trial.number else 3.0, tries=3, direction="minimize").score
        == 3.0
    )
    with pytest.raises(RuntimeError, match="all 2 tries were pruned"):
        tune(lambda trial: (_ for _ in ()).throw(optuna.TrialPruned), tries=2)


def test_the_best_tries_are_printed_best_first() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_categorical("kind", ["plain"])
        return 0.125 * trial.number

    text = str(tune(objective, tries=9)).splitlines()
    rows = [line.replace("│", " ").split() for line in text if "plain" in line]
    assert rows == [[str(k), f"{0.125 * k:.4g}", "plain"] for k in (8, 7, 6, 5, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tries": 0}, "tries=0"),
        ({"tries": 2.5}, "tries=2.5"),
        ({"direction": "up"}, "'maximize' or 'minimize'"),
    ],
)
def test_impossible_wishes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(hill, **{"tries": 1, **change})


def test_a_study_is_not_taken_for_another(storage: Path, tries: Callable[[int], list[int]]) -> None:
    tries(1)
    tune(hill, tries=1, storage=storage)
    with pytest.raises(ValueError, match="begun to maximize, not to minimize"):
        tune(hill, tries=2, storage=storage, direction="minimize")
    with pytest.raises(PrivacyError, match="holds tries of another tuning"):
        tune_privately(Training(), plan=PLAN, storage=storage, name="tuning")
    tune_privately(Training(), plan=PLAN, storage=storage)
    with pytest.raises(PrivacyError, match="belongs to tune_privately"):
        tune(hill, tries=1, storage=storage, name="private tuning")


@pytest.mark.parametrize(
    "call", [lambda: tune(hill, tries=1), lambda: tune_privately(Training(), plan=PLAN)]
)
def test_without_optuna_the_way_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'dpkfc\[tune\]'"):
        call()


def test_optunas_own_logs_are_off_and_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    tune(hill, tries=2)
    tune_privately(Training(), plan=PLAN)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO


# On private data


class Training:
    """An objective that trains a tiny model, scores it by `score(call)`, and records its work."""

    def __init__(self, score: Callable[[int], float] = lambda call: -call, **changes: Any) -> None:
        self.score, self.changes = score, changes
        self.calls = 0
        self.settings: list[float] = []
        self.weights: list[torch.Tensor] = []

    def __call__(self, trial: optuna.Trial) -> tuple[dpkfc.PrivateRun, float]:
        self.calls += 1
        self.settings.append(trial.suggest_float("lr", 0.1, 1.0))
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.settings[-1])
        run = dpkfc.make_private(
            model, optimizer, DATA, loss=output, **arguments_of({**RUN, **self.changes})
        )
        for batch in run.loader:
            output(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.weights.append(model.weight.detach().clone())
        return run, self.score(self.calls - 1)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Sets the number that is drawn next; returns the list of all draws."""
    draws: list[int] = []

    def draw_next(number: int) -> list[int]:
        monkeypatch.setattr(BestOf, "draw", lambda self, generator: draws.append(number) or number)
        return draws

    return draw_next


@pytest.mark.parametrize("stored", [True, False])
def test_the_best_try_is_released(
    storage: Path, tries: Callable[[int], list[int]], stored: bool
) -> None:
    tries(5)
    objective = Training(lambda call: [3.0, 1.0, 7.0, 7.0, 2.0][call])  # of a tie, the first
    chosen = tune_privately(objective, plan=PLAN, storage=storage if stored else None)
    assert objective.calls == 5 and len(set(objective.settings)) == 5
    assert chosen.settings == {"lr": objective.settings[2]} and chosen.score == 7.0
    assert chosen.state_dict is not None and list(chosen.state_dict) == ["weight", "bias"]
    assert torch.equal(chosen.state_dict["weight"], objective.weights[2])
    assert (chosen.plan, chosen.epsilon, chosen.delta) == (PLAN, PLAN.epsilon(), 1e-3)
    nn.Linear(2, 1).load_state_dict(chosen.state_dict)


def test_the_price_of_a_try_is_that_of_the_whole() -> None:
    run, _ = Training()(optuna.create_study().ask())
    assert run.epsilon() == PLAN.epsilon()
    single = dpkfc.Plan.make(records=8, clip=1.0, **{**RUN, "best_of": None})
    assert run.epsilon() > single.epsilon()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_resume_keeps_the_number_of_tries_and_the_best_weights(
    storage: Path, tries: Callable[[int], list[int]], error: type[BaseException]
) -> None:
    """An interrupted try is repeated; a failed one counts: its error may come from the data."""
    draws = tries(6)

    def score(call: int) -> float:
        if call == 3:
            raise error
        return [5.0, 9.0, 1.0, math.nan, 4.0, 8.0, 2.0][call]

    objective = Training(score)
    with pytest.raises(error) as raised:
        tune_privately(objective, plan=PLAN, storage=storage)
    assert any("This try counts" in note for note in getattr(raised.value, "__notes__", [])) == (
        error is MemoryError
    )
    tries(1000)
    chosen = tune_privately(objective, plan=PLAN, storage=storage)
    assert draws == [6] and objective.calls == (7 if error is KeyboardInterrupt else 6)
    assert chosen.score == 9.0 and chosen.settings == {"lr": objective.settings[1]}
    assert chosen.state_dict is not None and torch.equal(
        chosen.state_dict["weight"], objective.weights[1]
    )
    before = objective.calls
    again = tune_privately(objective, plan=PLAN, storage=storage)  # there is nothing left to do
    assert objective.calls == before and again.settings == chosen.settings
    assert again.state_dict is not None and torch.equal(
        again.state_dict["weight"], objective.weights[1]
    )


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_while_a_try_is_recorded_loses_no_weights(
    storage: Path,
    tries: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    seed: int | None,
) -> None:
    tries(3)
    objective = Training(lambda call: float(call))
    tell = optuna.Study.tell

    def killed(study: optuna.Study, trial: Any, *values: Any, **others: Any) -> Any:
        if trial.number == 1 and moment == "after":
            tell(study, trial, *values, **others)
        if trial.number == 1:
            raise KeyboardInterrupt
        return tell(study, trial, *values, **others)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "tell", killed)
        with pytest.raises(KeyboardInterrupt):
            tune_privately(objective, plan=PLAN, storage=storage, seed=seed)
    objective.score = lambda call: -1.0
    chosen = tune_privately(objective, plan=PLAN, storage=storage, seed=seed)
    best = 1 if moment == "after" else 0
    assert objective.calls == (3 if moment == "after" else 4) == len(set(objective.settings))
    assert chosen.state_dict is not None and torch.equal(
        chosen.state_dict["weight"], objective.weights[best]
    )


def test_only_the_best_weights_stay_on_disk_and_only_for_their_owner(
    storage: Path, tries: Callable[[int], list[int]]
) -> None:
    tries(4)
    tune_privately(Training(lambda call: [1.0, 3.0, 2.0, 4.0][call]), plan=PLAN, storage=storage)
    (folder,) = Path(f"{storage}.weights").iterdir()
    assert [file.name for file in folder.iterdir()] == ["3.safetensors"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(storage.stat().st_mode) == 0o600
    study = optuna.load_study(study_name="private tuning", storage=f"sqlite:///{storage}")
    assert "Do not publish" in study.user_attrs[STATE_ATTRIBUTE]["note"]


def test_lost_weights_are_noticed(storage: Path, tries: Callable[[int], list[int]]) -> None:
    tries(2)
    tune_privately(Training(), plan=PLAN, storage=storage)
    (file,) = Path(f"{storage}.weights").glob("*/*")
    file.unlink()
    with pytest.raises(OSError, match="weights of the best try so far are gone"):
        tune_privately(Training(), plan=PLAN, storage=storage)


@pytest.mark.parametrize("number", [0, 3])
def test_without_a_try_that_succeeded_nothing_is_chosen(
    storage: Path, tries: Callable[[int], list[int]], number: int
) -> None:
    """A Poisson number may be 0; and tries may all fail."""
    tries(number)

    def fails(trial: optuna.Trial) -> Any:
        raise ZeroDivisionError

    for _ in range(number):
        with pytest.raises(ZeroDivisionError):
            tune_privately(fails, plan=PLAN, storage=storage)
    chosen = tune_privately(fails, plan=PLAN, storage=storage)
    assert (chosen.settings, chosen.score, chosen.state_dict) == (None, None, None)
    assert chosen.epsilon == PLAN.epsilon() and "nothing was tried" in str(chosen)


def test_settings_are_drawn_uniformly_also_after_interruptions(
    storage: Path, tries: Callable[[int], list[int]]
) -> None:
    """TPE would crowd around the best."""
    tries(40)
    run, _ = Training()(optuna.create_study().ask())
    drawn: list[float] = []

    def quick(trial: optuna.Trial) -> tuple[dpkfc.PrivateRun, float]:
        drawn.append(trial.suggest_float("lr", 0, 1))
        if len(drawn) % 15 == 0:
            raise KeyboardInterrupt
        run._group_key = bytes([len(drawn)])  # as if it were another run
        return run, -drawn[-1]

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tune_privately(quick, plan=PLAN, storage=storage, seed=0)
    chosen = tune_privately(quick, plan=PLAN, storage=storage, seed=0)
    assert len(set(drawn)) == 42 and stats.kstest(drawn, "uniform").pvalue > 0.01
    assert chosen.settings == {"lr": min(x for k, x in enumerate(drawn, 1) if k % 15)}
    crowded = [
        trial.params["lr"]
        for trial in tune(lambda t: -t.suggest_float("lr", 0, 1), tries=42, seed=0).study.trials
    ]
    assert stats.kstest(crowded, "uniform").pvalue < 0.01, "the test can fail"


@pytest.mark.parametrize("seed", [None, 0])
def test_noise_of_the_asked_size_is_added_to_scores(
    tries: Callable[[int], list[int]], seed: int | None
) -> None:
    """Before they are compared: of equal scores, the one with the most noise wins."""
    tries(200)
    run = {**RUN, "best_of": BestOf(5, score_noise=3.0)}
    plan = dpkfc.Plan.make(records=8, clip=1.0, **run)
    run, _ = Training(best_of=plan.best_of)(optuna.create_study().ask())
    studies: list[optuna.Study] = []

    def objective(trial: optuna.Trial) -> tuple[dpkfc.PrivateRun, float]:
        studies.append(trial.study)
        run._group_key = bytes([len(studies) % 251, len(studies) // 251])
        return run, 40.0

    chosen = tune_privately(objective, plan=plan, seed=seed)
    scores = [trial.value for trial in studies[0].trials]
    assert chosen.score == max(scores)
    assert stats.kstest(scores, stats.norm(40, 3).cdf).pvalue > 1e-3
    again = tune_privately(objective, plan=plan, seed=seed)
    assert (again.score == chosen.score) == (seed is not None)


def test_scores_from_public_records_are_left_as_they_are(tries: Callable[[int], list[int]]) -> None:
    tries(3)
    assert (
        tune_privately(Training(lambda call: [math.nan, -4.0, -math.inf][call]), plan=PLAN).score
        == -4.0
    )


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_with_noise_must_be_finite(score: float) -> None:
    run = {**RUN, "best_of": BestOf(5, score_noise=3.0)}
    plan = dpkfc.Plan.make(records=8, clip=1.0, **run)
    with pytest.raises(PrivacyError, match="must be finite"):
        tune_privately(Training(lambda call: score, best_of=plan.best_of), plan=plan)


def test_the_iterate_of_disk_is_kept_not_what_lies_ahead_of_it(
    tries: Callable[[int], list[int]],
) -> None:
    tries(1)
    found: list[torch.Tensor] = []

    def objective(trial: optuna.Trial) -> tuple[dpkfc.PrivateRun, float]:
        model = nn.Linear(2, 1)
        optimizer = dpkfc.optim.DiSK(torch.optim.SGD(model.parameters(), lr=0.5), kappa=0.7)
        run = dpkfc.make_private(model, optimizer, DATA, loss=output, **arguments_of(RUN))
        for batch in run.loader:
            output(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ahead = model.weight.detach().clone()
        with optimizer.iterate():
            found.extend([model.weight.detach().clone(), ahead])
        return run, 0.0

    chosen = tune_privately(objective, plan=PLAN)
    assert chosen.state_dict is not None and torch.equal(chosen.state_dict["weight"], found[0])
    assert not torch.equal(*found)


# What is refused


@pytest.mark.parametrize(
    "changes",
    [
        {"best_of": None},
        {"best_of": BestOf(4)},
        {"best_of": BestOf(5, "poisson")},
        {"noise_multiplier": 1.9},
        {"steps": 3},
        {"batch_size": 5},
    ],
    ids=str,
)
def test_a_try_with_another_price_is_refused_and_not_counted(
    storage: Path, tries: Callable[[int], list[int]], changes: dict[str, Any]
) -> None:
    tries(1)
    with pytest.raises(PrivacyError, match="but the price is that of"):
        tune_privately(Training(**changes), plan=PLAN, storage=storage)
    assert trial_states(storage, "private tuning") == ["RUNNING"]
    assert tune_privately(Training(clip=0.3), plan=PLAN, storage=storage).settings is not None, (
        "the clip may be tuned"
    )


@pytest.mark.filterwarnings("ignore:Oracle builds the geometry")
def test_a_try_with_a_geometry_from_private_records_is_refused() -> None:
    probe = dpkfc.probes.Oracle(TensorDataset(DATA.tensors[0], torch.zeros(8, 1)))
    with pytest.raises(PrivacyError, match="public_geometry=False"):
        tune_privately(Training(geometry=dpkfc.KFC(probe, loss="mse")), plan=PLAN)


def test_a_try_with_a_ledger_of_its_own_is_refused(ledger: Ledger) -> None:
    with pytest.raises(PrivacyError, match="pass the ledger to tune_privately"):
        tune_privately(Training(ledger=ledger), plan=PLAN)


def test_tries_that_share_their_noise_are_refused(
    storage: Path, tries: Callable[[int], list[int]]
) -> None:
    tries(3)
    objective = Training(seed=1)
    for _ in range(2):  # also after a resume
        with pytest.raises(PrivacyError, match="two tries had the same noise"):
            tune_privately(objective, plan=PLAN, storage=storage)
    assert objective.calls == 3


@pytest.mark.parametrize("result", [1.0, (1.0, 2.0), None])
def test_an_objective_that_returns_something_else_is_refused(result: Any) -> None:
    with pytest.raises(TypeError, match=r"must return \(run, score\)"):
        tune_privately(lambda trial: result, plan=PLAN)


def test_a_plan_of_a_single_run_is_refused() -> None:
    single = dpkfc.Plan.make(records=8, clip=1.0, **{**RUN, "best_of": None})
    with pytest.raises(PrivacyError, match="make it with best_of"):
        tune_privately(Training(), plan=single)


def test_more_tries_than_were_drawn_are_not_released(
    storage: Path, tries: Callable[[int], list[int]]
) -> None:
    """Two processes at once."""
    tries(2)
    inner = Training()

    def objective(trial: optuna.Trial) -> tuple[dpkfc.PrivateRun, float]:
        if trial.number == 1:
            tune_privately(inner, plan=PLAN, storage=storage)
        return inner(trial)

    with pytest.raises(PrivacyError, match="two processes worked on it"):
        tune_privately(objective, plan=PLAN, storage=storage)


def test_a_run_resumed_with_another_selection_is_refused() -> None:
    trial = optuna.create_study().ask()
    first, other = Training()(trial)[0], Training(best_of=BestOf(6))(trial)[0]
    with pytest.raises(PrivacyError, match=r"another plan: best_of differ"):
        other.load_state_dict(first.state_dict())


# The ledger


def test_the_whole_price_is_charged_before_the_first_try_and_once(
    storage: Path, ledger: Ledger, tries: Callable[[int], list[int]]
) -> None:
    tries(3)
    charged: list[int] = []

    def score(call: int) -> float:
        charged.append(ledger.charged("tuning"))
        if call == 1:
            raise KeyboardInterrupt
        return 0.0

    objective = Training(score)
    with pytest.raises(KeyboardInterrupt):
        tune_privately(objective, plan=PLAN, storage=storage, ledger=ledger, run_id="tuning")
    for run_id in ("tuning", None):  # the same name, or the one that the storage knows
        tune_privately(objective, plan=PLAN, storage=storage, ledger=ledger, run_id=run_id)
    assert charged == [PLAN.steps] * 4
    (run,) = read(ledger.path)
    assert (run.run_id, run.mechanism, run.charged, run.closed) == (
        "tuning",
        PLAN.mechanism,
        PLAN.steps,
        True,
    )
    assert ledger.epsilon(PLAN.delta) == PLAN.epsilon()


def test_a_charge_pays_for_one_tuning(
    storage: Path, ledger: Ledger, tmp_path: Path, tries: Callable[[int], list[int]]
) -> None:
    tries(1)
    tune_privately(Training(), plan=PLAN, storage=storage, ledger=ledger)
    tune_privately(Training(), plan=PLAN, ledger=ledger)
    assert len(ledger.runs()) == 2, "another tuning has another name, and another charge"
    ledger.open_run(
        "mine", PLAN.mechanism, delta=PLAN.delta
    )  # a kill before the charge: nothing was seen yet
    tune_privately(Training(), plan=PLAN, storage=tmp_path / "a.db", ledger=ledger, run_id="mine")
    for place in (None, tmp_path / "b.db", tmp_path / "b.db"):
        with pytest.raises(PrivacyError, match="is closed"):
            tune_privately(Training(), plan=PLAN, storage=place, ledger=ledger, run_id="mine")
    ledger.open_run("other", PLAN.mechanism, delta=PLAN.delta)
    ledger.charge("other", PLAN.steps)
    for place in (None, tmp_path / "b.db", tmp_path / "b.db"):
        with pytest.raises(PrivacyError, match="was charged for another tuning"):
            tune_privately(Training(), plan=PLAN, storage=place, ledger=ledger, run_id="other")


def test_a_budget_that_is_too_small_is_kept(tmp_path: Path) -> None:
    objective = Training()
    budget = (0.9 * PLAN.epsilon(), PLAN.delta)
    with closing(Ledger(tmp_path / "ledger.db", "people", budget=budget)) as ledger:
        with pytest.raises(PrivacyError, match="does not fit"):
            tune_privately(objective, plan=PLAN, ledger=ledger)
        assert objective.calls == 0 and ledger.runs() == []


def test_a_tuning_is_taken_up_only_as_it_was_begun(
    storage: Path, ledger: Ledger, tmp_path: Path, tries: Callable[[int], list[int]]
) -> None:
    tries(1)

    def go_on(**changes: Any) -> Selected:
        settings = {"plan": PLAN, "storage": storage, "ledger": ledger, "run_id": "mine"}
        return tune_privately(Training(), **{**settings, **changes})

    go_on()
    with pytest.raises(PrivacyError, match="another plan: noise_multiplier differ"):
        go_on(plan=dpkfc.Plan.make(records=8, clip=1.0, **{**RUN, "noise_multiplier": 4.0}))
    with pytest.raises(PrivacyError, match="another plan: best_of differ"):
        go_on(plan=dpkfc.Plan.make(records=8, clip=1.0, **{**RUN, "best_of": BestOf(2)}))
    with pytest.raises(PrivacyError, match="as run 'mine' of a ledger"):
        go_on(ledger=None)
    with pytest.raises(PrivacyError, match="as run 'mine' of a ledger"):
        go_on(run_id="another")
    with closing(Ledger(tmp_path / "other.db", "people")) as other:
        with pytest.raises(PrivacyError, match="there is no run 'mine'"):
            go_on(ledger=other)
        other.open_run("mine", PLAN.mechanism)
        with pytest.raises(PrivacyError, match="was not charged to"):
            go_on(ledger=other)
    go_on()
    tune_privately(Training(), plan=PLAN, storage=storage, name="free")
    with pytest.raises(PrivacyError, match="without a ledger"):
        go_on(name="free", run_id=None)
