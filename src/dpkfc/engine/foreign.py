"""Parameters outside the model that a loop would train on private batches.

A module that is called while a private batch is open, and whose parameters belong to no private
run, could be trained by another optimizer on gradients that are neither clipped nor noised. So
calls of all modules are watched while a loop is under way, and steps of all optimizers are watched
always.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc.distributed import stop_reducing
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from dpkfc.engine.run import PrivateRun

# Parameters that were used on a private batch and belong to no private run, with their names.
ForeignParameters = WeakIdKeyDictionary

_live: weakref.WeakSet[PrivateRun] = weakref.WeakSet()
_iterating: weakref.WeakSet[PrivateRun] = weakref.WeakSet()
_module_watch: list[RemovableHandle] = []


def register(run: PrivateRun) -> None:
    """A new run exists."""
    _live.add(run)


def iteration_starts(run: PrivateRun) -> None:
    """The run's loader is being iterated: watch calls of modules."""
    _iterating.add(run)
    _update_watch()


def iteration_ends(run: PrivateRun) -> None:
    """The loop has ended: later calls have nothing to do with a private batch."""
    run._foreign.clear()
    _iterating.discard(run)
    _update_watch()


def _update_watch() -> None:
    if _iterating and not _module_watch:
        _module_watch.append(register_module_forward_pre_hook(_before_module))
    elif _module_watch and not _iterating:
        _module_watch.pop().remove()


def _before_module(module: nn.Module, args: Any) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        # it may have been wrapped around the model, or around a part of it, after make_private
        if any(_is_private(p) for p in module.parameters()):
            stop_reducing(module)
        return
    if not module._parameters or not torch.is_grad_enabled():
        return
    for run in (run for run in _snapshot(_iterating) if run.batch_open):
        for name, p in module._parameters.items():
            trainable = isinstance(p, nn.Parameter) and p.requires_grad
            if p is not None and trainable and not _is_private(p):
                run._foreign[p] = f"{type(module).__name__}.{name}"


def _is_private(p: nn.Parameter) -> bool:
    """True if some run clips and noises the parameter."""
    return any(run.owns(p) for run in _snapshot(_live))


def _snapshot(runs: weakref.WeakSet[PrivateRun]) -> list[PrivateRun]:
    """The runs in the set now.

    The garbage collector may end an abandoned iteration at any time, also while the set is read.
    """
    while True:
        try:
            return list(runs)
        except RuntimeError:  # the set changed its size
            continue


def _before_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer outside any private run that would step foreign parameters."""
    live = _snapshot(_live)
    runs = [run for run in live if run._foreign]
    if not runs or any(optimizer is run.optimizer for run in live if not run.detached):
        return
    for run in runs:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p in run._foreign and not _is_private(p):
                raise PrivacyError(
                    f"{type(optimizer).__name__} is about to train {run._foreign[p]} of shape "
                    f"{list(p.shape)}, which was used on a private batch and is not part of a "
                    "private model: its gradient is neither clipped nor noised. Put the module "
                    "into the model before make_private, or do not train it within the private loop"
                )


register_optimizer_step_pre_hook(_before_optimizer_step)
