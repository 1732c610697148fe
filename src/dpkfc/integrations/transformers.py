"""Private training inside Hugging Face's `Trainer` and its subclasses.

    trainer = PrivateTrainer(model, args, train_dataset=..., privacy={"epsilon": 3, "delta": 1e-5})
    trainer.train()

The Trainer keeps its own loop: schedules, evaluation, logging, callbacks, checkpoints. Three things
are replaced. The batches come from `run.loader`, one logical batch per optimizer step. The loss is
a mean over records. Gradients are clipped and noised inside ``optimizer.step()``, as in any loop.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.data.data_collator import DataCollatorWithFlattening

from dpkfc.accounting.rounding import round_up
from dpkfc.distributed import unwrapped
from dpkfc.engine import checkpoint
from dpkfc.engine.loader import read_source
from dpkfc.engine.make_private import make_private
from dpkfc.engine.rng_state import kept_generators
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.losses import mean_over_records

log = logging.getLogger(__name__)

for _name in ("_prepare_for_training", "get_batch_samples", "_finalize_training"):
    if not hasattr(Trainer, _name):
        raise ImportError(
            f"this version of transformers has no Trainer.{_name}, which PrivateTrainer needs: "
            "install transformers>=5.22"
        )

IGNORE_INDEX = -100  # the label of positions without a loss
# environment variables with which trackers upload whole checkpoints
UPLOADING = {
    "WANDB_LOG_MODEL": ("checkpoint",),
    "HF_MLFLOW_LOG_ARTIFACTS": ("true", "1"),
    "HF_DVCLIVE_LOG_MODEL": ("all",),
}
STATE_FOLDER = "dpkfc"  # in each checkpoint of the Trainer
DEFAULT_MAX_GRAD_NORM = 1.0  # of TrainingArguments
MAX_RECORDS_TRIED = 16  # until one is found that has labels
# relative difference of two ways to compute one loss, in float32 and in bfloat16
LOSS_RTOL, HALF_LOSS_RTOL = 1e-4, 1e-2

# arguments of make_private that the Trainer's own arguments decide
SET_BY_TRAINER = {
    "model": "model=",
    "optimizer": "optimizers= or TrainingArguments",
    "dataset": "train_dataset=",
    "loss": "the method record_loss",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "max_physical_batch_size": "per_device_train_batch_size",
}
# compute_loss of these modules averages over all tokens of a batch; record_loss is used instead
REPLACED_LOSS_MODULES = ("transformers.trainer", "trl.trainer.sft_trainer")


class PrivateTrainer(Trainer):
    """A `Trainer` that trains with differential privacy.

    Also a mixin for subclasses: ``class PrivateSFTTrainer(PrivateTrainer, SFTTrainer): pass``.

    Args:
        privacy: the arguments of `dpkfc.make_private` that concern privacy, by their names:
            epsilon, delta, noise_multiplier, clip, geometry, noise, records, ledger, seed, options.
        args, kwargs: those of the Trainer.

    The logical batch has an expected size of per_device_train_batch_size ×
    gradient_accumulation_steps × devices records; at most per_device_train_batch_size of them are
    in the memory of a device at a time. ``max_steps`` and ``num_train_epochs`` count as without
    privacy.

    Attributes:
        run: the private run, from the beginning of `train` on.

    **Guarantee.** That of `make_private` for the records of `train_dataset`: the weights, and all
    that is logged or saved without "not_private" in its name, are (ε, δ)-differentially private.
    Evaluation on other records costs no budget. What is logged as "loss_not_private" is exact.
    """

    def __init__(self, *args: Any, privacy: Mapping[str, Any], **kwargs: Any) -> None:
        self.privacy = _checked_privacy(privacy)
        self.run: PrivateRun | None = None
        _warn_of_private_evaluation(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        super().__init__(*args, **kwargs)
        _check_settings(self)
        if self.args.max_grad_norm == DEFAULT_MAX_GRAD_NORM:
            log.info(
                "max_grad_norm is not used: the gradient of each record is clipped to "
                f"clip={self.privacy.get('clip', 1.0)} of privacy="
            )
        self._logical_batches: Iterator[Iterator[Any]] = iter(())
        # for token losses: do the logits of a position predict the label of the next one?
        self._labels_shifted: bool | None = None

    # -- the loss

    def record_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a batch: the mean over its records of each record's own loss.

        Override it for a loss of your own, or override `compute_loss` as in any Trainer. Either is
        tried on a few records before any budget is spent.
        """
        inputs = dict(inputs)
        if self._overrides_compute_loss():
            return cast(Tensor, self.compute_loss(model, inputs))
        if self.compute_loss_func is not None:
            labels = inputs.pop("labels", None)
            value = self.compute_loss_func(model(**inputs), labels, num_items_in_batch=None)
            return cast(Tensor, value)
        smoothing = 0.0 if self.label_smoother is None else self.args.label_smoothing_factor
        if self._labels_shifted is not None:
            labels = inputs["labels"]
            logits = _logits(model(**_without_labels(model, inputs)))
            return token_loss(logits, labels, self._labels_shifted, smoothing)
        if smoothing and "labels" in inputs:
            labels = inputs.pop("labels")
            return F.cross_entropy(_logits(model(**inputs)), labels, label_smoothing=smoothing)
        return _model_loss(model(**inputs))

    def _overrides_compute_loss(self) -> bool:
        return type(self).compute_loss.__module__ not in REPLACED_LOSS_MODULES

    def _declared_loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self.compute_loss_context_manager():
            return self.record_loss(model, self._prepare_inputs(batch))

    # -- the run

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Make the run, once model and optimizer are prepared and their checkpoint is loaded."""
        _check_settings(self)
        earlier, ledger = self.run, self.privacy.get("ledger")
        if earlier is not None:
            folder = resume_from_checkpoint and Path(resume_from_checkpoint) / STATE_FOLDER
            _check_second_training(earlier, folder, ledger)
            earlier.detach(resumable=True)
        model, train_dataloader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if unwrapped(model) is not self.model:
            raise PrivacyError(
                f"the Trainer wraps the model in {type(model).__name__}, so its layers cannot be "
                "captured: start one process per device (torchrun), without torch_compile"
            )
        assert self.model is not None
        self._labels_shifted = self._choose_token_loss(self.model)
        self.run = make_private(
            self.model,
            cast(Optimizer, self.optimizer),
            self._source_loader,
            loss=self._declared_loss,
            steps=max_steps,
            batch_size=self.get_total_train_batch_size(self.args),
            max_physical_batch_size=self.args.per_device_train_batch_size,
            **self.privacy,
        )
        if resume_from_checkpoint is not None:
            _load_run(Path(resume_from_checkpoint) / STATE_FOLDER, self.run)
        self._logical_batches = self.run.loader.by_step(max_steps)
        return model, train_dataloader

    def _choose_token_loss(self, model: nn.Module) -> bool | None:
        """How the labels of tokens are aligned; None if the model's own loss can be used.

        For one record alone, the mean over its tokens is the loss that the model itself returns. So
        the alignment is the one that agrees with the model.
        """
        if self._overrides_compute_loss() or self.compute_loss_func is not None:
            return None
        batch = self._one_labelled_record()
        if batch is None:
            return None
        was_training = model.training
        model.eval()
        try:
            with kept_generators(0), torch.no_grad(), self.compute_loss_context_manager():
                likely = getattr(self, "_loss_shifts_labels", True)
                return _labels_shifted(model, self._prepare_inputs(batch), likely)
        finally:
            model.train(was_training)

    def _one_labelled_record(self) -> dict[str, Any] | None:
        """A batch of one record with a label per token; None if labels are not of that kind."""
        source = read_source(self._source_loader)
        collate = source.options["collate_fn"]
        for index in range(min(MAX_RECORDS_TRIED, len(source))):
            with kept_generators(index):
                batch = collate([source.dataset[index]])
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
                return None
            if int((labels[:, 1:] != IGNORE_INDEX).sum()) > 0:
                return dict(batch)
        raise ValueError(
            f"none of the first {MAX_RECORDS_TRIED} records has a label to learn from (all are "
            f"{IGNORE_INDEX}): check the data set and data_collator"
        )

    # -- the Trainer's loop

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Numbers for the Trainer to count; `get_batch_samples` draws the batches themselves."""
        self._source_loader = super().get_train_dataloader()
        per_epoch = math.ceil(self._public_records() / self.get_total_train_batch_size(self.args))
        positions = range(per_epoch * self.args.gradient_accumulation_steps)
        # a generator of its own: the global one is not used
        return DataLoader(positions, batch_size=1, generator=torch.Generator())  # type: ignore[arg-type]

    def _public_records(self) -> int:
        records = self.privacy.get("records")
        return len(read_source(self._source_loader)) if records is None else int(records)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The public number of records for training."""
        if isinstance(dataloader.dataset, range):
            return self._public_records()
        return int(super().num_examples(dataloader))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Iterator[Any]], None]:
        """The logical batch of one optimizer step, in as many parts as the Trainer counts.

        The first part holds all physical batches, the others none.
        """
        positions = list(islice(epoch_iterator, num_batches))
        batch = next(self._logical_batches, None) if positions else None
        if batch is None:
            return [], None
        return [batch, *(iter(()) for _ in positions[1:])], None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Gradients of all physical batches of `inputs`; returns the loss, which is not private.

        On several ranks, the mean of what they return is the mean over the logical batch.
        """
        assert self.run is not None
        model = unwrapped(model)
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            train()
        total = torch.zeros((), device=self.args.device)
        for batch in inputs:
            loss = self._declared_loss(model, batch)
            loss.backward()
            total += loss.detach() * self.run.batch_weight
        return total

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it would reveal the exact number of tokens."""
        return 0

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: each record was clipped on its own."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: the private gradient exists only within optimizer.step()."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self.run is not None
        self._logical_batches.close()  # type: ignore[attr-defined]
        taken, planned = self.run.charged, self.run.plan.steps
        if taken < planned:
            log.warning(
                f"training ended after {taken} of {planned} planned private steps, at epsilon = "
                f"{round_up(self.run.epsilon())}"
            )
        output = super()._finalize_training(*args, **kwargs)
        self.run.detach(resumable=taken < planned)
        return output

    # -- what is written

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds epsilon, and renames the exact losses of the private records."""
        for name in ("loss", "train_loss"):
            if name in logs:
                logs[f"{name}_not_private"] = logs.pop(name)
        if self.run is not None:
            logs["epsilon"] = float(round_up(self.run.epsilon()))
            ledger = self.privacy.get("ledger")
            if ledger is not None and self.is_world_process_zero():
                of_all_runs = ledger.epsilon(self.run.plan.delta)
                logs["epsilon_of_all_runs"] = float(round_up(of_all_runs))
        # TRL would add exact statistics of the private tokens
        getattr(self, "_metrics", {}).get("train", {}).clear()
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's card with a section on privacy."""
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir or "") / "README.md"
        if self.run is not None and self.is_world_process_zero() and card.exists():
            card.write_text(f"{card.read_text()}\n{privacy_section(self.run)}", encoding="utf-8")

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert self.run is not None and best is not None
        folder = Path(best) / STATE_FOLDER
        if not folder.is_dir() or checkpoint.run_id_of(folder) != self.run.run_id:
            raise PrivacyError(
                f"the best checkpoint '{best}' was not saved by this run, so its weights are not "
                "covered by this run's epsilon. Train into an empty output_dir, and save with "
                "save_only_model=False"
            )
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.run is not None
        checkpoint.save_run(Path(output_dir) / STATE_FOLDER, self.run)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every try would spend the budget again."""
        raise PrivacyError(
            "hyperparameter_search trains many times on the private records, and each time spends "
            "the budget again. Use dpkfc.tuning.tune_privately, or search on public data"
        )


# -- losses


def token_loss(logits: Tensor, labels: Tensor, shifted: bool, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy averaged over each record's own tokens, then over the records.

    Args:
        logits: [batch, length, classes].
        labels: [batch, length]; -100 where a position does not count. If shorter than the logits,
            they belong to the last positions, as with prompt tuning.
        shifted: the logits of a position predict the label of the next one.
        smoothing: of the labels, between 0 and 1.

    **Guarantee.** The weight of a record depends on no other record.

    >>> logits = torch.zeros(2, 3, 4)
    >>> labels = torch.tensor([[1, 2, 3], [1, -100, -100]])
    >>> round(float(token_loss(logits, labels, shifted=False)), 4)
    1.3863
    """
    labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORE_INDEX)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=smoothing,
    )
    return mean_over_records(losses.view_as(labels), labels != IGNORE_INDEX)


