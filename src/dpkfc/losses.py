"""Losses without interaction between records."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """``F.cross_entropy(model(batch[0]), batch[1])``, in the form that `make_private` expects.

    >>> import torch, dpkfc
    >>> batch = torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])
    >>> round(float(dpkfc.losses.cross_entropy(torch.nn.Identity(), batch)), 4)
    1.0986
    """
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_over_records(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average the positions within each record, then average over the records.

    Args:
        values: [batch, ...], for example token losses.
        mask: same shape, True where a position counts. A record without such positions counts as 0.

    **Guarantee.** The weight of a record depends on no other record. An average over all tokens of
    the batch would let the length of one record change the weight of every other record, so that
    clipping would no longer bound its influence.

    >>> import torch, dpkfc
    >>> losses = torch.tensor([[1.0, 3.0], [5.0, 0.0]])
    >>> dpkfc.losses.mean_over_records(losses, mask=torch.tensor([[True, True], [True, False]]))
    tensor(3.5000)
    """
    if mask is None:
        return values.flatten(1).mean(1).mean()
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    kept = torch.where(mask.bool(), values, zero)
    counts = mask.bool().flatten(1).sum(1).clamp(min=1)
    return (kept.flatten(1).sum(1) / counts).mean()
