"""Lightning's own loop under `PrivateTraining`: the same weights, steps and epsilon as the plain
loop; the same counts as Lightning without privacy; neighbours at most the clip apart; refusals.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.privacy.test_border import MIXING, Sums
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkfc
from dpkfc.losses import cross_entropy

L = pytest.importorskip("lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from dpkfc.integrations.lightning import (  # noqa: E402
    EmptyBatch,
    PrivateTraining,
    check_trainer,
)

RECORDS, CLASSES = 60, 3
Loss = Callable[[nn.Module, Any], Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        yield


def data(count: int = RECORDS) -> TensorDataset:
    """The last record is unlike the others."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(RECORDS, 6, generator=generator), torch.arange(RECORDS) % (CLASSES - 1)
    x[-1], y[-1] = -60.0, CLASSES - 1
    return TensorDataset(x[:count], y[:count])


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.01)


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


class Module(L.LightningModule):
    """As people write them: training_step calls the network, not the module, and logs."""

    def __init__(
        self, optimizer: str = "sgd", interval: str | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.net = network(dropout)
        self.kind, self.interval = optimizer, interval
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.accuracy.update(torch.zeros(len(batch[0]), CLASSES), batch[1])
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=len(batch[0]))
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training and not torch.is_grad_enabled()
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.kind, self.parameters())
        if self.interval is None:
            return optimizer
        self.estimated = int(self.trainer.estimated_stepping_batches)
        scheduler = make_scheduler(optimizer, self.estimated)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


class OwnLoss(Module):
    """A module whose training step computes a given loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.own = loss

    def loss(self, batch: Any) -> Tensor:
        return self.own(self, batch)


class Manual(Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def make_trainer(*more: Any, **settings: Any) -> Any:
    base = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(c, callbacks.Checkpoint) for c in more),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=list(more), **{**base, **settings})


def private(**settings: Any) -> PrivateTraining:
    return PrivateTraining(**{"noise_multiplier": 1.0, "delta": 1e-3, "seed": 3, **settings})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def plain(
    like: dpkfc.PrivateRun,
    *,
    optimizer: str = "sgd",
    interval: str | None = None,
    dropout: float = 0.0,
    physical: int | None = None,
    precision: str = "32-true",
    epochs: int = 2,
) -> Tensor:
    """The weights after the plain dpkfc loop with the same plan."""
    model = network(dropout)
    if precision == "bf16-true":
        model.bfloat16()
    own = make_optimizer(optimizer, model.parameters())
    run = dpkfc.make_private(
        model,
        own,
        data(),
        loss="unchecked",
        noise_multiplier=1.0,
        delta=1e-3,
        seed=3,
        steps=like.plan.steps,
        batch_size=like.plan.batch_size,
        max_physical_batch_size=physical,
    )
    per_epoch = run.plan.steps // epochs
    scheduler = make_scheduler(own, run.plan.steps)

    def after_step() -> None:
        if interval == "step" or (interval == "epoch" and run.steps % per_epoch == 0):
            scheduler.step()

    run.after_step(after_step)
    torch.manual_seed(5)
    for x, y in run.loader:
        x = x.bfloat16() if precision == "bf16-true" else x
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        own.step()
        own.zero_grad()
    assert run.epsilon() == like.epsilon()
    return weights(model)


class SeedAtStart(L.Callback):
    """Dropout as in the plain loop."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.ckpt_path:
            torch.manual_seed(5)


def fit(
    module: Any, callback: PrivateTraining, *more: Any, batch_size: int = 20, **settings: Any
) -> Any:
    ckpt_path = settings.pop("ckpt_path", None)
    loaders = settings.pop("loaders", None) or [DataLoader(data(), batch_size, shuffle=True)]
    trainer = make_trainer(callback, SeedAtStart(), *more, **settings)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


