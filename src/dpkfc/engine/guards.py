"""Rules about what a loop may do with a private run, one function per rule.

A function named after a rule raises `PrivacyError` if the rule is broken; the message says what
would break the guarantee and what to do. `batch_norms` and `weights_digest` compute what the rules
compare. `checkpoint_not_continued_elsewhere` and `no_copy` return the error for the caller to
raise.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dpkfc.distributed import ALONE, Ranks
from dpkfc.errors import PrivacyError
from dpkfc.sharding import is_sharded, local, owned_ranges

if TYPE_CHECKING:
    from dpkfc.engine.loader import Chunk

# entries hashed per parameter: a few suffice, since the noise of a step changes every entry
SAMPLED_ENTRIES = 256


# -- processes


def same_ranks(ranks: Ranks) -> None:
    """The ranks that share batches and noise are those of make_private."""
    count = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size()
    if count != ranks.count:
        raise PrivacyError(
            f"the job has {count} ranks, but had {ranks.count} when make_private was called: each "
            "rank would draw its own batches and noise, and account for them as if it were alone. "
            "Call torch.distributed.init_process_group (or build the Accelerator or Trainer) "
            "before make_private"
        )


def not_forked(pid: int) -> None:
    """Parent and child would train on the same batches with the same noise."""
    if pid != os.getpid():
        raise PrivacyError(
            "the process was forked while run.loader was being iterated: parent and child would "
            "train on the same batches. Begin to iterate in the child"
        )


# -- the model and the optimizer


def no_new_parameters(model: nn.Module, known: Mapping[nn.Parameter, str]) -> None:
    """Trainable parameters that are new since make_private would be neither clipped nor noised."""
    # FSDP2 replaces a sharded parameter by the gathered one while its module runs
    sharded = {name for p, name in known.items() if is_sharded(p)}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in known and (name not in sharded or is_sharded(p)):
            raise PrivacyError(
                f"parameter '{name}' is trainable and was not in the model when it was made "
                "private: it would be trained without clipping and noise. Build the whole model "
                "first (fully_shard replaces parameters too), then the optimizer, then call "
                "make_private; or set requires_grad=False"
            )


def only_known_parameters(optimizer: Optimizer, known: Container[nn.Parameter]) -> None:
    """The optimizer may step no parameter that is not clipped and noised."""
    if any(p not in known for group in optimizer.param_groups for p in group["params"]):
        raise PrivacyError(
            "the optimizer was given parameters that the model did not have when it was made "
            "private: they would be stepped without clipping and noise. Call detach(), then "
            "make_private again with all of them"
        )


def not_lbfgs(optimizer: Optimizer) -> None:
    """Evaluations of the loss beyond one per step are not accounted for."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PrivacyError(
            "LBFGS evaluates the loss several times per step, which is not accounted for. Use "
            "another optimizer"
        )


def batch_norms_frozen(norms: Mapping[str, nn.Module]) -> None:
    """A frozen BatchNorm must not return to training mode, in which it mixes the records."""
    for name, module in norms.items():
        if module.training:
            raise PrivacyError(
                f"'{name}' ({type(module).__name__}) is in training mode, where it mixes the "
                "records of a batch: call .eval() on it after model.train()"
            )


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm modules that were accepted because they are frozen and in eval mode."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }


def same_trainable(now: Iterable[str], at_start: Iterable[str], correlated: bool) -> None:
    """Correlated noise subtracts later what it added earlier, on the same parameters."""
    changed = set(now) ^ set(at_start)
    if correlated and changed:
        raise PrivacyError(
            f"{', '.join(sorted(changed))}: frozen or unfrozen since make_private. Correlated "
            "noise subtracts in a later step what it added in an earlier one, to the same "
            "parameters. Choose what is trainable before make_private, or use "
            "dpkfc.noise.Independent()"
        )


# -- the order of batches and steps


def attached(detached: bool) -> None:
    """After detach() the hooks are gone and gradients are raw."""
    if detached:
        raise PrivacyError(
            "this run was detached: the loop would continue with raw gradients. Call make_private "
            "again to continue privately"
        )


def previous_step_taken(chunk: Chunk, charged: int) -> None:
    """Skipping a step because of what is in the batch would leak."""
    if chunk.step != charged:
        raise PrivacyError(
            "optimizer.step() was not called for the last batch. Skipping a step because of what "
            "is in the batch would leak: call step() for every batch. Instead of accumulating "
            "gradients over batches, set batch_size and max_physical_batch_size"
        )


