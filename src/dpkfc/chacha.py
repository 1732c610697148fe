"""ChaCha20 (Bernstein, 2008; RFC 8439): a block of random bits for every value of a counter.

The state is sixteen 32-bit words: four constants, eight words of the 256-bit key, a 64-bit block
counter (words 12 and 13), and a 64-bit nonce (words 14 and 15). Twenty rounds of additions,
exclusive ors and rotations turn it into 64 bytes of the key stream. Only integer operations occur,
so the bits are the same on every machine and device. There are two implementations:

* `fill`: on the host, the C code of `cryptography`.
* `blocks`: on any device, tensor operations, one element per block. They are pointwise, so that
  `torch.compile` fuses them into one kernel, which keeps the state in registers.

RFC 8439 has a 32-bit counter and a 96-bit nonce in the same four words. Its test vectors hold for
both implementations.
"""

from __future__ import annotations

import struct

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

WORDS = 16  # 32-bit words per block
BYTES = 4 * WORDS
CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")
COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DOUBLE_ROUNDS = 10  # ChaCha20: twenty rounds
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


def fill(buffer: bytearray, key: bytes, block: int, length: int, nonce: int = 0) -> None:
    """Write `length` bytes of the key stream to `buffer`, beginning with block number `block`.

    `cryptography` does not carry from word 12 into word 13, so a stretch that crosses a multiple
    of 2³² blocks is written in parts.
    """
    zeros = memoryview(_ZEROS if length <= len(_ZEROS) else bytes(length))
    view = memoryview(buffer)
    done = 0
    while done < length:
        until_carry = BYTES * (2**32 - block % 2**32)
        part = min(length - done, until_carry)
        start = struct.pack("<QQ", block, nonce)
        stream = Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor()
        # update_into writes only the stream's own length, but asks for no smaller a buffer
        stream.update_into(zeros[:part], view[done:])
        done += part
        block += part // BYTES


_ZEROS = bytes(2**19)  # the plaintext: its ciphertext is the key stream


def key_words(key: bytes, device: torch.device) -> Tensor:
    """The key as eight int32 numbers on `device`.

    They are sent one by one as arguments of fill kernels. A copy of host memory would wait for the
    device.
    """
    words = torch.empty(8, dtype=torch.int32, device=device)
    for i, word in enumerate(struct.unpack("<8i", key)):
        words[i].fill_(word)
    return words


def blocks(key: Tensor, counter: Tensor, nonce: int = 0) -> list[Tensor]:
    """The sixteen words of every block, as int32 tensors of the counter's shape.

    Args:
        key: eight int32 words, as from `key_words`.
        counter: int64, the numbers of the blocks.
        nonce: separates streams of one key.

    >>> key = key_words(bytes(range(32)), torch.device("cpu"))
    >>> first = blocks(key, torch.arange(2))[0]
    >>> buffer = bytearray(2 * BYTES)
    >>> fill(buffer, bytes(range(32)), block=0, length=2 * BYTES)
    >>> first.tolist() == [struct.unpack_from("<i", buffer, at)[0] for at in (0, BYTES)]
    True
    """
    low = counter.to(torch.int32)  # modulo 2³²
    high = (counter >> 32).to(torch.int32)
    constants = [torch.full_like(low, word) for word in CONSTANTS]
    secrets = [key[i].expand(low.shape) for i in range(8)]
    tail = [torch.full_like(low, word) for word in struct.unpack("<2i", struct.pack("<Q", nonce))]
    start = [*constants, *secrets, low, high, *tail]
    state = list(start)
    for _ in range(DOUBLE_ROUNDS):
        for quarter in (*COLUMNS, *DIAGONALS):
            _quarter_round_(state, *quarter)
    return [word + first for word, first in zip(state, start, strict=True)]


def _quarter_round_(state: list[Tensor], a: int, b: int, c: int, d: int) -> None:
    state[a] = state[a] + state[b]
    state[d] = _rotate(state[d] ^ state[a], 16)
    state[c] = state[c] + state[d]
    state[b] = _rotate(state[b] ^ state[c], 12)
    state[a] = state[a] + state[b]
    state[d] = _rotate(state[d] ^ state[a], 8)
    state[c] = state[c] + state[d]
    state[b] = _rotate(state[b] ^ state[c], 7)


def _rotate(word: Tensor, left: int) -> Tensor:
    """Rotate by `left` bits. >> extends the sign of an int32, so the high bits are masked."""
    return (word << left) | ((word >> (32 - left)) & ((1 << left) - 1))
