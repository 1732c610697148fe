"""Hugging Face's Trainer on two ranks: weights, logs, checkpoints and ledger of one process.

Two processes run `work`, as torchrun starts them; the tests compare what they kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.launching import batch_sizes, keep, results_of
from tests.integrations.test_transformers import (
    CLIP,
    MeanOverTokens,
    N,
    StopAt,
    Sums,
    Texts,
    classifier,
    language_model,
    sentences,
    sft_trainer,
    trainer_of,
    weights,
)
from torch import nn

import dpkfc
from dpkfc.integrations.transformers import PrivateTrainer

RANKS = 2
# per_token, records of a logical batch, parts into which a rank divides its share, steps
CASES: dict[str, tuple[bool, int, int, int]] = {
    "classify": (False, 8, 1, 6),
    "language model, parts": (True, 12, 3, 6),
    # some logical batches leave a rank without a record, and some have none at all
    "uneven and empty": (False, 2, 1, 16),
}
LOGGED = {"logging_strategy": "steps", "logging_steps": 4}


def build(per_token: bool) -> nn.Module:
    """Without dropout, whose masks differ between ranks."""
    model = language_model() if per_token else classifier()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def settings_of(case: str) -> dict[str, Any]:
    """The same logical batch for any number of ranks."""
    _, batch, parts, steps = CASES[case]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "per_device_train_batch_size": batch // ranks // parts,
        "gradient_accumulation_steps": parts,
        "max_steps": steps,
    }


def make(case: str, folder: Path, *callbacks: Any, **changed: Any) -> PrivateTrainer:
    per_token = CASES[case][0]
    privacy = changed.pop("privacy", None)
    return trainer_of(
        folder,
        build(per_token),
        changed.pop("data", None) or Texts(per_token),
        privacy=privacy,
        callbacks=list(callbacks),
        **{**settings_of(case), **LOGGED, **changed},
    )


def trained(trainer: PrivateTrainer, resume: Any = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    run = trainer.run
    assert run is not None and run.steps == trainer.state.global_step
    return {
        "weights": weights(trainer.model),
        "steps": run.steps,
        "epsilon": run.epsilon(),
        "batch_size": run.plan.batch_size,
        "samples": run.not_private.samples,
        "logs": [
            (entry["loss_not_private"], entry["epsilon"], entry["learning_rate"])
            for entry in trainer.state.log_history
            if "learning_rate" in entry
        ],
    }


def evaluated(folder: Path) -> dict[str, Any]:
    # by default, transformers multiplies the loss of a classifier by the number of ranks
    trainer = make("classify", folder, average_tokens_across_devices=False)
    result = trained(trainer)
    result["eval_loss"] = trainer.evaluate(Texts(False, 16))["eval_loss"]
    trainer.create_model_card()
    return result


def sensitivity(per_token: bool, parts: int, folder: Path) -> float:
    """How far apart the first sums of neighbouring data sets are, in units of the clip."""
    sums = []
    for count in (N, N - 1):
        seen = Sums()
        trainer = make(
            "language model, parts" if per_token else "classify",
            folder,
            seen,
            data=Texts(per_token, count),
            privacy={"records": N},
            per_device_train_batch_size=-(-N // parts),
            gradient_accumulation_steps=parts,
            max_steps=1,
        )
        # every record at every step
        trainer.get_total_train_batch_size = lambda args: N  # type: ignore[method-assign]
        seen.trainer = trainer
        trainer.train()
        sums += seen.steps
    return float((sums[0] - sums[1]).norm()) / CLIP


def with_ledger(folder: Path) -> dict[str, Any]:
    ledger = dpkfc.Ledger(folder / "ledger.db", dataset="texts")
    charge, charges = ledger.charge, []

    def counted(run_id: str, steps: int) -> None:
        charges.append(steps)
        charge(run_id, steps)

    ledger.charge = counted  # type: ignore[method-assign]
    result = trained(make("classify", folder / "with ledger", privacy={"ledger": ledger}))
    (entry,) = ledger.runs()
    return {"charges": charges, "charged": entry.charged, **result}


def sft(folder: Path) -> dict[str, Any]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return trained(sft_trainer(folder, sentences(), per_device_train_batch_size=8 // ranks))


def work(folder: str) -> None:
    """What every rank does."""
    place = Path(folder)
    results: dict[str, Any] = {case: trained(make(case, place / case)) for case in CASES}
    results["evaluated"] = evaluated(place / "evaluated")
    results["sensitivity"] = [sensitivity(False, 1, place), sensitivity(True, 4, place)]
    results["ledger"] = with_ledger(place)
    case = "language model, parts"
    trained(make(case, place / "resumed", StopAt(3)))
    results["resumed"] = trained(make(case, place / "resumed"), resume=True)
    results["sft"] = sft(place / "sft")
    mixing = trainer_of(place, build(True), Texts(True), MeanOverTokens)
    with pytest.raises(dpkfc.PrivacyError, match=r"mixes the records|is not the mean over records"):
        mixing.train()
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
        for name in ("steps", "epsilon", "batch_size"):
            assert rank[name] == alone[name]
    assert torch.equal(*(rank["weights"] for rank in got))


@pytest.mark.parametrize("case", CASES)
def test_weights_steps_epsilon_and_logs_are_those_of_one_process(
    case: str, ranks: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = batch_sizes(monkeypatch)
    alone = trained(make(case, tmp_path))
    assert case != "uneven and empty" or {0, 1, 2, 3} <= set(sizes)
    got = [rank[case] for rank in ranks]
    check_same(got, alone)
    assert alone["batch_size"] == CASES[case][1]
    assert sum(rank["samples"] for rank in got) == alone["samples"]
    for rank in got:
        for entry, expected in zip(rank["logs"], alone["logs"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-4)


def test_evaluation_and_the_model_card(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    alone = evaluated(tmp_path)
    for rank in ranks:
        assert rank["evaluated"]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    card = (folder / "evaluated" / "README.md").read_text()
    assert card.count("## Differential privacy") == 1


def test_neighbouring_data_sets_differ_by_at_most_the_clip(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for difference in rank["sensitivity"]:
            assert 0.1 < difference <= 1 + 1e-5


def test_the_ledger_is_charged_once_per_step_by_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["ledger"] for rank in ranks)
    assert first["charges"] == list(range(1, 7)) and second["charges"] == []
    assert first["charged"] == second["charged"] == 6
    assert first["epsilon"] == ranks[0]["classify"]["epsilon"]


def test_saved_by_two_ranks_and_resumed_by_two_or_by_one(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    case = "language model, parts"
    check_same([rank["resumed"] for rank in ranks], ranks[0][case])
    checkpoint = folder / "resumed" / "checkpoint-3"
    for marker in (checkpoint / "dpkfc").glob("continued.*"):  # as if it were not continued yet
        marker.unlink()
    alone = trained(make(case, folder / "alone"), resume=str(checkpoint))
    torch.testing.assert_close(alone["weights"], ranks[0][case]["weights"], rtol=0, atol=1e-6)
    assert alone["epsilon"] == ranks[0][case]["epsilon"]


def test_sft(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = trained(sft_trainer(tmp_path, sentences(), per_device_train_batch_size=8))
    check_same([rank["sft"] for rank in ranks], alone)
