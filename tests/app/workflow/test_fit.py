"""A run in a folder: interrupted, killed and resumed; other runs in the folder are refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import default
from dpkfc.app.readers.images import image_probe
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.workflow import release, run_folder
from dpkfc.app.workflow.evaluation import count_correct
from dpkfc.app.workflow.fit import fit
from dpkfc.app.workflow.predict import restore
from dpkfc.app.workflow.preparation import adjust_recipe, base_recipe
from dpkfc.app.workflow.release import finish
from dpkfc.app.workflow.run_folder import check_folder, locked, stoppable
from dpkfc.app.workflow.settings import Settings

MODEL = """
import sys
from torch import nn

def network(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))

def wrong(shape, classes):
    return nn.Linear(shape[0], classes + 1)

def other(shape, classes):
    return nn.Linear(99, classes)

def more(shape, classes, hidden=3, **others):
    return nn.Sequential(nn.Linear(shape[0], hidden), nn.Linear(hidden, classes))

class Any(nn.Sequential):
    def __init__(self, *given):
        super().__init__(nn.Linear(given[0][0], given[1]))

def alone(inputs=4, *, classes=2, bias=True):
    return nn.Linear(inputs, classes, bias)

def leaves(shape, classes):
    sys.exit("enough")

def nothing():
    return 7

def three(a, b, c):
    return None