# -- the same as the plain loop

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # of the module; of the Trainer and its loader
    "SGD": ({}, {}),
    "AdamW, schedule per step": ({"optimizer": "adamw", "interval": "step"}, {}),
    "AdamW, schedule per epoch": ({"optimizer": "adamw", "interval": "epoch"}, {}),
    "dropout": ({"dropout": 0.5}, {}),
    "parts": ({}, {"batch_size": 5, "accumulate_grad_batches": 4}),
    "parts, AdamW, dropout": (
        {"optimizer": "adamw", "interval": "step", "dropout": 0.5},
        {"batch_size": 7, "accumulate_grad_batches": 2},
    ),
    "often empty": ({"interval": "step"}, {"batch_size": 1, "max_epochs": 1}),
    "often empty, parts": (
        {"interval": "step"},
        {"batch_size": 1, "accumulate_grad_batches": 2, "max_epochs": 1},
    ),
    "bf16-mixed": ({"optimizer": "adamw"}, {"precision": "bf16-mixed"}),
    "bf16-mixed, parts": (
        {},
        {"precision": "bf16-mixed", "batch_size": 5, "accumulate_grad_batches": 4},
    ),
    "bf16-true": ({}, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_steps_and_epsilon_are_those_of_the_plain_loop(case: str) -> None:
    of_module, settings = CASES[case]
    module, callback = Module(**of_module), private()
    trainer = fit(module, callback, **settings)
    run = callback.run
    parts = settings.get("accumulate_grad_batches", 1)
    expected = plain(
        run,
        **of_module,
        physical=settings["batch_size"] if parts > 1 else None,
        precision=settings.get("precision", "32-true"),
        epochs=settings.get("max_epochs", 2),
    )
    assert torch.equal(weights(module), expected)
    assert run.steps == run.plan.steps == trainer.global_step
    assert run.plan.batch_size == settings.get("batch_size", 20) * parts
    assert float(trainer.callback_metrics["epsilon"]) >= run.epsilon()
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(run.epsilon())
    # the Trainer and the module are given back as they were
    assert run.detached and trainer.accumulate_grad_batches == parts
    assert "forward" not in vars(module) and "training_step" not in vars(trainer.strategy)


@pytest.mark.parametrize(
    ("callback", "settings"),
    [
        (None, {}),
        ("early stopping", {}),
        (None, {"val_check_interval": 1}),
        (None, {"inference_mode": False}),
    ],
)
def test_validation_in_between_changes_nothing(callback: str | None, settings: Any) -> None:
    loaders = [DataLoader(data(), 20), DataLoader(data(), 30)]
    more = [callbacks.EarlyStopping("val_loss", patience=0, mode="max")] if callback else []
    module, own = Module(), private()
    trainer = fit(module, own, *more, loaders=loaders, max_epochs=4, **settings)
    if callback:
        assert trainer.global_step == own.run.steps < own.run.plan.steps
        assert own.run.epsilon() < own.run.plan.epsilon(own.run.plan.steps)
    else:
        assert torch.equal(weights(module), plain(own.run))


def test_manual_optimization() -> None:
    module, callback = Manual(), private(loss=cross_entropy)
    trainer = fit(module, callback)
    assert torch.equal(weights(module), plain(callback.run))
    assert trainer.global_step == callback.run.steps == callback.run.plan.steps
    module, callback = Manual(), private(loss=cross_entropy)
    trainer = fit(module, callback, batch_size=1, max_epochs=1)  # some are empty
    assert trainer.global_step == callback.run.steps == callback.run.plan.steps == RECORDS
    with pytest.raises(ValueError, match=r"manual optimization.*loss="):
        fit(Manual(), private())


def test_pytorch_lightning_is_the_same() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return make_optimizer("sgd", self.parameters())

    module, callback = Other(), private()
    quietly = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        enable_checkpointing=False,
        **quietly,
    )
    trainer.fit(module, DataLoader(data(), 20))
    assert torch.equal(weights(module), plain(callback.run))
    with pytest.raises(ValueError, match="gradient_clip_val"):
        check_trainer(pl.Trainer(gradient_clip_val=1.0, **quietly), module)


