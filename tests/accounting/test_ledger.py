"""The ledger: charges, budgets, composition against dp-accounting, processes, forks, bad files."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpkfc
from dpkfc.accounting import ledger as module
from dpkfc.accounting import ledger_file
from dpkfc.accounting.calibrate import calibrate_noise, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger, LedgerRun, read
from dpkfc.accounting.rounding import round_up
from dpkfc.errors import PrivacyError

PLAN = Mechanism(1.0, 16.0, 100)  # no sampling: fast to analyse
DELTA = 1e-5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger(path, "people")) as opened:
        yield opened


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that can import this dpkfc."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dpkfc.__path__[0]).parent)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_together(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Start all of them at once, and collect what they print."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [finish(process) for process in processes]


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


# One process


def test_a_new_run_starts_at_zero_and_keeps_what_is_charged(ledger: Ledger) -> None:
    assert ledger.open_run("a", PLAN) == 0
    assert ledger.charged("a") == 0
    for steps in (1, 2, 10, 100):
        ledger.charge("a", steps)
        assert ledger.charged("a") == steps


def test_runs_are_listed_as_they_were_opened(ledger: Ledger) -> None:
    for name in ("z", "a", "m"):
        ledger.open_run(name, PLAN)
    ledger.charge("a", 7)
    ledger.close_run("a")
    assert [(run.run_id, run.charged, run.closed) for run in ledger.runs()] == [
        ("z", 0, False),
        ("a", 7, True),
        ("m", 0, False),
    ]
    first = ledger.runs()[0]
    assert (first.dataset, first.mechanism) == ("people", PLAN)
    assert datetime.fromisoformat(first.started).utcoffset() == timedelta(0)
    with pytest.raises(AttributeError):
        first.charged = 0  # type: ignore[misc]


def test_reopening_goes_on_from_what_was_charged(path: Path) -> None:
    for expected in (0, 5, 10):
        with closing(Ledger(path, "people")) as ledger:
            assert ledger.open_run("a", PLAN) == expected
            ledger.charge("a", expected + 5)
    (run,) = read(path)
    assert run == LedgerRun("a", "people", PLAN, 15, run.started, False)


@pytest.mark.parametrize(
    "other",
    [
        Mechanism(0.5, 16.0, 100),
        Mechanism(math.nextafter(1.0, 0.0), 16.0, 100),
        Mechanism(1.0, 16.1, 100),
        Mechanism(1.0, 16.0, 101),
        Mechanism(1.0, 16.0, 100, public_geometry=False),
    ],
)
def test_reopening_with_another_mechanism_is_refused(ledger: Ledger, other: Mechanism) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 3)
    with pytest.raises(PrivacyError, match="was opened with"):
        ledger.open_run("a", other)
    assert ledger.open_run("a", PLAN) == 3


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_step_is_not_charged_twice(ledger: Ledger, steps: int) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 5)
    with pytest.raises(PrivacyError, match="paid for before"):
        ledger.charge("a", steps)
    assert ledger.charged("a") == 5


def test_a_charge_beyond_the_plan_is_refused(ledger: Ledger) -> None:
    ledger.open_run("a", PLAN)
    with pytest.raises(PrivacyError, match="planned 100 steps"):
        ledger.charge("a", 101)
    ledger.charge("a", 100)
    with pytest.raises(PrivacyError, match="planned 100 steps"):
        ledger.charge("a", 101)
    assert ledger.charged("a") == 100


def test_an_unknown_run_is_refused(ledger: Ledger, path: Path) -> None:
    ledger.open_run("a", PLAN)
    for act in (ledger.charged, ledger.close_run, lambda name: ledger.charge(name, 1)):
        with pytest.raises(PrivacyError, match="there is no run 'b' on data set 'people'"):
            act("b")
    with (
        closing(Ledger(path, "others")) as other,
        pytest.raises(PrivacyError, match="on data set 'others'"),
    ):
        other.charge("a", 1)


def test_an_unknown_run_with_a_similar_name_is_suggested(ledger: Ledger) -> None:
    ledger.open_run("first", PLAN)
    with pytest.raises(PrivacyError, match="did you mean 'first'"):
        ledger.charge("frist", 1)


def test_a_run_must_be_opened_where_it_is_charged(ledger: Ledger, path: Path) -> None:
    ledger.open_run("a", PLAN)
    with closing(Ledger(path, "people")) as second:
        with pytest.raises(PrivacyError, match="was not opened here"):
            second.charge("a", 1)
        assert second.charged("a") == 0


def test_a_closed_run_stays_closed(ledger: Ledger) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 5)
    ledger.close_run("a")
    ledger.close_run("a")
    with pytest.raises(PrivacyError, match="is closed"):
        ledger.charge("a", 6)
    with pytest.raises(PrivacyError, match="is closed"):
        ledger.open_run("a", PLAN)
    assert ledger.charged("a") == 5


def test_data_sets_in_one_file_are_apart(path: Path) -> None:
    with closing(Ledger(path, "x")) as x, closing(Ledger(path, "y")) as y:
        x.open_run("a", PLAN)
        y.open_run("a", PLAN.after(50))
        x.charge("a", 10)
        y.charge("a", 20)
        assert (x.charged("a"), y.charged("a")) == (10, 20)
        assert [run.dataset for run in x.runs()] == ["x"]
    assert [(run.dataset, run.charged) for run in read(path)] == [("x", 10), ("y", 20)]


def test_numbers_of_numpy_are_taken_and_kept_exactly(ledger: Ledger) -> None:
    # type: ignore[arg-type]
    ledger.open_run("a", Mechanism(np.float64(0.1), np.float32(1.5), np.int64(10)))
    ledger.charge("a", np.int64(3))  # type: ignore[arg-type]
    assert ledger.charged("a") == 3
    assert ledger.open_run("a", Mechanism(0.1, 1.5, 10)) == 3


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        *((steps, ValueError) for steps in (0, -1, 2**63)),
        *((steps, TypeError) for steps in (1.0, "1", None, True, math.nan)),
    ],
)
def test_a_wrong_number_of_steps_is_refused(
    ledger: Ledger, steps: int, error: type[Exception]
) -> None:
    ledger.open_run("a", PLAN)
    with pytest.raises(error, match="steps="):
        ledger.charge("a", steps)
    assert ledger.charged("a") == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((n, ValueError) for n in ("", " ", "a ", "\ta", "a\nb", "\x00", "\ud800", "\x1b[31m")),
        *((n, TypeError) for n in (None, 3)),
    ],
)
def test_a_name_that_cannot_be_printed_is_refused(
    path: Path, ledger: Ledger, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="run_id="):
        ledger.open_run(name, PLAN)
    with pytest.raises(error, match="dataset="):
        Ledger(path, name)


@pytest.mark.parametrize(
    ("mechanism", "error", "what"),
    [
        ((-0.1, 1.0, 10), ValueError, "sampling_rate"),
        ((1.1, 1.0, 10), ValueError, "sampling_rate"),
        ((math.nan, 1.0, 10), ValueError, "sampling_rate"),
        ((0.1, -1.0, 10), ValueError, "noise_multiplier"),
        ((0.1, math.nan, 10), ValueError, "noise_multiplier"),
        ((0.1, math.inf, 10), ValueError, "noise_multiplier"),
        ((0.1, 1.0, -1), ValueError, "steps"),
        ((0.1, 1.0, 1.5), TypeError, "steps"),
    ],
)
def test_a_mechanism_that_cannot_be_analysed_is_refused(
    ledger: Ledger, mechanism: tuple[float, float, int], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        ledger.open_run("a", Mechanism(*mechanism))
    assert ledger.runs() == []


def test_a_ledger_that_was_closed_says_so(path: Path) -> None:
    ledger = Ledger(path, "people")
    ledger.open_run("a", PLAN)
    ledger.close()
    ledger.close()
    for act in (ledger.runs, lambda: ledger.charge("a", 1), lambda: ledger.open_run("b", PLAN)):
        with pytest.raises(PrivacyError, match="was closed"):
            act()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("charge"), st.sampled_from("ab"), st.integers(-1, 12)),
            st.tuples(st.just("close"), st.sampled_from("ab"), st.just(0)),
            st.tuples(st.just("reopen"), st.sampled_from("ab"), st.just(0)),
        ),
        max_size=25,
    )
)
def test_any_sequence_of_acts_leaves_what_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, str, int]]
) -> None:
    path = tmp_path_factory.mktemp("acts") / "ledger.db"
    plan, charged, closed = Mechanism(0.1, 1.0, 10), {"a": 0, "b": 0}, set[str]()
    ledger = Ledger(path, "people")
    for name in charged:
        ledger.open_run(name, plan)
    for act, name, steps in acts:
        if act == "close":
            ledger.close_run(name)
            closed.add(name)
        elif act == "reopen":
            ledger.close()
            ledger = Ledger(path, "people")
            for other in charged.keys() - closed:
                assert ledger.open_run(other, plan) == charged[other]
        elif name not in closed and charged[name] < steps <= 10:
            ledger.charge(name, steps)
            charged[name] = steps
        else:
            with pytest.raises(ValueError if steps < 1 else PrivacyError):
                ledger.charge(name, steps)
    ledger.close()
    assert {run.run_id: (run.charged, run.closed) for run in read(path)} == {
        name: (steps, name in closed) for name, steps in charged.items()
    }


# Composition


def oracle(parts: list[tuple[float, float, int]], delta: float, accountant: str) -> float:
    analysis = (
        dp.pld.PLDAccountant(value_discretization_interval=1e-4)
        if accountant == "pld"
        else dp.rdp.RdpAccountant()
    )
    for rate, noise, steps in parts:
        analysis.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)
    return float(analysis.get_epsilon(delta))


@pytest.mark.parametrize(("accountant", "tolerance"), [("pld", 2e-3), ("rdp", 1e-9)])
def test_epsilon_composes_the_charged_steps_of_all_runs(
    ledger: Ledger, accountant: str, tolerance: float
) -> None:
    charges = {"a": (0.1, 2.0, 60), "b": (0.05, 1.5, 30), "c": (1.0, 9.0, 2)}
    for name, (rate, noise, steps) in charges.items():
        ledger.open_run(name, Mechanism(rate, noise, 100))
        ledger.charge(name, steps)
    ledger.open_run("planned, never begun", Mechanism(0.5, 0.5, 100))
    ledger.close_run("b")
    found = ledger.epsilon(DELTA, accountant)  # type: ignore[arg-type]
    assert found == pytest.approx(oracle(list(charges.values()), DELTA, accountant), rel=tolerance)


def test_epsilon_of_nothing_is_zero_and_of_no_noise_is_infinite(ledger: Ledger) -> None:
    assert ledger.epsilon(DELTA) == 0
    ledger.open_run("a", Mechanism(0.1, 0.0, 10))
    assert ledger.epsilon(DELTA) == 0
    ledger.charge("a", 1)
    assert ledger.epsilon(DELTA) == math.inf


def test_epsilon_with_an_oracle_geometry_is_infinite(ledger: Ledger) -> None:
    ledger.open_run("a", Mechanism(0.1, 1.0, 10, public_geometry=False))
    ledger.charge("a", 1)
    assert ledger.epsilon(DELTA) == math.inf


def test_epsilon_refuses_bad_arguments(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="delta"):
        ledger.epsilon(0.0)
    with pytest.raises(ValueError, match="accountant"):
        ledger.epsilon(DELTA, "gdp")  # type: ignore[arg-type]


# Budgets

COST = epsilon_spent([PLAN], DELTA)
TWICE = epsilon_spent([PLAN, PLAN], DELTA)


@pytest.mark.parametrize("epsilon", [COST, (COST + TWICE) / 2])
def test_a_budget_admits_what_fits_and_refuses_what_does_not(path: Path, epsilon: float) -> None:
    with closing(Ledger(path, "people", budget=(epsilon, DELTA))) as ledger:
        assert ledger.open_run("a", PLAN) == 0
        ledger.charge("a", 1)
        with pytest.raises(
            PrivacyError, match=r"is spent, .* when all planned steps have run, .* is allowed"
        ) as caught:
            ledger.open_run("b", PLAN)
        for number in (epsilon_spent([PLAN.after(1)], DELTA), TWICE):
            assert round_up(number) in str(caught.value)
        assert f"{epsilon:g}" in str(caught.value)
        assert [run.run_id for run in ledger.runs()] == ["a"]
        assert ledger.open_run("a", PLAN) == 1  # what was admitted may go on


def test_a_run_calibrated_to_the_budget_fits_it(path: Path) -> None:
    noise = calibrate_noise(lambda sigma: Mechanism(0.5, sigma, 50), 2.0, DELTA)
    with closing(Ledger(path, "people", budget=(2.0, DELTA))) as ledger:
        ledger.open_run("a", Mechanism(0.5, noise, 50))


def test_closing_a_run_gives_back_what_it_did_not_use(path: Path) -> None:
    with closing(Ledger(path, "people", budget=((COST + TWICE) / 2, DELTA))) as ledger:
        ledger.open_run("a", PLAN)
        ledger.charge("a", 10)
        with pytest.raises(PrivacyError, match="does not fit"):
            ledger.open_run("b", PLAN)
        ledger.close_run("a")
        ledger.open_run("b", PLAN)
        ledger.close_run("b")  # never charged: as if it had not been
        ledger.open_run("c", PLAN)
        with pytest.raises(PrivacyError, match="does not fit"):
            ledger.open_run("d", PLAN)


@pytest.mark.parametrize(
    "mechanism", [Mechanism(0.1, 0.0, 1), Mechanism(0.1, 5.0, 1, public_geometry=False)]
)
def test_no_budget_admits_what_is_not_private(path: Path, mechanism: Mechanism) -> None:
    with (
        closing(Ledger(path, "people", budget=(1e6, DELTA))) as ledger,
        pytest.raises(PrivacyError, match="inf when all"),
    ):
        ledger.open_run("a", mechanism)


def test_a_budget_is_kept_and_must_agree(path: Path) -> None:
    Ledger(path, "people", budget=(1.0, DELTA)).close()
    Ledger(path, "people", budget=(1, DELTA)).close()
    Ledger(path, "others", budget=(2.0, DELTA)).close()
    for other in ((2.0, DELTA), (0.5, DELTA), (1.0, 1e-6)):
        with pytest.raises(PrivacyError, match=r"keeps epsilon = 1 at delta = 1e-05"):
            Ledger(path, "people", budget=other)
    with (
        closing(Ledger(path, "people")) as ledger,
        pytest.raises(PrivacyError, match="1 is allowed"),
    ):
        ledger.open_run("a", Mechanism(0.5, 0.5, 1000))


def test_a_budget_may_come_later_if_it_is_not_yet_exceeded(path: Path) -> None:
    with closing(Ledger(path, "people")) as ledger:
        ledger.open_run("a", PLAN)
        with pytest.raises(PrivacyError, match="the budget does not fit"):
            Ledger(path, "people", budget=(COST / 2, DELTA))
        Ledger(path, "people", budget=(COST, DELTA)).close()
        with pytest.raises(PrivacyError, match="does not fit"):
            ledger.open_run("b", PLAN)  # a ledger that was open before knows it too


@pytest.mark.parametrize(
    "budget",
    [
        (0.0, DELTA),
        (-1.0, DELTA),
        (math.inf, DELTA),
        (math.nan, DELTA),
        (1.0, 0.0),
        (1.0, 1.0),
        1.0,
        (1.0,),
        "ab",
    ],
)
def test_a_wrong_budget_is_refused(path: Path, budget: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="budget="):
        Ledger(path, "people", budget=budget)


def test_a_run_that_slips_in_during_the_analysis_is_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ((COST + TWICE) / 2, DELTA)
    with (
        closing(Ledger(path, "people", budget=budget)) as one,
        closing(Ledger(path, "people")) as two,
    ):
        analyse, slipped = module.epsilon_spent, []

        def meanwhile(*arguments: object) -> float:
            if not slipped:
                slipped.append(True)
                two.open_run("b", PLAN)
            return analyse(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "epsilon_spent", meanwhile)
        with pytest.raises(PrivacyError, match="does not fit"):
            one.open_run("a", PLAN)
        assert [run.run_id for run in one.runs()] == ["b"]


# Several processes

CHARGE_OWN_RUN = """
import sys
from dpkfc.accounting.ledger import Ledger, Mechanism
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger(sys.argv[1], "people")
ledger.open_run(sys.argv[2], Mechanism(.1, 1., 1000))
for step in range(1, int(sys.argv[3]) + 1):
    ledger.charge(sys.argv[2], step)
