"""A resumed run is bit-identical to an uninterrupted one.

A damaged or foreign checkpoint is refused.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc

STEPS = 12


def make(
    optimizer_kind: str, ledger: dpkfc.Ledger | None = None, seed: int | None = 5, **settings: Any
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3))
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    }
    optimizer = kinds[optimizer_kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    private = dpkfc.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.0,
        delta=1e-3,
        steps=STEPS,
        batch_size=8,
        max_physical_batch_size=settings.pop("chunk", None),
        seed=seed,
        ledger=ledger,
        loss=dpkfc.losses.cross_entropy,
        **settings,
    )
    return private, model, optimizer, scheduler


def train(
    private: dpkfc.PrivateRun, model: nn.Module, optimizer: Any, scheduler: Any, until: int = STEPS
) -> None:
    for x, y in private.loader.take(until - private.steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if private.took_step:
            scheduler.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("stop", [0, 1, 7, STEPS])
def test_a_resumed_run_is_bit_identical(
    tmp_path: Path, kind: str, chunk: int | None, stop: int
) -> None:
    whole = make(kind, chunk=chunk)
    train(*whole)
    first = make(kind, chunk=chunk)
    train(*first, until=stop)
    first[0].save(tmp_path / "run", scheduler=first[3])
    torch.rand(100)  # the process goes on, and dies
    resumed = make(kind, chunk=chunk, seed=99)  # everything comes from the checkpoint
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    assert resumed[0].steps == stop
    assert resumed[0].epsilon() == first[0].epsilon()
    train(*resumed)
    assert torch.equal(weights(resumed[1]), weights(whole[1]))
    assert resumed[3].get_last_lr() == whole[3].get_last_lr()
    assert resumed[0].not_private == whole[0].not_private


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("stop", [0, 4, 5, 7])
@pytest.mark.parametrize("geometry", ["kfc", "low rank", "diagonal"])
def test_a_geometry_resumes_between_refreshes_bit_for_bit(
    tmp_path: Path, geometry: str, stop: int, chunk: int | None
) -> None:
    """The maps in use were built at weights that are gone.

    The next refresh draws the probes it would have drawn.
    """
    probe = dpkfc.probes.Tabular(6, classes=3)
    kinds = {
        "kfc": lambda: dpkfc.KFC(probe, every=4, factors="AG", damping=0.1, post=0.5),
        "low rank": lambda: dpkfc.KFC(probe, every=4, rank=2, others="diagonal"),
        "diagonal": lambda: dpkfc.Diagonal(probe, every=4),
    }
    whole = make("sgd", chunk=chunk, geometry=kinds[geometry]())
    train(*whole)
    first = make("sgd", chunk=chunk, geometry=kinds[geometry]())
    train(*first, until=stop)
    first[0].save(tmp_path / "run", scheduler=first[3])
    resumed = make("sgd", chunk=chunk, seed=99, geometry=kinds[geometry]())
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    train(*resumed)
    assert torch.equal(weights(resumed[1]), weights(whole[1]))


def test_secret_keys_resume_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpkfc.engine.run.first_key", lambda seed: bytes(range(32))
    )  # the same secret for both runs
    whole = make("sgd", seed=None)
    train(*whole)
    first = make("sgd", seed=None)
    monkeypatch.undo()
    train(*first, until=4)
    first[0].save(tmp_path / "run", scheduler=first[3])
    resumed = make("sgd", seed=None)
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    train(*resumed)
    assert torch.equal(weights(resumed[1]), weights(whole[1]))


def test_steps_lost_after_the_checkpoint_stay_charged_and_their_noise_is_not_replayed(
    tmp_path: Path,
) -> None:
    def open_ledger() -> dpkfc.Ledger:
        return dpkfc.Ledger(tmp_path / "ledger.db", dataset="people")

    first = make("sgd", ledger=open_ledger())
    train(*first, until=4)
    first[0].save(tmp_path / "run", scheduler=first[3])
    key_at_four = first[0]._key
    train(*first, until=7)  # steps 5 to 7 are released, and the process dies before it saves
    resumed = make("sgd", ledger=open_ledger())
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    assert resumed[0].steps == 4 and resumed[0].charged == 7
    assert resumed[0]._key != key_at_four, "the noise of step 5 must not be used on another sum"
    assert resumed[0].epsilon() == first[0].epsilon() > resumed[0].plan.epsilon(4)
    train(*resumed, until=STEPS)
    assert resumed[0].charged == STEPS and resumed[0].steps == STEPS - 3, (
        "the budget of the plan is never exceeded"
    )
    assert open_ledger().charged(resumed[0].run_id) == STEPS
    # the same checkpoint once more: nothing is left
    again = make("sgd", ledger=open_ledger())
    again[0].load(tmp_path / "run", scheduler=again[3])
    assert len(again[0].loader) == 0


def test_going_back_within_one_process_does_not_replay_noise(tmp_path: Path) -> None:
    run = make("sgd")
    train(*run, until=4)
    run[0].save(tmp_path / "run", scheduler=run[3])
    key = run[0]._key
    run[0].load(tmp_path / "run", scheduler=run[3])
    assert run[0]._key == key, "nothing happened in between"
    train(*run, until=6)
    run[0].load(tmp_path / "run", scheduler=run[3])
    assert run[0].steps == 4 and run[0].charged == 6 and run[0]._key != key


def test_resuming_with_the_ledger_in_step_changes_nothing(tmp_path: Path) -> None:
    whole = make("sgd")
    train(*whole)
    first = make("sgd", ledger=dpkfc.Ledger(tmp_path / "a.db", dataset="people"))
    train(*first, until=5)
    first[0].save(tmp_path / "run", scheduler=first[3])
    resumed = make("sgd", ledger=dpkfc.Ledger(tmp_path / "a.db", dataset="people"))
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    train(*resumed)
    assert torch.equal(weights(resumed[1]), weights(whole[1]))


def test_a_checkpoint_is_json_and_safetensors_readable_by_its_owner_only(tmp_path: Path) -> None:
    run = make("adam")
    train(*run, until=2)
    for _ in range(2):  # the second replaces the first
        run[0].save(tmp_path / "deep" / "run", scheduler=run[3])
    folder = tmp_path / "deep" / "run"
    assert sorted(p.name for p in folder.iterdir()) == ["state.json", "tensors.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["run"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    json.loads((folder / "state.json").read_text())


def test_a_kill_between_the_two_renames_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    run = make("sgd")
    train(*run, until=2)
    run[0].save(tmp_path / "run", scheduler=run[3])
    (tmp_path / "run").rename(tmp_path / "run.old")
    resumed = make("sgd")
    resumed[0].load(tmp_path / "run", scheduler=resumed[3])
    assert resumed[0].steps == 2


def test_wrong_checkpoints_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    run = make("sgd")
    train(*run, until=2)
    run[0].save(tmp_path / "run", scheduler=run[3])
    other = make("sgd", clip=2.0)
    before = weights(other[1])
    with pytest.raises(dpkfc.PrivacyError, match="another plan: clip"):
        other[0].load(tmp_path / "run", scheduler=other[3])
    with pytest.raises(ValueError, match="disagree about: scheduler"):
        other[0].load(tmp_path / "run")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        other[0].load(tmp_path / "nowhere")
    (tmp_path / "run" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        other[0].load(tmp_path / "run", scheduler=other[3])
    assert torch.equal(before, weights(other[1])) and other[0].steps == 0


def test_saving_in_the_middle_of_a_batch_is_refused(tmp_path: Path) -> None:
    run = make("sgd")
    for x, y in run[0].loader:
        F.cross_entropy(run[1](x), y).backward()
        with pytest.raises(dpkfc.PrivacyError, match="middle of a batch"):
            run[0].save(tmp_path / "run")
        break


def test_states_that_are_not_plain_data_are_refused(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    run = make("sgd")
    with pytest.raises(TypeError, match="/others/odd/thing"):
        run[0].save(tmp_path / "run", odd=Odd())
    assert not (tmp_path / "run").exists()
