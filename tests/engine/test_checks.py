"""What would break the guarantee is named, with the fix, before any budget is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import dpkfc


def make(
    model: nn.Module, x: Tensor, y: Tensor | None = None, **settings: Any
) -> tuple[dpkfc.PrivateRun, TensorDataset]:
    data = TensorDataset(x, torch.randint(2, (len(x),)) if y is None else y)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1))], lr=0.1
    )
    # "unchecked": most of these models are refused whatever the loss, and many at the first batch
    # only without one
    defaults = {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "steps": 2,
        "batch_size": len(x),
        "loss": "unchecked",
    }
    return dpkfc.make_private(model, optimizer, data, **{**defaults, **settings}), data


def first_batch(private: dpkfc.PrivateRun, model: nn.Module) -> None:
    for x, _ in private.loader:
        model(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            r"'1' \(BatchNorm1d\).*dpkfc\.fix",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), r"SyncBatchNorm"),
        (
            lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
            "running statistics",
        ),
        (lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), "max_norm"),
        (lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)), "sparse=False"),
        (lambda: nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True)), "scale_grad_by_freq"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), r"\(LSTM\).*batch_first=True"),
        (lambda: nn.MultiheadAttention(4, 2), "batch_first=True"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4), "batch_first=True"),
        (lambda: nn.LazyLinear(3), "not initialised"),
        (lambda: nn.ReLU(), "no trainable parameter"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), "wraps the model"),
        (lambda: torch.compile(nn.Linear(4, 4)), "before torch.compile"),
    ],
)
def test_modules_that_cannot_be_private_are_named(build: Any, message: str) -> None:
    error = ValueError if message == "no trainable parameter" else dpkfc.PrivacyError
    with pytest.raises(error, match=message):
        make(build(), torch.randn(8, 4))


def test_all_problems_are_named_at_once() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
    )
    with pytest.raises(dpkfc.PrivacyError, match=r"(?s)'1'.*'3'"):
        make(model, torch.randn(8, 4, 3))


def test_frozen_batch_norm_in_eval_mode_is_fine_until_it_is_set_to_train() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].eval().requires_grad_(False)
    private, _ = make(model, torch.randn(8, 4))
    first = iter(private.loader)
    model(next(first)[0])
    model.train()
    with pytest.raises(dpkfc.PrivacyError, match=r"'0'.*training mode"):
        model(torch.randn(8, 4))


class Mixes(nn.Module):
    """Several ways to let one record see another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if self.how == "centre":
            h = h - h.mean(0)
        elif self.how == "attend":
            h = torch.softmax(h @ h.T, -1) @ h
        elif self.how == "buffer":
            self.seen.copy_(0.9 * self.seen + 0.1 * h.detach().mean(0))
        elif self.how == "wrong_dimension":
            h = self.one(h.reshape(6, -1).T.reshape(len(x), 6))
        elif (
            self.how == "constant"
        ):  # its gradient is a sum over the records, in as many rows as there are records
            h = h + self.one(torch.eye(6)[:4].repeat(len(x) // 4, 1)).sum(0)
        return self.two(torch.tanh(h))


@pytest.mark.parametrize("how", ["centre", "attend", "buffer", "wrong_dimension", "constant"])
def test_layers_that_mix_records_are_found_by_trying(how: str) -> None:
    torch.manual_seed(0)
    model = Mixes(how)
    private, _ = make(model, torch.randn(8, 6))
    before = model.seen.clone()
    with pytest.raises(
        dpkfc.PrivacyError,
        match="buffer 'seen'" if how == "buffer" else "mixes the records|first dimension",
    ):
        first_batch(private, model)
    assert private.epsilon() == 0 and torch.equal(model.seen, before)
    private.detach()
    with pytest.raises(dpkfc.PrivacyError, match="buffer 'seen'|mixes the records|first dimension"):
        make(model, torch.randn(8, 6), loss=dpkfc.losses.cross_entropy)  # before the first batch


def test_time_before_batch_is_refused_even_when_the_sizes_agree() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))

    model = TimeFirst()
    for length in (4, 8, 7):
        private, _ = make(model, torch.randn(8, length, 6))
        with pytest.raises(
            dpkfc.PrivacyError, match="mixes the records|first dimension must hold the samples"
        ):
            first_batch(private, model)
        private.detach()