class NotANumber(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")

def not_a_number(shape, classes):
    return NotANumber(shape[0], classes)

def without_a_value(shape, classes):
    model = nn.Linear(shape[0], classes)
    nn.init.constant_(model.bias[:1], float("inf"))
    return model

def batch_norm(shape, classes):
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], classes))
"""
SETTINGS = Settings(epsilon=3.0, delta=1e-3, epochs=2, batch_size=20, noise="independent", seed=0)
QUIET = Console(quiet=True)
STEPS = 6
EPSILON = cache(dpkfc.Plan.epsilon)
DRAW = release.draw_figures

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(autouse=True)
def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpkfc.Plan, "epsilon", EPSILON)  # the same few plans again and again
    monkeypatch.setattr(release, "draw_figures", lambda *arguments: None)


def some_data(records: int = 60, shape: tuple[int, ...] = (4,), shift: float = 0.0) -> Loaded:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(records + 20) % 2
    x = (
        torch.rand(records + 20, *shape, generator=generator) * 0.5
        + 0.4 * y.view(-1, *[1] * len(shape))
        + shift
    )
    train, test = TensorDataset(x[:records], y[:records]), TensorDataset(x[records:], y[records:])
    images = len(shape) == 3
    probe = image_probe(shape, 2) if images else dpkfc.probes.Tabular(shape[0])
    return Loaded(
        train,
        test,
        "images" if images else "tabular",
        shape,
        2,
        ("no", "yes"),
        ("a remark",),
        probe,
    )


@pytest.fixture
def own(tmp_path: Path) -> Settings:
    (tmp_path / "net.py").write_text(MODEL)
    return replace(SETTINGS, model=f"{tmp_path}/net.py:network")


def stop_at(step: int) -> Callable[[int], None]:
    return lambda now: signal.raise_signal(signal.SIGINT) if now == step else None


def kill_at(step: int) -> Callable[[int], None]:
    def kill(now: int) -> None:
        if now == step:
            raise OSError("killed")

    return kill


def weights(out: Path) -> dict[str, list[float]]:
    return {
        name: value.flatten().tolist()
        for name, value in load_file(out / "model.safetensors").items()
    }


def test_a_stopped_run_ends_as_one_that_went_through_and_a_killed_one_uses_no_noise_twice(
    own: Settings, tmp_path: Path
) -> None:
    data = some_data()
    assert fit(data, own, tmp_path / "whole", console=QUIET)
    assert not fit(data, own, tmp_path / "stopped", console=QUIET, on_step=stop_at(2))
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    assert not fit(data, own, tmp_path / "stopped", console=QUIET, on_step=stop_at(4))
    taken: list[int] = []
    torch.manual_seed(99)  # what else goes on in the process has no part in it
    assert fit(data, own, tmp_path / "stopped", console=QUIET, on_step=taken.append)
    assert taken == [5, 6]
    with pytest.raises(OSError, match="killed"):
        fit(data, own, tmp_path / "killed", console=QUIET, on_step=kill_at(5))
    assert fit(data, own, tmp_path / "killed", console=QUIET)
    assert (
        weights(tmp_path / "whole") == weights(tmp_path / "stopped") != weights(tmp_path / "killed")
    )
    lines = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        for name in ("whole", "stopped")
    ]
    steps = [
        [(json.loads(line)["step"], json.loads(line)["epsilon"]) for line in found]
        for found in lines
    ]
    assert steps[0] == steps[1] and [step for step, _ in steps[0]] == [3, 6]
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")
    ]
    assert results[0]["epsilon"] == results[1]["epsilon"], "what the kill took stays charged"
    assert results[1]["lost_steps"] > 0 and results[1]["steps"] + results[1]["lost_steps"] == STEPS


def test_what_a_finished_run_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "draw_figures", DRAW)
    data, out = some_data(), tmp_path / "run"
    assert fit(data, SETTINGS, out, source={"path": "people.csv"}, console=QUIET)
    names = {"config.json", "plan.json", "metrics.jsonl", "model.safetensors", "result.json"}
    names |= {"geometry.png", "clipping.png"}
    assert {file.name for file in out.iterdir()} == names  # and no checkpoint, which is a secret
    keys = {
        key for line in (out / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)
    }
    assert keys == {"step", "epsilon", "seconds"}  # no loss, no accuracy of training records
    result = json.loads((out / "result.json").read_text())
    assert 2.9 < result["epsilon"] <= 3 and result["steps"] == STEPS
    assert data.test is not None
    assert count_correct(restore(out, data), data.test, "cpu", 7) == result["test"]["accuracy"] * 20
    before = weights(out)
    assert fit(
        data, SETTINGS, out, source={"path": "people.csv"}, console=QUIET, on_step=kill_at(1)
    )  # takes no step
    assert weights(out) == before
    finish(out, Console(width=200))
    shown = capsys.readouterr().out
    assert (
        "epsilon does not protect the test records" in shown and "add or remove one record" in shown
    )


def test_the_ledger_is_charged_once(
    own: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_folder, "SAVE_SHARE", 1.0)  # no checkpoint between
    settings = replace(own, ledger=str(tmp_path / "privacy.db"), dataset="people")
    data, out = some_data(), tmp_path / "run"
    assert not fit(data, settings, out, console=QUIET, on_step=stop_at(2))
    with pytest.raises(OSError, match="killed"):
        fit(data, settings, out, console=QUIET, on_step=kill_at(4))
    taken: list[int] = []
    assert fit(data, settings, out, console=Console(width=200), on_step=taken.append)
    assert taken == [
        3,
        4,
    ]  # steps 3 and 4 were lost with the kill, stay charged, and are not had again
    assert (
        "2 steps after the last checkpoint were charged, and the result was lost"
        in capsys.readouterr().out
    )
    result = json.loads((out / "result.json").read_text())
    assert (result["steps"], result["lost_steps"]) == (4, 2) and 2.9 < result[
        "epsilon"
    ] <= 3  # what all six cost
    (run,) = dpkfc.accounting.ledger.read(tmp_path / "privacy.db")
    assert (run.dataset, run.charged, run.closed) == ("people", STEPS, True)
    assert fit(data, replace(settings, dataset=None), tmp_path / "second", console=QUIET)
    assert len(dpkfc.accounting.ledger.read(tmp_path / "privacy.db")) == 2


def test_little_is_at_stake_between_checkpoints(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOST_SAVING", 1.0)  # small runs are slow to save
    settings = replace(own, ledger=str(tmp_path / "privacy.db"), dataset="people")
    with pytest.raises(OSError, match="killed"):
        fit(some_data(), settings, tmp_path / "run", console=QUIET, on_step=kill_at(5))
    taken: list[int] = []
    assert fit(some_data(), settings, tmp_path / "run", console=QUIET, on_step=taken.append)
    assert (
        taken == [5]
        and json.loads((tmp_path / "run" / "result.json").read_text())["lost_steps"] == 1
    )


@pytest.mark.parametrize(
    ("steps", "since", "saving", "expected"),
    [
        (19, 59.0, 0.0, False),
        (20, 1.0, 0.0, True),  # a fiftieth of the planned steps
        (1, 61.0, 0.0, True),
        (20, 61.0, 11.0, False),  # more than a tenth of the time went into saving
        (20, 1.0, 10.0, True),
    ],
)
def test_when_a_checkpoint_is_due(steps: int, since: float, saving: float, expected: bool) -> None:
    assert run_folder.worth_saving(steps, 1000, since, saving, 100.0) == expected


@pytest.mark.parametrize("end", ['{"step": 6, "eps', '{"step": 6}', "7", "\0\0", "{}"])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, end: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n' + end)
    run_folder.keep_metrics(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3}\n'


def interrupted(*arguments: object) -> int:
    raise KeyboardInterrupt


def test_an_interrupted_release_is_repeated_with_the_weights_that_were_paid_for(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(own, ledger=str(tmp_path / "privacy.db"), dataset="people")
    data, out = some_data(), tmp_path / "run"
    assert fit(data, own, tmp_path / "whole", console=QUIET)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(release, "count_correct", interrupted)
        fit(data, settings, out, console=QUIET)
    assert (out / "checkpoint").exists() and not (out / "result.json").exists()
    assert fit(data, settings, out, console=QUIET, on_step=kill_at(1))  # takes no step
    assert weights(out) == weights(tmp_path / "whole")
    assert json.loads((out / "result.json").read_text())["steps"] == STEPS
    (run,) = dpkfc.accounting.ledger.read(tmp_path / "privacy.db")
    assert (run.charged, run.closed) == (STEPS, True)


def test_weights_are_not_replaced_by_those_of_fewer_steps(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(own, ledger=str(tmp_path / "privacy.db"), dataset="people")
    data, out = some_data(), tmp_path / "run"
    assert not fit(data, settings, out, console=QUIET, on_step=stop_at(2))
    shutil.copytree(out / "checkpoint", tmp_path / "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(release, "count_correct", interrupted)
        fit(data, settings, out, console=QUIET)
    before = weights(out)
    shutil.rmtree(out / "checkpoint")
    shutil.copytree(tmp_path / "old", out / "checkpoint")  # from a backup, say
    assert fit(data, settings, out, console=QUIET)
    result = json.loads((out / "result.json").read_text())
    assert weights(out) == before and (result["steps"], result["lost_steps"]) == (STEPS, 0)
    assert data.test is not None
    assert (
        count_correct(restore(out, data), data.test, "cpu", 20) == result["test"]["accuracy"] * 20
    )


def test_weights_of_something_else_are_not_replaced(own: Settings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="something else: choose another --out"):
        fit(some_data(), own, out, console=QUIET)
    (out / "model.safetensors").rename(tmp_path / "mine")
    assert not fit(some_data(), own, out, console=QUIET, on_step=stop_at(2))
    (tmp_path / "mine").rename(out / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be read .* move it away"):
        fit(some_data(), own, out, console=QUIET)
    assert (out / "model.safetensors").read_text() == "mine"


def test_a_finished_run_keeps_no_secret(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(release, "draw_figures", interrupted)
        fit(some_data(), own, tmp_path / "run", console=QUIET)
    assert (tmp_path / "run" / "checkpoint").exists()
    assert fit(some_data(), own, tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_budget_that_does_not_suffice_leaves_nothing_behind(tmp_path: Path) -> None:
    file, out = tmp_path / "privacy.db", tmp_path / "run"
    with closing(dpkfc.Ledger(file, "people", budget=(1.0, 1e-3))):
        pass
    with pytest.raises(dpkfc.PrivacyError, match="does not fit"):
        fit(some_data(), replace(SETTINGS, ledger=str(file), dataset="people"), out, console=QUIET)
    assert [file.name for file in tmp_path.iterdir()] == ["privacy.db"]


HOLDER = """
import sys, time
from pathlib import Path
from dpkfc.app.workflow.run_folder import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(run_folder.fcntl is None, reason="needs locks")
def test_a_folder_is_for_one_process_until_that_is_killed(own: Settings, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "mine"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with pytest.raises(
                BlockingIOError, match="another process is training in .*mine: wait for it"
            ):
                fit(some_data(), own, out, console=QUIET)
        finally:
            holder.kill()
    assert fit(some_data(), own, out, console=QUIET)
    assert not (out / ".lock").exists()


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "mine"):
        assert (tmp_path / "runs" / "mine").is_dir()
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("out", ["file", "file/inside", "file/far/inside", 300 * "x"])
def test_an_out_that_cannot_be_a_folder(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="--out .*: choose another"):
        check_folder(tmp_path / out)


