"""Randomness with a key of its own: AES-128 in counter mode, never the global generator.

torch's CPU generator keeps 32 bits of its seed and its Mersenne twister can be run backwards, so whoever
guesses the seed, or finds the state in a checkpoint, can subtract the noise again. Here every step has a
256-bit key; the generator is a cipher, so its output is indistinguishable from random to anyone without
the key, and it costs less than torch's own `normal_` (`benchmarks/noise.py`).

* The keys form a one-way chain, ``key[t+1] = SHA-256(key[t])``: a checkpoint written at step t holds
  key[t], from which the noise of *earlier* steps cannot be computed. That of later steps can: a
  checkpoint is a secret until what it continues into has been discarded.
* Within a step, any stretch of the stream can be computed on its own, by its offset.
* Without a seed the first key comes from the operating system (`os.urandom`).
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

HALF = 2**17  # radii in a lane, and as many angles: together they make a lane of 2 HALF normals
LANE = 2 * HALF
TAIL = 2**12  # radii drawn below this, one in a million, get 32 bits more
ZEROS = bytes(4 * HALF)  # the plain text whose cipher text is the key stream


def first_key(seed: int | None) -> bytes:
    """256 bits: from the operating system, or, for reproducible experiments only, from a seed."""
    return (
        os.urandom(32) if seed is None else hashlib.sha256(f"dpkfc seed {seed}".encode()).digest()
    )


def is_key(text: object) -> bool:
    """Is it a key as it is written to files: 64 hexadecimal digits?"""
    return (
        isinstance(text, str)
        and len(text) == 64
        and all(digit in "0123456789abcdef" for digit in text)
    )


def next_key(key: bytes) -> bytes:
    """The next link of the one-way chain."""
    return hashlib.sha256(b"dpkfc next" + key).digest()


def sub_key(key: bytes, purpose: str) -> bytes:
    """An independent key for one purpose ("noise", "sampling"), so that no stream is used twice."""
    return hashlib.sha256(b"dpkfc purpose " + purpose.encode() + key).digest()


def _fill(key: bytes, byte_offset: int, buffer: bytearray, length: int) -> None:
    """Write `length` bytes of AES-CTR key stream, starting at a multiple of the 16-byte block."""
    stream = Cipher(
        algorithms.AES(key[:16]), modes.CTR((byte_offset // 16).to_bytes(16, "big"))
    ).encryptor()
    zeros = ZEROS if length <= len(ZEROS) else bytes(length)
    stream.update_into(memoryview(zeros)[:length], buffer)


def uniform_bits(key: bytes, count: int) -> np.ndarray:
    """`count` independent uniform 64-bit integers."""
    buffer = bytearray(8 * count + 16)
    _fill(key, 0, buffer, 8 * count)
    return np.frombuffer(buffer, dtype="<u8", count=count)


class _Workspace(threading.local):
    """Memory for one lane, kept from step to step: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = bytearray(4 * HALF + 16)
        self.words = torch.frombuffer(self.bits, dtype=torch.uint32, count=HALF)
        self.u, self.angle, self.normals = torch.empty(HALF), torch.empty(HALF), torch.empty(LANE)


_workspace = _Workspace()


def _lane_of_normals(key: bytes, lane: int, count: int) -> Tensor:
    """The first `count` normals of a lane, valid until the next call.

    Box and Muller: with u, v uniform on (0, 1), ``sqrt(-2 ln u) (cos 2πv, sin 2πv)`` are two independent
    standard normals; the first half of a lane holds the cosines and the second the sines. u has 32 bits, and
    64 where it is small, so the tail reaches 9.5 standard deviations (torch's float32 `normal_` stops at 5.8).
    """
    pairs = min(count, HALF)
    blocks = -(-pairs // 4) * 4  # whole blocks of the cipher
    u, angle, normals = _workspace.u[:pairs], _workspace.angle[:pairs], _workspace.normals[:count]
    for numbers, offset in ((u, 0), (angle, HALF)):
        _fill(key, 4 * (lane * LANE + offset), _workspace.bits, 4 * blocks)
        numbers.copy_(_workspace.words[:pairs])
    u.add_(0.5)
    if float(u.min()) < TAIL:
        _sharpen_tail_(u, key, lane)
    radius = u.mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi * 2.0**-32)
    torch.cos(angle, out=normals[:pairs]).mul_(radius)
    if count > HALF:
        torch.sin(angle[: count - HALF], out=normals[HALF:]).mul_(radius[: count - HALF])
    return normals


def _sharpen_tail_(u: Tensor, key: bytes, lane: int) -> None:
    """Give the integers below `TAIL` a fraction of 32 bits, from a stream of its own at the same position.

    In `u` they have the fraction one half, as all others.
    """
    bits = bytearray(32)
    for column in (u < TAIL).nonzero().flatten().tolist():
        position = 4 * (lane * HALF + column)
        _fill(sub_key(key, "tail"), position - position % 16, bits, 16)
        fraction = (int.from_bytes(bits[position % 16 : position % 16 + 4], "little") + 0.5) / 2**32
        u[column] = (
            float(u[column]) - 0.5 + fraction
        )  # in float64, so that the smallest are not lost


def normal_lanes(key: bytes, count: int) -> Iterator[Tensor]:
    """The first `count` normals of the stream of `key`, lane by lane, each valid until the next is asked for."""
    for start in range(0, count, LANE):
        yield _lane_of_normals(key, start // LANE, min(count - start, LANE))


def add_lanes_(tensors: list[Tensor], lanes: Iterable[Tensor], scale: float) -> None:
    """Add ``scale * lanes``, one long vector, to the tensors, read as one flat vector, in place.

    The lanes must hold exactly as many numbers as the tensors.
    """
    flats = iter(tensor.view(-1) for tensor in tensors)
    flat = torch.empty(0)
    for lane in lanes:
        while lane.numel():
            while not flat.numel():
                flat = next(flats)
            take = min(lane.numel(), flat.numel())
            flat[:take].add_(lane[:take].to(flat.device, flat.dtype), alpha=scale)
            flat, lane = flat[take:], lane[take:]


def add_normal_(tensors: list[Tensor], key: bytes, scale: float) -> None:
    """Add independent ``scale * N(0, 1)`` to every entry, in place.

    The tensors are read as one flat vector; entry k receives normal k of the stream of `key`.
    """
    add_lanes_(tensors, normal_lanes(key, sum(tensor.numel() for tensor in tensors)), scale)
