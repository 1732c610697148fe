"""Rules about what a loop may do with a private run: one function per rule. Each raises or returns nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc.errors import PrivacyError

SAMPLED = (
    256  # entries per parameter, at least, that are hashed: the noise of a step changes every one
)


def one_process() -> None:
    """Refuse several ranks: each would draw its own batches and noise, and account as if it were alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise PrivacyError(
                f"a process group with {ranks} ranks is initialised: each rank would draw its own batches and noise, "
                "and account for them as if it were alone. Train in one process"
            )


def no_new_parameters(model: nn.Module, known: Container[nn.Parameter]) -> None:
    """Refuse trainable parameters that are new since make_private: they would be neither clipped nor noised."""
    for name, p in model.named_parameters():
        if p.requires_grad and p not in known:
            raise PrivacyError(
                f"parameter '{name}' is trainable and was not in the model when it was made private: it would be "
                "trained without clipping and noise. Build the whole model first, then the optimizer, then "
                "make_private; or set requires_grad=False"
            )


Touched = WeakIdKeyDictionary  # parameters of no private model that were used on a private batch; the values are names


def note_foreign(
    module: nn.Module, is_private: Callable[[nn.Parameter], bool], touched: Touched
) -> None:
    """Note the trainable parameters of the module, which is used on a private batch, that no private run knows."""
    for name, p in module._parameters.items():
        if p is not None and p.requires_grad and isinstance(p, nn.Parameter) and not is_private(p):
            touched[p] = f"{type(module).__name__}.{name}"


def not_stepped(optimizer: Optimizer, touched: Touched) -> None:
    """Refuse an optimizer outside any private run that would step parameters used on a private batch."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and p in touched:
            raise PrivacyError(
                f"{type(optimizer).__name__} is about to train {touched[p]} of shape {list(p.shape)}, which was used "
                "on a private batch and is part of no private model: its gradient is neither clipped nor noised. Put "
                "the module into the model before make_private, or do not train it within the private loop"
            )


def weights_digest(parameters: dict[str, nn.Parameter]) -> str:
    """Tells the weights after one step from those after another, from a few entries of every parameter."""
    digest = hashlib.sha256()
    for name, p in parameters.items():
        flat: Tensor = p.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLED)].cpu().contiguous()
        digest.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same_weights(found: str, expected: str, steps: int) -> None:
    """Refuse weights that this run's steps did not produce: its epsilon would not count how they were trained."""
    if found != expected:
        raise PrivacyError(
            f"the model's weights are not those that the privacy state belongs to ({steps} steps): something else than "
            "the steps of this run changed them after make_private or after the run was loaded. If a framework "
            "restored a checkpoint, restore the run with it: keep run.state_dict() beside the weights and call "
            "run.load_state_dict(), or use run.save() and run.load(). If the weights are public, load them before "
            "make_private"
        )