def test_an_out_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "os.access", lambda path, mode: False
    )  # whoever runs the tests may write everywhere
    with pytest.raises(PermissionError, match="is not writable"):
        check_folder(tmp_path / "run")


def test_images_through_scattering_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kymatio")
    monkeypatch.setattr(default, "PROBES", 64)
    data, out = some_data(shape=(1, 16, 16)), tmp_path / "run"
    assert fit(data, SETTINGS, out, console=QUIET)
    assert data.test is not None
    result = json.loads((out / "result.json").read_text())
    assert result["model"] == "scattering" and result["parameters"] == 2 * (81 * 16 + 1)
    assert (
        count_correct(restore(out, data), data.test, "cpu", 20) == result["test"]["accuracy"] * 20
    )


@pytest.mark.parametrize(
    "settings", [{"model": "cnn"}, {"model": "mlp", "method": "sgd", "lr": 0.1}]
)
def test_other_models_and_methods(tmp_path: Path, settings: dict[str, object]) -> None:
    data = some_data(shape=(3, 6, 5))
    # type: ignore[arg-type]
    assert fit(data, replace(SETTINGS, **settings), tmp_path, console=QUIET)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == settings["model"] and ("DP-SGD" in result["geometry"]) == (
        "method" in settings
    )
    assert result["lr"] == settings.get("lr", result["lr"])


