"""The probe loss: one number a probe, against targets that are uniformly random or public, never private."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probes, token_ids

Loss = (
    Literal["cross_entropy", "mse", "bce", "masked_lm", "next_token"]
    | Callable[[Any, Probes, torch.Generator], Tensor]
)
NAMES = ("cross_entropy", "mse", "bce", "masked_lm", "next_token")
MASKED = 0.15  # of the active positions, as in BERT
IGNORED = -100  # the target that PyTorch and Hugging Face skip


def probe_losses(
    loss: Loss, output: Any, probes: Probes, generator: torch.Generator, classes: int | None = None
) -> Tensor:
    """The losses [B] of the probes, whose gradients are the per-sample δ of the factor G.

    `output` is what the model returned: logits, an object or dict with `logits`, or a tuple that begins with them.
    Targets are `probes.targets` where there are any; otherwise, from `generator` (on the CPU):

    - cross_entropy: uniform classes. For [B, K, ...] the classes are in dimension 1, where PyTorch has them, but for
      [B, T, K] from token ids in the last, where language models have them; the mean over positions.
    - mse: standard normal numbers; the sum of squares over outputs.
    - bce: fair bits; the sum over outputs.
    - masked_lm: uniform vocabulary ids at 15% of the active positions, at least one; the mean over them.
    - next_token: the probes' own ids, shifted; the mean over positions.

    Padded positions never count. Any other loss is a function (output, probes, generator) -> losses [B].

    >>> import torch
    >>> probe_losses("cross_entropy", torch.zeros(4, 10), Probes(torch.randn(4, 7)), torch.Generator())
    tensor([2.3026, 2.3026, 2.3026, 2.3026])
    """
    if callable(loss):
        return _checked(loss(output, probes, generator), len(probes))
    if loss not in NAMES:
        raise PrivacyError(
            f"loss={loss!r}: give one of {', '.join(NAMES)}, or a function returning losses [batch]"
        )
    logits = _logits(output, len(probes))
    if loss == "mse":
        return _mse(logits, probes, generator)
    if loss == "bce":
        return _bce(logits, probes, generator, classes)
    if loss == "cross_entropy":
        return _cross_entropy(logits, probes, generator, classes)
    ids = token_ids(probes.inputs)
    if ids is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        found = "no token ids" if ids is None else f"ids of shape {tuple(ids.shape)}"
        raise PrivacyError(
            f"loss={loss!r} needs logits [batch, length, vocabulary] for token ids [batch, length], but found logits "
            f"of shape {tuple(logits.shape)} and {found}: use Tokens probes and a language model, or a loss of your own"
        )
    if loss == "masked_lm":
        return _masked_lm(logits, ids, probes, generator, classes)
    return _next_token(logits, ids, probes, classes)


def _cross_entropy(
    logits: Tensor, probes: Probes, generator: torch.Generator, classes: int | None
) -> Tensor:
    """``-log softmax(z)_y``, y uniform."""
    by_token = logits.dim() == 3 and token_ids(probes.inputs) is not None
    if by_token:
        logits = logits.movedim(2, 1)
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise PrivacyError(
            f"loss='cross_entropy' needs two or more classes, but the output has shape {tuple(logits.shape)}: "
            "use loss='bce' or loss='mse'"
        )
    _agree(classes, logits.shape[1])
    targets = probes.targets
    if targets is None:
        targets = torch.randint(
            logits.shape[1], (len(logits), *logits.shape[2:]), generator=generator
        )
    return _classified(logits, targets, _active(probes) if by_token else None)


def _mse(outputs: Tensor, probes: Probes, generator: torch.Generator) -> Tensor:
    """``Σ (z - y)²``, y standard normal."""
    targets = probes.targets
    if targets is None:
        targets = torch.randn(outputs.shape, generator=generator, dtype=torch.float32)
    return _sum(outputs, (outputs - _alike(targets, outputs)).square(), probes)


def _bce(logits: Tensor, probes: Probes, generator: torch.Generator, classes: int | None) -> Tensor:
    """``-Σ y log s(z) + (1-y) log(1-s(z))``, y fair bits; one output may stand for two classes."""
    if logits.dim() > 1 and not (classes == 2 and logits.shape[-1] == 1):
        _agree(classes, logits.shape[-1])
    targets = probes.targets
    if targets is None:
        targets = torch.randint(2, logits.shape, generator=generator)
    losses = F.binary_cross_entropy_with_logits(logits, _alike(targets, logits), reduction="none")
    return _sum(logits, losses, probes)


def _masked_lm(
    logits: Tensor, ids: Tensor, probes: Probes, generator: torch.Generator, classes: int | None
) -> Tensor:
    """Cross-entropy to uniform ids at the positions with the ``max(1, 0.15 ℓ)`` smallest of uniform numbers."""
    _agree(classes, logits.shape[2])
    if probes.targets is not None:
        return _classified(logits.movedim(2, 1), probes.targets, _active(probes))
    active = _active(probes)
    active = torch.ones(ids.shape, dtype=torch.bool) if active is None else active.cpu()
    wanted = (MASKED * active.sum(1, keepdim=True)).round().clamp(min=1)
    score = torch.rand(ids.shape, generator=generator, dtype=torch.float32).masked_fill(
        ~active, 2.0
    )
    chosen = (score.argsort(1).argsort(1) < wanted) & active
    targets = torch.randint(logits.shape[2], ids.shape, generator=generator)
    return _classified(logits.movedim(2, 1), targets, chosen)


def _next_token(logits: Tensor, ids: Tensor, probes: Probes, classes: int | None) -> Tensor:
    """Cross-entropy of the logits at t to the id at t + 1: public, since the probes are."""
    _agree(classes, logits.shape[2])
    if ids.shape[1] < 2:
        raise PrivacyError(
            "loss='next_token': sequences of length 1 have no next token: raise the probe's length"
        )
    active = _active(probes)
    targets = ids if probes.targets is None else probes.targets
    if targets.shape != ids.shape:
        raise PrivacyError(
            f"loss='next_token': targets of shape {tuple(targets.shape)} for ids of shape {tuple(ids.shape)}: "
            "give one target a token (they are shifted here), or pass labels=False"
        )
    return _classified(
        logits[:, :-1].movedim(2, 1), targets[:, 1:], None if active is None else active[:, 1:]
    )


def _classified(logits: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """Cross-entropy of logits [B, K, *positions], averaged over the positions of each sample that count."""
    targets = targets.to(logits.device)
    kept = targets[targets != IGNORED]
    if targets.is_floating_point() or targets.shape != logits[:, 0].shape:
        raise PrivacyError(
            f"the probes' targets are {targets.dtype} of shape {tuple(targets.shape)}, where the model's output asks "
            f"for class ids of shape {tuple(logits[:, 0].shape)}: pass labels=False for uniform ones, or another loss"
        )
    if kept.numel() and (kept.min() < 0 or kept.max() >= logits.shape[1]):
        raise PrivacyError(
            f"the probes' targets range from {int(kept.min())} to {int(kept.max())}, but the model has "
            f"{logits.shape[1]} classes: pass labels=False for uniform ones"
        )
    losses = F.cross_entropy(
        logits, targets.long(), reduction="none", ignore_index=IGNORED
    ).reshape(len(logits), -1)
    counts = (targets != IGNORED).reshape(len(logits), -1)
    if counted is not None:
        counts = counts & counted.to(logits.device)
    return losses.masked_fill(~counts, 0).sum(1) / counts.sum(1).clamp(min=1)


def _sum(outputs: Tensor, losses: Tensor, probes: Probes) -> Tensor:
    """The sum over a sample's outputs; over the active positions of a sequence."""
    active = _active(probes)
    if active is not None and outputs.dim() == 3 and outputs.shape[:2] == active.shape:
        losses = losses.masked_fill(~active.to(losses.device).unsqueeze(2), 0)
    return losses.reshape(len(losses), -1).sum(1)


