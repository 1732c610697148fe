"""Random numbers from AES-128 in counter mode, with keys of their own.

torch's CPU generator keeps 32 bits of its seed, and its Mersenne twister can be run backwards.
Anyone who guesses the seed, or reads the generator's state from a checkpoint, can subtract the
noise. Here every step has a 256-bit key, and the generator is a cipher: without the key, its
output cannot be distinguished from random bits. It is faster than torch's `normal_`
(`benchmarks/noise.py`).

**Keys** form a one-way chain, ``key[t+1] = SHA-256("dpkfc next" ‖ key[t])``. A checkpoint of step
t contains key[t], from which the noise of *earlier* steps cannot be computed. The noise of later
steps can: a checkpoint must stay secret until the run that continues from it has been discarded.
Without a seed, the first key comes from the operating system (`os.urandom`).

**Lanes.** A key defines one endless stream of standard normals, divided into lanes of `LANE`
numbers. The counter of the cipher is the position in the stream, so

* any lane can be computed on its own, on any device, from the key and the index of the lane;
* normal k of the stream is the same bits however long the stream is, and however it is cut into
  tensors, physical batches or ranks;
* a lane fits into the processor's cache, so correlated noise reads its past from memory once.

>>> import torch
>>> key = sub_key(first_key(seed=0), "noise")
>>> whole, first, second = torch.zeros(5), torch.zeros(2), torch.zeros(3)
>>> add_normal_([whole], key, scale=2.0)
>>> add_normal_([first, second], key, scale=2.0)
>>> torch.equal(whole, torch.cat([first, second]))
True
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

PAIRS = 2**17  # (radius, angle) pairs per lane; each pair makes two normals
LANE = 2 * PAIRS  # normals per lane
TAIL = 2**12  # 32-bit radii below this number, one in a million, get 32 more bits
ZEROS = bytes(4 * PAIRS)  # the plaintext: its ciphertext is the key stream


def first_key(seed: int | None) -> bytes:
    """The 256-bit key of the first step.

    It comes from the operating system, or from `seed`, for reproducible experiments only.
    """
    if seed is None:
        return os.urandom(32)
    return hashlib.sha256(f"dpkfc seed {seed}".encode()).digest()


def is_key(text: object) -> bool:
    """Whether `text` is a key in the form written to files: 64 hexadecimal digits."""
    return (
        isinstance(text, str)
        and len(text) == 64
        and all(digit in "0123456789abcdef" for digit in text)
    )


def next_key(key: bytes) -> bytes:
    """The key of the following step. No key can be computed from a later one."""
    return hashlib.sha256(b"dpkfc next" + key).digest()


def sub_key(key: bytes, purpose: str) -> bytes:
    """An independent key per purpose ("noise", "sampling"), so that no stream is used twice."""
    return hashlib.sha256(b"dpkfc purpose " + purpose.encode() + key).digest()


def _fill(key: bytes, byte_offset: int, buffer: bytearray, length: int) -> None:
    """Write `length` bytes of the AES-CTR key stream from `byte_offset`, a multiple of 16."""
    counter = (byte_offset // 16).to_bytes(16, "big")
    stream = Cipher(algorithms.AES(key[:16]), modes.CTR(counter)).encryptor()
    zeros = ZEROS if length <= len(ZEROS) else bytes(length)
    stream.update_into(memoryview(zeros)[:length], buffer)


def uniform_bits(key: bytes, count: int) -> np.ndarray:
    """`count` independent uniform 64-bit integers."""
    buffer = bytearray(8 * count + 16)
    _fill(key, 0, buffer, 8 * count)
    return np.frombuffer(buffer, dtype="<u8", count=count)


class _Workspace(threading.local):
    """Memory for one lane per thread. Allocating it anew would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = bytearray(4 * PAIRS + 16)
        self.words = torch.frombuffer(self.bits, dtype=torch.uint32, count=PAIRS)
        self.uniform = torch.empty(PAIRS)
        self.angle = torch.empty(PAIRS)
        self.normals = torch.empty(LANE)


_workspace = _Workspace()


def _lane_of_normals(key: bytes, lane: int, count: int) -> Tensor:
    """The first `count` normals of a lane, valid until the next call.

    Box-Muller: for u, v uniform on (0, 1), ``sqrt(-2 ln u) (cos 2πv, sin 2πv)`` are two independent
    standard normals. The first half of a lane holds the cosines, the second half the sines. u has
    32 bits, and 64 where it is small, so that the tail reaches 9.5 standard deviations (torch's
    float32 `normal_` stops at 5.8).
    """
    pairs = min(count, PAIRS)
    words = -(-pairs // 4) * 4  # a cipher block is four 32-bit words
    uniform = _workspace.uniform[:pairs]
    angle = _workspace.angle[:pairs]
    normals = _workspace.normals[:count]
    for numbers, offset in ((uniform, 0), (angle, PAIRS)):
        _fill(key, 4 * (lane * LANE + offset), _workspace.bits, 4 * words)
        numbers.copy_(_workspace.words[:pairs])
    uniform.add_(0.5)
    if float(uniform.min()) < TAIL:
        _refine_tail_(uniform, key, lane)
    radius = uniform.mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi * 2.0**-32)
    torch.cos(angle, out=normals[:pairs]).mul_(radius)
    if count > PAIRS:
        torch.sin(angle[: count - PAIRS], out=normals[PAIRS:]).mul_(radius[: count - PAIRS])
    return normals


def _refine_tail_(uniform: Tensor, key: bytes, lane: int) -> None:
    """Replace the fraction 0.5 of integers below `TAIL` by 32 random bits, in place.

    The bits come from a separate stream, at the same position.
    """
    block = bytearray(32)
    for column in (uniform < TAIL).nonzero().flatten().tolist():
        position = 4 * (lane * PAIRS + column)
        _fill(sub_key(key, "tail"), position - position % 16, block, 16)
        word = block[position % 16 : position % 16 + 4]
        fraction = (int.from_bytes(word, "little") + 0.5) / 2**32
        # Added in float64, so that the smallest fractions are not lost.
        uniform[column] = float(uniform[column]) - 0.5 + fraction


def normal_lanes(key: bytes, count: int) -> Iterator[Tensor]:
    """Yield the first `count` normals of the stream of `key`, lane by lane.

    A lane is valid until the next one is computed.
    """
    for start in range(0, count, LANE):
        yield _lane_of_normals(key, start // LANE, min(count - start, LANE))


def add_lanes_(tensors: list[Tensor], lanes: Iterable[Tensor], scale: float) -> None:
    """Add ``scale * lanes`` to the tensors in place; both are read as one flat vector.

    The lanes must have exactly as many numbers as the tensors.
    """
    flats = iter(tensor.view(-1) for tensor in tensors)
    flat = torch.empty(0)
    for lane in lanes:
        while lane.numel():
            while not flat.numel():
                flat = next(flats)
            count = min(lane.numel(), flat.numel())
            flat[:count].add_(lane[:count].to(flat.device, flat.dtype), alpha=scale)
            flat = flat[count:]
            lane = lane[count:]


def add_normal_(tensors: list[Tensor], key: bytes, scale: float) -> None:
    """Add independent ``scale * N(0, 1)`` to every entry, in place.

    The tensors are read as one flat vector. Entry k receives normal k of the stream of `key`.
    """
    add_lanes_(tensors, normal_lanes(key, sum(tensor.numel() for tensor in tensors)), scale)
