"""Lightning on two ranks: weights, counts, checkpoints and ledger of one process.

Two processes run `work`, as torchrun starts them; the tests compare what they kept. One test lets
Lightning start the second process itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.launching import batch_sizes, environment, keep, results_of
from torch.utils.data import DataLoader

import dpkfc
from dpkfc.losses import cross_entropy

L = pytest.importorskip("lightning")

from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from tests.integrations.test_lightning import (  # noqa: E402
    RECORDS,
    Manual,
    Module,
    StopBefore,
    data,
    every,
    fit,
    make_trainer,
    private,
    sensitivity,
    weights,
)

RANKS = 2
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Synced(Module):
    """Logs the mean over the ranks at every step, as people do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = cross_entropy(self, batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[0]))


class SyncedManual(Manual):
    validation_step = Synced.validation_step


# module and its settings, records of a logical batch, parts of a rank's share, further settings
CASES: dict[str, tuple[Any, dict[str, Any], int, int, dict[str, Any]]] = {
    "SGD": (Synced, {}, 20, 1, {}),
    "AdamW, schedule, parts": (Synced, {"optimizer": "adamw", "interval": "step"}, 20, 2, {}),
    # some logical batches leave a rank without a record, and some have none at all
    "uneven and empty": (Synced, {"interval": "step"}, 2, 1, {"max_epochs": 1}),
    "manual": (SyncedManual, {}, 20, 1, {"of_run": {"loss": cross_entropy}}),
}


def ranks_here() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def distributed(strategy: Any = "ddp") -> dict[str, Any]:
    """Settings of the Trainer."""
    return {} if ranks_here() == 1 else {"strategy": strategy, "devices": RANKS}


def settings_of(case: str) -> dict[str, Any]:
    """The same logical batch for any number of ranks."""
    _, _, batch, parts, more = CASES[case]
    size = batch // ranks_here() // parts
    more = {name: value for name, value in more.items() if name != "of_run"}
    loaders = [DataLoader(data(), size, shuffle=True), DataLoader(data(), 15)]
    return {"loaders": loaders, "accumulate_grad_batches": parts, **more}


def trained(case: str, *more: Any, **settings: Any) -> dict[str, Any]:
    kind, of_module, _, _, of_case = CASES[case]
    module = kind(**of_module)
    callback = private(**{**of_case.get("of_run", {}), **settings.pop("of_run", {})})
    settings = {**settings_of(case), **distributed(), **settings}
    trainer = fit(module, callback, *more, **settings)
    run = callback.run
    assert run.detached and run.steps == run.plan.steps == trainer.global_step
    return {
        "weights": weights(module),
        "steps": run.steps,
        "epsilon": run.epsilon(),
        "batch_size": run.plan.batch_size,
        "samples": run.not_private.samples,
        "logged": float(trainer.callback_metrics["epsilon"]),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


def interrupted(folder: Path) -> None:
    with pytest.raises(InterruptedError):
        trained("AdamW, schedule, parts", every(folder, 2), StopBefore(2))


def continued(folder: Path) -> dict[str, Any]:
    return trained("AdamW, schedule, parts", ckpt_path=folder / "step=2.ckpt")


def with_ledger(folder: Path) -> dict[str, Any]:
    ledger = dpkfc.Ledger(folder / "ledger.db", dataset="people")
    charge, charges = ledger.charge, []

    def counted(run_id: str, steps: int) -> None:
        charges.append(steps)
        charge(run_id, steps)

    ledger.charge = counted  # type: ignore[method-assign]
    result = trained("SGD", of_run={"ledger": ledger})
    (entry,) = ledger.runs()
    return {"charges": charges, "charged": entry.charged, **result}


def counts(*callbacks: Any, **settings: Any) -> tuple[int, int, int]:
    """What Lightning counts, with or without privacy."""
    loader = DataLoader(data(), 7, drop_last=settings.pop("drop_last", False))
    trainer = make_trainer(*callbacks, **{"max_epochs": 2, **distributed(), **settings})
    module = Module(interval="step")
    trainer.fit(module, loader)
    return trainer.global_step, trainer.current_epoch, module.estimated


COUNTED: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 2},
    {"drop_last": True},
    {"limit_train_batches": 3, "max_steps": 5, "max_epochs": -1},
]


def work(folder: str) -> None:
    """What every rank does."""
    place = Path(folder)
    results: dict[str, Any] = {case: trained(case) for case in CASES}
    results["static graph"] = trained("manual", strategy=DDPStrategy(static_graph=True))
    results["sensitivity"] = [
        sensitivity(Module, RECORDS // RANKS, **distributed()),
        sensitivity(Module, 7, accumulate_grad_batches=5, **distributed()),
    ]
    results["counts"] = [(counts(**each), counts(private(), **each)) for each in COUNTED]
    results["ledger"] = with_ledger(place)
    interrupted(place)
    results["resumed"] = continued(place)
    keep(folder, results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return results_of(__name__, folder, RANKS)


def check_same(got: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank in got:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-6)
        for name in ("steps", "epsilon", "batch_size", "logged"):
            assert rank[name] == alone[name]
        assert rank["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
    assert torch.equal(*(rank["weights"] for rank in got))
    assert sum(rank["samples"] for rank in got) == alone["samples"]


@pytest.mark.parametrize("case", CASES)
def test_weights_steps_epsilon_and_validation_are_those_of_one_process(
    case: str, ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = batch_sizes(monkeypatch)
    alone = trained(case)
    assert case != "uneven and empty" or {0, 1, 2, 3} <= set(sizes)
    check_same([rank[case] for rank in ranks], alone)
    assert alone["batch_size"] == CASES[case][2]
    assert alone["logged"] >= alone["epsilon"]


def test_a_static_graph_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["static graph"]["weights"], rank["manual"]["weights"])


def test_neighbouring_data_sets_differ_by_at_most_the_clip(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for difference in rank["sensitivity"]:
            assert 0.9 < difference <= 1 + 1e-5


def test_settings_count_as_without_privacy(ranks: list[dict[str, Any]]) -> None:
    """Lightning itself is the oracle."""
    for rank in ranks:
        for ordinary, private_ones in rank["counts"]:
            assert ordinary == private_ones


def test_the_ledger_is_charged_once_per_step_by_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["ledger"] for rank in ranks)
    assert first["charges"] == list(range(1, first["steps"] + 1)) and second["charges"] == []
    assert first["charged"] == second["charged"] == first["steps"]
    assert first["epsilon"] == ranks[0]["SGD"]["epsilon"]


def test_saved_by_two_ranks_and_resumed_by_two_or_by_one(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    uninterrupted = ranks[0]["AdamW, schedule, parts"]
    for result in (*(rank["resumed"] for rank in ranks), continued(folder)):
        torch.testing.assert_close(result["weights"], uninterrupted["weights"], rtol=0, atol=1e-6)
        assert result["epsilon"] == uninterrupted["epsilon"]


SCRIPT = """
import sys
import torch
import tests.integrations.test_distributed_lightning as t

module, callback = t.Synced(), t.private()
loader = t.DataLoader(t.data(), 10, shuffle=True)
trainer = t.make_trainer(callback, strategy="ddp", devices=2)
trainer.fit(module, loader)
assert trainer.world_size == 2
if trainer.is_global_zero:
    torch.save(t.weights(module), sys.argv[1])
"""


def test_lightning_starts_the_processes_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "weights.pt")]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    got = torch.load(tmp_path / "weights.pt")
    torch.testing.assert_close(got, trained("SGD")["weights"], rtol=0, atol=1e-6)