class WithData(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.records = data()

    def train_dataloader(self) -> Any:
        return DataLoader(self.records, 20)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """An augmentation: the check of the loss repeats it."""
        if isinstance(batch, EmptyBatch) or not self.trainer.training:
            return batch
        return batch[0] + torch.randn_like(batch[0]), batch[1]


def test_a_data_module_with_a_random_augmentation() -> None:
    module, callback = Module(), private()
    trainer = make_trainer(callback)
    trainer.fit(module, datamodule=WithData())
    assert callback.run.steps == callback.run.plan.steps == 6


@pytest.mark.parametrize(
    ("settings", "interval"),
    [
        ({"max_epochs": 3}, "epoch"),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, "step"),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, "epoch"),
        ({"max_steps": 4, "max_epochs": -1}, "step"),
        ({"max_steps": 40, "max_epochs": 2}, "step"),
        ({"limit_train_batches": 5, "accumulate_grad_batches": 2}, "step"),
        ({"limit_train_batches": 0.5}, "epoch"),
        ({"fast_dev_run": True}, "step"),
        ({"drop_last": True}, "step"),
    ],
    ids=str,
)
def test_settings_count_as_without_privacy(settings: dict[str, Any], interval: str) -> None:
    """Lightning itself is the oracle."""
    settings = dict(settings)
    loader = DataLoader(data(), 7, drop_last=settings.pop("drop_last", False))
    counts = []
    for more in ([], [private()]):
        trainer = make_trainer(*more, **settings)
        module = Module(interval=interval)
        trainer.fit(module, loader)
        (scheduler,) = (config.scheduler for config in trainer.lr_scheduler_configs)
        counts.append(
            (
                trainer.global_step,
                trainer.current_epoch,
                module.estimated,
                scheduler.last_epoch,
                scheduler.get_last_lr(),
            )
        )
    assert counts[0] == counts[1]
    assert more[0].run.steps == more[0].run.plan.steps == counts[0][0]


def test_if_the_number_of_records_is_stated_nothing_depends_on_the_true_one() -> None:
    counts = []
    for count in (RECORDS, RECORDS - 25):
        callback = private(records=50)
        module = Module(interval="step")
        trainer = fit(module, callback, loaders=[DataLoader(data(count), 10)])
        plan = callback.run.plan
        counts.append((trainer.global_step, module.estimated, plan.batch_size))
    assert counts == [(10, 10, 10)] * 2


def test_the_loss_is_computed_once_per_part_and_checks_leave_no_trace() -> None:
    module = Module()
    fit(module, private(loss="unchecked", options=dpkfc.Options(check=False)), max_epochs=1)
    assert module.calls == 3 and module.accuracy._update_count == 3
    module, callback = Module(), private()
    trainer = fit(module, callback, max_epochs=1)
    assert module.calls > 3 and module.accuracy._update_count == 3
    assert callback.run.not_private.samples == int(
        module.accuracy.tp.sum() + module.accuracy.fn.sum()
    )
    assert set(trainer.callback_metrics) == {"loss", "loss_step", "loss_epoch", "epsilon"}


class Bare(Module):
    """Owns a parameter itself, and calls itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.shift)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class BareOutside(Bare):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0] + self.shift), batch[1])


@pytest.mark.parametrize("shape", [(1, 6), (6,)])
def test_a_module_with_parameters_of_its_own(shape: tuple[int, ...]) -> None:
    assert 0.9 < sensitivity(lambda: Bare(shape)) <= 1 + 1e-5
    with pytest.raises(dpkfc.PrivacyError, match="outside .*[Cc]all the mod"):
        fit(BareOutside(shape), private())


def test_geometry() -> None:
    """Probes go through the module's own forward."""
    geometry = dpkfc.KFC(dpkfc.probes.Tabular(features=6, classes=CLASSES), every=2)
    callback = private(geometry=geometry)
    fit(Module(), callback)
    assert callback.run.steps == 6 and "DP-KFC" in callback.run.plan.geometry