@pytest.mark.parametrize("change", [{"rho": 1.0}, {"clip": 4.0}, {"rho": 4.0, "clip": 0.5}])
def test_the_noise_in_the_weights_is_what_was_asked_for(change: dict[str, float]) -> None:
    """The noise length is lr · clip · rmse · √(parameters / units), and 2 by default."""
    built = default.build("linear", "tabular", (4,), 2, dpkfc.probes.Tabular(4))
    base = base_recipe(built, 60, SETTINGS)
    found = adjust_recipe(base, replace(SETTINGS, **change))  # type: ignore[arg-type]
    rho, clip = change.get("rho", 2.0), change.get("clip", 1.0)
    assert found.arguments["clip"] == clip and found.noise_length == rho
    assert found.lr * clip / rho == pytest.approx(base.lr * 1.0 / 2.0)
    assert adjust_recipe(base, SETTINGS) == base
    assert adjust_recipe(base, replace(SETTINGS, lr=0.3)).lr == 0.3
    changed = {row[0] for row, old in zip(found.reasons, base.reasons, strict=True) if row != old}
    assert changed == {{"rho": "learning rate", "clip": "clip"}[name] for name in change}


def test_a_model_without_pictures_is_still_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> None:
        raise dpkfc.PrivacyError("no example has a finite gradient")

    monkeypatch.setattr(release, "draw_figures", refused)
    assert fit(some_data(), SETTINGS, tmp_path, console=Console(width=200))
    assert "no figures of probes: no example has a finite gradient" in capsys.readouterr().out
    assert (tmp_path / "result.json").exists() and not (tmp_path / "checkpoint").exists()


