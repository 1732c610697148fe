"""Private training with Lightning: one callback.

    trainer = L.Trainer(max_epochs=5, callbacks=[PrivateTraining(epsilon=3.0, delta=1e-5)])
    trainer.fit(module, loader)

    setup            -> refuse settings that privacy replaces; the source of the training data
                        is replaced by one that yields Poisson batches
    on_fit_start     -> make_private; continue the run of the checkpoint, if there is one
    strategy.training_step, for each physical part of a batch -> module.training_step
    optimizer.step   -> the private step, as in any other loop

One batch of Lightning is one private step, so that everything that Lightning counts is a public
number of the plan: how many records were drawn, and in how many parts, does not show.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from dpkfc.accounting.ledger import Ledger
from dpkfc.clipping import AutomaticClipping
from dpkfc.distributed import unwrapped
from dpkfc.engine.loader import read_source
from dpkfc.engine.make_private import make_private
from dpkfc.engine.options import Options
from dpkfc.engine.rng_state import get_generators, set_generators
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.noise.auto import Auto
from dpkfc.planning.choose_noise import Noise

if TYPE_CHECKING:
    # so that type checking does not need Lightning
    class Callback:
        log: Callable[..., None]
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
# callbacks that would break the plan, and why
UNSAFE_CALLBACKS = {
    "BatchSizeFinder": "it trains on the private records to choose the batch size",
    "LearningRateFinder": "it trains on the private records to choose the learning rate",
    "GradientAccumulationScheduler": "the expected batch size must be the same at every step",
    "ModelPruning": "it replaces parameters after they were made private",
    "StochasticWeightAveraging": "it runs over the training data once more than planned. Average "
    "weights with WeightAveraging, or with torch.optim.swa_utils in on_train_batch_end",
}


class PrivateTraining(Callback):
    """Makes `Trainer.fit` differentially private.

    Takes the module, its optimizer and the training DataLoader from the Trainer. The expected batch
    size is that of the DataLoader times `accumulate_grad_batches` times the number of devices; the
    number of steps follows from `max_epochs`, `max_steps` and `limit_train_batches`.

    Args:
        epsilon, delta, noise_multiplier, clip, geometry, noise, records, ledger, seed, options: as
            in `dpkfc.make_private`.
        loss: ``loss(module, batch) -> scalar``, the loss that the loop computes. By default what
            `training_step` returns. Manual optimization needs it, since there `training_step` also
            takes the step.

    Attributes:
        run: the `dpkfc.PrivateRun` of the last `fit`; ``run.epsilon()`` is the privacy loss.

    **Guarantee.** That of `dpkfc.make_private`, for the sequence of weights that the Trainer and
    its callbacks see. Values that the module logs, and metrics on private validation data, are
    exact functions of private records and are not covered.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        clip: float | AutomaticClipping | Literal["auto"] = 1.0,
        geometry: Geometry | None = None,
        noise: Noise | Auto | Literal["auto"] | None = None,
        records: int | None = None,
        ledger: Ledger | None = None,
        seed: int | None = None,
        options: Options | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | Literal["unchecked"] | None = None,
    ) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "clip": clip,
            "geometry": geometry,
            "noise": noise,
            "records": records,
            "ledger": ledger,
            "seed": seed,
            "options": options,
        }
        self._loss = loss
        self._run: PrivateRun | None = None
        self._restored: dict[str, Any] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    @property
    def run(self) -> PrivateRun:
        if self._run is None:
            raise AttributeError("there is no run yet: it is made when Trainer.fit begins")
        return self._run

    # -- events of the Trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._restored = {}
        check_trainer(trainer, pl_module)
        if self._loss is None and not pl_module.automatic_optimization:
            raise ValueError(
                "manual optimization: training_step computes the loss and takes the step, so that "
                "the loss cannot be tried before. Give it as PrivateTraining(loss=...), a function "
                "loss(module, batch) -> scalar"
            )
        fit_loop = trainer.fit_loop
        self._source = _PrivateSource(
            fit_loop._data_source,
            self._settings["records"],
            trainer.limit_train_batches,
            trainer.accumulate_grad_batches,
            trainer.world_size,
        )
        self._replace(fit_loop, "_data_source", self._source)
        # both are part of the length of the private loader
        self._replace(trainer, "limit_train_batches", 1.0)
        self._replace(trainer, "accumulate_grad_batches", 1)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._run is not None and not self._restored:
            raise PrivacyError(
                "this PrivateTraining has already trained a run, and another one has its own "
                "epsilon, which adds up. Make a new PrivateTraining for a new run; to continue an "
                "interrupted one, give Trainer.fit(ckpt_path=...)"
            )
        if trainer.ckpt_path and not self._restored:
            raise PrivacyError(
                f"the checkpoint '{trainer.ckpt_path}' holds weights but no privacy state: the "
                "steps behind them would not be counted. It was saved without PrivateTraining, or "
                "with save_weights_only=True. Resume from a checkpoint of the private run; if the "
                "weights are public, load them into the module before fit"
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers: private "
                "training needs exactly one, over all trainable parameters. Use parameter groups"
            )
        self._trainer, self._module = trainer, pl_module
        self._batch_idx: tuple[int, ...] = (0,) * _takes_batch_idx(pl_module.training_step)
        data = self._source.dataloader()
        self._run = make_private(
            pl_module,
            trainer.optimizers[0],
            data.user_loader,
            loss="unchecked" if self._loss == "unchecked" else self._declared_loss,
            steps=_planned_steps(trainer, len(data)),
            batch_size=data.batch_size,
            max_physical_batch_size=data.max_physical_batch_size,
            **self._settings,
        )
        if self._restored:
            self._run.load_state_dict(self._restored["run"])
        data.run = self._run
        unwrapped(trainer.strategy.model)  # DistributedDataParallel sends nothing from here on
        self._replace(trainer.strategy, "training_step", self._training_step)
        self._replace(trainer.precision_plugin, "clip_gradients", _refuse_clipping)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._restored:
            set_generators(self._restored["generators"])
        self._stop_if_spent(trainer)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        self._stop_if_spent(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        epsilon = _float32_above(self.run.epsilon())
        # the same on all ranks; the largest of them is not rounded
        once = {"sync_dist": True, "reduce_fx": "max", "batch_size": 1}
        self.log("epsilon", epsilon, prog_bar=True, **once)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, with its secret keys, and of the global generators."""
        if self._run is None:
            return {}
        return {"run": self._run.state_dict(), "generators": get_generators()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the run is made, when the weights are restored."""
        self._restored = state_dict

    # -- the training step

    def _training_step(self, batch: Any, *batch_idx: int) -> Any:
        """Takes the place of `strategy.training_step`: all physical parts of one private step."""
        trainer, module = self._trainer, self._module
        if isinstance(batch, EmptyBatch):
            if not module.automatic_optimization:
                module.optimizers().step()
                module.optimizers().zero_grad()
                return None
            # Lightning takes the step, of pure noise, after a backward pass that reaches no layer
            return torch.zeros((), device=module.device, requires_grad=True)
        self._batch_idx = batch_idx
        output = self._step_on(batch)
        if not module.automatic_optimization:
            return output
        if not self.run.batch_open:
            raise PrivacyError(
                "training_step took the optimizer's step itself, and Lightning would take another "
                "one: return the loss only, or set automatic_optimization = False"
            )
        while not self.run.batch_complete:
            trainer.strategy.backward(_loss_of(output), trainer.optimizers[0])
            output = self._step_on(self._on_device(self._source.dataloader().next_part()))
        _loss_of(output)  # Lightning calls backward, and would skip it for None
        return output

    def _step_on(self, batch: Any) -> Any:
        return self._call(self._module.training_step, batch, *self._batch_idx)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._trainer.precision_plugin.train_step_context():
            return _through_forward(self._module, function, *args)

    def _declared_loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch of the loader: as in the loop, and nothing is logged."""
        with _not_logging(self._module):
            batch = self._on_device(batch)
            if callable(self._loss):
                return _loss_of(self._call(partial(self._loss, module), batch))
            return _loss_of(self._step_on(batch))

    def _on_device(self, batch: Any) -> Any:
        """What Lightning does with a batch before `training_step`."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    # -- the end

    def _stop_if_spent(self, trainer: Any) -> None:
        """Steps that an interrupted process has charged and lost leave fewer for this one."""
        if self.run.steps < self.run.charged == self.run.plan.steps:
            trainer.should_stop = True

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def _release(self) -> None:
        """The Trainer and the module are as they were before `fit`."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        if self._run is not None and not self._run.detached:
            self._run.detach(resumable=self._run.charged < self._run.plan.steps)


_ABSENT = object()


class EmptyBatch(list[Any]):
    """The batch of a step that draws no record, as hooks of modules and callbacks see it."""


class _StepLoader:
    """What Lightning iterates over instead of the user's DataLoader: one batch per private step.

    It yields the first physical part of each batch; `next_part` returns the others.
    """

    run: PrivateRun

    def __init__(self, user_loader: DataLoader[Any], length: int, batch_size: int, split: bool):
        self.user_loader, self._length, self.batch_size = user_loader, length, batch_size
        self.max_physical_batch_size = read_source(user_loader).batch_size if split else None
        self._parts: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for parts in self.run.loader.by_step(self._length):
            self._parts = parts
            yield next(parts, EmptyBatch())

    def next_part(self) -> Any:
        return next(self._parts)

    # the run knows where it is: Lightning asks for these to resume within an epoch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass
class _PrivateSource:
    """Takes the place of Lightning's source of training data, which is read when it is asked for:
    after `setup` of the module, and perhaps from within `configure_optimizers`.
    """

    source: Any
    records: int | None
    limit_train_batches: int | float
    accumulate_grad_batches: int
    ranks: int
    _loader: _StepLoader | None = None

    def dataloader(self) -> _StepLoader:
        if self._loader is None:
            loader = self.source.dataloader()
            if not isinstance(loader, DataLoader):
                raise TypeError(
                    f"train_dataloader is a {type(loader).__name__}: private training needs one "
                    "torch.utils.data.DataLoader, whose records are sampled anew at every step"
                )
            source = read_source(loader)
            if source.batch_size is None:
                raise ValueError("train_dataloader has no batch size: give DataLoader(batch_size=)")
            # if the number of records is stated, nothing may depend on the true one
            records = len(source) if self.records is None else self.records
            # as without privacy: each rank reads its share in batches of this size
            batches = math.ceil(records / self.ranks) / source.batch_size
            length = max(1, math.floor(batches) if loader.drop_last else math.ceil(batches))
            if isinstance(self.limit_train_batches, int):
                length = min(length, self.limit_train_batches)
            else:
                length = int(length * self.limit_train_batches)
            if length < 1:
                raise ValueError(
                    f"limit_train_batches={self.limit_train_batches} leaves no batch to train on"
                )
            parts = self.accumulate_grad_batches
            steps = math.ceil(length / parts)
            batch_size = min(records, source.batch_size * parts * self.ranks)
            self._loader = _StepLoader(loader, steps, batch_size, split=parts > 1)
        return self._loader

    def is_defined(self) -> bool:
        return bool(self.source.is_defined())

    def is_module(self) -> bool:
        return False


def check_trainer(trainer: Any, module: Any) -> None:
    """Refuse settings of the Trainer that privacy replaces or that would break the plan."""
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val}: the gradient of every single record "
            "is clipped instead. Remove it from the Trainer and set PrivateTraining(clip=...)"
        )
    strategy = trainer.strategy
    replicated = _is_a(strategy, "DDPStrategy") and not _is_a(strategy, "DeepSpeedStrategy")
    if not replicated and not _is_a(strategy, "SingleDeviceStrategy"):
        raise ValueError(
            f"strategy {type(strategy).__name__}: private training works with one device, and with "
            "one copy of the model per device. Use Trainer(strategy='ddp'), or devices=1"
        )
    if replicated and strategy._start_method != "popen":
        raise ValueError(
            f"a strategy that starts its processes by {strategy._start_method}: the run and its "
            "epsilon would stay there when fit returns. Use Trainer(strategy='ddp'), or torchrun"
        )
    if trainer.precision not in PRECISIONS:
        raise ValueError(
            f"precision='{trainer.precision}': private training works with "
            f"{', '.join(PRECISIONS)}. Instead of '16-mixed', whose gradient scaler skips steps "
            "that overflow, use 'bf16-mixed'"
        )
    if trainer.overfit_batches:
        raise ValueError(
            f"overfit_batches={trainer.overfit_batches}: private batches are drawn anew at every "
            "step. Remove it; limit_train_batches shortens an epoch"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "reload_dataloaders_every_n_epochs: the plan holds for one data set. Remove it"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "the module is compiled, so its layers cannot be captured: give Trainer.fit the module "
            "before torch.compile"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            "training_step(dataloader_iter) fetches batches itself: use training_step(batch, "
            "batch_idx), so that a step is taken for each batch that was drawn"
        )
    for callback in trainer.callbacks:
        for name, reason in UNSAFE_CALLBACKS.items():
            if _is_a(callback, name):
                raise ValueError(
                    f"the callback {name} cannot be used in private training: {reason}"
                )


def _is_a(thing: Any, class_name: str) -> bool:
    """By name: `lightning.pytorch` and `pytorch_lightning` have classes of their own."""
    return any(kind.__name__ == class_name for kind in type(thing).__mro__)


def _planned_steps(trainer: Any, steps_per_epoch: int) -> int:
    limits = []
    if trainer.max_epochs not in (None, -1):
        limits.append(trainer.max_epochs * steps_per_epoch)
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps)
    if not limits:
        raise ValueError(
            "max_epochs and max_steps are both unlimited: the noise depends on the number of "
            "steps. Give Trainer one of them"
        )
    return int(min(limits))


def _takes_batch_idx(training_step: Callable[..., Any]) -> bool:
    parameters = inspect.signature(training_step).parameters.values()
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise PrivacyError(
            f"the training step returned {type(loss).__name__} instead of a loss. To skip a batch "
            "because of what is in it would leak: return the loss of every batch, as a tensor or "
            "as the 'loss' of a dict"
        )
    return loss


def _float32_above(epsilon: float) -> Tensor:
    """What is logged is never below the true value."""
    rounded = torch.tensor(epsilon, dtype=torch.float32)
    if float(rounded) < epsilon:
        rounded = torch.nextafter(rounded, torch.tensor(math.inf))
    return rounded


def _through_forward(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` within a call of the module itself.

    Hooks of the module then see the batch, also if `training_step` calls only its submodules. A
    module that owns parameters itself must be called by `training_step`: they are captured in its
    own forward.
    """
    if module._parameters:
        return function(*args)
    own = vars(module).get("forward", _ABSENT)

    def restore() -> None:
        if own is not _ABSENT:
            module.forward = own
        else:
            vars(module).pop("forward", None)

    def forward(*args: Any) -> Any:
        restore()  # the function may call the module
        return function(*args)

    module.forward = forward
    try:
        return module(*args)
    finally:
        restore()


@contextmanager
def _not_logging(module: Any) -> Iterator[None]:
    """`self.log` does nothing, and metrics of the module stay as they are."""
    names = [name for name in ("log", "log_dict") if name not in vars(module)]
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states = [(part, part._copy_state_dict(), part._update_count) for part in metrics]
    for name in names:
        setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)
        for part, state, updates in states:
            for name, value in state.items():
                setattr(part, name, value)
            part._update_count, part._computed = updates, None


def _refuse_clipping(*args: Any, **kwargs: Any) -> None:
    clip_val = kwargs.get("clip_val", args[1] if len(args) > 1 else None)
    if clip_val:
        raise ValueError(
            f"clip_gradients({clip_val}): at this moment gradients are not yet private, and each "
            "record's own gradient is clipped. Remove the call and set PrivateTraining(clip=...)"
        )
