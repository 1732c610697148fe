"""accelerate on two ranks: weights, steps, epsilon and ledger of the plain loop in one process.

Two processes run `work`, as torchrun starts them; the tests compare what they kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.launching import batch_sizes, keep, results_of
from torch import Tensor
from torch.utils.data import DataLoader

import dpkfc
from dpkfc.engine.loader import read_source

accelerate = pytest.importorskip("accelerate")

from tests.integrations.test_accelerate import (  # noqa: E402
    ORDERS,
    RECORDS,
    STEPS,
    Loop,
    data,
    sensitivity,
)

RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW, parts": {"optimizer": "adamw", "max_physical_batch_size": 3},
    # some logical batches leave a rank without a record, and some have none at all
    "uneven and empty": {"optimizer": "adamw", "batch_size": 1, "steps": 12},
    "uneven parts": {"batch_size": 3, "max_physical_batch_size": 1, "steps": 12},
}
OF_STEPS = {"uneven and empty": 12, "uneven parts": 12}


def split_batches() -> dict[str, Any]:
    """The batch size of a prepared loader is that of all ranks, as in one process."""
    config = accelerate.utils.DataLoaderConfiguration(split_batches=True)
    return {"dataloader_config": config}


class LoggingLoop(Loop):
    """Gathers the loss of every batch."""

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        gathered = self.accelerator.gather(loss.detach())
        assert gathered.numel() == self.accelerator.num_processes
        return loss


def trained(case: str, order: str | None, **more: Any) -> dict[str, Any]:
    kind = Loop if order is None else LoggingLoop
    if order is not None:
        more = {"of_accelerator": split_batches(), **more}
    steps = OF_STEPS.get(case, STEPS)
    loop = kind(order, **CASES[case], **more).train(steps, clip=1e-6)
    return {
        "weights": loop.weights,
        "steps": loop.run.steps,
        "epsilon": loop.run.epsilon(),
        "rate": loop.scheduler.get_last_lr(),
        "batch_size": loop.run.plan.batch_size,
    }


def resumed(order: str, folder: Path) -> Tensor:
    first = Loop(order, of_accelerator=split_batches(), **CASES["AdamW, parts"]).train(2)
    first.accelerator.save_state(folder)
    return continued(order, folder)


def continued(order: str, folder: Path) -> Tensor:
    loop = Loop(order, of_accelerator=split_batches(), **CASES["AdamW, parts"])
    loop.accelerator.load_state(folder)
    assert loop.run.steps == 2
    return loop.train().weights


def with_ledger(folder: Path) -> dict[str, Any]:
    ledger = dpkfc.Ledger(folder / "ledger.db", dataset="people")
    charge, charges = ledger.charge, []

    def counted(run_id: str, steps: int) -> None:
        charges.append(steps)
        charge(run_id, steps)

    ledger.charge = counted  # type: ignore[method-assign]
    loop = Loop(ORDERS[1], ledger=ledger, of_accelerator=split_batches()).train()
    (entry,) = ledger.runs()
    return {"charges": charges, "charged": entry.charged, "epsilon": loop.run.epsilon()}


def work(folder: str) -> None:
    """What every rank does."""
    results: dict[str, Any] = {
        "trained": {(case, order): trained(case, order) for case in CASES for order in ORDERS},
        "per rank": trained("SGD", ORDERS[1], of_accelerator={}),
        "sensitivity": {
            (order, part): sensitivity(order, max_physical_batch_size=part)
            for order in ORDERS
            for part in (None, 13)
        },
        "resumed": {order: resumed(order, Path(folder) / order) for order in ORDERS},
        "ledger": with_ledger(Path(folder)),
    }
    dispatched = accelerate.data_loader.prepare_data_loader(
        DataLoader(data(), batch_size=20), put_on_device=True, dispatch_batches=True
    )
    results["dispatched"] = read_source(dispatched).batch_size
    refused = Loop(ORDERS[0], of_accelerator={"gradient_accumulation_steps": 4})
    with pytest.raises(dpkfc.PrivacyError, match="Instead of accumulating gradients"):
        refused.train()
    results["refused"] = refused.run.epsilon()
    keep(folder, results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return results_of(__name__, folder, RANKS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_weights_steps_epsilon_and_schedule_are_those_of_one_process(
    case: str, order: str, ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = batch_sizes(monkeypatch)
    alone = trained(case, None)
    assert case != "uneven and empty" or {0, 1, 2} <= set(sizes)
    for rank in ranks:
        got = rank["trained"][case, order]
        torch.testing.assert_close(got["weights"], alone["weights"], rtol=0, atol=1e-6)
        for name in ("steps", "epsilon", "batch_size", "rate"):
            assert got[name] == alone[name]
    assert torch.equal(*(rank["trained"][case, order]["weights"] for rank in ranks))


def test_a_prepared_loader_counts_per_rank_unless_it_splits_batches(
    ranks: list[dict[str, Any]],
) -> None:
    """accelerate's own total_batch_size; the schedule steps once per rank, as accelerate does."""
    alone = trained("SGD", None, batch_size=20 * RANKS)
    for rank in ranks:
        got = rank["per rank"]
        assert got["batch_size"] == 20 * RANKS and got["epsilon"] == alone["epsilon"]
        assert got["rate"] != alone["rate"]


def test_neighbouring_data_sets_differ_by_at_most_the_clip(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for value in rank["sensitivity"].values():
            assert 0.9 < value <= 1 + 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_saved_by_two_ranks_and_resumed_by_two_or_by_one(
    order: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    uninterrupted = trained("AdamW, parts", None)["weights"]
    for rank in ranks:
        torch.testing.assert_close(rank["resumed"][order], uninterrupted, rtol=0, atol=1e-6)
    alone = continued(order, folder / order)
    torch.testing.assert_close(alone, uninterrupted, rtol=0, atol=1e-6)


def test_the_ledger_is_charged_once_per_step_by_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["ledger"] for rank in ranks)
    assert first["charges"] == list(range(1, STEPS + 1)) and second["charges"] == []
    assert first["charged"] == second["charged"] == STEPS
    assert first["epsilon"] == second["epsilon"] == trained("SGD", None)["epsilon"]


def test_accumulation_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["refused"] for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, 21 * 3), ({"split_batches": True}, 21)], ids=str
)
def test_the_batch_size_of_a_prepared_loader(settings: dict[str, Any], expected: int) -> None:
    accelerate.Accelerator(cpu=True)
    prepared = accelerate.data_loader.prepare_data_loader(
        DataLoader(data(), batch_size=21, shuffle=True),
        num_processes=3,
        process_index=1,
        **settings,
    )
    source = read_source(prepared)
    assert (len(source), source.batch_size) == (RECORDS, expected)


def test_the_batch_size_of_a_loader_that_dispatches(ranks: list[dict[str, Any]]) -> None:
    assert [rank["dispatched"] for rank in ranks] == [20 * RANKS] * RANKS