def same_learning_rates(before: list[float] | None, now: list[float]) -> None:
    """A scheduler must not step between the physical parts of one logical batch."""
    if before is not None and before != now:
        raise PrivacyError(
            "a learning-rate scheduler was stepped within one logical batch, which "
            "max_physical_batch_size has split. Write `run.after_step(scheduler.step)` before the "
            "loop instead"
        )


def has_batch(chunk: Chunk | None) -> Chunk:
    """A step needs a batch of the loader: what is sampled must be what is accounted."""
    if chunk is None:
        raise PrivacyError(
            "optimizer.step() without a batch from run.loader: what is sampled must be what is "
            "accounted. Iterate over run.loader and call step() once per batch"
        )
    return chunk


def all_samples_seen(chunk: Chunk, seen: int) -> None:
    """Every sample of the logical batch must be clipped on its own, exactly once."""
    if seen != chunk.share:
        raise PrivacyError(
            f"{chunk.share} samples were drawn for this step but {seen} were seen by backward(): "
            "every sample must be clipped on its own, exactly once. Call backward once for every "
            "forward pass, on the batches that run.loader yields. To ignore samples, give them "
            "weight zero in the loss"
        )


def steps_left(charged: int, planned: int) -> None:
    """No step beyond the plan."""
    if charged >= planned:
        raise PrivacyError(f"all {planned} planned steps are used up. Make a new plan to continue")


# -- weights


def weights_digest(parameters: Mapping[str, nn.Parameter], ranks: Ranks = ALONE) -> str:
    """A hash that differs between the weights after different steps, from a few entries of each.

    It does not depend on how the parameters are divided over ranks. If they are, all ranks must
    call this.
    """
    digest = hashlib.sha256()
    for (name, _), bits in zip(parameters.items(), _sampled_bits(parameters, ranks), strict=True):
        digest.update(name.encode() + bits.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sampled_bits(parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> list[Tensor]:
    """Every n-th entry of each parameter, as integers."""
    sampled = []
    for p in parameters.values():
        places = torch.arange(0, p.numel(), max(1, p.numel() // SAMPLED_ENTRIES))
        flat = local(p.detach()).reshape(-1)
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        (own,) = owned_ranges([p])
        here = (places >= own.start) & (places < own.stop)
        values = flat[(places[here] - own.start).to(flat.device)].cpu()
        bits = torch.full((len(places),), torch.iinfo(kind).min, dtype=torch.int64)
        bits[here] = values.contiguous().view(kind).long()
        sampled.append((bits, kind))
    if any(is_sharded(p) for p in parameters.values()):
        together = torch.cat([bits for bits, _ in sampled])
        ranks.largest_(together)
        parts = together.split([len(bits) for bits, _ in sampled])
        sampled = [(part, kind) for part, (_, kind) in zip(parts, sampled, strict=True)]
    return [bits.to(kind) for bits, kind in sampled]


def same_weights(digest: str, expected: str, steps: int) -> None:
    """The epsilon of a run counts only weights that the run's own steps produced."""
    if digest != expected:
        raise PrivacyError(
            f"the model's weights are not those that the privacy state belongs to ({steps} steps): "
            "something other than the steps of this run changed them after make_private or after "
            "the run was loaded. If a framework restored a checkpoint, restore the run with it: "
            "keep run.state_dict() beside the weights and call run.load_state_dict(), or use "
            "run.save() and run.load(). If the weights are public, load them before make_private"
        )


# -- checkpoints


def checkpoint_not_continued_elsewhere(folder: object) -> PrivacyError:
    """The error for a checkpoint of this run that another process has continued."""
    return PrivacyError(
        f"the checkpoint '{folder}' that this run has just saved was continued by another process: "
        "both would use the same noise. Iterate over run.loader again to continue with fresh noise"
    )


def noise_may_restart(bands: int | None, groups: int, non_negative: bool, name: str) -> None:
    """After lost steps the noise stream continues without its past.

    See `noise.stream.Stream.restart`.
    """
    if not (non_negative or (bands is not None and bands <= groups)):
        raise PrivacyError(
            f"steps after this checkpoint were lost, and {name} cannot continue without their "
            "noise: its matrix has negative entries, for which that is not known to be private. "
            "Start a new run"
        )


def no_copy() -> PrivacyError:
    """The error for copying or pickling a run."""
    return PrivacyError(
        "a private run cannot be copied or pickled: the copy would use the same noise on other "
        "sums, and the difference of the results would contain no noise. Use save() and load(), or "
        "call make_private in the other process"
    )
