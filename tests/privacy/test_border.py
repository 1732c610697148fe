"""Where the guarantee ended at the border to the user's code: in each case it now holds, or the
loop is refused.

One test per case that was once silently wrong. Neighbouring data sets go through the real loop, and
the sums that are about to be released, before the noise, may differ by at most the clip; or the
loop is refused with a message that names the fix.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import dpkfc
from dpkfc.accounting.unchecked import NOT_CHECKED
from dpkfc.engine.state_files import pack
from dpkfc.losses import cross_entropy
from dpkfc.random import first_key

N, CLIP, CLASSES = 24, 0.5, 3
Loss = Callable[[nn.Module, Any], Tensor]


def records(count: int = N, seed: int = 0) -> TensorDataset:
    """The last record is unlike the others: whatever depends on the batch changes with it."""
    torch.manual_seed(seed)
    x, y = torch.randn(N, 6), torch.arange(N) % (CLASSES - 1)
    x[-1], y[-1] = -60.0, CLASSES - 1
    return TensorDataset(x[:count], y[:count])


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def begin(
    model: nn.Module,
    data: Any,
    loss: Loss | str = cross_entropy,
    optimizer: Any = None,
    **changed: Any,
) -> dpkfc.PrivateRun:
    """Every record at every step, so that neighbouring data sets differ only by the record."""
    run: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "steps": 4,
        "batch_size": N,
        "clip": CLIP,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return dpkfc.make_private(
        model, optimizer, data, **{**run, "records": N, "loss": loss, **changed}
    )


def step(private: dpkfc.PrivateRun, batch: Any, loss: Loss) -> None:
    loss(private.model, batch).backward()
    private.optimizer.step()
    private.optimizer.zero_grad()


def train(
    private: dpkfc.PrivateRun, loss: Loss = cross_entropy, steps: int | None = None
) -> dpkfc.PrivateRun:
    for batch in private.loader.take(private.plan.steps if steps is None else steps):
        step(private, batch, loss)
    return private


class Sums:
    """Takes the place of the noise and keeps the sums that it would have been added to."""

    def __init__(self, private: dpkfc.PrivateRun) -> None:
        self.steps: list[Tensor] = []
        self.batch_size = private.plan.batch_size
        private._noise = self  # type: ignore[assignment]

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self.steps.append(torch.cat([x.flatten().double() for x in sums]) * self.batch_size)


def sensitivity(loop: Callable[[dpkfc.PrivateRun], Any], **settings: Any) -> float:
    """How far apart the first sums of two neighbouring data sets are, in units of the clip."""
    sums = []
    for count in (N, N - 1):
        private = begin(network(), records(count), **settings)
        seen = Sums(private)
        loop(private)
        sums.append(seen.steps[0])
        private.detach()
    return float((sums[0] - sums[1]).norm()) / settings.get("clip", CLIP)


def plain_loop(loss: Loss = cross_entropy) -> Callable[[dpkfc.PrivateRun], Any]:
    return lambda private: train(private, loss, 1)


# -- the loss


def centred(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out - out.mean(0), batch[1])


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    out = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(out @ out.T.detach() / 0.1, torch.arange(len(out)))


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    """Over the tokens of all records: one record has many, the others have one or two."""
    tokens = torch.where(batch[1] == CLASSES - 1, 60, 1 + batch[1])
    return (
        F.cross_entropy(model(batch[0]), batch[1], reduction="none") * tokens
    ).sum() / tokens.sum()


def by_sign(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * torch.sign(batch[0].sum())


WEIGHTS = torch.tensor([1.0, 2.0, 500.0])
MIXING: dict[str, Loss] = {
    "class weights": lambda model, batch: F.cross_entropy(
        model(batch[0]), batch[1], weight=WEIGHTS
    ),
    "centred outputs": centred,
    "token mean": token_mean,
    "sum": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
    "InfoNCE": contrastive,
    "sign of the batch": by_sign,
}


@pytest.mark.parametrize("name", MIXING)
class TestLosses:
    def test_declared_it_is_refused_before_anything_is_spent(self, name: str) -> None:
        """Also where the records of the trial look harmless.

        They are drawn with as many classes as there are.
        """
        with pytest.raises(
            dpkfc.PrivacyError, match="mixes the records|is not the mean over records"
        ):
            begin(network(), records(), MIXING[name])

    def test_in_the_loop_it_is_refused_before_anything_is_released(self, name: str) -> None:
        private = begin(network(), records())
        before = [p.detach().clone() for p in private.model.parameters()]
        with pytest.raises(dpkfc.PrivacyError, match="does not compute the loss that was declared"):
            train(private, MIXING[name])
        assert private.epsilon() == 0 and not private.batch_open
        assert all(
            torch.equal(p, b) for p, b in zip(private.model.parameters(), before, strict=True)
        )
        with pytest.raises(dpkfc.PrivacyError, match=r"without a batch from run\.loader"):
            private.optimizer.step()  # `except: pass` does not release it either

    def test_unchecked_it_is_silently_wrong_and_the_plan_says_that_nobody_looked(
        self, name: str
    ) -> None:
        """The control: what the two refusals above prevent."""
        settings: dict[str, Any] = {
            "loss": "unchecked",
            "options": dpkfc.Options(check=False),
            "clip": 100.0 if name == "sum" else CLIP,
        }
        assert sensitivity(plain_loop(MIXING[name]), **settings) > (
            1.005 if name in ("sum", "InfoNCE") else 1.2
        )
        said = str(begin(network(), records(), **settings).plan)
        assert "not checked: loss" in said and "not checked: model" in said


def test_without_a_loss_nothing_begins() -> None:
    with pytest.raises(dpkfc.PrivacyError, match=r"loss= is missing.*loss='unchecked'"):
        begin(network(), records(), loss=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a function"):
        begin(network(), records(), loss="cross_entropy")


def hand_split(private: dpkfc.PrivateRun, scale: float = 1.0) -> None:
    """A loop that takes the gradients of a batch in parts of its own."""
    for x, y in private.loader.take(1):
        for part in (slice(0, 7), slice(7, 20), slice(20, None)):
            (F.cross_entropy(private.model(x[part]), y[part]) * scale).backward()
        private.optimizer.step()


def with_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy(model, batch)


def under_autocast(private: dpkfc.PrivateRun) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(private, steps=1)


def evaluating(private: dpkfc.PrivateRun) -> None:
    """Forward passes of its own, with and without gradients, random numbers of its own, and a
    change of mode.
    """
    for x, y in private.loader.take(1):
        torch.rand(3)
        private.model(x[:2])
        with torch.no_grad():
            private.model.eval()
            private.model(x[:5])
            private.model.train()
        loss = F.cross_entropy(private.model(x), y)
        loss.backward()
        private.model.eval()
        private.model(x[:3])
        private.model.train()
        private.optimizer.step()


HARMLESS: dict[str, Callable[[dpkfc.PrivateRun], Any]] = {
    "plain": plain_loop(),
    "split by hand": hand_split,
    "autocast in the loss": plain_loop(with_autocast),
    "autocast around the loop": under_autocast,
    "evaluation in between": evaluating,
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("loop", HARMLESS)
def test_harmless_loops_pass_and_keep_the_sensitivity(
    loop: str, chunk: int | None, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop == "split by hand" and chunk:
        chunk = N  # one part, which the loop splits again
    plain = network
    monkeypatch.setattr(
        f"{__name__}.network", lambda: nn.Sequential(*plain()[:2], nn.Dropout(dropout), plain()[2])
    )
    found = sensitivity(HARMLESS[loop], max_physical_batch_size=chunk)
    if not dropout:  # with dropout, masks differ between data sets of different sizes
        # In bfloat16 the mean over a batch rounds each record's gradient, and its size decides how.
        assert found <= 1 + (2**-8 * N**0.5 if "autocast" in loop else 1e-5)


@pytest.mark.parametrize("how", ["model", "loss", "autocast"])
def test_bfloat16_is_not_refused(how: str) -> None:
    """The tolerance fits the dtype; it refused ten of ten."""
    model = network(torch.bfloat16 if how == "model" else torch.float32)
    dtype = torch.bfloat16 if how == "model" else torch.float32

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how != "model"):
            return F.cross_entropy(model(batch[0].to(dtype)).float(), batch[1])

    for seed in range(10):
        data = records(seed=seed)
        assert train(begin(copy.deepcopy(model), data, loss), loss).steps == 4
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        begin(model, records(), lambda m, b: loss(m, b) * torch.sign(b[0].sum()))


@pytest.mark.parametrize("scale", [0.5, 1 / 3, -1.0])
def test_a_loss_divided_by_the_number_of_parts_is_refused(scale: float) -> None:
    private = begin(network(), records())
    with pytest.raises(dpkfc.PrivacyError, match=r"declared as loss=.*max_physical_batch_size"):
        hand_split(private, scale)
    assert private.epsilon() == 0


def test_a_resumed_run_is_compared_again(tmp_path: Path) -> None:
    private = train(begin(network(), records()), steps=1)
    private.save(tmp_path / "run")
    resumed = begin(network(), records())
    resumed.load(tmp_path / "run")
    with pytest.raises(dpkfc.PrivacyError, match="does not compute the loss that was declared"):
        train(resumed, centred)
    assert resumed.steps == 1


def test_a_loop_that_changes_its_loss_later_is_found_at_secretly_chosen_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {
        dpkfc.engine.run._secret_steps(1000) == dpkfc.engine.run._secret_steps(1000)
        for _ in range(3)
    }
    assert found == {False}, "nobody can foresee them"
    monkeypatch.setattr(dpkfc.engine.run, "_secret_steps", lambda steps: {5})
    private = begin(network(), records(), steps=8)
    train(private, steps=4)
    with pytest.raises(dpkfc.PrivacyError, match="does not compute the loss that was declared"):
        train(private, centred)
    assert private.steps == 5


def test_a_model_that_begins_to_mix_records_later_is_found_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later(nn.Module):
        mixes = False

        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.mixes else x

    monkeypatch.setattr(dpkfc.engine.run, "_secret_steps", lambda steps: {2})
    for loss in (cross_entropy, "unchecked"):
        model = nn.Sequential(Later(), network())
        private = train(begin(model, records(), loss), steps=2)
        model[0].mixes = True
        with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
            train(private)
        assert private.steps == 2


def test_a_loss_that_reaches_a_parameter_outside_the_model_is_refused() -> None:
    head = nn.Linear(CLASSES, CLASSES)
    with pytest.raises(dpkfc.PrivacyError, match="not in the model"):
        begin(
            network(),
            records(),
            lambda model, batch: F.cross_entropy(head(model(batch[0])), batch[1]),
        )
    assert head.weight.grad is None
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(dpkfc.PrivacyError, match="not in the model"):
        begin(
            network(),
            records(),
            lambda model, batch: F.cross_entropy(model(batch[0]) * temperature, batch[1]),
        )


def test_a_loss_that_trains_a_bare_tensor_is_refused_and_one_with_gradients_of_inputs_is_not() -> (
    None
):
    bias = torch.zeros(CLASSES, requires_grad=True)
    with pytest.raises(dpkfc.PrivacyError, match="not in the model"):
        begin(
            network(),
            records(),
            lambda model, batch: F.cross_entropy(model(batch[0]) + bias, batch[1]),
        )

    def with_inputs(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0].requires_grad_(), batch[1]))

    assert train(begin(network(), records(), with_inputs), with_inputs).steps == 4


def with_statistics(rows: list[Any]) -> list[Tensor]:
    x, y = default_collate(rows)
    return [x, y, x.mean(0)]


def with_a_count(rows: list[Any]) -> list[Any]:
    x, y = default_collate(rows)
    return [x, y, float((y == CLASSES - 1).sum())]


def test_lists_of_values_and_constants_from_collate_are_accepted() -> None:
    def collate(rows: list[Any]) -> list[Any]:
        x, y = default_collate(rows)
        return [
            x,
            y,
            [int(label) for label in y],
            ["a" if label else "b" for label in y],
            3.0,
            torch.ones(2),
            (1, 2),
        ]

    data = DataLoader(records(), batch_size=N, collate_fn=collate)
    assert train(begin(network(), data)).steps == 4


class Words(Dataset[dict[str, Tensor]]):
    """Records of different lengths; the last is much longer than the others."""

    def __init__(self, count: int = N) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = [2 + index % 3 for index in range(N - 1)] + [15]
        self.records = [
            {"ids": torch.randint(1, 20, (length,), generator=generator), "labels": index % CLASSES}
            for index, length in enumerate(lengths[:count])
        ]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {"ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}


class BagOfWords(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.embed, self.head = masked, nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(2) if self.masked else torch.ones_like(ids).unsqueeze(2)
        out: Tensor = self.head((self.embed(ids) * mask).sum(1) / mask.sum(1))
        return out


def of_words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["labels"])


def one_step_on_words(masked: bool, count: int, collate: Any = padded, **changed: Any) -> Tensor:
    model, data = BagOfWords(masked), DataLoader(Words(count), N, collate_fn=collate)
    private = begin(model, data, of_words, steps=1, **changed)
    seen = Sums(private)
    train(private, of_words)
    private.detach()
    return seen.steps[0]


def test_a_gradient_that_depends_on_the_padding_of_the_batch_is_refused() -> None:
    """One long record would change the gradients of all others."""
    with pytest.raises(dpkfc.PrivacyError, match=r"how far its batch is padded.*attention_mask"):
        one_step_on_words(False, N)
    sums = [one_step_on_words(True, count) for count in (N, N - 1)]
    assert float((sums[0] - sums[1]).norm()) <= CLIP * (1 + 1e-5)


def test_unchecked_the_padding_breaks_the_guarantee() -> None:
    """The control: what the refusal above prevents."""
    settings = {"loss": "unchecked", "options": dpkfc.Options(check=False), "steps": 1}
    sums = []
    for count in (N, N - 1):
        data = DataLoader(Words(count), N, collate_fn=padded)
        private = begin(BagOfWords(False), data, **settings)
        seen = Sums(private)
        train(private, of_words)
        sums.append(seen.steps[0])
        private.detach()
    assert float((sums[0] - sums[1]).norm()) > 1.05 * CLIP


def test_a_random_collate_function_is_said_to_be_unchecked() -> None:
    def with_random_words(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(rows)
        batch["ids"] = torch.where(torch.rand(batch["ids"].shape) < 0.2, 1, batch["ids"])
        return batch

    own = np.random.default_rng()

    def with_own_generator(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(rows)
        batch["noise"] = torch.from_numpy(own.normal(size=len(rows)))
        return batch

    for collate, said in ((padded, False), (with_random_words, True), (with_own_generator, True)):
        data = DataLoader(Words(), N, collate_fn=collate)
        private = begin(BagOfWords(True), data, of_words)
        assert ("collate" in private.plan.unchecked) is said
        assert ("not checked: collate" in str(private.plan)) is said


def test_a_collate_function_may_change_its_records() -> None:
    def popping(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = torch.tensor([row.pop("labels") for row in rows])
        ids = [row["ids"] for row in rows]
        return {"ids": nn.utils.rnn.pad_sequence(ids, batch_first=True), "labels": labels}

    private = begin(BagOfWords(True), DataLoader(Words(), N, collate_fn=popping), of_words)
    assert "collate" not in private.plan.unchecked
    assert all("labels" in record for record in private.loader.dataset.records)  # type: ignore[attr-defined]


class Mixing(Dataset[Any]):
    """Reads a batch at once, and mixes its records (mixup in a transform)."""

    def __init__(self) -> None:
        self.tensors = records().tensors

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][row], self.tensors[1][row]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        x = self.tensors[0][rows]
        return list(zip((x + x.roll(1, 0)) / 2, self.tensors[1][rows], strict=True))


def mixed_transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
    x = torch.tensor(rows["x"])
    return {"x": list((x + x.roll(1, 0)) / 2), "y": rows["y"]}


@pytest.mark.parametrize("of_hugging_face", [False, True])
def test_records_are_read_one_by_one_where_reading_might_mix_them(of_hugging_face: bool) -> None:
    wanted, labels = records().tensors
    if of_hugging_face:
        columns = {"x": wanted.tolist(), "y": labels.tolist()}
        data: Any = datasets.Dataset.from_dict(columns).with_transform(mixed_transform)
        loss: Loss = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    else:
        data, loss = Mixing(), cross_entropy
    private = begin(network(), data, loss)
    (batch,) = private.loader.take(1)
    read = batch["x"] if of_hugging_face else batch[0]
    assert torch.equal(read, wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_come_from_secret_numbers_whatever_the_global_seed(workers: int) -> None:
    """With masks from a public seed, a record more would change the masks of all others."""

    def draws(seed: int | None) -> tuple[list[float], int]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        data = DataLoader(records(), batch_size=N, num_workers=workers)
        private = begin(network(), data, seed=seed)
        for batch in private.loader.take(1):
            drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
            step(private, batch, cross_entropy)
        return drawn, private.steps

    one, other = draws(None), draws(None)
    assert all(x != y for x, y in zip(one[0], other[0], strict=True))
    assert draws(3) == draws(3)  # a seed is for experiments


@pytest.mark.parametrize("collate", [with_statistics, with_a_count])
def test_a_statistic_of_the_batch_from_collate_is_refused(
    collate: Callable[[list[Any]], Any],
) -> None:
    data = DataLoader(records(), batch_size=N, collate_fn=collate)
    with pytest.raises(dpkfc.PrivacyError, match="from all records of a batch"):
        begin(network(), data)


class Remembers(nn.Module):
    """A running mean, in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_a_buffer_that_learns_in_training_mode_only_is_found_in_the_loop() -> None:
    """A model from from_pretrained() is in eval mode when it is made private."""
    model = nn.Sequential(Remembers(), network()).eval()
    private = begin(model, records())
    model.train()
    with pytest.raises(dpkfc.PrivacyError, match=r"buffer '0\.mean' is computed from the records"):
        train(private)
    assert private.epsilon() == 0


