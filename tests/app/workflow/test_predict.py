"""New records are read like those of the run; whatever disagrees with the run is refused."""

from __future__ import annotations

import importlib.util
import json
import py_compile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

import dpkfc
from dpkfc.app.cli.main import app
from dpkfc.app.readers.sources import Loaded, load
from dpkfc.app.workflow import release
from dpkfc.app.workflow.fit import fit
from dpkfc.app.workflow.predict import predict, restore
from dpkfc.app.workflow.settings import Settings

SCHEMA: dict[str, Any] = {"age": [0, 100], "sex": ["f", "m"], "ill": ["no", "yes"]}
SETTINGS = Settings(epsilon=3.0, delta=1e-3, epochs=2, batch_size=20, noise="independent", seed=0)
QUIET = Console(quiet=True)
EPSILON = cache(dpkfc.Plan.epsilon)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(dpkfc.Plan, "epsilon", EPSILON)
    monkeypatch.setattr(release, "draw_figures", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{n % 90},{'fm'[n % 2]},{('no', 'yes')[n % 90 > 45]},{('fine', 'ache')[n % 90 > 45]}"
        for n in range(60)
    ]
    Path("people.csv").write_text("\n".join(["age,sex,ill,said", *rows]))
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def people(schema: dict[str, Any] = SCHEMA, **options: Any) -> Loaded:
    return load("people.csv", target="ill", schema=schema, test=0, **options)


def by_hand(data: Loaded) -> list[tuple[str, float]]:
    outputs = restore("run", data)(data.train.tensors[0]).softmax(1).detach()
    return [(data.names[int(row.argmax())], float(row.max())) for row in outputs]


def agrees(found: list[Any], data: Loaded) -> bool:
    pairs = zip(found, by_hand(data), strict=True)
    return all(
        one.label == label and one.probability == pytest.approx(sure)
        for one, (label, sure) in pairs
    )


def test_a_table_without_its_target_in_another_order_of_columns() -> None:
    data = people()
    assert fit(data, SETTINGS, Path("run"), console=QUIET)
    lines = [line.split(",") for line in Path("people.csv").read_text().splitlines()]
    Path("new.csv").write_text("\n".join(f"{sex},{age}" for age, sex, _, _ in lines))
    found = predict("run", "new.csv")
    assert [one.name for one in found[:2]] == ["1", "2"] and agrees(found, data)
    done = run("predict", "run", "new.csv", "--out", "predictions.csv")
    assert done.exit_code == 0 and "wrote predictions.csv: 60 predictions" in done.stdout
    written = Path("predictions.csv").read_text().splitlines()
    assert written[0] == "record,predicted,probability"
    assert written[1] == f"1,{found[0].label},{found[0].probability:.6f}" and len(written) == 61
    assert run("predict", "run", "new.csv").stdout.splitlines() == written
    assert run("predict", "run", "new.csv", "--out", "no/where.csv").exit_code == 2


def test_a_column_of_texts_and_a_folder_of_them() -> None:
    data = load("people.csv", target="ill", text="said", classes=("no", "yes"), test=0, features=32)
    assert fit(data, SETTINGS, Path("run"), console=QUIET)
    assert agrees(predict("run", "people.csv"), data)
    (Path("notes") / "old").mkdir(parents=True)
    Path("notes/a.txt").write_text("fine")
    Path("notes/old/b.txt").write_text("ache")
    found, rows = predict("run", "notes"), predict("run", "people.csv")
    assert [one.name for one in found] == ["a.txt", "old/b.txt"]
    assert (found[0][1:], found[1][1:]) == (rows[0][1:], rows[50][1:])
    assert predict("run", "notes/a.txt")[0] == found[0]