"""


def test_processes_charge_their_runs_at_the_same_time(path: Path) -> None:
    processes = [start(CHARGE_OWN_RUN, path, f"run {i}", 100 + i) for i in range(3)]
    run_together(processes)  # all at once, so the file itself is made by all at once
    assert {run.run_id: run.charged for run in read(path)} == {
        f"run {i}": 100 + i for i in range(3)
    }


SHARE_A_RUN = """
import sys
from dpkfc.accounting.ledger import Ledger, Mechanism, PrivacyError
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger(sys.argv[1], "people")
released = 0
while True:
    step = ledger.open_run("shared", Mechanism(.1, 1., 200))
    if step == 200:
        break
    try:
        while step < 200:
            ledger.charge("shared", step + 1)
            step, released = step + 1, released + 1
    except PrivacyError as error:
        assert "another process" in str(error) or "paid for" in str(error), error
print(released)
"""


def test_two_processes_never_release_more_than_one_step_for_one_charge(path: Path) -> None:
    processes = [start(SHARE_A_RUN, path) for _ in range(2)]
    assert sum(map(int, run_together(processes))) == 200
    assert read(path)[0].charged == 200


def test_of_two_holders_of_one_run_the_late_one_is_refused(path: Path) -> None:
    with closing(Ledger(path, "people")) as one, closing(Ledger(path, "people")) as two:
        one.open_run("a", PLAN)
        one.charge("a", 1)
        assert two.open_run("a", PLAN) == 1
        one.charge("a", 2)  # opening it elsewhere takes nothing away
        for steps in (2, 3, 50):
            with pytest.raises(PrivacyError, match="another process runs under the same run_id"):
                two.charge("a", steps)
        assert two.open_run("a", PLAN) == 2
        two.charge("a", 3)
        with pytest.raises(PrivacyError, match="another process"):
            one.charge("a", 3)
        assert read(path)[0].charged == 3


ADMIT = """
import sys
from dpkfc.accounting.ledger import Ledger, Mechanism, PrivacyError
ledger = Ledger(sys.argv[1], "people")
print("ready", flush=True)
sys.stdin.readline()
try:
    ledger.open_run(sys.argv[2], Mechanism(1., 16., 100))
    print("admitted")
