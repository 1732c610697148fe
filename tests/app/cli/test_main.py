"""The command line: `dpkfc ledger` and `dpkfc plan`, and the help of every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import dpkfc
from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger, LedgerRun
from dpkfc.accounting.rounding import round_up
from dpkfc.app.cli.main import COMMANDS, app
from dpkfc.app.reports.ledger_table import ledger_tables

PLAN = Mechanism(1.0, 16.0, 100)
STARTED = "2025-01-02T03:04:05+00:00"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with closing(Ledger(path, "people")) as people, closing(Ledger(path, "houses")) as houses:
        people.open_run("first", PLAN)
        people.charge("first", 40)
        people.close_run("first")
        people.open_run("second", PLAN)
        people.charge("second", 2)
        houses.open_run("third", Mechanism(0.25, 0.0, 7))
        houses.charge("third", 1)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def shown(runs: list[LedgerRun], delta: float | None, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(ledger_tables(runs, delta))
    return capture.get()


def row(text: str, start: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {start}  "))
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize(("options", "delta"), [((), 1e-5), (("--delta", "1e-6"), 1e-6)])
def test_every_run_and_the_total_are_shown(
    path: Path, options: tuple[str, ...], delta: float
) -> None:
    code, out, _ = run("ledger", path, *options)
    assert code == 0
    first, second = PLAN.after(40), PLAN.after(2)
    cells = row(out, "first")
    assert cells[2:] == ["40/100", "1", "16", round_up(epsilon_spent([first], delta)), "closed"]
    assert row(out, "second")[2:] == [
        "2/100",
        "1",
        "16",
        round_up(epsilon_spent([second], delta)),
        "open",
    ]
    assert row(out, "third")[2:] == ["1/7", "0.25", "0", "inf", "open"]
    total = round_up(epsilon_spent([first, second], delta))
    assert f"all runs composed: epsilon = {total} at delta = {delta:g}, add-or-remove-one" in out
    assert f"all runs composed: epsilon = inf at delta = {delta:g}, add-or-remove-one" in out
    assert out.index("people") < out.index("houses")
    assert ("assumed" in out) == (not options)


def test_a_ledger_without_runs_says_so(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.db", "people").close()
    code, out, _ = run("ledger", tmp_path / "ledger.db")
    assert (code, out.strip()) == (0, "the ledger holds no runs yet")


def test_showing_a_ledger_leaves_nothing_behind(path: Path) -> None:
    before = path.read_bytes()
    run("ledger", path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "no ledger at"),
        (b"something else entirely " * 50, (), "not a ledger"),
        ("ledger", ("--delta", "0"), "delta=0.0"),
        ("ledger", ("--delta", "2"), "delta=2.0"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(
    path: Path, content: object, options: tuple[str, ...], message: str
) -> None:
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    code, out, err = run("ledger", path, *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("dpkfc: ")
    assert message in err


def test_an_error_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, _, err = run("ledger", "/nowhere")
    assert code == 2
    assert err.startswith("\x1b[31mdpkfc: no ledger at")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("ledger", "--help")])
def test_help_has_an_example(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert "dpkfc ledger privacy.db" in result.output


def test_python_m_dpkfc_is_the_same_program(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(dpkfc.__path__[0]).parent)}
    command = [sys.executable, "-m", "dpkfc", "ledger"]
    done = subprocess.run(
        [*command, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    assert "all runs composed" in done.stdout
    failed = subprocess.run(
        [*command, "/nowhere"], env=environment, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "[link=x]", ":smile:"])
def test_names_are_shown_as_they_are(name: str) -> None:
    text = shown([LedgerRun(name, name, PLAN, 0, STARTED, False)], None)
    assert row(text, name)[:2] == [name, "2025-01-02 03:04"]
    assert text.startswith(f"{name} ") and "at delta = 1e-05" in text


def test_a_narrow_terminal_still_shows_the_total_on_one_line() -> None:
    text = shown(
        [LedgerRun("a long name for a run" * 3, "people", PLAN, 3, STARTED, False)], 1e-5, width=80
    )
    assert "add-or-remove-one" in next(
        line for line in text.splitlines() if line.startswith("all runs composed")
    )


def test_a_correlated_run_shows_how_often_a_record_may_join() -> None:
    mechanism = Mechanism(0.25, 1.0, 40, True, 4)
    runs = [LedgerRun("r", "people", mechanism, 40, STARTED, False)]
    assert "every 4" in shown(
        runs, 1e-5
    ) and f"{round_up(epsilon_spent([mechanism], 1e-5))}" in shown(runs, 1e-5)


def test_plan_compares_noises_and_states_the_privacy_of_the_best() -> None:
    options = ("--batch-size", 50, "--epochs", 2, "--epsilon", 6, "--max-buffers", 3)
    code, text, _ = run("plan", 1000, *options)
    assert code == 0
    rows = [
        line for line in text.splitlines() if re.search(r"(Poisson|in turn) .* \d\.\d{3}\s*$", line)
    ]
    errors = [float(line.split()[-1]) for line in rows]
    (chosen,) = [line for line in rows if line.strip().startswith(">")]
    assert (
        len(rows) == 10
        and errors[0] == 1.0
        and float(chosen.split()[-1]) <= 1.01 * min(errors) < 0.95
    )
    assert "anticorrelated" in chosen  # within 1 % of the best, and without buffers
    assert "6 after all 40 steps" in text and "add or remove one record" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "0 records"),
        ((100,), "batch_size=256 exceeds"),
        ((1000, "--momentum", 1), "momentum=1.0"),
        ((1000, "--epsilon", -1), "epsilon=-1.0"),
        ((1000, "--clip", 0), "clip=0.0"),
        ((1000, "--max-buffers", -1), "max_buffers=-1"),
        ((1000, "--weight-decay", 100), "weight_decay=100.0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments: tuple[object, ...], message: str) -> None:
    code, _, errors = run("plan", *arguments)
    assert code == 2 and message in errors and len(errors.splitlines()) == 1


def test_a_device_that_is_not_there_is_refused() -> None:
    code, _, errors = run("demo", "--device", "cuda:7")
    assert code == 2 and "--device cuda:7 cannot be used" in errors and "choose from cpu" in errors


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_every_command_has_help_with_examples(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and "Examples" in out and f"dpkfc {command}" in out


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("train", ["Options", "Reading the data", "Training", "Privacy", "Computing"]),
        ("tune", ["Options", "Tuning", "Reading the data", "Training", "Privacy", "Computing"]),
        ("plan", ["Options", "Optimizer"]),
        ("reproduce", ["Options", "Computing"]),
    ],
)
def test_common_options_come_first(command: str, panels: list[str]) -> None:
    _, out, _ = run(command, "--help")
    assert re.findall(r"─ ([A-Z][\w ]+) ─", out)[1:] == panels  # after "Arguments"
    assert out.index("--device" if "Computing" in panels else "--lr") > out.index("--help")


def test_a_paragraph_of_help_is_broken_by_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run("train", "--help")
    assert any(len(line.rstrip()) > 150 for line in out.split("Examples")[0].splitlines())