def _active(probes: Probes) -> Tensor | None:
    if probes.active is not None:
        return probes.active.bool()
    given = probes.inputs.get("attention_mask") if isinstance(probes.inputs, dict) else None
    return given.bool() if given is not None and given.dim() == 2 else None


def _alike(targets: Tensor, outputs: Tensor) -> Tensor:
    if targets.numel() != outputs.numel() or len(targets) != len(outputs):
        raise PrivacyError(
            f"the probes' targets have shape {tuple(targets.shape)}, the model's output {tuple(outputs.shape)}: "
            "pass labels=False for random ones, or another loss"
        )
    return targets.to(outputs.device, outputs.dtype).view_as(outputs)


def _logits(output: Any, batch: int) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise PrivacyError(
            f"the model returned {type(output).__name__} without logits: pass loss=, a function "
            "(output, probes, generator) -> losses [batch]"
        )
    if not found.dim() or len(found) != batch:
        raise PrivacyError(
            f"the model's output has shape {tuple(found.shape)} for {batch} probes: the leading dimension must be the "
            "batch; return one output a sample, or pass loss="
        )
    return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found


def _agree(classes: int | None, found: int) -> None:
    if classes is not None and classes != found:
        raise PrivacyError(
            f"the probe says classes={classes}, but the model's output has {found}: pass classes={found} or none"
        )


def _checked(losses: Any, batch: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (batch,) or not losses.is_floating_point():
        is_tensor = isinstance(losses, Tensor)
        shape = (
            f"{losses.dtype} of shape {tuple(losses.shape)}" if is_tensor else type(losses).__name__
        )
        raise PrivacyError(
            f"loss= returned {shape} for {batch} probes: return one floating-point loss a probe, shape ({batch},), "
            "without a mean over the batch"
        )
    return losses