except PrivacyError as error:
    print("does not fit" in str(error))
"""


def test_of_processes_that_ask_at_once_only_what_fits_is_admitted(path: Path) -> None:
    Ledger(path, "people", budget=((COST + TWICE) / 2, DELTA)).close()
    processes = [start(ADMIT, path, f"run {i}") for i in range(3)]
    assert sorted(text.strip() for text in run_together(processes)) == ["True", "True", "admitted"]
    assert len(read(path)) == 1


def test_threads_share_a_ledger(ledger: Ledger) -> None:
    def work(name: str) -> None:
        ledger.open_run(name, PLAN)
        for step in range(1, 51):
            ledger.charge(name, step)

    threads = [threading.Thread(target=work, args=(f"run {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.charged for run in ledger.runs()] == [50] * 4


def test_a_charge_that_was_interrupted_may_be_repeated(ledger: Ledger) -> None:
    """Ctrl-C between the commit and the return: the step is on disk and was not released."""
    ledger.open_run("a", PLAN)
    ledger.charge("a", 4)
    before = dict(ledger._last_seen)
    ledger.charge("a", 5)
    ledger._last_seen.update(before)  # as an interrupt there leaves it
    ledger.charge("a", 5)
    ledger.charge("a", 6)
    assert ledger.charged("a") == 6


def test_an_interrupt_inside_the_transaction_leaves_no_trace(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Ledger(path, "people")) as ledger, closing(Ledger(path, "people")) as other:
        ledger.open_run("a", PLAN)
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_writer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ledger.charge("a", 1)
        other.open_run("b", PLAN)  # the file is not left locked
        ledger.charge("a", 1)


# Forks

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

FORK = """
import os, sys
from dpkfc.accounting.ledger import Ledger, Mechanism, PrivacyError, read
path = sys.argv[1]
ledger = Ledger(path, "people")
ledger.open_run("a", Mechanism(.1, 1., 100))
ledger.charge("a", 1)

