"""Random permutations of 2^k numbers from a key, evaluated at a few numbers at a time.

* Up to `SHUFFLED` numbers, the permutation is a shuffle: all numbers sorted by random keys. It is
  uniform among all permutations.
* Larger ones are a Feistel network: a number is cut in two halves, and each half in turn is
  encrypted by adding a random function of the other. Format-preserving encryption uses the same
  network (NIST SP 800-38G, FF1: 10 rounds, at least a million numbers). Here it has `ROUNDS`
  rounds, and the random functions are tables from the cipher stream. No feasible computation is
  known that distinguishes it from a uniform permutation.

Tables need memory in proportion to the square root of the number of numbers: 3 MB for 2³¹.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dpkfc.random import sub_key, uniform_bits

SHUFFLED = 2**20
ROUNDS = 16

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Permutation:
    """A permutation of 0, ..., 2^`bits` - 1.

    >>> permutation = Permutation(b"k" * 32, bits=3)
    >>> sorted(permutation(np.arange(8)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, key: bytes, bits: int) -> None:
        self.bits = bits
        self._shuffled = _shuffle(key, 2**bits) if 2**bits <= SHUFFLED else None
        self._low_bits = bits // 2
        self._tables = [] if self._shuffled is not None else self._random_functions(key)

    def __call__(self, numbers: Numbers) -> Numbers:
        if self._shuffled is not None:
            return self._shuffled[numbers].astype(np.int64)
        low = numbers & (2**self._low_bits - 1)
        high = numbers >> self._low_bits
        for of_low, of_high in zip(self._tables[::2], self._tables[1::2], strict=True):
            high = high ^ of_low[low]
            low = low ^ of_high[high]
        numbers = high << self._low_bits | low
        return numbers

    def _random_functions(self, key: bytes) -> list[np.ndarray]:
        """For each round, from one half to the other."""
        high_bits = self.bits - self._low_bits
        tables = []
        for number in range(ROUNDS):
            arguments, values = self._low_bits, high_bits
            if number % 2:
                arguments, values = values, arguments
            words = uniform_bits(sub_key(key, f"round {number}"), 2**arguments // 2)
            # halves of 64-bit words, the lower one first on any machine
            tables.append(words.view("<u4") >> np.uint32(32 - values))
        return tables


@lru_cache(maxsize=4)
def permutation(key: bytes, bits: int) -> Permutation:
    """The permutation of a key. The last ones are kept: a run asks for the same one again."""
    return Permutation(key, bits)


def _shuffle(key: bytes, size: int) -> np.ndarray:
    """The numbers 0, ..., size - 1 in the order of random 64-bit integers.

    Given that the integers differ, all orders are equally likely. Otherwise others are drawn.
    """
    attempt = 0
    while True:
        words = uniform_bits(sub_key(key, f"shuffle {attempt}"), size)
        order = np.argsort(words)
        in_order = words[order]
        if (in_order[1:] != in_order[:-1]).all():
            return order.astype(np.int32)
        attempt += 1