LOSSES = {
    "contrastive": lambda m, b: F.cross_entropy(
        m(b[0]) @ m(b[0]).detach().roll(1, 0).T, torch.arange(len(b[0]))
    ),
    "batch_variance": lambda m, b: m(b[0]).var(0).sum(),
    "hardest": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").max(),
    "sum_called_mean": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "class_weights": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.tensor([1.0, 20.0])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_mix_records_or_are_not_a_mean_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records|is not the mean over records"):
        make(model, torch.randn(8, 6), torch.tensor([0, 1, 0, 1] * 2), loss=LOSSES[name])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_good_losses_pass_also_with_dropout(reduction: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    make(
        model,
        torch.randn(8, 6),
        options=dpkfc.Options(loss_reduction=reduction),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction=reduction),
    )
    assert model[1].training


def test_a_mean_called_sum_is_refused() -> None:
    model = nn.Linear(6, 2)
    with pytest.raises(dpkfc.PrivacyError, match="is not the sum over records"):
        make(
            model,
            torch.randn(8, 6),
            options=dpkfc.Options(loss_reduction="sum"),
            loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        )


def test_a_loss_must_be_declared() -> None:
    model = nn.Linear(6, 2)
    with pytest.raises(dpkfc.PrivacyError, match=r"loss= is missing.*loss='unchecked'"):
        make(model, torch.randn(8, 6), loss=None)
    with pytest.raises(TypeError, match="loss='cross_entropy'"):
        make(model, torch.randn(8, 6), loss="cross_entropy")


def test_the_plan_says_what_was_not_checked(tmp_path: Path) -> None:
    private, _ = make(
        nn.Linear(6, 2), torch.randn(8, 6), seed=1, options=dpkfc.Options(check=False)
    )
    assert private.plan.unchecked == ("loss", "model", "seed", "ledger", "records")
    rows = dict(private.plan.statement())
    assert all(f"not checked: {what}" in rows for what in private.plan.unchecked)
    assert dpkfc.Plan.from_json(private.plan.to_json()) == private.plan
    ledger = dpkfc.Ledger(tmp_path / "privacy.db", dataset="people")
    private, _ = make(
        nn.Linear(6, 2),
        torch.randn(8, 6),
        loss=dpkfc.losses.cross_entropy,
        ledger=ledger,
        records=8,
    )
    assert private.plan.unchecked == () and "not checked" not in str(private.plan)


def test_ragged_token_losses_need_a_mean_within_each_record() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    x = torch.randint(1, 9, (8, 5))
    for row in range(8):
        x[row, 1 + row % 4 :] = 0

    def over_the_batch(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]).transpose(1, 2), b[0], ignore_index=0)

    def within_records(m: nn.Module, b: Any) -> Tensor:
        losses = F.cross_entropy(m(b[0]).transpose(1, 2), b[0], reduction="none")
        return dpkfc.losses.mean_over_records(losses, b[0] != 0)

    with pytest.raises(dpkfc.PrivacyError, match="mean_over_records"):
        make(model, x, loss=over_the_batch)
    make(model, x, loss=within_records)


def test_iterable_data_is_refused() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield torch.zeros(3)

    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="map-style"):
        dpkfc.make_private(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            Stream(),
            noise_multiplier=1.0,
            delta=1e-5,
            steps=1,
            batch_size=1,
            loss=dpkfc.losses.cross_entropy,
        )


def test_a_module_that_does_not_run_under_vmap_is_named_with_what_to_do() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(6, 6), Branches(), nn.Linear(6, 2))
    private, _ = make(model, torch.randn(8, 6))
    with pytest.raises(dpkfc.PrivacyError, match=r"module '1' \(Branches\).*freeze it"):
        first_batch(private, model)


def test_calling_parts_of_the_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    private, _ = make(model, torch.randn(8, 6))
    with pytest.raises(dpkfc.PrivacyError, match="call the model itself"):
        for x, _ in private.loader:
            model[1](model[0](x))


def test_arguments_of_the_wrong_kind_are_named() -> None:
    model, data = nn.Linear(6, 2), TensorDataset(torch.randn(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 1, "batch_size": 4}
    settings["loss"] = dpkfc.losses.cross_entropy
    with pytest.raises(TypeError, match="model must be"):
        dpkfc.make_private("bert", optimizer, data, **settings)
    with pytest.raises(TypeError, match="optimizer must be"):
        dpkfc.make_private(model, "adam", data, **settings)
    with pytest.raises(TypeError, match="ledger must be"):
        dpkfc.make_private(model, optimizer, data, **settings, ledger="privacy.db")
