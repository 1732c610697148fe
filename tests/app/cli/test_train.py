"""`dpkfc train`, `dpkfc data` and `dpkfc doctor` on tiny files."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import dpkfc
from dpkfc.accounting.ledger import read
from dpkfc.app.cli.main import app
from dpkfc.app.workflow import doctor, release, run_folder

SCHEMA = '{"age": [0, 100], "sex": ["f", "m"], "ill": ["no", "yes"]}'
QUICK = (
    "--epsilon",
    3,
    "--delta",
    "1e-3",
    "--epochs",
    1,
    "--batch-size",
    20,
    "--noise",
    "independent",
    "--test",
    0,
)
LEDGER = ("--ledger", "privacy.db")
EPSILON = cache(dpkfc.Plan.epsilon)
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a table and its schema."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(dpkfc.Plan, "epsilon", EPSILON)  # the same few plans again and again
    monkeypatch.setattr(release, "draw_figures", lambda *arguments: None)
    monkeypatch.delenv("DPKFC_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{n},{n % 90},{'fm'[n % 2]},{('no', 'yes')[n % 90 > 45]},note {n % 7}" for n in range(60)
    ]
    Path("people.csv").write_text("\n".join(["id,age,sex,ill,said", *rows]))
    Path("schema.json").write_text(SCHEMA)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def images(folder: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(RNG.integers(0, 256, (9, 9), dtype=np.uint8)).save(
                folder / name / f"{number}.png"
            )


def test_a_table_from_draft_to_model() -> None:
    looked = run("data", "people.csv")
    assert (
        looked.exit_code == 0
        and "60 records" in looked.stdout
        and "id, age, sex, ill, said" in looked.stdout
    )
    drafted = run("data", "people.csv", "--target", "ill", "--suggest-schema", "draft.json")
    assert drafted.exit_code == 0 and "No epsilon covers that" in drafted.stdout
    assert json.loads(Path("draft.json").read_text())["age"] == [0, 60]
    again = run("data", "people.csv", "--target", "ill", "--suggest-schema", "draft.json")
    assert again.exit_code == 2 and "may have edited it" in again.stderr
    seen = run("data", "people.csv", "--target", "ill", "--schema", "schema.json")
    assert "for your eyes only: no" in seen.stdout and "treated as public" in seen.stdout
    trained = run(
        "train",
        "people.csv",
        "--target",
        "ill",
        "--schema",
        "schema.json",
        *QUICK[:-1],
        0.25,
        "--ledger",
        "privacy.db",
    )
    assert trained.exit_code == 0, trained.output
    assert (
        "test accuracy" in trained.stdout
        and "epsilon does not protect the test records" in trained.stdout
    )
    assert "add or remove one record" in trained.stdout and "training loss" not in trained.stdout
    assert Path("runs/people/model.safetensors").exists()
    assert "people" in run("ledger", "privacy.db").stdout
    config = json.loads(Path("runs/people/config.json").read_text())
    assert (
        config["source"]["schema"] == json.loads(SCHEMA)
        and config["settings"]["dataset"] == "people"
    )


def test_categories_that_match_nothing_are_shown() -> None:
    Path("schema.json").write_text('{"age": [0, 50], "sex": ["F", "M"], "ill": ["no", "yes"]}')
    seen = run("data", "people.csv", "--target", "ill", "--schema", "schema.json")
    lines = [line.strip("│| ").replace("│", " ").split() for line in seen.stdout.splitlines()]
    assert ["age", "0", "0", "9"] in lines and ["sex", "60", "0", "0"] in lines
    assert (
        "sex: no cell is a category of the schema" in seen.stdout
        and "for your eyes only" in seen.stdout
    )


def test_text_from_a_column() -> None:
    options = ("--text", "said", "--target", "ill", "--classes", "no,yes", "--text-features", 32)
    done = run("train", "people.csv", *options, *QUICK)
    assert done.exit_code == 0 and "linear, 66 parameters" in done.stdout


@pytest.mark.filterwarnings("default")
def test_a_large_delta_is_said_once_in_one_line() -> None:
    options = ("--target", "ill", "--schema", "schema.json", *QUICK, "--delta", 0.2)
    done = run("train", "people.csv", *options)
    assert done.exit_code == 0 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("dpkfc: delta=0.2") and ".py" not in done.stderr


def test_a_folder_of_images() -> None:
    pytest.importorskip("PIL")
    images(Path("photos"))
    done = run("train", "photos", "--size", 6, "--grey", *QUICK, "--out", "mine")
    assert done.exit_code == 0 and "cnn, " in done.stdout and Path("mine/result.json").exists()
    assert "test accuracy" not in done.stdout


def test_arrays_and_a_model_of_ones_own() -> None:
    np.savez("a.npz", x=RNG.random((60, 5)), y=np.arange(60) % 3)
    Path("net.py").write_text(
        "import torch\n\ndef net(shape, classes):\n    return torch.nn.Linear(*shape, classes)\n"
    )
    done = run(
        "train",
        "a.npz",
        "--range",
        "0,1",
        "--model",
        "net.py:net",
        "--method",
        "sgd",
        "--lr",
        0.1,
        *QUICK,
    )
    assert done.exit_code == 0 and "net.py:net, 18 parameters, identity (DP-SGD)" in done.stdout


def test_ctrl_c_and_the_same_command_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pressed() -> Iterator[Callable[[], bool]]:
        with run_folder.stoppable() as stopping:
            signal.raise_signal(signal.SIGINT)
            yield stopping

    command = (
        "train",
        "people.csv",
        "--target",
        "ill",
        "--schema",
        "schema.json",
        *QUICK,
        "--seed",
        1,
    )
    with monkeypatch.context() as patch:
        patch.setattr("dpkfc.app.workflow.fit.stoppable", pressed)
        stopped = run(*command)
    assert stopped.exit_code == 130 and "The same command resumes" in stopped.stdout
    other = run(*command[:-1], 2)
    assert other.exit_code == 2 and "another seed" in other.stderr
    done = run(*command)
    assert done.exit_code == 0 and "resumed after step 1 of 3" in done.stdout
    assert "this run is finished" in run(*command).stdout


def test_ctrl_c_before_the_first_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpkfc.app.workflow.fit.start_run", lambda *arguments: signal.raise_signal(signal.SIGINT)
    )
    stopped = run("train", "people.csv", "--target", "ill", "--schema", "schema.json", *QUICK)
    assert stopped.exit_code == 130 and "nothing was begun or spent" in stopped.stdout
    assert not Path("runs").exists()


def test_ctrl_c_after_the_last_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*arguments: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    command = (
        "train",
        "people.csv",
        "--target",
        "ill",
        "--schema",
        "schema.json",
        *QUICK[:-1],
        0.25,
    )
    with monkeypatch.context() as patch:
        patch.setattr("dpkfc.app.workflow.release.count_correct", pressed)
        stopped = run(*command, "--ledger", "privacy.db")
    assert stopped.exit_code == 130 and "The same command resumes" in stopped.stdout
    done = run(*command, "--ledger", "privacy.db")
    assert done.exit_code == 0 and "resumed after step 3 of 3" in done.stdout
    assert json.loads(Path("runs/people/result.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.csv", *QUICK), "there is no nowhere.csv"),
        (("train", "people.csv", *QUICK), "Give --target"),
        (("train", "people.csv", "--target", "ill", *QUICK), "--suggest-schema"),
        (
            ("train", "people.csv", "--target", "ill", "--schema", "none.json", *QUICK),
            "schema none.json cannot be read",
        ),
        (
            ("train", "people.csv", "--target", "ill", "--schema", "people.csv", *QUICK),
            "is not JSON",
        ),
        (
            ("train", "people.csv", "--target", "no", "--text", "said", "--classes", "a,b", *QUICK),
            "no column 'no'",
        ),
        (
            (
                "train",
                "people.csv",
                "--target",
                "ill",
                "--text",
                "said",
                "--classes",
                "a,b",
                *QUICK,
            ),
            "is not one of",
        ),
        (
            (
                "train",
                "people.csv",
                "--target",
                "ill",
                "--schema",
                "schema.json",
                "--model",
                "lstm",
                *QUICK,
            ),
            "lstm",
        ),
        (
            (
                "train",
                "people.csv",
                "--target",
                "ill",
                "--schema",
                "schema.json",
                *QUICK,
                "--batch-size",
                2,
            ),
            "size 2",
        ),
        (
            (
                "train",
                "people.csv",
                "--target",
                "ill",
                "--schema",
                "schema.json",
                *QUICK,
                "--range",
                "1",
            ),
            "--range 1",
        ),
        (
            ("train", "people.csv", "--target", "ill", "--classes", 10**12, *QUICK),
            "--classes 1000000000000: a number",
        ),
        (("data", "people.csv", "--suggest-schema", "draft.json"), "needs --target"),
        (("data", "people.csv", "other.csv"), "give one source, or write dpkfc data fetch NAME"),
        (("data", "fetch"), "a name of mnist, fashion-mnist"),
        (("data", "fetch", "mnist"), "no folder to download to"),
        (("data", "fetch", "letters", "--data-dir", "."), "'letters' cannot be fetched"),
        (("train", "mnist", *QUICK, "--data-dir", "."), "Or fetch it: dpkfc data fetch mnist"),
        (("train", "people.csv", *QUICK, "--device", "toaster"), "--device toaster cannot be used"),
        (("train", "people.csv", *QUICK, "--lr", 1, "--rho", 1), "--lr and --rho"),
        (("train", "people.csv", *QUICK, "--seed", 10**23), "--seed 100000000000000000000000"),
        (
            ("train", "people.csv", *QUICK, "--budget", 8),
            "kept in a ledger: give --ledger FILE too",
        ),
        (
            ("train", "people.csv", *QUICK, *LEDGER, "--budget", 0),
            "--budget 0: give EPSILON or EPSILON,DELTA",
        ),
        (("train", "people.csv", *QUICK, *LEDGER, "--budget", -1), "--budget -1: give EPSILON"),
        (("train", "people.csv", *QUICK, *LEDGER, "--budget", "nan"), "--budget nan: give EPSILON"),
        (("train", "people.csv", *QUICK, *LEDGER, "--budget", "inf"), "--budget inf: give EPSILON"),
        (
            ("train", "people.csv", *QUICK, *LEDGER, "--budget", "much"),
            "--budget much: give EPSILON",
        ),
        (("train", "people.csv", *QUICK, *LEDGER, "--budget", "8,"), "--budget 8,: give EPSILON"),
        (("train", "people.csv", *QUICK, *LEDGER, "--budget", "8,0"), "--budget 8,0: give EPSILON"),
        (
            ("train", "people.csv", *QUICK, *LEDGER, "--budget", "8,1e-5,3"),
            "--budget 8,1e-5,3: give EPSILON",
        ),
        (
            ("train", "people.csv", *QUICK, *LEDGER, "--budget", 2),
            "--budget 2 for all runs together is less than",
        ),
        (
            ("train", "people.csv", *QUICK, *LEDGER, "--budget", "2,1e-3"),
            "--budget 2 for all runs together is less",
        ),
        (
            ("train", "people.csv", *QUICK, "--records", 3),
            "--records 3: the public number of training records",
        ),
        (("train", "people.csv", *QUICK, "--records", -60), "--records -60: the public number"),
        (("demo", "--seed", -1), "--seed -1"),
        (
            ("train", "people.csv", *QUICK, "--out", "people.csv"),
            "--out people.csv: people.csv is a file",
        ),
        (
            ("train", "people.csv", *QUICK, "--out", "people.csv/x"),
            "people.csv is a file, and a folder is needed",
        ),
        (
            ("data", "people.csv", "--target", "ill", "--suggest-schema", "no/s.json"),
            "there is no folder no",
        ),
        (
            ("data", "people.csv", "--target", "ill", "--suggest-schema", 300 * "x"),
            "xxx: File name too long",
        ),
        (("report", "people.csv"), "people.csv is a file: give the folder"),
        (("demo", "--out", "people.csv/x"), "--out people.csv/x"),
    ],
)
def test_an_error_is_one_line_and_spends_nothing(
    arguments: tuple[object, ...], message: str
) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith("dpkfc: ") and message in done.stderr
    assert not Path("runs").exists() and not Path("privacy.db").exists()


TABLE = ("train", "people.csv", "--target", "ill", "--schema", "schema.json", *QUICK)


@pytest.mark.parametrize(("budget", "delta"), [("3.5", 1e-3), ("3.5,1e-3", 1e-3)])
def test_a_budget_for_all_runs_is_kept_in_the_ledger(budget: str, delta: float) -> None:
    first = run(*TABLE, *LEDGER, "--budget", budget, "--out", "first")
    assert first.exit_code == 0, first.output
    assert json.loads(Path("first/config.json").read_text())["settings"]["budget"][0] == 3.5
    with closing(sqlite3.connect("privacy.db")) as db:
        assert db.execute("SELECT * FROM budgets").fetchall() == [("people", 3.5, delta)]
    second = run(*TABLE, *LEDGER, "--out", "second")
    assert second.exit_code == 2 and "3.5 is allowed" in second.stderr
    assert not Path("second").exists()
    third = run(*TABLE, *LEDGER, "--budget", "9,1e-3", "--out", "third")
    assert third.exit_code == 2 and "keeps epsilon = 3.5 at delta = 0.001" in third.stderr
    again = run(*TABLE, *LEDGER, "--budget", budget, "--out", "first")
    assert again.exit_code == 0 and "this run is finished" in again.stdout


def test_the_delta_of_a_budget_is_that_of_the_recipe() -> None:
    options = [option for option in TABLE if option not in ("--delta", "1e-3")]
    done = run(*options, *LEDGER, "--budget", 9)
    assert done.exit_code == 0, done.output
    plan = json.loads(Path("runs/people/plan.json").read_text())
    with closing(sqlite3.connect("privacy.db")) as db:
        assert db.execute("SELECT epsilon, delta FROM budgets").fetchall() == [(9.0, plan["delta"])]


def test_a_stated_number_of_records_hides_the_true_one() -> None:
    """The plan and everything released depend only on the stated number."""
    lines = Path("people.csv").read_text().splitlines()
    options = [option for option in TABLE if option not in ("--delta", "1e-3", "--batch-size", 20)]
    for name, kept in (("all", 61), ("one-less", 60)):
        Path("people.csv").write_text("\n".join(lines[:kept]))
        done = run(*options, "--records", 64, "--out", name)
        assert done.exit_code == 0, done.output
    for file in ("plan.json", "config.json"):
        assert Path("all", file).read_text() == Path("one-less", file).read_text()
    results = [json.loads(Path(name, "result.json").read_text()) for name in ("all", "one-less")]
    assert {**results[0], "run": ""} == {**results[1], "run": ""}
    assert (
        results[0]["records"] == 64
        and "records" not in json.loads(Path("all/plan.json").read_text())["unchecked"]
    )
    assert "stated number of records" in Path("all/report.html").read_text()
    Path("people.csv").write_text("\n".join(lines))
    assert run(*options, "--out", "counted").exit_code == 0
    assert "records" in json.loads(Path("counted/plan.json").read_text())["unchecked"]


def test_the_result_names_the_run_of_the_ledger() -> None:
    assert run(*TABLE, *LEDGER).exit_code == 0
    (known,) = read("privacy.db")
    assert json.loads(Path("runs/people/result.json").read_text())["run"] == known.run_id
    assert "is wrong" not in Path("runs/people/report.html").read_text()


def test_data_sets_that_go_by_a_name_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = run("data")
    assert (
        nowhere.exit_code == 0
        and "set DPKFC_DATA" in nowhere.stdout
        and "dpkfc data fetch imdb" in nowhere.stdout
    )
    Path("pathmnist.npz").touch()
    listed = run("data", "--data-dir", ".")
    (line,) = (line for line in listed.stdout.splitlines() if " pathmnist " in line)
    assert line.rstrip(" │|┃").endswith("present") and "dpkfc data fetch mnist" in listed.stdout


def test_a_data_set_is_fetched_into_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        "dpkfc.app.readers.download.fetch", lambda name, place, console: asked.append((name, place))
    )
    assert run("data", "fetch", "mnist", "--data-dir", "somewhere").exit_code == 0
    assert asked == [("mnist", Path("somewhere"))]


@pytest.mark.parametrize("command", ["train", "data", "doctor"])
def test_help_has_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0 and "Examples" in done.stdout and f"dpkfc {command}" in done.stdout


def test_a_doctor_who_finds_nothing_wrong() -> None:
    done = run("doctor")
    assert done.exit_code == 0 and "ready to train privately" in done.stdout
    assert "2 steps of DP-KFC" in done.stdout and "variance" in done.stdout


def test_a_doctor_who_finds_noise_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "add_normal_", lambda tensors, key, scale: None)
    monkeypatch.setattr(doctor, "_private_run", lambda: "not tried")
    monkeypatch.setattr(doctor, "REQUIRED", ("no-such-package",))
    done = run("doctor")
    assert done.exit_code == 1 and "do not train with this" in done.stdout
    assert "to fix: no-such-package, noise" in done.stdout


@pytest.mark.filterwarnings("default")
def test_a_data_set_name_that_resembles_a_known_one_is_told_in_one_line() -> None:
    assert run(*TABLE, *LEDGER, "--dataset", "people", "--out", "one").stderr == ""
    other = run(*TABLE, *LEDGER, "--dataset", "People", "--out", "two")
    assert other.exit_code == 0 and other.stderr.count("\n") == 1, other.stderr
    assert (
        other.stderr.startswith("dpkfc: data set 'People' is new")
        and "not composed" in other.stderr
    )
