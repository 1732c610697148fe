"""The probe loss: one number per probe, against random or public targets, never private ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.probes.probe import Probes, token_ids

Loss = (
    Literal["cross_entropy", "mse", "bce", "masked_lm", "next_token"]
    | Callable[[Any, Probes, torch.Generator], Tensor]
)
NAMES = ("cross_entropy", "mse", "bce", "masked_lm", "next_token")
MASKED = 0.15  # share of the active positions, as in BERT
IGNORED = -100  # the target that PyTorch and Hugging Face skip


def probe_losses(
    loss: Loss, output: Any, probes: Probes, generator: torch.Generator, classes: int | None = None
) -> Tensor:
    """The losses [B] of the probes. Their gradients are the per-sample δ of the factor G.

    Args:
        loss: a function (output, probes, generator) -> losses [B], or one of these names. Targets
            are `probes.targets` if given; otherwise they are drawn from `generator` (on the CPU).

            - cross_entropy: uniform classes; the mean over positions. The classes of [B, K, ...]
              are in dimension 1, as in PyTorch. Those of [B, T, K] from token ids are in the last
              dimension, as in language models.
            - mse: standard normal numbers; the sum of squares over outputs.
            - bce: fair bits; the sum over outputs.
            - masked_lm: uniform vocabulary ids at 15% of the active positions, at least one; the
              mean over these positions.
            - next_token: the probes' own ids, shifted; the mean over positions.

            Padded positions never count.
        output: what the model returned: logits, an object or dict with `logits`, or a tuple that
            begins with them.
        probes: the batch.
        generator: the source of random targets.
        classes: the number of classes that the probe declares, compared with the output.

    >>> import torch
    >>> probes = Probes(torch.randn(4, 7))
    >>> probe_losses("cross_entropy", torch.zeros(4, 10), probes, torch.Generator())
    tensor([2.3026, 2.3026, 2.3026, 2.3026])
    """
    if callable(loss):
        return _check_losses(loss(output, probes, generator), len(probes))
    if loss not in NAMES:
        nearest = get_close_matches(str(loss), NAMES, n=1)
        suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"loss={loss!r}: give one of {', '.join(NAMES)}, or a function returning losses "
            f"[batch].{suggestion}"
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
        description = "no token ids" if ids is None else f"ids of shape {tuple(ids.shape)}"
        raise ValueError(
            f"loss={loss!r} needs logits [batch, length, vocabulary] for token ids "
            f"[batch, length], but there are logits of shape {tuple(logits.shape)} and "
            f"{description}: use Tokens probes and a language model, or your own loss"
        )
    if loss == "masked_lm":
        return _masked_lm(logits, ids, probes, generator, classes)
    return _next_token(logits, ids, probes, classes)


def _cross_entropy(
    logits: Tensor, probes: Probes, generator: torch.Generator, classes: int | None
) -> Tensor:
    """``-log softmax(z)_y``, y uniform."""
    per_token = logits.dim() == 3 and token_ids(probes.inputs) is not None
    if per_token:
        logits = logits.movedim(2, 1)
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise ValueError(
            "loss='cross_entropy' needs two or more classes, but the output has shape "
            f"{tuple(logits.shape)}: use loss='bce' or loss='mse'"
        )
    _check_classes(classes, logits.shape[1])
    targets = probes.targets
    if targets is None:
        targets = torch.randint(
            logits.shape[1], (len(logits), *logits.shape[2:]), generator=generator
        )
    return _mean_cross_entropy(logits, targets, _active(probes) if per_token else None)


def _mse(outputs: Tensor, probes: Probes, generator: torch.Generator) -> Tensor:
    """``Σ (z - y)²``, y standard normal."""
    targets = probes.targets
    if targets is None:
        targets = torch.randn(outputs.shape, generator=generator, dtype=torch.float32)
    return _sum(outputs, (outputs - _match_shape(targets, outputs)).square(), probes)


def _bce(logits: Tensor, probes: Probes, generator: torch.Generator, classes: int | None) -> Tensor:
    """``-Σ y log s(z) + (1-y) log(1-s(z))``, y fair bits. One output may mean two classes."""
    if logits.dim() > 1 and not (classes == 2 and logits.shape[-1] == 1):
        _check_classes(classes, logits.shape[-1])
    targets = probes.targets
    if targets is None:
        targets = torch.randint(2, logits.shape, generator=generator)
    losses = F.binary_cross_entropy_with_logits(
        logits, _match_shape(targets, logits), reduction="none"
    )
    return _sum(logits, losses, probes)


def _masked_lm(
    logits: Tensor, ids: Tensor, probes: Probes, generator: torch.Generator, classes: int | None
) -> Tensor:
    """Cross-entropy to uniform ids at ``max(1, 0.15 ℓ)`` random active positions."""
    _check_classes(classes, logits.shape[2])
    if probes.targets is not None:
        return _mean_cross_entropy(logits.movedim(2, 1), probes.targets, _active(probes))
    active = _active(probes)
    active = torch.ones(ids.shape, dtype=torch.bool) if active is None else active.cpu()
    wanted = (MASKED * active.sum(1, keepdim=True)).round().clamp(min=1)
    score = torch.rand(ids.shape, generator=generator, dtype=torch.float32)
    score = score.masked_fill(~active, 2.0)
    chosen = (score.argsort(1).argsort(1) < wanted) & active
    targets = torch.randint(logits.shape[2], ids.shape, generator=generator)
    return _mean_cross_entropy(logits.movedim(2, 1), targets, chosen)


def _next_token(logits: Tensor, ids: Tensor, probes: Probes, classes: int | None) -> Tensor:
    """Cross-entropy of the logits at t to the id at t + 1, which is public like the probes."""
    _check_classes(classes, logits.shape[2])
    if ids.shape[1] < 2:
        raise ValueError(
            "loss='next_token': sequences of length 1 have no next token: raise the probe's length"
        )
    active = _active(probes)
    targets = ids if probes.targets is None else probes.targets
    if targets.shape != ids.shape:
        raise ValueError(
            f"loss='next_token': targets of shape {tuple(targets.shape)} for ids of shape "
            f"{tuple(ids.shape)}: give one target per token (they are shifted here), or pass "
            "labels=False"
        )
    return _mean_cross_entropy(
        logits[:, :-1].movedim(2, 1), targets[:, 1:], None if active is None else active[:, 1:]
    )


def _mean_cross_entropy(logits: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """Cross-entropy of logits [B, K, *positions]: the mean over a sample's counted positions."""
    targets = targets.to(logits.device)
    kept = targets[targets != IGNORED]
    if targets.is_floating_point() or targets.shape != logits[:, 0].shape:
        raise ValueError(
            f"the probes' targets are {targets.dtype} of shape {tuple(targets.shape)}, but the "
            f"model's output needs class ids of shape {tuple(logits[:, 0].shape)}: pass "
            "labels=False for uniform ones, or another loss"
        )
    if kept.numel() and (kept.min() < 0 or kept.max() >= logits.shape[1]):
        raise ValueError(
            f"the probes' targets range from {int(kept.min())} to {int(kept.max())}, but the model "
            f"has {logits.shape[1]} classes: pass labels=False for uniform ones"
        )
    losses = F.cross_entropy(logits, targets.long(), reduction="none", ignore_index=IGNORED)
    losses = losses.reshape(len(logits), -1)
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
    mask = probes.inputs.get("attention_mask") if isinstance(probes.inputs, dict) else None
    return mask.bool() if mask is not None and mask.dim() == 2 else None