def in_child(act):
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, act

def child_charges():
    ledger.charge("a", 2)
    return ledger.charged("a") == 2

def child_opens_its_own():
    own = Ledger(path, "people")
    own.open_run("b", Mechanism(.1, 1., 100))
    own.charge("b", 9)
    own.close()
    return True

def child_leaves():
    ledger.charged("a")
    ledger.close()
    return True

in_child(child_opens_its_own)
in_child(child_leaves)
in_child(lambda: True)
in_child(child_charges)
try:
    ledger.charge("a", 2)
except PrivacyError as error:
    assert "another process" in str(error)
else:
    raise AssertionError("two releases for one charge")
assert ledger.open_run("a", Mechanism(.1, 1., 100)) == 2
ledger.charge("a", 3)
print([run.charged for run in read(path)])
"""


@forks
def test_parent_and_child_of_a_fork_each_have_a_sound_ledger(path: Path) -> None:
    assert finish(start(FORK, path)).strip() == "[3, 9]"
    assert [run.charged for run in read(path)] == [3, 9]


FORK_LOSES_NOTHING = """
import os, sys, time
from dpkfc.accounting.ledger import Ledger, Mechanism
ledger = Ledger(sys.argv[1], "people")
ledger.open_run("parent", Mechanism(.1, 1., 100))
ledger.charge("parent", 1)
ready, go = os.pipe(), os.pipe()
if not os.fork():
    ledger.open_run("child", Mechanism(.1, 1., 100))
    ledger.charge("child", 1)
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    ledger.charge("child", 2)  # the parent, the only other user, has closed the file meanwhile
    os.kill(os.getpid(), 9)
