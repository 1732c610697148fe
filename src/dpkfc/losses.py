"""Losses with an explicit per-record contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """``F.cross_entropy(model(batch[0]), batch[1])``, the usual loss, as `make_private` wants it declared.

    >>> import torch, dpkfc
    >>> batch = torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])
    >>> round(float(dpkfc.losses.cross_entropy(torch.nn.Identity(), batch)), 4)
    1.0986
    """
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_over_records(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean over records of each record's own mean over its unmasked positions.

    `values` is [batch, ...], for example token losses; `mask` is True where a position counts. A record
    without any counts as zero. Averaging over all tokens of the batch at once would instead let the
    length of one record change the weight of every other, and its influence would no longer be bounded.

    >>> import torch, dpkfc
    >>> dpkfc.losses.mean_over_records(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.5000)
    """
    if mask is None:
        return values.flatten(1).mean(1).mean()
    kept = torch.where(
        mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)
    )
    return (kept.flatten(1).sum(1) / mask.bool().flatten(1).sum(1).clamp(min=1)).mean()