# -- neighbouring data sets


class KeepSums(L.Callback):
    def __init__(self, callback: PrivateTraining) -> None:
        self.callback = callback

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sums = Sums(self.callback.run)


def sensitivity(module: Callable[[], Any], batch_size: int = RECORDS, **settings: Any) -> float:
    """How far apart the first sums of neighbouring data sets are, in units of the clip.

    Every record is drawn at every step.
    """
    of_run = settings.pop("of_run", {})
    sums = []
    for count in (RECORDS, RECORDS - 1):
        callback = private(clip=0.5, records=RECORDS, **of_run)
        keep = KeepSums(callback)
        loaders = [DataLoader(data(count), batch_size), DataLoader(data(), 30)]
        fit(module(), callback, keep, loaders=loaders, max_steps=1, **settings)
        sums.append(keep.sums.steps[0])
    return float((sums[0] - sums[1]).norm()) / 0.5


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Module, {}),
        (Module, {"batch_size": 13, "accumulate_grad_batches": 5}),
        (Module, {"precision": "bf16-mixed"}),
        (Manual, {"of_run": {"loss": cross_entropy}}),
    ],
    ids=["plain", "parts", "bf16-mixed", "manual"],
)
def test_neighbouring_data_sets_differ_by_at_most_the_clip(module: Any, settings: Any) -> None:
    rounding = 2**-8 * RECORDS**0.5 if "precision" in settings else 1e-5
    assert 0.9 < sensitivity(module, **settings) <= 1 + rounding


@pytest.mark.parametrize("name", ["class weights", "centred outputs", "sign of the batch"])
def test_the_control_unchecked_a_loss_that_mixes_records_exceeds_the_clip(name: str) -> None:
    unchecked = {"loss": "unchecked", "options": dpkfc.Options(check=False)}
    assert sensitivity(lambda: OwnLoss(MIXING[name]), of_run=unchecked) > 1.2


@pytest.mark.parametrize("name", MIXING)
def test_a_training_step_that_mixes_records_is_refused_before_anything_is_released(
    name: str,
) -> None:
    module, callback = OwnLoss(MIXING[name]), private()
    before = weights(module)
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records|is not the mean over records"):
        fit(module, callback)
    assert callback._run is None and torch.equal(before, weights(module))


class Scaled(Module):
    def backward(self, loss: Tensor, *args: Any) -> None:
        (3 * loss).backward()


class Changing(Module):
    """Mixes records in the loop only."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * torch.sign(batch[0].sum()) if "log" not in vars(self) else loss


@pytest.mark.parametrize(
    ("module", "loss"),
    [
        (OwnLoss(MIXING["centred outputs"]), cross_entropy),
        (Scaled(), None),
        (Changing(), None),
    ],
    ids=["another loss", "another backward", "mixes in the loop"],
)
def test_a_loop_that_computes_another_loss_is_refused_before_anything_is_released(
    module: Any, loss: Loss | None
) -> None:
    callback = private(loss=loss, clip=0.5)
    before = weights(module)
    with pytest.raises(dpkfc.PrivacyError, match="does not compute the loss that was declared"):
        fit(module, callback, batch_size=RECORDS)
    assert callback.run.steps == 0 and callback.run.epsilon() == 0
    assert torch.equal(before, weights(module))


# -- refusals


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [make_optimizer("sgd", part.parameters()) for part in (self.net[0], self.net[3])]


class ReturnsNone(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class SkipsSome(Module):
    """None from its second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else None


class ClipsItself(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), 1.0, "norm")


class ClipsInHook(Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 1.0, "norm")