def _labels_shifted(model: nn.Module, inputs: dict[str, Any], likely: bool) -> bool | None:
    """See `PrivateTrainer._choose_token_loss`; `inputs` is one record.

    `likely` is tried first: a head of zeros has the same loss in both ways.
    """
    labels = inputs["labels"]
    own = float(_model_loss(model(**inputs)))
    logits = _logits(model(**_without_labels(model, inputs)))
    if logits.dim() != labels.dim() + 1:
        return None
    ways = (likely, not likely)
    losses = {shifted: float(token_loss(logits, labels, shifted)) for shifted in ways}
    tolerance = LOSS_RTOL if logits.dtype is torch.float32 else HALF_LOSS_RTOL
    for shifted, loss in losses.items():
        if math.isclose(loss, own, rel_tol=tolerance):
            return shifted
    raise ValueError(
        f"{type(model).__name__} has a label per token, but its loss of one record ({own:.4g}) is "
        f"not the mean over the record's tokens ({losses[True]:.4g} with shifted labels, "
        f"{losses[False]:.4g} without). Define the loss of a batch as a mean over records: "
        "override record_loss(model, inputs) of PrivateTrainer"
    )


def _without_labels(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs for logits alone; encoder-decoder models still get their decoder_input_ids."""
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = shift(labels=labels)
    return inputs


def _logits(outputs: Any) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    assert isinstance(logits, Tensor)
    return logits


def _model_loss(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ValueError(
            "the model returned no loss: the data set needs a column of labels that the model "
            "knows (remove_unused_columns drops others), or override record_loss(model, inputs)"
        )
    return loss


# -- what is refused


def _checked_privacy(privacy: Any) -> dict[str, Any]:
    if not isinstance(privacy, Mapping):
        raise TypeError(
            'privacy= is a dict of arguments of make_private, such as {"epsilon": 3, "delta": '
            f"1e-5}}, not {type(privacy).__name__}"
        )
    allowed = [
        name for name in inspect.signature(make_private).parameters if name not in SET_BY_TRAINER
    ]
    for name in privacy:
        if name in SET_BY_TRAINER:
            raise ValueError(f"privacy: {name} is decided by {SET_BY_TRAINER[name]} of the Trainer")
        if name not in allowed:
            nearest = difflib.get_close_matches(name, allowed, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"privacy: unknown {name!r}.{hint} Known: {', '.join(allowed)}")
    return dict(privacy)


# setting of TrainingArguments or SFTConfig, whether its value is refused, and why
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "max_grad_norm",
        lambda value: value not in (None, 0, DEFAULT_MAX_GRAD_NORM),
        'each record is clipped instead: write privacy={"clip": ...} and leave it out',
    ),
    ("fp16", bool, "its loss scaling is not supported here: use bf16"),
    ("auto_find_batch_size", bool, "it repeats steps with other batches"),
    ("enable_jit_checkpoint", bool, "it saves in the middle of a batch: use save_steps"),
    ("torch_compile", bool, "the layers of a compiled model cannot be captured"),
    ("deepspeed", bool, "its engine reduces raw gradients: start torchrun without it"),
    ("fsdp", bool, "only whole copies of the model per device: start torchrun without it"),
    ("use_liger_kernel", bool, "the layers of fused kernels cannot be captured"),
    (
        "neftune_noise_alpha",
        lambda value: value is not None,
        "its noise depends on the longest record of a batch",
    ),
    (
        "include_num_input_tokens_seen",
        lambda value: value not in (False, None, "no"),
        "the exact number of tokens would be published",
    ),
    (
        "hub_strategy",
        lambda value: "checkpoint" in str(getattr(value, "value", value)),
        "checkpoints hold the keys of future noise: upload the model alone (every_save, end)",
    ),
    (
        "optim",
        lambda value: any(kind in str(value) for kind in ("lomo", "layerwise")),
        "it updates weights during backward(), before clipping and noise",
    ),
    # of TRL's SFTConfig
    ("packing", bool, "a row would hold several records, and a record several rows"),
    ("padding_free", bool, "it joins all records of a batch into one row"),
    ("activation_offloading", bool, "not supported here: use a smaller batch size per device"),
    ("loss_type", lambda value: value not in (None, "nll"), "only 'nll' is supported"),
)


def _check_settings(trainer: PrivateTrainer) -> None:
    """Refuse settings that privacy replaces or forbids."""
    args = trainer.args
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True in the model's config: the auxiliary loss of a mixture of "
            "experts is computed from all records of a batch. Set it to False (with TRL, "
            "router_aux_loss_coef=0)"
        )
    for name, refused, why in _REFUSED:
        value = getattr(args, name, None)
        if refused(value):
            raise ValueError(f"{name}={value!r} cannot be used in a private Trainer: {why}")
    for name, values in UPLOADING.items():
        if os.environ.get(name, "").lower() in values:
            raise ValueError(
                f"{name}={os.environ[name]} uploads checkpoints, which hold the keys of future "
                "noise: unset it"
            )
    if isinstance(trainer.data_collator, DataCollatorWithFlattening):
        raise ValueError(
            "DataCollatorWithFlattening joins all records of a batch into one row: use "
            "DataCollatorWithPadding"
        )


def _check_second_training(run: PrivateRun, resumed: Any, ledger: Any) -> None:
    """A second `train` spends the budget a second time, unless it continues the first."""
    continues = resumed and resumed.is_dir() and checkpoint.run_id_of(resumed) == run.run_id
    if run.charged and not continues and ledger is None:
        raise PrivacyError(
            f"this Trainer has trained already, and spent epsilon = {round_up(run.epsilon())}: "
            "training again on the same records adds to it. Continue it with "
            'resume_from_checkpoint, or give a ledger (privacy={"ledger": dpkfc.Ledger(...)}), '
            "which adds up all runs"
        )


def _warn_of_private_evaluation(train_dataset: Any, eval_dataset: Any) -> None:
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(each is train_dataset for each in evaluated if each is not None):
        log.warning(
            "eval_dataset is the private train_dataset: its metrics are exact, not private, and so "
            "is every choice that follows from them"
        )


def _load_run(folder: Path, run: PrivateRun) -> None:
    problem = None
    if not folder.is_dir():
        problem = PrivacyError(
            f"'{folder.parent}' holds no state of a private run, so the steps behind its weights "
            "would not be counted. Resume from a checkpoint that PrivateTrainer has saved with "
            "save_only_model=False, in a folder that all ranks can read"
        )
    run._ranks.agree(problem)
    checkpoint.load_run(folder, run)
    lost = run.charged - run.steps
    if lost:
        log.warning(
            f"{lost} steps after '{folder.parent}' were lost with their process. They stay "
            f"charged, so training ends {lost} steps before the planned {run.plan.steps}"
        )


# -- reporting


def privacy_section(run: PrivateRun) -> str:
    """The section of a model card that states the guarantee."""
    rows = [
        ("spent", f"epsilon = {round_up(run.epsilon())} after {run.charged} steps"),
        *run.plan.statement(),
    ]
    lines = [
        "## Differential privacy",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "Training losses are exact functions of the private records and are not covered.",
        "",
    ]
    return "\n".join(lines)
