"""`Auto`: choose the noise when the run is planned (`dpkfc.planning.choose_noise`)."""

from __future__ import annotations

from dataclasses import dataclass

from dpkfc.noise.workload import Workload


@dataclass(frozen=True)
class Auto:
    """The noise with the smallest error on the workload at the same epsilon.

    Args:
        max_buffers: memory for past noise, in vectors of the model's size.
        workload: how noise accumulates in the parameters. By default that of the optimizer.

    >>> import dpkfc
    >>> dpkfc.noise.Auto(max_buffers=4)
    Auto(max_buffers=4, workload=None)
    """

    max_buffers: int = 16
    workload: Workload | None = None