def test_texts_of_folders() -> None:
    for name in ("sad", "glad"):
        Path("letters", name).mkdir(parents=True)
        for number in range(15):
            Path("letters", name, f"{number}.txt").write_text(f"{name} {number}")
    data = load("letters", test=0, features=64)
    assert fit(data, SETTINGS, Path("run"), console=QUIET)
    assert agrees(predict("run", "letters"), data)
    Path("new.csv").write_text("text\nsad 3\n")
    assert (
        predict("run", "new.csv")[0].probability
        == predict("run", "letters/sad/3.txt")[0].probability
    )


@pytest.mark.parametrize("grey", [False, True])
def test_images_of_classes_or_in_a_flat_folder(grey: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    Path("flat").mkdir()
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for number in range(15):
            picture = image.fromarray(RNG.integers(0, 256, (9, 9, 3), dtype=np.uint8))
            picture.save(Path("photos", name, f"{number:02}.png"))
            picture.save(Path("flat", f"{name}{number:02}.png"))
    data = load("photos", size=6, grey=grey, test=0)
    assert fit(data, SETTINGS, Path("run"), console=QUIET)
    flat = predict("run", "flat")
    assert (
        flat[0].name == "cat00.png"
        and agrees(flat, data)
        and agrees(predict("run", "photos"), data)
    )
    (one,) = predict("run", "flat/cat00.png")
    assert one[:2] == flat[0][:2] and one.probability == pytest.approx(flat[0].probability)


@pytest.mark.parametrize("names", [("x", "y"), ("images",), ("anything",)])
def test_arrays_alone(names: tuple[str, ...]) -> None:
    x, y = RNG.random((60, 5)), np.arange(60) % 2
    np.savez("a.npz", x=x, y=y)
    data = load("a.npz", limits=(0, 2), test=0)
    assert fit(data, SETTINGS, Path("run"), console=QUIET)
    np.savez("b.npz", **dict(zip(names, (x, y), strict=False)))
    assert agrees(predict("run", "b.npz"), data)


def test_a_model_is_restored_only_for_data_that_is_read_alike() -> None:
    assert fit(people(), SETTINGS, Path("run"), console=QUIET)
    turned = {name: SCHEMA[name] for name in ("sex", "age", "ill")}
    np.savez("a.npz", x=np.zeros((60, 3), np.uint8), y=np.arange(60) % 2)
    others: dict[str, Callable[[], Loaded]] = {
        "schema": lambda: people({**SCHEMA, "age": [0, 200]}),
        "schema ": lambda: people(turned),
        "list of classes": lambda: people({**SCHEMA, "ill": ["yes", "no"]}),
        "shape of inputs": lambda: people({**SCHEMA, "sex": ["f", "m", "x"]}),
        "kind": lambda: load(
            "people.csv", target="ill", text="said", classes=("no", "yes"), features=3
        ),
    }
    for what, loaded in others.items():
        with pytest.raises(
            ValueError, match=f"trained with the {what.strip()} .* the data was loaded with"
        ):
            restore("run", loaded())
    x = people().train.tensors[0]
    assert torch.equal(restore("run", people())(x), restore(Path("run"))(x))


def test_runs_that_cannot_be_used() -> None:
    with pytest.raises(FileNotFoundError, match="there is no run in nowhere: give the folder"):
        restore("nowhere")
    assert fit(people(), SETTINGS, Path("run"), console=QUIET)
    weights = Path("run/model.safetensors").read_bytes()
    config = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").write_text(json.dumps({**config, "shape": [4]}))
    with pytest.raises(ValueError, match="does not fit the model linear"):
        restore("run")
    Path("run/config.json").write_text(json.dumps(config))
    Path("run/model.safetensors").write_bytes(weights[:20])
    with pytest.raises(ValueError, match="does not fit the model linear"):
        restore("run")
    Path("run/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="is not finished: repeat its command"):
        predict("run", "people.csv")
    Path("run/config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        predict("run", "people.csv")


def test_a_model_of_ones_own_whose_file_has_changed() -> None:
    Path("net.py").write_text(
        "import torch\n\ndef net(shape, classes):\n    return torch.nn.Linear(*shape, classes)\n"
    )
    assert fit(
        people(), Settings(**{**vars(SETTINGS), "model": "net.py:net"}), Path("run"), console=QUIET
    )
    assert len(predict("run", "people.csv")) == 60
    Path("net.py").write_text(Path("net.py").read_text() + "\n")
    with pytest.raises(ValueError, match="has changed since the run"):
        predict("run", "people.csv")


def test_records_that_the_run_cannot_read() -> None:
    assert fit(people(), SETTINGS, Path("run"), console=QUIET)
    Path("empty").mkdir()
    Path("new.csv").write_text("age\n3\n")
    np.savez("wide.npz", x=np.zeros((2, 5), np.uint8))
    with pytest.raises(FileNotFoundError, match="there is no nowhere.csv: give a table"):
        predict("run", "nowhere.csv")
    for source, message in {
        "empty": "give a table with the columns of the schema",
        "new.csv": "has no column 'sex'",
        "wide.npz": r"inputs of shape \(5,\), but the run was trained on \(3,\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            predict("run", source)
    done = run("predict", "run", "empty")
    assert (
        done.exit_code == 2 and done.stderr.startswith("dpkfc: ") and done.stderr.count("\n") == 1
    )


def test_help_says_what_is_free_and_what_is_not() -> None:
    shown = " ".join(run("predict", "--help").stdout.split())
    assert (
        "they cost no budget" in shown
        and "not covered by epsilon" in shown
        and "dpkfc predict runs/people" in shown
    )


MARKS = """
from pathlib import Path

import torch

Path("marker").touch()


def net(shape, classes):
    return torch.nn.Linear(*shape, classes)
"""


@pytest.fixture
def marker(folder: Path) -> Path:
    """A run with a user model whose file creates a marker whenever it runs."""
    Path("net.py").write_text(MARKS)
    assert fit(people(), replace(SETTINGS, model="net.py:net"), Path("run"), console=QUIET)
    marker = Path("marker")
    marker.unlink()
    return marker


def edit_config(**changes: Any) -> None:
    file = Path("run/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_changed_model_file_is_refused_before_it_is_run(marker: Path) -> None:
    original = Path("net.py").read_text()
    Path("net.py").write_text(original + "\n# changed\n")
    for use in (
        lambda: restore("run"),
        lambda: restore("run", people()),
        lambda: predict("run", "people.csv"),
    ):
        with pytest.raises(
            ValueError, match=r"net\.py:net has changed since the run, and was not run"
        ):
            use()
    assert run("predict", "run", "people.csv").exit_code == 2
    assert not marker.exists()
    Path("net.py").write_text(original)
    assert len(predict("run", "people.csv")) == 60
    assert marker.exists()


@pytest.mark.parametrize("code", [None, "", 3])
def test_a_model_file_without_a_digest_is_refused_before_it_is_run(marker: Path, code: Any) -> None:
    edit_config(code=code)
    with pytest.raises(ValueError, match="without a digest"):
        predict("run", "people.csv")
    assert not marker.exists()


def test_a_config_that_names_another_file_is_refused_before_it_is_run(marker: Path) -> None:
    Path("other.py").write_text(MARKS + "\n")
    settings = json.loads(Path("run/config.json").read_text())["settings"]
    edit_config(settings={**settings, "model": "other.py:net"})
    with pytest.raises(ValueError, match="has changed since the run"):
        predict("run", "people.csv")
    assert not marker.exists()


def test_compiled_code_beside_the_file_is_not_run(marker: Path) -> None:
    """Python would run it instead of the file, whatever the digest of the file."""
    compiled = importlib.util.cache_from_source("net.py")
    Path("evil.py").write_text("raise SystemExit('evil')")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile("evil.py", cfile=compiled, dfile="net.py", invalidation_mode=mode)
    assert len(predict("run", "people.csv")) == 60
