"""Poisson and cyclic Poisson sampling.

Which records step t uses is a function of that step's key alone (and of the key of the groups, if
there are several). So workers may run ahead, and a resumed run continues where it was interrupted,
without a sampler state that could be lost.
"""

from __future__ import annotations

import numpy as np

from dpkfc.random import uniform_bits


def poisson_sample(key: bytes, records: int, rate: float) -> list[int]:
    """Each record independently with probability `rate` (rounded down to a multiple of 2⁻⁶⁴)."""
    if rate >= 1:
        return list(range(records))
    return np.flatnonzero(uniform_bits(key, records) < np.uint64(int(rate * 2**64))).tolist()


class CyclicPoisson:
    """Groups take turns: step t draws each record of group t mod b with probability `rate`.

    Every record belongs to one of b = `groups` groups, drawn for it independently and uniformly. So
    adding or removing a record changes nothing for the others (groups of equal size would). One
    group is Poisson sampling; a rate of 1 uses whole groups in turn. A record participates at most
    once in any b consecutive steps: the batches are b-min-separated.

    **Guarantee: amplification with banded noise.** Let q = `rate`, n the number of steps, R the
    clip norm, and s the standard deviation of z. Let the strategy matrix C have at most b bands,
    and consider what adding record r changes in the released stream ``C x + z``. Fix the group of
    r; it can join the steps t = j, j+b, j+2b, .... If it joins step t, it contributes a vector v,
    ‖v‖ ≤ R, which is a function of what was released before t. Row i of C x moves by ``C[i, t] v``,
    which is zero except for the rows t ≤ i < t+b. Those rows contain no other participation of r,
    and everything else in them is a function of earlier rows. So given the past, rows t to t+b-1
    are, up to a known shift, ``N(0, s²)`` without the record and a mixture ``(1-q) N(0, s²) + q
    N(C[:, t] vᵀ, s²)`` with it: a Poisson-subsampled Gaussian with sensitivity ``‖C[:, t]‖ ‖v‖``.
    At most ⌈n/b⌉ such blocks compose adaptively, whichever group r is in; a mixture over groups is
    no worse than the worst group.
    """

    def __init__(self, key: bytes, records: int, groups: int, rate: float) -> None:
        self.records, self.groups, self.rate = records, groups, rate
        if groups > 1:
            # uniform up to groups / 2⁶⁴
            self._group = uniform_bits(key, records) % np.uint64(groups)

    @property
    def expected_batch_size(self) -> float:
        return self.records * self.rate / self.groups

    def draw(self, key: bytes, step: int) -> list[int]:
        """The records of one step."""
        if self.groups == 1:
            return poisson_sample(key, self.records, self.rate)
        members = np.flatnonzero(self._group == step % self.groups)
        return [int(row) for row in members[poisson_sample(key, len(members), self.rate)]]