def test_a_buffer_that_grows_on_first_use_is_no_error() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(0))
            self.register_buffer("cache", None)

        def forward(self, x: Tensor) -> Tensor:
            if not len(self.table):
                self.table = torch.linspace(0, 1, x.shape[1])
                self.cache = self.table * 2
            return x + self.table

    assert train(begin(nn.Sequential(Grows(), network()), records())).steps == 4


@pytest.mark.parametrize("weight", [0.003, 0.01])
def test_a_small_term_over_the_batch_is_seen_in_bfloat16_too(weight: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0].bfloat16()).float()
        return F.cross_entropy(out, batch[1]) + weight * len(out) * out.mean(0).square().sum()

    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        begin(network(torch.bfloat16), records(), loss)


def test_a_fused_optimizer_with_a_scaler_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(ValueError, match="fused=False"):
        begin(
            model,
            records(),
            optimizer=optimizer,
            options=dpkfc.Options(grad_scaler=torch.amp.GradScaler("cpu")),
        )


# -- noise is never used twice


def released(private: dpkfc.PrivateRun, loss: Loss = cross_entropy, steps: int = 1) -> Tensor:
    found = []
    for batch in private.loader.take(steps):
        loss(private.model, batch).backward()
        private.optimizer.step()
        found.append(torch.cat([p.grad.flatten() for p in private.model.parameters()]))
        private.optimizer.zero_grad()
    return torch.stack(found)