def _match_shape(targets: Tensor, outputs: Tensor) -> Tensor:
    """The targets with the shape, dtype and device of the outputs."""
    if targets.numel() != outputs.numel() or len(targets) != len(outputs):
        raise ValueError(
            f"the probes' targets have shape {tuple(targets.shape)}, the model's output "
            f"{tuple(outputs.shape)}: pass labels=False for random ones, or another loss"
        )
    return targets.to(outputs.device, outputs.dtype).view_as(outputs)


def _logits(output: Any, batch: int) -> Tensor:
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            f"the model returned {type(output).__name__} without logits: pass loss=, a function "
            "(output, probes, generator) -> losses [batch]"
        )
    if not logits.dim() or len(logits) != batch:
        raise ValueError(
            f"the model's output has shape {tuple(logits.shape)} for {batch} probes: the leading "
            "dimension must be the batch; return one output per sample, or pass loss="
        )
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _check_classes(declared: int | None, actual: int) -> None:
    if declared is not None and declared != actual:
        raise ValueError(
            f"the probe says classes={declared}, but the model's output has {actual}: pass "
            f"classes={actual}, or omit it"
        )


def _check_losses(losses: Any, batch: int) -> Tensor:
    advice = (
        f"return one floating-point loss per probe, shape ({batch},), without a mean over the batch"
    )
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss= returned {type(losses).__name__} for {batch} probes: {advice}")
    if losses.shape != (batch,) or not losses.is_floating_point():
        raise ValueError(
            f"loss= returned {losses.dtype} of shape {tuple(losses.shape)} for {batch} probes: "
            f"{advice}"
        )
    return losses