os.read(ready[0], 1)
ledger.charge("parent", 2)
ledger.close()
os.write(go[1], b"x")
os.wait()
"""


@forks
def test_a_child_charges_durably_after_its_parent_has_closed(path: Path) -> None:
    finish(start(FORK_LOSES_NOTHING, path))
    assert {run.run_id: run.charged for run in read(path)} == {"parent": 2, "child": 2}


def test_a_connection_carried_across_an_unseen_fork_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.open_run("a", PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(PrivacyError, match="was carried from process"):
            ledger.charge("a", 1)
        ledger._file.disconnect()  # must not touch the parent's connection
    ledger.charge("a", 1)


# The file


def test_the_file_is_kept_as_promised(ledger: Ledger, path: Path) -> None:
    assert ledger._file.connection is not None
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA user_version").fetchone() == (ledger_file.VERSION,)
    assert ledger._file.connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert ledger._file.connection.execute("PRAGMA busy_timeout").fetchone() == (
        1000 * ledger_file.PATIENCE,
    )


@pytest.mark.parametrize("change", ["charged = 4", "closed = 0, charged = 9", "mechanism = '{}'"])
def test_the_file_itself_refuses_to_forget(ledger: Ledger, path: Path, change: str) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 5)
    ledger.close_run("a")
    with (
        closing(sqlite3.connect(path)) as db,
        pytest.raises(sqlite3.IntegrityError, match="stays charged"),
    ):
        db.execute(f"UPDATE runs SET {change}")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM runs",
        "DELETE FROM budgets",
        "UPDATE runs SET dataset = 'others'",
        "UPDATE runs SET run_id = 'z'",
        "UPDATE runs SET delta = 0.5",
        "UPDATE runs SET delta = NULL",
        "UPDATE runs SET started = '1999'",
        "UPDATE runs SET unchecked = ''",
        "UPDATE runs SET unchecked = 'seed\n'",
        "UPDATE runs SET charged = 'many'",
        "UPDATE runs SET charged = NULL",
        "UPDATE runs SET closed = 2",
        "UPDATE runs SET rowid = 7 WHERE run_id = 'a'",
        "UPDATE OR REPLACE runs SET rowid = 2 WHERE rowid = 1",
        "UPDATE OR REPLACE runs SET run_id = 'b' WHERE run_id = 'a'",
        "UPDATE budgets SET epsilon = 100",
        "UPDATE budgets SET delta = 0.1",
        "UPDATE budgets SET dataset = 'others'",
        "INSERT OR REPLACE INTO runs (dataset, run_id, mechanism, started) "
        "VALUES ('people', 'a', '{}', '')",
        "INSERT OR REPLACE INTO runs (rowid, dataset, run_id, mechanism, started) "
        "VALUES (1, 'x', 'y', '{}', '')",
        "REPLACE INTO budgets VALUES ('people', 100, 0.1)",
        "INSERT OR REPLACE INTO budgets (rowid, dataset, epsilon, delta) VALUES (1, 'x', 1, 0.1)",
        "INSERT INTO runs (dataset, run_id, mechanism, started) VALUES ('people', 'a', '{}', '') "
        "ON CONFLICT DO UPDATE SET charged = 0",
    ],
)
def test_rows_are_neither_deleted_nor_renamed_nor_altered(path: Path, statement: str) -> None:
    with closing(Ledger(path, "people", budget=(50.0, DELTA))) as ledger:
        ledger.open_run("a", PLAN, delta=1e-6, unchecked=["loss"])
        ledger.open_run("b", PLAN, delta=1e-6, unchecked=["loss"])
        ledger.charge("a", 5)
    before = read(path)
    with closing(sqlite3.connect(path)) as db:
        with pytest.raises(sqlite3.IntegrityError), db:
            db.execute(statement)
        assert db.execute("SELECT * FROM budgets").fetchall() == [("people", 50.0, DELTA)]
    assert read(path) == before


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "what?.db", "#1.db", ":memory:", "ü.db"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    with closing(Ledger(tmp_path / name, "people")) as ledger:
        ledger.open_run("a", PLAN)
    assert [run.run_id for run in read(str(tmp_path / name))] == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Ledger("ledger.db", "people")) as ledger:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        ledger._file.disconnect()
        ledger.open_run("a", PLAN)
    assert len(read(tmp_path / "ledger.db")) == 1


def test_an_empty_file_becomes_a_ledger(path: Path) -> None:
    path.touch()
    with pytest.raises(PrivacyError, match="is empty"):
        read(path)
    Ledger(path, "people").close()
    assert read(path) == []


@pytest.mark.parametrize("use", [read, lambda path: Ledger(path, "people")])
@pytest.mark.parametrize("content", [b"not a database, but long enough to be looked at" * 50, b"x"])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(
    path: Path, use: object, content: bytes
) -> None:
    path.write_bytes(content)
    with pytest.raises(PrivacyError, match="not a ledger"):
        use(path)  # type: ignore[operator]
    assert path.read_bytes() == content


@pytest.mark.parametrize("use", [read, lambda path: Ledger(path, "people")])
@pytest.mark.parametrize(
    "statement", ["CREATE TABLE runs (x)", "PRAGMA user_version = 1", "PRAGMA application_id = 7"]
)
def test_someone_elses_database_is_refused_and_left_alone(
    path: Path, use: object, statement: str
) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
    before = path.read_bytes()
    with pytest.raises(PrivacyError, match="not a ledger"):
        use(path)  # type: ignore[operator]
    assert path.read_bytes() == before


@pytest.mark.parametrize("use", [read, lambda path: Ledger(path, "people")])
def test_a_ledger_of_another_version_is_refused(path: Path, use: object) -> None:
    Ledger(path, "people").close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(PrivacyError, match="schema version 99"):
        use(path)  # type: ignore[operator]


@pytest.mark.parametrize(
    "fields", [{"mechanism": "tree"}, {**PLAN.to_json(), "bands": 4}, [], "text"]
)
def test_a_mechanism_of_a_newer_version_is_not_skipped(path: Path, fields: object) -> None:
    Ledger(path, "people").close()
    with closing(sqlite3.connect(path)) as db, db:
        row = ("people", "a", json.dumps(fields), "2025-01-01T00:00:00+00:00")
        db.execute(
            "INSERT INTO runs (dataset, run_id, mechanism, started) VALUES (?, ?, ?, ?)", row
        )
    with pytest.raises(PrivacyError, match="newer"):
        read(path)


def test_a_missing_ledger_is_not_made_by_reading(tmp_path: Path) -> None:
    for missing in (tmp_path / "ledger.db", tmp_path / "folder" / "ledger.db", tmp_path):
        with pytest.raises(FileNotFoundError, match="no ledger at"):
            read(missing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/ledger.db", ".", "file/ledger.db"])
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrivacyError, match="existing folder"):
        Ledger(tmp_path / place, "people")


def test_a_ledger_that_vanished_is_not_begun_anew(ledger: Ledger, path: Path) -> None:
    ledger.open_run("a", PLAN)
    ledger._file.disconnect()
    path.unlink()
    with pytest.raises(PrivacyError, match="was removed"):
        ledger.charge("a", 1)
    assert not path.exists()


USES: dict[str, Callable[[Ledger], object]] = {
    "charge": lambda ledger: ledger.charge("a", 2),
    "charged": lambda ledger: ledger.charged("a"),
    "open_run": lambda ledger: ledger.open_run("b", PLAN),
    "close_run": lambda ledger: ledger.close_run("a"),
    "runs": lambda ledger: ledger.runs(),
    "epsilon": lambda ledger: ledger.epsilon(DELTA),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("which", ["", "-wal"])
def test_a_file_removed_under_a_live_run_is_noticed(
    ledger: Ledger, path: Path, which: str, use: str
) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 1)
    Path(f"{path}{which}").rename(f"{path}.moved")
    with pytest.raises(
        PrivacyError, match=r"was removed while .* Restore the file .* count what ran since then as"
    ):
        USES[use](ledger)
    Path(f"{path}.moved").rename(f"{path}{which}")
    assert [(run.run_id, run.charged, run.closed) for run in ledger.runs()] == [("a", 1, False)]
    ledger.charge("a", 2)  # the very file is back


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("connected", [True, False])
def test_a_file_replaced_under_a_live_run_is_noticed(
    ledger: Ledger, path: Path, connected: bool, use: str
) -> None:
    ledger.open_run("a", PLAN)
    ledger.charge("a", 1)
    with closing(Ledger(f"{path}.other", "people")) as other:
        other.open_run("a", PLAN)
        other.charge("a", 1)
    if not connected:  # as before a fork
        ledger._file.disconnect()
    os.replace(f"{path}.other", path)
    with pytest.raises(PrivacyError, match="was replaced by another file"):
        USES[use](ledger)


def test_a_file_that_goes_in_the_middle_of_a_charge_is_noticed(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.open_run("a", PLAN)
    find = Ledger._writer

    def meanwhile(*arguments: Any) -> str:
        path.unlink()
        return find(*arguments)

    monkeypatch.setattr(Ledger, "_writer", meanwhile)
    with pytest.raises(PrivacyError, match="was removed"):
        ledger.charge("a", 1)


def test_other_users_of_the_file_are_no_alarm(path: Path) -> None:
    """They connect and disconnect, and SQLite rewrites its log."""
    with closing(Ledger(path, "people")) as ledger:
        ledger.open_run("a", PLAN)
        for step in range(1, 6):
            with closing(Ledger(path, "people")) as other:
                other.open_run(f"run {step}", PLAN)
            with closing(sqlite3.connect(path)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            ledger.charge("a", step)
            if step == 3:
                ledger._file.disconnect()
    assert read(path)[0].charged == 5


# What a run declares


def test_a_run_keeps_its_delta_and_what_nobody_checked(ledger: Ledger, path: Path) -> None:
    ledger.open_run("a", PLAN, delta=np.float64(1e-6), unchecked=["loss", "seed", "loss"])
    ledger.open_run("b", PLAN)
    assert [(run.delta, run.unchecked) for run in ledger.runs()] == [
        (1e-6, ("loss", "seed")),
        (None, ()),
    ]
    assert ledger.runs() == read(path)


def test_a_run_that_is_resumed_keeps_its_delta(ledger: Ledger) -> None:
    ledger.open_run("a", PLAN, delta=1e-6)
    ledger.open_run("b", PLAN)
    ledger.open_run("a", PLAN, delta=1e-6)
    ledger.open_run("a", PLAN)
    for name in ("a", "b"):
        with pytest.raises(PrivacyError, match=r"was opened with delta=.*, not 1e-05"):
            ledger.open_run(name, PLAN, delta=1e-5)
    assert [run.delta for run in ledger.runs()] == [1e-6, None]


def test_notes_of_a_run_that_is_resumed_only_grow(ledger: Ledger) -> None:
    for notes, kept in (
        (["seed"], ("seed",)),
        ([], ("seed",)),
        (["loss", "seed"], ("seed", "loss")),
        (["loss"], ("seed", "loss")),
    ):
        ledger.open_run("a", PLAN, unchecked=notes)
        assert ledger.runs()[0].unchecked == kept


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, "x", [1]])
def test_a_wrong_delta_is_refused(ledger: Ledger, delta: float) -> None:
    with pytest.raises(ValueError, match="delta="):
        ledger.open_run("a", PLAN, delta=delta)
    assert ledger.runs() == []


@pytest.mark.parametrize(
    ("unchecked", "error"),
    [("loss", TypeError), (["a\nb"], ValueError), ([""], ValueError), ([3], TypeError)],
)
def test_wrong_notes_are_refused(ledger: Ledger, unchecked: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="unchecked="):
        ledger.open_run("a", PLAN, unchecked=unchecked)
    assert ledger.runs() == []


# Similar names


@pytest.mark.parametrize(
    "name", ["People", "peo ple", "p-e-o-p-l-e", "PEOPLE!", "peoples", "peple"]
)
def test_a_new_name_similar_to_a_known_one_is_warned_of_once(path: Path, name: str) -> None:
    with closing(Ledger(path, "people")) as known, closing(Ledger(path, name)) as new:
        known.open_run("a", PLAN)
        with pytest.warns(
            UserWarning, match=r"which knows 'people': runs under different names are not composed"
        ):
            new.open_run("a", PLAN)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new.open_run("a", PLAN)
            new.open_run("b", PLAN)
            known.open_run("b", PLAN)


def test_a_name_known_by_its_budget_alone_counts_too(path: Path) -> None:
    Ledger(path, "people", budget=(1.0, DELTA)).close()
    with closing(Ledger(path, "People")) as new, pytest.warns(UserWarning, match="knows 'people'"):
        new.open_run("a", PLAN)


@pytest.mark.parametrize("name", ["pupils", "digits", "x", "...", "人々"])
def test_other_names_are_not_warned_of(path: Path, name: str) -> None:
    with closing(Ledger(path, "people")) as known, closing(Ledger(path, name)) as new:
        known.open_run("a", PLAN)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new.open_run("a", PLAN)


def test_where_warnings_are_errors_nothing_is_entered(path: Path) -> None:
    with closing(Ledger(path, "people")) as known, closing(Ledger(path, "People")) as new:
        known.open_run("a", PLAN)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning):
                new.open_run("a", PLAN)
        assert new.runs() == []
        known.charge("a", 1)  # the file is not left locked


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to"
)
def test_a_folder_that_takes_no_file_is_refused() -> None:
    with pytest.raises(PrivacyError, match="may write to both"):
        Ledger("/proc/ledger.db", "people")


AS_NOBODY = """
import os, sys
from dpkfc.accounting.ledger import Ledger, PrivacyError, read
if os.geteuid() == 0:
    os.setuid(65534)