class StepsEverySecond(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx % 2:
            optimizer.step()


class FetchesItself(Module):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


two_loaders = [{"a": DataLoader(data(), 20), "b": DataLoader(data(), 20)}]
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any], dict[str, Any]]] = {
    "clip": (ValueError, r"gradient_clip_val.*clip=", Module, {"gradient_clip_val": 1.0}),
    "clip in a hook": (ValueError, r"clip_gradients\(1.0\).*clip=", ClipsInHook, {}),
    "clip by hand": (
        ValueError,
        r"clip_gradients\(1.0\).*clip=",
        ClipsItself,
        {"of_run": {"loss": cross_entropy}},
    ),
    "two optimizers": (
        ValueError,
        "2 optimizers.*exactly one",
        TwoOptimizers,
        {"of_run": {"loss": cross_entropy}},
    ),
    "none": (dpkfc.PrivacyError, "returned NoneType instead of a loss", ReturnsNone, {}),
    "float16": (
        ValueError,
        "precision='16-mixed'.*bf16-mixed",
        Module,
        {"plugins": MixedPrecision("16-mixed", "cpu")},
    ),
    "overfit": (ValueError, "overfit_batches=2", Module, {"overfit_batches": 2}),
    "reload": (
        ValueError,
        "reload_dataloaders",
        Module,
        {"reload_dataloaders_every_n_epochs": 1},
    ),
    "unlimited": (ValueError, "max_epochs and max_steps", Module, {"max_epochs": -1}),
    "loaders": (TypeError, "train_dataloader is a dict", Module, {"loaders": two_loaders}),
    "no batch": (ValueError, "leaves no batch", Module, {"limit_train_batches": 0.01}),
    "iterator": (ValueError, "fetches batches itself", FetchesItself, {}),
    "SWA": (
        ValueError,
        "StochasticWeightAveraging.*once more than planned",
        Module,
        {"more": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1)},
    ),
    "batch sizes": (
        ValueError,
        "GradientAccumulationScheduler",
        Module,
        {"more": lambda: callbacks.GradientAccumulationScheduler({0: 1})},
    ),
    "learning rates": (
        ValueError,
        "LearningRateFinder.*trains on the private records",
        Module,
        {"more": callbacks.LearningRateFinder},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words_before_anything_is_spent(case: str) -> None:
    error, match, make_module, settings = REFUSED[case]
    settings = dict(settings)
    more = [settings.pop("more")()] if "more" in settings else []
    callback, module = private(**settings.pop("of_run", {})), make_module()
    before = weights(module)
    with pytest.raises(error, match=match):
        fit(module, callback, *more, **settings)
    assert torch.equal(before, weights(module))
    assert callback._run is None or callback.run.steps == 0


def test_the_tuner_of_lightning_is_refused() -> None:
    trainer = make_trainer(private(), enable_checkpointing=True)
    tuner = L.pytorch.tuner.Tuner(trainer)
    with pytest.raises(ValueError, match="LearningRateFinder.*trains on the private records"):
        tuner.lr_find(Module(), DataLoader(data(), 20))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [("fsdp", "FSDPStrategy.*strategy='ddp'"), ("ddp_spawn", "by spawn.*strategy='ddp'")],
)
def test_strategies_without_a_copy_of_the_model_per_process_are_refused(
    strategy: str, said: str
) -> None:
    trainer = make_trainer(strategy="ddp_spawn", devices=2)
    if strategy == "fsdp":  # which needs a GPU
        trainer = SimpleNamespace(
            gradient_clip_val=None, strategy=L.pytorch.strategies.FSDPStrategy(), world_size=2
        )
    with pytest.raises(ValueError, match=said):
        check_trainer(trainer, Module())