def test_defaults_by_the_kind_of_data() -> None:
    assert (
        default.default_model("tabular", (4,)) == default.default_model("text", (4096,)) == "linear"
    )
    assert default.default_model("images", (1, 28, 28)) == "scattering"
    assert (
        default.default_model("images", (1, 8, 8))
        == default.default_model("images", (3, 224, 224))
        == "cnn"
    )


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("lstm", ValueError, "choose one of linear, mlp"),
        ("cnn", ValueError, "is for images, not for tabular"),
        ("nowhere.py:network", ValueError, "there is no file nowhere.py"),
        (
            "{}:netwerk",
            ValueError,
            r"has no function 'netwerk' \(did you mean 'network'\?\); it has network",
        ),
        ("{}:wrong", ValueError, r"gives \(3,\) for each record, but there are 2 classes"),
        ("{}:other", ValueError, r"does not take inputs of shape \(4,\)"),
        ("{}:nothing", TypeError, "returned int"),
        ("{}:three", ValueError, "takes 3 arguments"),
        ("{}:leaves", ValueError, "leaves fails with SystemExit: enough"),
        ("{}:batch_norm", dpkfc.PrivacyError, "mixes the records"),
        (
            "{}:not_a_number",
            ValueError,
            "not_a_number gives numbers that are not finite for each of 8 probes",
        ),
        ("{}:without_a_value", ValueError, "without_a_value gives numbers that are not finite"),
    ],
)
@pytest.mark.parametrize("method", ["kfc", "sgd"])
def test_models_that_cannot_be(
    own: Settings, tmp_path: Path, model: str, error: type[Exception], message: str, method: Any
) -> None:
    settings = replace(own, model=model.format(tmp_path / "net.py"), method=method)
    with pytest.raises(error, match=message):
        fit(some_data(), settings, tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("function", ["more", "Any", "alone"])
def test_a_function_is_asked_for_what_it_must_be_given(
    own: Settings, tmp_path: Path, function: str
) -> None:
    assert fit(
        some_data(),
        replace(own, model=f"{tmp_path}/net.py:{function}"),
        tmp_path / "run",
        console=QUIET,
    )


def test_a_file_that_ends_the_process(own: Settings, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ValueError, match=r"net.py fails with SystemExit: 3"):
        fit(some_data(), own, tmp_path / "run", console=QUIET)


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"{")])
def test_a_checkpoint_that_cannot_be_read_says_what_to_do(
    own: Settings, tmp_path: Path, file: str, damage: Callable[[Path], Any]
) -> None:
    assert not fit(some_data(), own, tmp_path / "run", console=QUIET, on_step=stop_at(2))
    damage(tmp_path / "run" / "checkpoint" / file)
    with pytest.raises(
        OSError,
        match=r"lost or damaged .* restore the folder from a backup, or begin a new run",
    ):
        fit(some_data(), own, tmp_path / "run", console=QUIET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "--batch-size 3"),
        ({"batch_size": 100}, "--batch-size 100: there are 60 training records"),
        ({"physical_batch_size": 0}, "--physical-batch-size 0"),
        ({"lr": 0.0}, "--lr 0"),
        ({"rho": -1.0}, "--rho -1"),
        ({"clip": float("inf")}, "--clip inf"),
        ({"rho": 1.0, "lr": 1.0}, "--lr and --rho"),
        ({"epsilon": -1.0}, "--epsilon -1"),
        ({"epochs": 0.0}, "--epochs 0"),
        ({"seed": -1}, "--seed -1: give a whole number from 0"),
        ({"seed": 2**63}, "--seed 9223372036854775808"),
        ({"seed": 10**30}, "--seed 1000000000000000000000000000000"),
        ({"delta": 2.0}, "--delta 2"),
        ({"delta": 0.0}, "--delta 0"),
        ({"method": "adam"}, "--method adam"),
        ({"noise": "pink"}, "--noise pink"),
        ({"device": "toaster"}, "--device toaster"),
        ({"device": "meta"}, "--device meta"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        # type: ignore[arg-type]
        fit(some_data(), replace(SETTINGS, **change), tmp_path / "run", console=QUIET)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_largest_seed(tmp_path: Path) -> None:
    assert fit(some_data(), replace(SETTINGS, seed=2**63 - 1), tmp_path, console=QUIET)


def test_an_epsilon_that_promises_nothing_still_has_a_report(tmp_path: Path) -> None:
    assert fit(some_data(), replace(SETTINGS, epsilon=1000.0), tmp_path, console=QUIET)
    finish(tmp_path, QUIET)
    assert "promises nothing" in (tmp_path / "report.html").read_text()


def test_a_model_that_learned_nothing_is_seen_beside_the_most_frequent_class(
    tmp_path: Path,
) -> None:
    data = some_data()
    assert data.test is not None
    x, y = data.test.tensors[0], torch.tensor([1] * 13 + [0] * 7)
    assert fit(replace(data, test=TensorDataset(x, y)), SETTINGS, tmp_path, console=QUIET)
    test = json.loads((tmp_path / "result.json").read_text())["test"]
    assert test["majority"] == 0.65 and "epsilon does not protect" in test["note"]


def test_too_few_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 5 training records"):
        fit(some_data(5), replace(SETTINGS, batch_size=None), tmp_path / "run", console=QUIET)


def test_a_folder_goes_on_with_its_own_run_only(own: Settings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert not fit(some_data(), own, out, console=QUIET, on_step=stop_at(1))
    with pytest.raises(dpkfc.PrivacyError, match="another epsilon, lr: repeat"):
        fit(some_data(), replace(own, epsilon=2.0, lr=1.0), out, console=QUIET)
    with pytest.raises(dpkfc.PrivacyError, match="another source"):
        fit(some_data(), own, out, source={"path": "other.csv"}, console=QUIET)
    with pytest.raises(dpkfc.PrivacyError, match="records are not those"):
        fit(some_data(shift=0.01), own, out, console=QUIET)
    (tmp_path / "net.py").write_text(MODEL + "\n# changed")
    with pytest.raises(dpkfc.PrivacyError, match="another code"):
        fit(some_data(), own, out, console=QUIET)
    (out / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        fit(some_data(), own, out, console=QUIET)


def test_a_second_ctrl_c_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stoppable() as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGINT)
        assert stopping()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup; SIGTERM still stops the run after the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fixture puts the handler back
    before = signal.getsignal(signal.SIGTERM)
    with stoppable() as stopping:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert not stopping()
        signal.raise_signal(signal.SIGTERM)
        assert stopping()
    assert (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and signal.getsignal(signal.SIGTERM) is before
    )


def test_a_handler_that_is_not_of_python_is_left_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python represents it as None and cannot install it again."""
    installed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            signal, "getsignal", lambda number: None if number == signal.SIGINT else signal.SIG_DFL
        )
        patch.setattr(signal, "signal", lambda number, handler: installed.append(number))
        with stoppable() as stopping:
            assert not stopping()
    assert installed == [signal.SIGTERM] * 2
