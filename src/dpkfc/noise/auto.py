"""`Auto`: choose the noise when the run is planned (`dpkfc.planning.choose_noise`)."""

from __future__ import annotations

from dataclasses import dataclass

from dpkfc.noise.workload import Workload


@dataclass(frozen=True)
class Auto:
    """The noise with the smallest error on the workload at the same epsilon.

    Args:
        max_buffers: vectors of the model's size that the noise may keep in memory.
        workload: how noise accumulates in the parameters; by default that of the optimizer.
    """

    max_buffers: int = 16
    workload: Workload | None = None