class StepsTwice(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if "log" not in vars(self):  # not in a check
            loss.backward()
            self.trainer.optimizers[0].step()
        return loss


@pytest.mark.parametrize(
    ("make_module", "match"),
    [
        (SkipsSome, "To skip a batch"),
        (StepsEverySecond, "was not called for the last batch"),
        (StepsTwice, "took the optimizer's step itself"),
    ],
)
def test_steps_that_are_skipped_later_are_refused(make_module: Any, match: str) -> None:
    callback = private()
    with pytest.raises(dpkfc.PrivacyError, match=match):
        fit(make_module(), callback)
    assert callback.run.steps <= 1


def test_a_callback_trains_one_run() -> None:
    module, callback = Module(), private()
    fit(module, callback, max_epochs=1)
    with pytest.raises(dpkfc.PrivacyError, match="already trained a run"):
        fit(module, callback, max_epochs=1)
    fit(module, private(), max_epochs=1)


# -- checkpoints


class StopBefore(L.Callback):
    """Fails when the batch of this step was drawn, after earlier checkpoints were written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *batch: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def every(folder: Path, steps: int, **settings: Any) -> Any:
    return callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=steps, save_top_k=-1, **settings
    )


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: CASES[name] for name in ("SGD", "parts, AdamW, dropout", "bf16-true")
}


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize("case", RESUMED)
def test_resumed_in_the_middle_or_at_the_end_of_an_epoch_it_is_bit_identical(
    case: str, step: int, validation: bool, tmp_path: Path
) -> None:
    of_module, settings = RESUMED[case]
    settings = dict(settings)
    batch_size = settings.pop("batch_size", 20)
    loaders = [DataLoader(data(), batch_size)]
    loaders += [DataLoader(data(), 30)] if validation else []
    settings |= {"loaders": loaders}
    with pytest.raises(InterruptedError):
        fit(Module(**of_module), private(), every(tmp_path, step), StopBefore(step), **settings)
    module, callback = Module(**of_module), private()
    trainer = fit(module, callback, ckpt_path=tmp_path / f"step={step}.ckpt", **settings)
    parts = settings.get("accumulate_grad_batches", 1)
    if validation and "dropout" in of_module:  # which shares its generator with validation
        uninterrupted = Module(**of_module)
        fit(uninterrupted, private(), **settings)
        expected = weights(uninterrupted)
    else:
        expected = plain(
            callback.run,
            **of_module,
            physical=batch_size if parts > 1 else None,
            precision=settings.get("precision", "32-true"),
        )
    assert torch.equal(weights(module), expected)
    assert trainer.global_step == callback.run.steps == callback.run.plan.steps
    assert trainer.current_epoch == 2


def test_the_checkpoint_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    keep = callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    with pytest.raises(InterruptedError):
        fit(Module(), private(), keep, StopBefore(3))
    module, callback = Module(), private()
    trainer = fit(module, callback, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights(module), plain(callback.run))
    assert trainer.global_step == 6


def test_a_second_continuation_uses_fresh_noise_and_counts_the_first(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        fit(Module(), private(), every(tmp_path, 2), StopBefore(2))
    ends = []
    for lost in (0, 4):
        module, callback = Module(), private()
        trainer = fit(module, callback, ckpt_path=tmp_path / "step=2.ckpt")
        ends.append(weights(module))
        assert callback.run.charged == callback.run.plan.steps == 6
        assert callback.run.steps == 6 - lost == trainer.global_step
    assert torch.equal(ends[0], plain(callback.run)) and not torch.equal(*ends)


def test_weights_without_their_privacy_state_are_refused(tmp_path: Path) -> None:
    """Weights only; a checkpoint of ordinary training; weights of a later step."""
    with pytest.raises(InterruptedError):
        fit(
            Module(),
            private(),
            every(tmp_path, 2),
            callbacks.ModelCheckpoint(tmp_path / "weights", "{step}", save_weights_only=True),
            StopBefore(4),
        )
    ordinary = make_trainer(every(tmp_path / "ordinary", 2))
    ordinary.fit(Module(), DataLoader(data(), 20))
    for path in ("weights/step=3.ckpt", "ordinary/step=2.ckpt"):
        callback = private()
        with pytest.raises(dpkfc.PrivacyError, match="holds weights but no privacy state"):
            fit(Module(), callback, ckpt_path=tmp_path / path)
        assert callback._run is None
    early, late = (torch.load(tmp_path / f"step={step}.ckpt") for step in (2, 4))
    torch.save({**late, "callbacks": early["callbacks"]}, tmp_path / "mixed.ckpt")
    with pytest.raises(dpkfc.PrivacyError, match="weights are not those that the privacy state"):
        fit(Module(), private(), ckpt_path=tmp_path / "mixed.ckpt")


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        fit(Module(), private(), every(tmp_path, 2), StopBefore(2))
    with pytest.raises(dpkfc.PrivacyError, match="another plan: .*steps"):
        fit(Module(), private(), ckpt_path=tmp_path / "step=2.ckpt", max_epochs=5)


KILLED = """
import os, sys
from pathlib import Path
import dpkfc
import tests.integrations.test_lightning as t

class Kill(t.L.Callback):
    def on_train_batch_start(self, trainer, *batch):
        if trainer.global_step == 5:
            os._exit(9)

folder = Path(sys.argv[1])
ledger = dpkfc.Ledger(folder / "ledger.db", dataset="people") if sys.argv[2] == "ledger" else None
callback = t.private(ledger=ledger, seed=None if ledger else 3)
every = int(sys.argv[3])
t.fit(t.Module("adamw", "step"), callback, t.every(folder, every), Kill())
"""


@pytest.mark.parametrize(("how", "last"), [("seed", 5), ("seed", 3), ("ledger", 3)])
def test_killed_and_resumed_in_another_process(how: str, last: int, tmp_path: Path) -> None:
    """The checkpoint is of the last step, or of two steps before."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), how, str(last)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 9, ended.stderr
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people") if how == "ledger" else None
    module = Module("adamw", "step")
    callback = private(ledger=ledger, seed=None if ledger else 3)
    trainer = fit(module, callback, ckpt_path=tmp_path / f"step={last}.ckpt")
    run = callback.run
    assert run.charged == run.plan.steps == 6
    if ledger is None:
        assert run.steps == trainer.global_step == 6
        assert torch.equal(weights(module), plain(run, optimizer="adamw", interval="step"))
    else:
        assert run.steps == trainer.global_step == 6 - (5 - last)
        assert ledger.epsilon(1e-3) == pytest.approx(run.plan.epsilon(6), rel=1e-6)


def test_an_interrupted_run_stays_open_in_the_ledger_and_a_finished_one_is_closed(
    tmp_path: Path,
) -> None:
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people")
    with pytest.raises(InterruptedError):
        fit(Module(), private(ledger=ledger), every(tmp_path, 2), StopBefore(2))
    callback = private(ledger=ledger)
    fit(Module(), callback, ckpt_path=tmp_path / "step=2.ckpt")
    assert callback.run.steps == 6
    with pytest.raises(dpkfc.PrivacyError, match="closed"):
        fit(Module(), private(ledger=ledger), ckpt_path=tmp_path / "step=2.ckpt")


def test_after_early_stopping_the_rest_of_the_budget_is_freed_on_request(tmp_path: Path) -> None:
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="people", budget=(3.1, 1e-3))
    stop = callbacks.EarlyStopping("val_loss", patience=0, mode="max")
    loaders = [DataLoader(data(), 20), DataLoader(data(), 30)]
    settings: dict[str, Any] = {"epsilon": 3.0, "noise_multiplier": None, "ledger": ledger}
    callback = private(**settings)
    fit(Module(), callback, stop, loaders=loaders, max_epochs=4)
    assert callback.run.steps < callback.run.plan.steps
    settings["epsilon"] = 1.5
    with pytest.raises(dpkfc.PrivacyError, match=r"3\.1 is allowed"):
        fit(Module(), private(**settings), max_epochs=1)
    callback.run.detach()
    fit(Module(), private(**settings), max_epochs=1)
