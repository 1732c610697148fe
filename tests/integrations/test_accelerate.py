"""Hugging Face accelerate around a plain loop: prepared before make_private or after it, the
weights are those of the loop without accelerate; saved and resumed, the run goes with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.privacy.test_border import MIXING, Sums
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkfc
from dpkfc.losses import cross_entropy

accelerate = pytest.importorskip("accelerate")

RECORDS, CLASSES, STEPS = 60, 3, 6
ORDERS = ["make_private first", "prepare first"]


def data(count: int = RECORDS) -> TensorDataset:
    """The last record is unlike the others."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(RECORDS, 6, generator=generator), torch.arange(RECORDS) % (CLASSES - 1)
    x[-1], y[-1] = -60.0, CLASSES - 1
    return TensorDataset(x[:count], y[:count])


def network(dropout: float) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


class Loop:
    """Model, optimizer, scheduler and run, prepared or not, and the user's loop over them."""

    def __init__(
        self,
        order: str | None,
        *,
        optimizer: str = "sgd",
        dropout: float = 0.0,
        of_accelerator: dict[str, Any] | None = None,
        count: int = RECORDS,
        **settings: Any,
    ) -> None:
        self.model: Any = network(dropout)
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.optimizer: Any = kinds[optimizer](self.model.parameters(), lr=0.05)
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.accelerator: Any = None
        if order is not None:
            self.accelerator = accelerate.Accelerator(cpu=True, **(of_accelerator or {}))
        loader: Any = DataLoader(data(count), batch_size=20, shuffle=True)
        budget = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": STEPS, "seed": 3}
        settings = {"loss": cross_entropy, **budget, **settings}
        if order == "prepare first":
            self.model, self.optimizer, self.scheduler, loader = self.accelerator.prepare(
                self.model, self.optimizer, self.scheduler, loader
            )
        self.run = dpkfc.make_private(self.model, self.optimizer, loader, **settings)
        self.loader: Any = self.run.loader
        if order == "make_private first":
            self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
                self.model, self.optimizer, self.scheduler, self.loader
            )
        if self.accelerator is not None:
            self.accelerator.register_for_checkpointing(self.run)
        torch.manual_seed(5)

    def forward(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def train(self, steps: int = STEPS, clip: float | None = None) -> Loop:
        for batch in self.loader:
            if self.accelerator is None:
                self.forward(batch).backward()
            else:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.forward(batch))
                    if clip is not None:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            if self.run.took_step:
                self.scheduler.step()
            self.optimizer.zero_grad()
            if self.run.steps == steps:
                break
        return self

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class PlainBfloat16(Loop):
    """What accelerate does for mixed_precision="bf16": autocast around the model alone."""

    def forward(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.model(batch[0])
        return F.cross_entropy(out.float(), batch[1])


def bfloat16_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch[0])
    return F.cross_entropy(out.float(), batch[1])


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW, dropout": {"optimizer": "adamw", "dropout": 0.5},
    "parts": {"optimizer": "adamw", "max_physical_batch_size": 7},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_weights_steps_and_epsilon_are_those_of_the_plain_loop(case: str, order: str) -> None:
    plain = Loop(None, **CASES[case]).train()
    loop = Loop(order, **CASES[case]).train()
    assert torch.equal(loop.weights, plain.weights)
    assert loop.run.steps == STEPS and loop.run.epsilon() == plain.run.epsilon()
    assert loop.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    assert type(loop.optimizer).__name__ == "AcceleratedOptimizer"
    assert type(loop.scheduler).__name__ == "AcceleratedScheduler"


@pytest.mark.parametrize("order", ORDERS)
def test_bfloat16(order: str) -> None:
    plain = PlainBfloat16(None, optimizer="adamw", loss=bfloat16_loss).train()
    loop = Loop(order, optimizer="adamw", of_accelerator={"mixed_precision": "bf16"}).train()
    assert torch.equal(loop.weights, plain.weights)
    assert not torch.equal(loop.weights, Loop(None, optimizer="adamw").train().weights)


