"""Loops that would quietly release more than epsilon covers: each is refused, or made harmless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

import dpkfc
from dpkfc.engine import checkpoint

RUN: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "steps": 20,
    "batch_size": 20,
    "seed": 0,
}
RUN["loss"] = dpkfc.losses.cross_entropy


def records(count: int = 40) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 4), torch.arange(count) % 2)


def begin(
    data: Dataset[Any] | DataLoader[Any] | None = None,
    model: nn.Module | None = None,
    **changed: Any,
) -> dpkfc.PrivateRun:
    model = nn.Linear(4, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpkfc.make_private(
        model, optimizer, records() if data is None else data, **{**RUN, **changed}
    )


def train(private: dpkfc.PrivateRun, steps: int | None = None) -> dpkfc.PrivateRun:
    for x, y in private.loader.take(private.plan.steps if steps is None else steps):
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    return private


# -- what is measured is what is released


@pytest.mark.parametrize("width", [2, 600], ids=["of one position", "of several"])
def test_a_batch_that_is_changed_after_backward_is_refused(width: int) -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (4, 1)), nn.Linear(1, width), nn.Flatten(), nn.Linear(4 * width, 2)
    )
    private = begin(
        model=model, loss="unchecked"
    )  # what is compared with the loss would be changed too
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    x[0].fill_(1e6)
    with pytest.raises(dpkfc.PrivacyError, match="changed in place after backward"):
        private.optimizer.step()


def test_a_gradient_that_a_hook_changes_is_refused() -> None:
    model = nn.Linear(4, 2)
    private = begin(model=model, loss="unchecked")  # it would refuse the changed gradient as well
    x, y = next(iter(private.loader))
    out = model(x)
    kept: list[Tensor] = []
    out.register_hook(lambda grad: kept.append(grad))
    F.cross_entropy(out, y).backward()
    kept[0].mul_(1e6)
    with pytest.raises(dpkfc.PrivacyError, match="changed in place after backward"):
        private.optimizer.step()


def test_old_gradients_of_frozen_parameters_are_not_stepped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x, y = records().tensors
    F.cross_entropy(model(x), y).backward()  # without privacy
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model[0].parameters()]
    train(begin(model=model), 2)
    assert all(torch.equal(p, b) for p, b in zip(model[0].parameters(), before, strict=True))


# -- a run forgets no step


def test_the_state_of_another_run_is_refused_once_steps_were_taken(tmp_path: Path) -> None:
    private, other = train(begin(), 5), begin(seed=1)
    spent = private.epsilon()
    other.save(tmp_path / "other")
    for load in (
        lambda: private.load_state_dict(other.state_dict()),
        lambda: private.load(tmp_path / "other"),
    ):
        before = [p.detach().clone() for p in private.model.parameters()]
        with pytest.raises(
            dpkfc.PrivacyError, match="belongs to another run, and this one has taken 5 steps"
        ):
            load()
        assert private.epsilon() == spent and private.steps == 5
        assert all(
            torch.equal(p, b) for p, b in zip(private.model.parameters(), before, strict=True)
        )
    other.load_state_dict(private.state_dict())
    assert other.epsilon() == spent, "a fresh run may continue it"


def test_a_load_that_fails_leaves_the_count_of_steps(tmp_path: Path) -> None:
    private = train(begin(), 5)
    private.save(tmp_path / "early")
    train(private, 3)
    spent = private.epsilon()
    private.model.register_buffer("new", torch.zeros(1))
    with pytest.raises(ValueError, match="missing new"):
        private.load(tmp_path / "early")
    assert (private.charged, private.epsilon()) == (8, spent)


def test_a_load_that_fails_counts_the_steps_of_the_weights_that_it_brought(tmp_path: Path) -> None:
    """`try: load; except: begin anew` is common, and the weights may be there already."""
    trained = train(begin(), 5)
    trained.save(tmp_path / "checkpoint")
    model = nn.Linear(4, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    before = model.weight.detach().clone()
    fresh = dpkfc.make_private(model, torch.optim.SGD(groups, lr=0.1), records(), **RUN)
    with pytest.raises(ValueError, match="parameter groups"):
        fresh.load(tmp_path / "checkpoint")
    assert torch.equal(model.weight, before) and fresh.epsilon() == 0, (
        "it was seen before anything was changed"
    )

    class Failing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("does not fit")

    trained.save(tmp_path / "checkpoint", other=Failing())
    fresh = begin()
    with pytest.raises(ValueError, match="does not fit"):
        fresh.load(tmp_path / "checkpoint", other=Failing())
    assert (
        torch.equal(fresh.model.weight, trained.model.weight)
        and fresh.epsilon() == trained.epsilon()
    )


def test_nothing_of_a_checkpoint_is_left(tmp_path: Path) -> None:
    """It holds keys; a kill in the middle of a save leaves the folder that was being written."""
    train(begin(), 1).save(tmp_path / "checkpoint")
    for left in (".checkpoint.abcd", "checkpoint.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "state.json").write_text("{}")
    checkpoint.discard(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


# -- batches without records


def test_what_is_to_happen_after_every_step_happens_after_empty_ones_too() -> None:
    """Otherwise learning rates and averages would tell how many batches had records."""
    private = begin(batch_size=1, steps=60)
    model, optimizer = private.model, private.optimizer
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    private.after_step(scheduler.step)
    private.after_step(lambda: averaged.update_parameters(model))
    seen = 0
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += 1
    assert 0 < seen < 60 == private.steps
    assert int(averaged.n_averaged) == 60 and optimizer.param_groups[0]["lr"] == pytest.approx(
        0.1 * 0.9**60
    )


def test_after_step_waits_for_the_last_part_of_a_batch() -> None:
    private, calls = begin(max_physical_batch_size=3), []
    private.after_step(lambda: calls.append(private.steps))
    train(private)
    assert calls == list(range(1, 21))


def test_the_plan_says_when_batches_may_be_empty() -> None:
    plan: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 20, "clip": 1.0}
    said = dict(dpkfc.Plan.make(records=100, batch_size=4, **plan).statement())
    assert (
        "0.337 of 20 batches are expected to be empty" in said["not covered"]
        and "after_step" in said["not covered"]
    )
    assert "empty" not in str(dpkfc.Plan.make(records=10_000, batch_size=100, **plan).statement())


# -- records that mix


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_forward_pass_of_ones_own_does_not_use_up_the_trial() -> None:
    model = nn.Sequential(Centred(), nn.Linear(4, 2))
    private = begin(model=model, loss="unchecked")  # otherwise refused before
    model(torch.zeros(2, 4))
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        train(private)


class Awakening(Dataset[Any]):
    """Equal records, until they are told apart."""

    apart = False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(row) if self.apart else 1.0), row % 2


def test_a_trial_on_equal_records_is_repeated() -> None:
    data, model = Awakening(), nn.Sequential(Centred(), nn.Linear(4, 2))
    private = train(begin(data, model, loss="unchecked"), 1)  # the trial of the model alone
    data.apart = True
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        train(private, 1)


@pytest.mark.parametrize("order", [1, -1], ids=["rare class last", "rare class first"])
def test_class_weights_are_seen_in_data_that_is_sorted_by_class(order: int) -> None:
    """CrossEntropyLoss(weight=...) divides by the weights of the whole batch."""
    labels = torch.cat([torch.zeros(90), torch.ones(10)]).long()
    data = TensorDataset(torch.randn(100, 4), labels if order == 1 else labels.flip(0))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1000.0]))
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        begin(data, loss=lambda model, batch: weighted(model(batch[0]), batch[1]))


def mixup(rows: list[Any]) -> list[Tensor]:
    x, y = default_collate(rows)
    weight = torch.rand(1)
    return [weight * x + (1 - weight) * x.roll(1, 0), y]


def augmented(rows: list[Any]) -> list[Tensor]:
    x, y = default_collate(rows)
    return [x + torch.randn_like(x), y]


def ordered(rows: list[Any]) -> list[Tensor]:
    # type: ignore[no-any-return]
    return default_collate(sorted(rows, key=lambda row: float(row[0][0])))


def one_by_one(rows: list[Any]) -> list[Tensor]:
    """As much randomness for each record as it asks for."""
    changed = [(x + (torch.randn(4) if x[0] > 0 else 0), y) for x, y in rows]
    return default_collate(changed)  # type: ignore[no-any-return]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).div_(2.0)


def test_a_model_that_changes_its_input_in_place_is_tried_on_a_copy() -> None:
    data = records()
    before = data.tensors[0].clone()
    private = begin(data, nn.Sequential(InPlace(), nn.Linear(4, 2)))
    assert train(private).steps == 20 and torch.equal(data.tensors[0], before)


def test_a_collate_function_that_mixes_records_is_refused() -> None:
    with pytest.raises(dpkfc.PrivacyError, match="collate_fn mixes the records"):
        begin(DataLoader(records(), batch_size=20, collate_fn=mixup))
    for collate in (augmented, ordered, one_by_one):
        data, model = DataLoader(records(), batch_size=20, collate_fn=collate), nn.Linear(4, 2)
        state = torch.get_rng_state()
        private = begin(data, model)
        assert torch.equal(torch.get_rng_state(), state)
        assert train(private).steps == 20


# -- public data that is not


@pytest.mark.parametrize(
    "share",
    [
        lambda data: data,
        lambda data: data.tensors,
        lambda data: (data.tensors[0][30:], data.tensors[1][30:]),
    ],
    ids=["itself", "its tensors", "some of its records"],
)
@pytest.mark.parametrize("around", ["probe", "hybrid", "through", "adadps"])
def test_public_data_is_not_the_private_data(
    share: Callable[[TensorDataset], Any], around: str
) -> None:
    data = records()
    public = dpkfc.probes.PublicData(share(data))
    probes: dict[str, Any] = {
        "probe": public,
        "hybrid": dpkfc.probes.Hybrid(A=public, G=dpkfc.probes.Tabular(4, classes=2)),
        "through": dpkfc.probes.TransformedProbe(public, lambda x: x),
    }
    geometry = dpkfc.Diagonal(source=public) if around == "adadps" else dpkfc.KFC(probes[around])
    with pytest.raises(dpkfc.PrivacyError, match="PublicData holds private records"):
        begin(data, geometry=geometry)


def test_public_records_beside_private_ones_are_accepted() -> None:
    x, y = records(80).tensors
    public = dpkfc.probes.PublicData((x[40:], y[40:]))
    assert begin(TensorDataset(x[:40], y[:40]), geometry=dpkfc.KFC(public)).plan.public_geometry
    whole = records(80)
    halves = Subset(whole, range(40)), Subset(whole, range(40, 80))
    begin(halves[0], geometry=dpkfc.KFC(dpkfc.probes.PublicData(halves[1])))
    overlapping: list[Dataset[Any]] = [
        Subset(whole, range(39, 80)),
        Subset(whole, torch.tensor([3, 70])),  # type: ignore[arg-type]
        Subset(Subset(whole, range(30, 80)), [0, 49]),
        ConcatDataset([halves[1], Subset(whole, [0])]),
        whole,
    ]
    for other in overlapping:
        with pytest.raises(dpkfc.PrivacyError, match="PublicData holds private records"):
            begin(halves[0], geometry=dpkfc.KFC(dpkfc.probes.PublicData(other)))


def test_a_woken_batch_norm_learns_nothing_without_gradients_either() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval().requires_grad_(False)
    begin(model=model)
    model.train()
    with torch.no_grad(), pytest.raises(dpkfc.PrivacyError, match="is in training mode"):
        model(records().tensors[0])
    assert torch.equal(model[1].running_mean, torch.zeros(4))