def same_noise(one: Tensor, other: Tensor, private: dpkfc.PrivateRun) -> bool:
    """Two releases of nearly the same sum with different noise are about √2 noise scales apart in
    every coordinate.
    """
    scale = private.plan.noise_scale / private.plan.batch_size
    return float((one - other).square().mean().sqrt()) < 0.5 * scale


def other_rate(private: dpkfc.PrivateRun) -> dpkfc.PrivateRun:
    """The second branch does something else with the same noise.

    The difference would be free of it.
    """
    for group in private.optimizer.param_groups:
        group["lr"] = 0.01
    return private


NOISES: dict[str, Any] = {"independent": None, "banded": dpkfc.noise.BandedToeplitz(bands=2)}


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("noise", NOISES)
class TestNoiseIsUsedOnce:
    def settings(self, noise: str, seed: int | None) -> dict[str, Any]:
        return {
            "noise": NOISES[noise],
            "seed": seed,
            "batch_size": N // 2,
            "steps": 6,
            "clip": CLIP,
        }

    def test_a_checkpoint_taken_up_twice(
        self, noise: str, seed: int | None, tmp_path: Path
    ) -> None:
        settings = self.settings(noise, seed)
        train(begin(network(), records(), **settings), steps=2).save(tmp_path / "run")
        branches = []
        for _ in range(2):
            private = begin(network(), records(), **settings)
            private.load(tmp_path / "run")
            branches.append((private, released(private)))
        (first, one), (_, other) = branches
        assert not same_noise(one, other, first)

    def test_a_checkpoint_taken_up_twice_by_other_processes(
        self, noise: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each process knows only what is on disk."""
        settings = self.settings(noise, seed)
        train(begin(network(), records(), **settings), steps=2).save(tmp_path / "run")
        branches = []
        for _ in range(2):
            forget_this_process(monkeypatch)
            private = begin(network(), records(), **settings)
            if branches:
                with pytest.warns(UserWarning, match="was continued before"):
                    private.load(tmp_path / "run")
            else:
                private.load(tmp_path / "run")
            branches.append(released(private))
        assert not same_noise(*branches, private)

    def test_two_processes_that_loaded_before_either_went_on(
        self, noise: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = self.settings(noise, seed)
        train(begin(network(), records(), **settings), steps=2).save(tmp_path / "run")
        runs = []
        for _ in range(2):
            forget_this_process(monkeypatch)
            runs.append(begin(network(), records(), **settings))
            runs[-1].load(tmp_path / "run")
            kept = dict(dpkfc.engine.lineage._owner), dict(dpkfc.engine.lineage._steps)
            runs[-1].kept = kept  # type: ignore[attr-defined]
        found = []
        for private in runs:
            forget_this_process(monkeypatch, *private.kept)
            found.append(released(private))
        assert not same_noise(*found, private)

    @pytest.mark.parametrize("how", ["two saves", "load and save", "moved"])
    def test_every_checkpoint_of_a_step_is_known_to_be_continued(
        self,
        noise: str,
        seed: int | None,
        how: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        settings = self.settings(noise, seed)
        private = train(begin(network(), records(), **settings), steps=2)
        private.save(tmp_path / "kept")
        if how == "two saves":
            private.save(tmp_path / "latest")
        elif how == "moved":
            private.save(tmp_path / "latest")
            (tmp_path / "kept").rename(tmp_path / "elsewhere")
            (tmp_path / "latest").rename(tmp_path / "kept")
        else:
            private = begin(network(), records(), **settings)
            private.load(tmp_path / "kept")
            private.save(tmp_path / "latest")
        one = released(private)
        forget_this_process(monkeypatch)
        resumed = begin(network(), records(), **settings)
        resumed.load(tmp_path / ("elsewhere" if how == "moved" else "kept"))
        again = released(other_rate(resumed))
        if how == "moved" and seed is not None:
            return  # nobody can know, and a seed asks for the same noise
        assert not same_noise(one, again, resumed)

    def test_a_checkpoint_that_another_process_continues_while_the_run_goes_on(
        self, noise: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run that saved it is refused, and does not use the noise when the error is caught
        either.
        """
        settings = self.settings(noise, seed)
        private = begin(network(), records(), **settings)
        batches = iter(private.loader)
        step(private, next(batches), cross_entropy)
        private.save(tmp_path / "run")
        kept = dict(dpkfc.engine.lineage._owner), dict(dpkfc.engine.lineage._steps)
        forget_this_process(monkeypatch)
        other = begin(network(), records(), **settings)
        other.load(tmp_path / "run")
        one = released(other)
        forget_this_process(monkeypatch, *kept)
        with pytest.raises(dpkfc.PrivacyError, match="was continued by another process"):
            next(batches)
        assert not same_noise(one, released(private), private)

    def test_a_checkpoint_that_was_continued_and_replaced(
        self, noise: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Loaded, not yet continued.

        Meanwhile another process continued it and saved to the same place.
        """
        settings = self.settings(noise, seed)
        train(begin(network(), records(), **settings), steps=2).save(tmp_path / "run")
        forget_this_process(monkeypatch)
        waiting = begin(network(), records(), **settings)
        waiting.load(tmp_path / "run")
        kept = dict(dpkfc.engine.lineage._owner), dict(dpkfc.engine.lineage._steps)
        forget_this_process(monkeypatch)
        other = begin(network(), records(), **settings)
        other.load(tmp_path / "run")
        one = released(other)
        other.save(tmp_path / "run")
        forget_this_process(monkeypatch, *kept)
        with pytest.warns(UserWarning, match="was continued before"):
            late = released(waiting)
        assert not same_noise(one, late, waiting)

    def test_a_run_that_went_on_after_it_was_saved(
        self, noise: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was killed then, and what it had released may have been seen."""
        settings = self.settings(noise, seed)
        private = train(begin(network(), records(), **settings), steps=2)
        private.save(tmp_path / "run")
        one = released(private)
        forget_this_process(monkeypatch)
        resumed = begin(network(), records(), **settings)
        with pytest.warns(UserWarning, match="was continued before"):
            resumed.load(tmp_path / "run")
        assert not same_noise(one, released(other_rate(resumed)), resumed)

    def test_a_state_loaded_into_another_handle(self, noise: str, seed: int | None) -> None:
        settings = self.settings(noise, seed)
        first = train(begin(network(), records(), **settings), steps=2)
        second = begin(copy.deepcopy(first.model), records(), **settings)
        second.load_state_dict(first.state_dict())
        released(second)
        with pytest.raises(dpkfc.PrivacyError, match="loaded into another run object"):
            released(first)

    def test_a_state_that_another_process_kept_by_itself(
        self, noise: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As torch.save and torch.load do.

        A seed means that the noise is to be reproduced; otherwise it is fresh.
        """
        settings = self.settings(noise, seed)
        first = train(begin(network(), records(), **settings), steps=2)
        state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(first.model)
        one = released(first)
        forget_this_process(monkeypatch)
        resumed = begin(weights, records(), **settings)
        resumed.load_state_dict(state)
        assert same_noise(one, released(resumed), resumed) == (seed is not None)

    def test_going_back_and_forth_with_a_ledger(
        self, noise: str, seed: int | None, tmp_path: Path
    ) -> None:
        settings = self.settings(noise, seed)
        found = []
        for _ in range(2):
            ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people")
            private = begin(network(), records(), ledger=ledger, **settings)
            if found:
                private.load(tmp_path / "run")
                assert private.charged == 3, "the step of the other branch stays charged"
            else:
                train(private, steps=2).save(tmp_path / "run")
            found.append(released(private))
        assert not same_noise(*found, private)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process")
    def test_a_fork(self, noise: str, seed: int | None) -> None:
        private = train(begin(network(), records(), **self.settings(noise, seed)), steps=2)
        twin, own = in_a_fork(lambda: released(private)), released(private)
        assert not same_noise(twin, own, private)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process")
    def test_a_fork_within_an_iteration(self, noise: str, seed: int | None) -> None:
        """The batches of the child would be those of the parent."""
        private = begin(network(), records(), **self.settings(noise, seed))
        batches = private.loader.take(3)
        step(private, next(batches), cross_entropy)

        def go_on() -> str:
            try:
                next(batches)
            except dpkfc.PrivacyError as problem:
                return str(problem)
            return "went on"

        assert "Begin to iterate in the child" in in_a_fork(go_on)

    def test_copies_and_pickles(self, noise: str, seed: int | None) -> None:
        private = begin(network(), records(), **self.settings(noise, seed))
        for way in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(dpkfc.PrivacyError, match=r"cannot be copied or pickled.*save\(\)"):
                way(private)
        assert train(private).steps == 6


def forget_this_process(
    monkeypatch: pytest.MonkeyPatch,
    owner: dict[str, str] | None = None,
    steps: dict[str, int] | None = None,
) -> None:
    """What is known of runs in memory is gone, or is that of another process."""
    monkeypatch.setattr(dpkfc.engine.lineage, "_owner", owner or {})
    monkeypatch.setattr(dpkfc.engine.lineage, "_steps", steps or {})


def in_a_fork(function: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        torch.set_num_threads(1)
        found = function()
        there.send(found.tolist() if isinstance(found, Tensor) else found)

    process = context.Process(target=work)
    process.start()
    assert here.poll(60), "the child did not answer"
    found = here.recv()
    process.join()
    return torch.tensor(found) if isinstance(found, list) else found


# -- weights that are newer than the privacy state


@pytest.mark.parametrize("which", ["weights alone", "state alone"])
def test_weights_and_privacy_state_must_belong_together(which: str) -> None:
    """A framework restored one of them; the run would report the epsilon of other steps."""
    trained = train(begin(network(), records()), steps=3)
    fresh = begin(network(), records())
    if which == "weights alone":
        fresh.model.load_state_dict(trained.model.state_dict())
    else:
        fresh.load_state_dict(trained.state_dict())
    before = fresh.charged
    with pytest.raises(dpkfc.PrivacyError, match=r"weights are not those.*load_state_dict"):
        train(fresh)
    assert fresh.charged == before
    fresh.model.load_state_dict(trained.model.state_dict())
    if which == "weights alone":
        fresh.load_state_dict(trained.state_dict())
    assert train(fresh).charged == 4


def test_weights_may_move_to_another_layout_or_be_the_same() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, CLASSES))
    data = TensorDataset(torch.randn(N, 3, 6, 6), torch.arange(N) % CLASSES)
    private = begin(model, data)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert train(private).steps == 4


# -- nothing trains outside


def test_a_head_that_is_added_later_is_refused_in_the_forward_pass() -> None:
    model = network()
    private = begin(model, records())
    model.append(nn.Linear(CLASSES, CLASSES))
    head = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    for x, y in private.loader:
        with pytest.raises(
            dpkfc.PrivacyError, match=r"'3\.weight' is trainable and was not in the model"
        ):
            F.cross_entropy(model(x), y).backward()
        break
    model[-1].requires_grad_(False)
    assert head.param_groups and train(begin_again(private, model)).steps == 4


def begin_again(private: dpkfc.PrivateRun, model: nn.Module) -> dpkfc.PrivateRun:
    private.detach()
    return begin(
        model,
        records(),
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
    )


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_outside_the_model_with_an_optimizer_of_its_own_is_refused(
    when: str, detached: bool
) -> None:
    """A stateless teacher, or an oracle, may be called; what it must not be is trained."""
    model, head = network(), nn.Linear(CLASSES, CLASSES)
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    private, before = begin(model, records()), head.weight.detach().clone()
    for x, y in private.loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if detached:
            head(model(x).detach()).sum().backward()
        else:
            head.weight.grad = torch.ones_like(
                head.weight
            )  # as a joint backward would leave it behind
            head(torch.zeros(1, CLASSES))
        if when == "after":
            private.optimizer.step()
        with pytest.raises(
            dpkfc.PrivacyError, match=r"Linear\.weight of shape .* not part of a private model"
        ):
            other.step()
        break
    assert torch.equal(head.weight, before)
    private.detach()
    head.zero_grad()
    head(torch.zeros(1, CLASSES)).sum().backward()
    other.step()  # outside the loop it is nobody's business


def test_two_private_models_may_meet_in_one_loop() -> None:
    one, other = network(), network()
    first, second = begin(one, records()), begin(other, records())
    for batch, same in zip(first.loader, second.loader, strict=True):
        step(first, batch, cross_entropy)
        step(second, same, cross_entropy)
    assert first.steps == second.steps == 4


def test_a_replaced_parameter_is_refused() -> None:
    model = network()
    private = begin(model, records())
    model[0].weight = nn.Parameter(torch.zeros(8, 6))
    for x, _ in private.loader:
        with pytest.raises(dpkfc.PrivacyError, match="was not in the model"):
            model(x)
        break


@pytest.mark.parametrize("when", ["before", "within"])
def test_after_detach_the_loader_refuses_to_go_on(when: str) -> None:
    private = begin(network(), records())
    batches = iter(private.loader)
    if when == "within":
        step(private, next(batches), cross_entropy)
    private.detach()
    with pytest.raises(dpkfc.PrivacyError, match="this run was detached"):
        next(batches)


def joins_a_group_too_late(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    private = begin(network(), records())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2
    )
    try:
        nn.parallel.DistributedDataParallel(private.model)
        train(private)
    except dpkfc.PrivacyError as problem:
        (Path(folder) / f"rank{rank}").write_text(str(problem))
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_that_meet_after_make_private_are_refused(tmp_path: Path) -> None:
    """Each would draw batches and noise of its own, and account as if it were alone."""
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=joins_a_group_too_late, args=(rank, str(tmp_path)))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert all("the job has 2 ranks, but had 1" in text for text in said)


@pytest.mark.parametrize(
    "geometry", [None, lambda: dpkfc.KFC(dpkfc.probes.Tabular(6, classes=CLASSES), every=2)]
)
@pytest.mark.parametrize("noise", NOISES)
def test_what_is_dropped_is_freed(geometry: Any, noise: str) -> None:
    def use() -> Iterator[weakref.ref[Any]]:
        model = network()
        private = begin(
            model,
            records(),
            geometry=geometry and geometry(),
            noise=NOISES[noise],
            batch_size=N // 2,
            clip=CLIP,
        )
        next(iter(private.loader))  # a batch is open, too
        train(private)
        yield weakref.ref(model)
        yield weakref.ref(private)
        yield weakref.ref(private.optimizer)

    found = list(use())
    gc.collect()
    assert [each() for each in found] == [None, None, None]
    assert not torch.nn.modules.module._global_forward_pre_hooks, (
        "no hook stands in the way of others"
    )


# -- the loader of trainers that count


@pytest.mark.parametrize(("batch_size", "chunk"), [(6, None), (1, None), (6, 2), (2, 1), (N, 5)])
def test_len_is_the_number_of_batches(batch_size: int, chunk: int | None) -> None:
    """Trainers that count batches ended after 1 of 8 steps."""
    private = begin(
        network(), records(), batch_size=batch_size, steps=12, max_physical_batch_size=chunk, seed=3
    )
    promised = len(private.loader)
    seen = 0
    for batch in private.loader:
        assert len(private.loader) == promised, "it does not shrink on the way"
        step(private, batch, cross_entropy)
        seen += 1
    assert seen == promised and private.steps == 12 and len(private.loader) == 0


# -- what is released lies on a grid


class Bag(nn.Module):
    """Token 1 occurs in the last record only.

    Without it, the row of its embedding is nothing but noise.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.head = nn.Embedding(3, 128), nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x).mean(1))


def only_noise_can_be(values: Tensor, scale: float, grid: float) -> bool:
    """The attack: is every value one that noise alone can take?"""
    near = (values.double() / scale).float().view(torch.int32)
    reached = torch.zeros(len(values), dtype=torch.bool)
    steps = range(-4, 5)
    for offset in steps:
        noise = torch.zeros(len(values)).add_((near + offset).view(torch.float32), alpha=scale)
        reached |= (noise if not grid else (noise / grid).round() * grid) == values
    return bool(reached.all())


def row_of_one_record(
    present: bool, dtype: torch.dtype, noise: Any, seed: int
) -> tuple[Tensor, dpkfc.PrivateRun]:
    x = torch.zeros(N, 4, dtype=torch.long)
    x[-1] = 1 if present else 2
    model = Bag().to(dtype)
    data = TensorDataset(x, torch.arange(N) % 2)
    size = N if noise is None else N // 3
    private = begin(
        model, data, noise=noise, batch_size=size, steps=3, seed=seed, noise_multiplier=0.7
    )
    for batch in private.loader.take(1):
        cross_entropy(model, batch).backward()
        private.optimizer.step()
    assert model.rows.weight.grad is not None
    return model.rows.weight.grad[1], private


def test_no_bit_pattern_proves_that_a_record_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack on a row that one record alone touches.

    It told presence for certain, and tells nothing now.
    """

    def told(grid: bool) -> list[float]:
        shares = []
        for present in (True, False):
            found = []
            for seed in range(30):
                row, private = row_of_one_record(present, torch.float32, None, seed)
                scale = private.plan.noise_scale / private.plan.batch_size
                found.append(not only_noise_can_be(row, scale, private.plan.grid if grid else 0.0))
            shares.append(sum(found) / len(found))
        return shares

    assert told(grid=True) == [0.0, 0.0], "every released value can be reached by noise alone"
    monkeypatch.setattr(dpkfc.engine.step, "round_to_grid_", lambda tensors, grid: None)
    with_record, without = told(grid=False)
    assert without == 0 and with_record > 0.9, "the control: the attack succeeds without the grid"


@pytest.mark.parametrize(
    "noise", [None, dpkfc.noise.BandedToeplitz(bands=2), dpkfc.noise.BufferedToeplitz(1)], ids=str
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("present", [True, False])
def test_released_values_are_multiples_of_a_public_number(
    present: bool, dtype: torch.dtype, noise: Any
) -> None:
    row, private = row_of_one_record(present, dtype, noise, seed=0)
    grid = private.plan.grid
    assert 0 < grid <= private.plan.noise_scale / private.plan.batch_size / 64
    assert math.frexp(grid)[0] == 0.5, "a power of two"
    assert row.dtype == dtype
    multiples = row.double() / grid
    assert torch.equal(multiples, multiples.round())
    size = private.plan.batch_size
    others = begin(
        network(), records(), noise=noise, batch_size=size, steps=3, noise_multiplier=0.7
    )
    assert others.plan.grid == grid, "no record, and no model, moves it"


def test_every_multiple_near_zero_is_reached_with_and_without_a_record() -> None:
    """Gaps in the reachable set would be seen by who draws often: there are none."""
    from dpkfc.noise.grid import round_to_grid_, spacing
    from dpkfc.random import add_normal_

    grid, draws = spacing(1.0), 400_000
    for shift in (0.0, 0.2345678):
        values = torch.full((draws,), shift)
        add_normal_([values], bytes(32), 1.0)
        round_to_grid_([values], grid)
        reached = set((values / grid).long().tolist())
        assert all(k in reached for k in range(int(-1.5 / grid), int(1.5 / grid)))


# -- a public number of records


def test_neighbouring_data_sets_have_the_same_plan_if_their_number_is_stated() -> None:
    plans = {
        begin(network(), records(count), **{**given, "records": N, "batch_size": 7}).plan
        for count in (N, N - 1, N - 2)
        for given in ({"epochs": 1.7, "steps": None},)
    }
    (plan,) = plans
    assert (plan.records, plan.steps, plan.sampling_rate) == (N, math.ceil(1.7 * N / 7), 7 / N)
    assert "records" not in plan.unchecked
    counted = begin(network(), records(), records=None)
    assert "records" in counted.plan.unchecked and "treated as public" in str(counted.plan)


@pytest.mark.parametrize("records_given", [0, -3, 24.0, True, "24"])
def test_a_number_of_records_that_is_none_is_refused(records_given: Any) -> None:
    with pytest.raises(ValueError, match="records=.*whole number"):
        begin(network(), records(), records=records_given)


def test_every_record_is_drawn_with_the_stated_rate() -> None:
    """Not with the one that the true number would give."""
    private = begin(network(), records(N - 4), records=2 * N, batch_size=16, steps=600, seed=0)
    sampler = private.loader._sampler()
    counts = torch.zeros(N - 4)
    for number in range(600):
        counts[sampler.draw(first_key(number), number)] += 1
    assert (counts / 600 - 1 / 3).abs().max() < 5 * (2 / 9 / 600) ** 0.5


def test_adding_a_record_moves_the_normalised_sum_by_at_most_the_clip() -> None:
    assert sensitivity(plain_loop()) <= 1 + 1e-5
    assert sensitivity(plain_loop()) > 0.9, "the last record saturates the clip"


# -- files


def test_save_never_removes_what_it_did_not_write(tmp_path: Path) -> None:
    private = begin(network(), records())
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("years of work")
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(folder)
    for place in ("thesis", "file", "link"):
        with pytest.raises(ValueError, match="Choose another path"):
            private.save(tmp_path / place)
    private.save(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt.*Choose another path"):
        private.save(tmp_path / "run")
    dpkfc.engine.checkpoint.discard(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    (tmp_path / "run.old").mkdir()
    (tmp_path / "run.old" / "mine").write_text("too")
    (tmp_path / "run" / "notes.txt").unlink()
    with pytest.raises(ValueError, match="Choose another path"):
        private.save(tmp_path / "run")
    assert (folder / "chapter1.txt").read_text() == "years of work" and (
        tmp_path / "file"
    ).read_text() == "content"
    assert (tmp_path / "run.old" / "mine").read_text() == "too"


DAMAGE: dict[str, Any] = {
    "step": [-100, 5, 1.5, "1", True, None],
    "lost_steps": [-4, 4, 0.0],
    "key": ["", "ab", "zz" * 32, None],
    "groups": ["00", 5],
    "run": ["", None, 3],
    "weights": [None, "00"],
    "salt": [None, "ab"],
    "not_private": [{}, {"samples": -1, "clipped": 0, "non_finite": 0}, None],
    "noise": [{}, {"next": -1}, {"next": 99}, None],
    "geometry": [None],
    "plan": [None, {}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in DAMAGE.items() for value in values]
)
def test_a_checkpoint_is_validated_before_anything_changes(
    field: str, value: Any, tmp_path: Path
) -> None:
    trained = train(begin(network(), records()), steps=1)
    trained.save(tmp_path / "run")
    state = {**trained.state_dict(), field: value}
    document = json.loads((tmp_path / "run" / "state.json").read_text())
    parts = dict(document["state"]["dict"])
    parts["private"] = pack(state, {}, "")
    document["state"]["dict"] = [[name, part] for name, part in parts.items()]
    (tmp_path / "run" / "state.json").write_text(json.dumps(document))
    fresh = begin(network(), records())
    before = [p.detach().clone() for p in fresh.model.parameters()], fresh._key, fresh.run_id
    for load in (lambda: fresh.load(tmp_path / "run"), lambda: fresh.load_state_dict(state)):
        with pytest.raises(dpkfc.PrivacyError):
            load()
        assert all(
            torch.equal(p, b) for p, b in zip(fresh.model.parameters(), before[0], strict=True)
        )
        assert (fresh._key, fresh.run_id, fresh.charged) == (*before[1:], 0)
    assert train(fresh).steps == 4


# -- frameworks


def test_a_loader_that_accelerate_has_prepared_is_accepted() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare(
        DataLoader(records(), batch_size=6, shuffle=True)
    )
    private = begin(network(), loader, batch_size=None)
    assert private.plan.batch_size == 6 and train(private).steps == 4


class Sentences(Dataset[Any]):
    """One long record and many short ones, as a causal language model sees them."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.rows = []
        for row in range(count):
            ids = torch.randint(1, 30, (12,))
            length = 12 if row == N - 1 else 3
            labels = ids.clone()
            labels[length:] = -100
            self.rows.append(
                {
                    "input_ids": ids,
                    "attention_mask": (torch.arange(12) < length).long(),
                    "labels": labels,
                }
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.rows[row]


def of_each_record(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a causal language model, averaged within each record."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    )
    return dpkfc.losses.mean_over_records(losses, batch["labels"][:, 1:] != -100)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=30,
        n_positions=12,
        n_embd=16,
        n_layer=1,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def trainer_of(private: dpkfc.PrivateRun, folder: Path, own_loss: bool, **arguments: Any) -> Any:
    """Hugging Face's Trainer around a private loader.

    With its own loss, or with the declared one.
    """
    from transformers import Trainer, TrainingArguments

    class Around(Trainer):
        def get_train_dataloader(self) -> Any:
            return private.loader

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if own_loss:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return of_each_record(model, inputs)

    options = {
        "max_steps": private.plan.steps,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
    }
    settings = TrainingArguments(str(folder), disable_tqdm=True, **{**options, **arguments})
    return Around(private.model, settings, optimizers=(private.optimizer, None))


@pytest.mark.parametrize("own_loss", [True, False])
def test_hugging_face_trainer_with_a_causal_language_model(own_loss: bool, tmp_path: Path) -> None:
    """The Trainer's own loss divides by the tokens of the whole batch, and is refused.

    The declared one is not.
    """
    sums = []
    for count in (N, N - 1):
        model = gpt2()
        private = begin(model, Sentences(count), of_each_record, steps=2)
        seen = Sums(private)
        trainer = trainer_of(private, tmp_path, own_loss, max_grad_norm=0.01)
        if own_loss:
            with pytest.raises(dpkfc.PrivacyError, match=r"declared as loss=.*num_items_in_batch"):
                trainer.train()
            assert private.epsilon() == 0
            return
        trainer.train()
        assert private.steps == 2
        sums.append(seen.steps[0])
        private.detach()
    assert float((sums[0] - sums[1]).norm()) <= CLIP * (1 + 1e-5)


def test_hugging_face_trainer_takes_all_steps_with_physical_chunks(tmp_path: Path) -> None:
    """Of 8 it took one. A schedule that moves within a logical batch is refused, with the fix."""
    settings: dict[str, Any] = {"steps": 8, "batch_size": 8, "max_physical_batch_size": 3}
    for schedule in ("constant", "linear"):
        private = begin(gpt2(), Sentences(N), of_each_record, **settings)
        trainer = trainer_of(
            private,
            tmp_path,
            own_loss=False,
            max_steps=-1,
            num_train_epochs=1,
            lr_scheduler_type=schedule,
        )
        if schedule == "linear":
            with pytest.raises(dpkfc.PrivacyError, match=r"run\.after_step"):
                trainer.train()
        else:
            trainer.train()
            assert private.steps == 8


def test_hugging_face_trainer_that_restores_weights_alone_is_refused(tmp_path: Path) -> None:
    private = begin(gpt2(), Sentences(N), of_each_record, steps=4)
    for batch in private.loader.take(2):
        step(private, batch, of_each_record)
    saved = {name: value.clone() for name, value in private.model.state_dict().items()}
    fresh = begin(gpt2(), Sentences(N), of_each_record, steps=4)
    fresh.model.load_state_dict(saved)  # what resume_from_checkpoint and accelerate's load_state do
    with pytest.raises(dpkfc.PrivacyError, match=r"weights are not those.*run\.load"):
        trainer_of(fresh, tmp_path, own_loss=False).train()
    assert fresh.epsilon() == 0


# -- what is said


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"loss": "unchecked"}, "loss"),
        ({"options": dpkfc.Options(check=False)}, "model"),
        ({"seed": 1}, "seed"),
        ({}, "ledger"),
        ({"records": None}, "records"),
    ],
)
def test_what_was_not_checked_is_said(changed: dict[str, Any], what: str, tmp_path: Path) -> None:
    said = dict(begin(network(), records(), **changed).plan.statement())
    assert said[f"not checked: {what}"] == NOT_CHECKED[what]  # type: ignore[index]
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people")
    assert not re.search("not checked", str(begin(network(), records(), ledger=ledger).plan))


def test_what_was_not_checked_stays_so_after_a_resume(tmp_path: Path) -> None:
    first = begin(network(), records(), "unchecked", seed=1)
    train(first, steps=1).save(tmp_path / "run")
    resumed = begin(network(), records())
    resumed.load(tmp_path / "run")
    assert {"loss", "seed", "ledger"} <= set(resumed.plan.unchecked)