@pytest.mark.parametrize("order", ORDERS)
def test_the_scaler_of_float16_is_divided_out(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate makes a scaler on GPUs only: here it gets one for the CPU."""
    scaler = torch.amp.GradScaler("cpu")
    make = accelerate.Accelerator.__init__

    def with_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.scaler = scaler

    monkeypatch.setattr(accelerate.Accelerator, "__init__", with_scaler)
    loop = Loop(order, options=dpkfc.Options(grad_scaler=scaler)).train()
    assert loop.run.steps == STEPS and torch.equal(loop.weights, Loop(None).train().weights)


def test_clip_grad_norm_has_no_effect() -> None:
    """Gradients are private only within step(), which writes them."""
    assert torch.equal(Loop(ORDERS[0]).train(clip=1e-6).weights, Loop(None).train().weights)


def test_the_optimizer_is_unwrapped_for_dpkfc_optimizers_too() -> None:
    model = network(0.0)
    own = dpkfc.optim.DPAdamBC(model.parameters(), lr=0.01)
    accelerator = accelerate.Accelerator(cpu=True)
    model, prepared, loader = accelerator.prepare(model, own, DataLoader(data(), batch_size=20))
    run = dpkfc.make_private(
        model,
        prepared,
        loader,
        loss=cross_entropy,
        noise_multiplier=1.0,
        delta=1e-3,
        steps=2,
    )
    assert run.optimizer is own
    for batch in run.loader:
        accelerator.backward(cross_entropy(model, batch))
        prepared.step()
    assert run.steps == 2


# -- gradient accumulation of accelerate


@pytest.mark.parametrize("order", ORDERS)
def test_accelerates_own_accumulation_is_refused_before_anything_is_released(order: str) -> None:
    """It skips steps; max_physical_batch_size splits batches instead."""
    loop = Loop(order, of_accelerator={"gradient_accumulation_steps": 4})
    before = loop.weights
    with pytest.raises(
        dpkfc.PrivacyError, match=r"Instead of accumulating gradients.*max_physical_batch_size"
    ):
        loop.train()
    assert loop.run.epsilon() == 0 and torch.equal(loop.weights, before)


def test_a_loss_that_backward_divides_is_refused() -> None:
    """As accelerate does for the accumulation, also outside of its context."""
    loop = Loop(ORDERS[0], of_accelerator={"gradient_accumulation_steps": 4})
    (batch,) = loop.loader.take(1)
    loop.accelerator.backward(loop.forward(batch))
    with pytest.raises(dpkfc.PrivacyError, match=r"0\.25 times as long.*max_physical_batch_size"):
        loop.optimizer.step()
    assert loop.run.epsilon() == 0


def test_a_scheduler_that_steps_for_every_part_is_refused() -> None:
    loop = Loop(ORDERS[0], max_physical_batch_size=7)
    with pytest.raises(dpkfc.PrivacyError, match=r"run\.after_step\(scheduler\.step\)"):
        for batch in loop.loader:
            loop.accelerator.backward(loop.forward(batch))
            loop.optimizer.step()
            loop.scheduler.step()


# -- neighbouring data sets


def sensitivity(order: str, **settings: Any) -> float:
    """How far apart the first sums of neighbouring data sets are, in units of the clip."""
    sums = []
    every_record = {"batch_size": RECORDS, "records": RECORDS, "clip": 0.5}
    for count in (RECORDS, RECORDS - 1):
        loop = Loop(order, count=count, **every_record, **settings)
        seen = Sums(loop.run)
        loop.train(1)
        sums.append(seen.steps[0])
    return float((sums[0] - sums[1]).norm()) / 0.5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_physical_batch_size": 13}, {"of_accelerator": {"mixed_precision": "bf16"}}],
    ids=["plain", "parts", "bf16"],
)
def test_neighbouring_data_sets_differ_by_at_most_the_clip(settings: Any, order: str) -> None:
    rounding = 2**-8 * RECORDS**0.5 if "of_accelerator" in settings else 1e-5
    assert 0.9 < sensitivity(order, **settings) <= 1 + rounding


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MIXING)
def test_a_loop_that_mixes_records_is_refused(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records|is not the mean over records"):
        Loop(order, loss=MIXING[name])
    loop = Loop(order, batch_size=RECORDS)
    before = loop.weights
    monkeypatch.setattr(loop, "forward", lambda batch: MIXING[name](loop.model, batch))
    with pytest.raises(dpkfc.PrivacyError, match="does not compute the loss that was declared"):
        loop.train()
    assert loop.run.epsilon() == 0 and torch.equal(loop.weights, before)


# -- save_state and load_state


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_resumed_in_the_middle_it_is_bit_identical(case: str, order: str, tmp_path: Path) -> None:
    first = Loop(order, **CASES[case]).train(2)
    first.accelerator.save_state(tmp_path / "state")
    resumed = Loop(order, **CASES[case])
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.run.steps == 2
    resumed.train()
    assert torch.equal(resumed.weights, Loop(None, **CASES[case]).train().weights)
    assert resumed.run.steps == STEPS


def test_a_second_continuation_uses_fresh_noise_and_counts_the_first(tmp_path: Path) -> None:
    first = Loop(ORDERS[0]).train(2)
    first.accelerator.save_state(tmp_path / "state")
    ends = []
    for lost in (0, STEPS - 2):
        loop = Loop(ORDERS[0])
        loop.accelerator.load_state(tmp_path / "state")
        ends.append(loop.train().weights)
        assert loop.run.charged == STEPS and loop.run.steps == STEPS - lost
    assert not torch.equal(*ends)


@pytest.mark.parametrize("order", ORDERS)
def test_weights_without_the_state_of_the_run_are_refused(order: str, tmp_path: Path) -> None:
    """Whether the run was not registered when saving, or not when loading."""
    first = Loop(order).train(2)
    first.accelerator.save_state(tmp_path / "with run")
    first.accelerator._custom_objects.clear()
    first.accelerator.save_state(tmp_path / "without run")
    for folder in ("with run", "without run"):
        for registered in (False, True):
            loop = Loop(order)
            if not registered:
                loop.accelerator._custom_objects.clear()
            if (folder == "with run") == registered:
                loop.accelerator.load_state(tmp_path / folder)
            else:
                with pytest.raises(RuntimeError, match="does not match the number of registered"):
                    loop.accelerator.load_state(tmp_path / folder)
            if registered and folder == "with run":
                assert loop.train().run.steps == STEPS
                continue
            with pytest.raises(dpkfc.PrivacyError, match="weights are not those that the privacy"):
                loop.train()
            assert loop.run.steps == 0


def test_skip_first_batches_is_refused_in_words() -> None:
    loop = Loop(ORDERS[0])
    with pytest.raises(AttributeError, match="do not skip or resample its batches"):
        loop.accelerator.skip_first_batches(loop.loader, 2)


KILLED = """
import os, sys
import dpkfc
import tests.integrations.test_accelerate as t

folder, how = sys.argv[1:]
ledger = dpkfc.Ledger(f"{folder}/ledger.db", dataset="people") if how == "ledger" else None
loop = t.Loop(t.ORDERS[1], optimizer="adamw", ledger=ledger, seed=None if ledger else 3)
loop.train(2)
loop.accelerator.save_state(f"{folder}/state")
loop.train(4)
os._exit(9)
"""


@pytest.mark.parametrize("how", ["seed", "ledger"])
def test_killed_and_resumed_in_another_process(how: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 9, ended.stderr
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people") if how == "ledger" else None
    loop = Loop(ORDERS[1], optimizer="adamw", ledger=ledger, seed=None if ledger else 3)
    loop.accelerator.load_state(tmp_path / "state")
    loop.train()
    assert loop.run.charged == STEPS
    if ledger is None:
        plain = Loop(None, optimizer="adamw").train()
        assert loop.run.steps == STEPS and torch.equal(loop.weights, plain.weights)
    else:
        # the two steps after the checkpoint stay charged
        assert loop.run.steps == STEPS - 2
        assert ledger.epsilon(1e-3) == pytest.approx(loop.run.plan.epsilon(STEPS), rel=1e-6)