print([run.charged for run in read(sys.argv[1])])
try:
    Ledger(sys.argv[1], "people").charged("a")
    Ledger(sys.argv[1], "people").open_run("b", read(sys.argv[1])[0].mechanism)
except PrivacyError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs file permissions")
def test_a_ledger_in_a_read_only_folder_is_read_and_not_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which is closed to other users
        path = Path(folder) / "ledger.db"
        with closing(Ledger(path, "people")) as ledger:
            ledger.open_run("a", PLAN)
            ledger.charge("a", 3)
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        try:
            charged, message = finish(start(AS_NOBODY, path)).splitlines()
        finally:
            Path(folder).chmod(0o755)
    assert charged == "[3]"
    assert "check that" in message
    assert "may write to" in message


def test_a_locked_file_is_waited_for_and_then_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.2)
    with (
        closing(Ledger(path, "people")) as ledger,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        ledger.open_run("a", PLAN)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PrivacyError, match="another process holds it"):
            ledger.charge("a", 1)
        assert ledger.charged("a") == 0  # reading goes on
        assert read(path)[0].charged == 0
        other.execute("ROLLBACK")
        ledger.charge("a", 1)


def test_a_file_locked_as_a_whole_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(PrivacyError, match="another process holds it"):
            Ledger(path, "people")


def test_reading_sees_what_a_running_process_has_charged(ledger: Ledger, path: Path) -> None:
    ledger.open_run("a", PLAN)
    for step in range(1, 6):
        ledger.charge("a", step)
        assert read(path)[0].charged == step
