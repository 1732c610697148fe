"""How many records were seen, clipped or dropped: exact, and so not private."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.engine.step import ClippedBatch


@dataclass
class NotPrivate:
    """Exact counts over the private records, not covered by epsilon: do not publish them."""

    samples: int = 0
    clipped: int = 0
    non_finite: int = 0


class Counts:
    """Counts that stay on the device until somebody asks for them."""

    def __init__(self, counted: NotPrivate) -> None:
        self._counted = counted
        self._on_device: Tensor | None = None  # clipped and not finite, not yet in `_counted`

    def add(self, clipped: ClippedBatch) -> None:
        self._counted.samples += len(clipped.finite)
        is_clipped = (clipped.clip_factors < 1).logical_and(clipped.finite)
        counts = torch.stack([is_clipped.sum(), (~clipped.finite).sum()])
        self._on_device = counts if self._on_device is None else self._on_device + counts

    def read(self) -> NotPrivate:
        """The counts as numbers. Waits for the device."""
        if self._on_device is not None:
            clipped, non_finite = self._on_device.tolist()
            self._counted.clipped += clipped
            self._counted.non_finite += non_finite
            self._on_device = None
        return self._counted
