"""Poisson and cyclic Poisson sampling, at a cost in proportion to the batch.

Which records step t uses is a function of that step's key alone (and of the key of the groups, if
there are several). So workers may run ahead, and a resumed run continues where it was interrupted,
without a sampler state that could be lost. All arithmetic is on integers: the same key draws the
same records on every machine. No array has an entry per record.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from dpkfc.permutation import permutation
from dpkfc.random import sub_key, uniform_bits

MOST_RECORDS = 2**48
FRACTION = 512  # binary digits of the fixed-point numbers of which the probabilities are computed
WORD = 16  # random bits that decide most Bernoulli draws; one draw in 2^16 needs more
MORE = 256  # random bits that decide the others
MOST_BITS = 62  # of a gap, so that it fits a 64-bit integer
FIRST_CHUNK = 512  # gaps that are drawn at a time, then twice as many, ...
LARGEST_CHUNK = 2**14  # 2¹⁴ · (2⁴⁸ + 1), the largest sum of gaps, fits a 64-bit integer

Rows = np.ndarray[Any, np.dtype[np.int64]]


def poisson_sample(key: bytes, records: int, rate: float) -> list[int]:
    """Draw each record independently with probability `rate`.

    Time and memory are in proportion to the number of records drawn, times the number of binary
    digits of 1 / `rate`; nothing is computed for the others. The drawn records below n are the same
    for all `records` ≥ n: appending a record changes nothing for the others.

    Args:
        key: different for every draw.
        records: number of records N, at most 2⁴⁸.
        rate: rounded down to a multiple of 2⁻⁵¹², which matters only below 2⁻⁴⁵⁹.

    Returns:
        The drawn records in increasing order.

    **Guarantee.** The drawn set is within total variation distance 2⁻²¹⁶ of N independent
    Bernoulli(q) draws, q = `rate`, if the cipher stream is random.

    *Gaps.* Let G be the number of records that are skipped before the next drawn one. In
    independent Bernoulli(q) draws all gaps are independent, and ``P(G = g) = q xᵍ`` with x = 1 - q.
    Write g in binary, ``g = Σ_k d_k 2ᵏ``. Then ``xᵍ = Π_k (x^(2ᵏ))^(d_k)`` is a product of one
    factor per digit. So the digits of G are independent, and digit k is one with probability
    ``p_k = x^(2ᵏ) / (1 + x^(2ᵏ))``. The digits from K on are all zero with probability
    ``1 - x^(2ᴷ)``. One Bernoulli draw of probability x^(2ᴷ) stands for all of them: either this
    probability is below 2⁻²⁷², or 2ᴷ = 2⁶² exceeds N, and then any such gap is beyond the last
    record.

    *Error.* The powers of x are computed with 512 binary digits. Squaring at most doubles an error
    and adds 2⁻⁵¹², so after 62 squarings it is below 2⁻⁴⁴⁰. The probabilities are then cut off
    after 272 digits and compared with 272 random bits: every Bernoulli draw is within 2⁻²⁷¹ of its
    probability. At most N + 1 gaps of 63 draws matter: (2⁴⁸ + 1) · 63 · 2⁻²⁷¹ < 2⁻²¹⁶.

    >>> drawn = poisson_sample(b"k" * 32, records=10**12, rate=5e-12)
    >>> poisson_sample(b"k" * 32, records=10**13, rate=5e-12)[: len(drawn)] == drawn
    True
    """
    rows: list[int] = _draw(key, records, rate).tolist()
    return rows


def _draw(key: bytes, records: int, rate: float) -> Rows:
    if records > MOST_RECORDS:
        raise ValueError(f"{records} records: at most 2⁴⁸ can be sampled from")
    if rate >= 1:
        return np.arange(records, dtype=np.int64)
    probabilities = _digit_probabilities(rate)
    parts = []
    last = -1  # the last record drawn so far
    for chunk in count() if probabilities else ():
        gaps = _gaps(sub_key(key, f"gaps {chunk}"), _chunk_size(chunk), probabilities)
        # A gap that leads beyond the last record is cut, so that the sum does not overflow.
        rows = last + np.cumsum(np.minimum(gaps, records) + 1)
        last = int(rows[-1])
        if last >= records:
            parts.append(rows[: np.searchsorted(rows, records)])
            break
        parts.append(rows)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _chunk_size(chunk: int) -> int:
    return min(FIRST_CHUNK << min(chunk, MOST_BITS), LARGEST_CHUNK)


@lru_cache(maxsize=64)
def _digit_probabilities(rate: float) -> tuple[int, ...]:
    """The probabilities of the binary digits of a gap, times 2²⁷².

    The last one is that of all higher digits. Empty if `rate` is 0.
    """
    one = 1 << FRACTION
    rounded = int(Fraction(rate) * one)
    if rounded <= 0:
        return ()
    power = one - rounded  # x^(2ᵏ)
    probabilities: list[int] = []
    while power >> (FRACTION - WORD - MORE) and len(probabilities) < MOST_BITS:
        probabilities.append((power << FRACTION) // (one + power))
        power = power * power >> FRACTION
    probabilities.append(power)
    return tuple(p >> (FRACTION - WORD - MORE) for p in probabilities)


def _gaps(key: bytes, size: int, probabilities: tuple[int, ...]) -> Rows:
    """`size` independent gaps; digit k is one with probability ``probabilities[k] / 2²⁷²``."""
    digits = len(probabilities)
    first = np.array([p >> MORE for p in probabilities], dtype=np.uint16)
    words = uniform_bits(key, -(-size * digits // 4)).view("<u2")[: size * digits]
    words = words.reshape(size, digits)
    ones = words < first
    # the first 16 random bits are equal to those of the probability: the next 256 decide
    for gap, digit in zip(*np.nonzero(words == first), strict=True):
        ones[gap, digit] = _more_bits(key, gap, digit) < probabilities[digit] % (1 << MORE)
    packed = np.zeros((size, 8), dtype=np.uint8)
    filled = np.packbits(ones, axis=1, bitorder="little")
    packed[:, : filled.shape[1]] = filled
    return packed.view("<i8")[:, 0].astype(np.int64)


def _more_bits(key: bytes, gap: int, digit: int) -> int:
    return int.from_bytes(sub_key(key, f"digit {digit} of gap {gap}"), "big")


def slots_for(planned_records: int) -> int:
    """V of `CyclicPoisson`: the smallest power of two that is at least 2 · `planned_records`."""
    return 1 << (2 * planned_records - 1).bit_length()


def check_slots(records: int, planned_records: int) -> None:
    """Refuse more records than there are slots. The message does not say how many there are."""
    if records > slots_for(planned_records):
        raise ValueError(
            f"the data set has more than twice the {planned_records} records of the plan: with "
            "groups of records that take turns, each record needs a slot of its own, and there "
            f"are {slots_for(planned_records)}. Give make_private(..., records=...) a number that "
            "is closer to the true one"
        )


class CyclicPoisson:
    """Groups take turns: step t draws each record of group t mod b with probability `rate`.

    Every record has a slot of its own, drawn at random without replacement from V slots; slot y
    belongs to group y mod b, b = `groups`. V is the smallest power of two that is at least twice
    `planned_records`. So a record belongs to one group for the whole run, each with the same
    probability (up to 1/V). One group is Poisson sampling; a rate of 1 uses whole groups in turn. A
    record participates at most once in any b consecutive steps: the batches are b-min-separated.

    A step draws slots and looks up their records, if there are any: two to four times as many slots
    as records, whatever N and b are. The permutation of the slots takes memory in proportion to √N
    (`dpkfc.permutation`): 3 MB for 10⁹ records.

    Args:
        key: of the groups; the same for the whole run.
        records: the number of records N, which may be private.
        groups: the number of groups b.
        rate: the probability q with which a record joins a step of its group.
        planned_records: the number of records of the plan, which is public.

    Raises:
        ValueError: there are more records than slots.

    **Guarantee: adding or removing a record changes nothing for the others.** Let D' be D with one
    record r more, anywhere, and at most V records in all. The slots of the records of D' are a
    uniformly random choice of distinct slots, one for each. Without the slot of r, they are a
    uniformly random choice for the records of D. That is their law in a run on D, whatever the
    order of the records. (Groups of equal size would not have this property, nor would a fixed
    function of a record's position, if r is inserted before other records.) Each slot is drawn in a
    step independently of whether a record is in it. So we may take the slots of all records, and
    the participations of all other records, to be the same with and without r.

    **Guarantee: amplification with banded noise.** Let q = `rate`, n the number of steps, R the
    clip norm, and s the standard deviation of z. Let the strategy matrix C have at most b bands,
    and consider what adding record r changes in the released stream ``C x + z``. Fix the slots of
    all records, and so the group of r; it can join the steps t = j, j+b, j+2b, .... It joins each
    of them with probability q, independently (`poisson_sample`). If it joins step t, it contributes
    a vector v, ‖v‖ ≤ R, which is a function of what was released before t. Row i of C x moves by
    ``C[i, t] v``, which is zero except for the rows t ≤ i < t+b. Those rows contain no other
    participation of r, and everything else in them is a function of earlier rows. So given the
    past, rows t to t+b-1 are, up to a known shift, ``N(0, s²)`` without the record and a mixture
    ``(1-q) N(0, s²) + q N(C[:, t] vᵀ, s²)`` with it: a Poisson-subsampled Gaussian with sensitivity
    ``‖C[:, t]‖ ‖v‖``. At most ⌈n/b⌉ such blocks compose adaptively, whichever group r is in; a
    mixture over slots is no worse than the worst choice of slots.
    """

    def __init__(
        self, key: bytes, records: int, groups: int, rate: float, *, planned_records: int
    ) -> None:
        self.records, self.groups, self.rate = records, groups, rate
        self._key, self._slots = key, slots_for(planned_records)
        if groups > 1:
            check_slots(records, planned_records)

    @property
    def expected_batch_size(self) -> float:
        """Of the smallest group. The probability of an empty batch is at most exp(-this)."""
        if self.groups == 1:
            return self.records * self.rate
        return self.records * self.rate * (self._slots // self.groups) / self._slots

    def draw(self, key: bytes, step: int) -> list[int]:
        """The records of one step, in increasing order."""
        if self.groups == 1:
            return poisson_sample(key, self.records, self.rate)
        group = step % self.groups
        slots = len(range(group, self._slots, self.groups))
        drawn = group + self.groups * _draw(key, slots, self.rate)
        rows = permutation(self._key, self._slots.bit_length() - 1)(drawn)
        present: list[int] = np.sort(rows[rows < self.records]).tolist()
        return present
