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

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

LANE = 4096  # normals made from one stretch of the stream: LANE / 2 radii and as many angles
LANES_AT_ONCE = 64
WORDS = LANE // 2 * 3  # 64 bits for a radius, 32 for an angle
ZEROS = bytes(LANES_AT_ONCE * WORDS * 4)  # the plain text whose cipher text is the key stream


def first_key(seed: int | None) -> bytes:
    """256 bits: from the operating system, or, for reproducible experiments only, from a seed."""
    return os.urandom(32) if seed is None else hashlib.sha256(f"dpkfc seed {seed}".encode()).digest()


def next_key(key: bytes) -> bytes:
    """The next link of the one-way chain."""
    return hashlib.sha256(b"dpkfc next" + key).digest()


def sub_key(key: bytes, purpose: str) -> bytes:
    """An independent key for one purpose ("noise", "sampling"), so that no stream is used twice."""
    return hashlib.sha256(b"dpkfc purpose " + purpose.encode() + key).digest()


def _fill(key: bytes, byte_offset: int, buffer: bytearray, length: int) -> None:
    """Write `length` bytes of AES-CTR key stream, starting at a multiple of the 16-byte block."""
    stream = Cipher(algorithms.AES(key[:16]), modes.CTR((byte_offset // 16).to_bytes(16, "big"))).encryptor()
    zeros = ZEROS if length <= len(ZEROS) else bytes(length)
    stream.update_into(memoryview(zeros)[:length], buffer)


def uniform_bits(key: bytes, count: int) -> np.ndarray:
    """`count` independent uniform 64-bit integers."""
    buffer = bytearray(8 * count + 16)
    _fill(key, 0, buffer, 8 * count)
    return np.frombuffer(buffer, dtype="<u8", count=count)


class _Workspace(threading.local):
    """Memory for one stretch of the stream, kept from step to step: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = bytearray(LANES_AT_ONCE * WORDS * 4 + 16)
        self.words = torch.frombuffer(self.bits, dtype=torch.uint32, count=LANES_AT_ONCE * WORDS)
        self.floats = torch.empty(LANES_AT_ONCE, 3, LANE // 2)
        self.normals = torch.empty(LANES_AT_ONCE, LANE)


_workspace = _Workspace()


def _normal_lanes(key: bytes, first: int, lanes: int) -> Tensor:
    """Lanes `first`, `first`+1, ... of the normal stream, valid until the next call.

    Box and Muller: with u, v uniform on (0, 1), ``sqrt(-2 ln u) (cos 2πv, sin 2πv)`` are two independent
    standard normals. u has 64 bits, so the tail reaches 9.4 standard deviations (torch's float32
    `normal_` stops at 5.8).
    """
    _fill(key, first * WORDS * 4, _workspace.bits, lanes * WORDS * 4)
    floats, normals = _workspace.floats[:lanes], _workspace.normals[:lanes]
    floats.view(-1).copy_(_workspace.words[: lanes * WORDS])
    high, low, angle = floats.unbind(1)
    u = high.add_(low.add_(0.5), alpha=2.0**-32).mul_(2.0**-32)
    radius = u.log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi * 2.0**-32)
    torch.cos(angle, out=normals[:, : LANE // 2])
    torch.sin(angle, out=normals[:, LANE // 2 :])
    normals.view(lanes, 2, LANE // 2).mul_(radius.unsqueeze(1))
    return normals.view(-1)


def add_normal_(tensors: list[Tensor], key: bytes, scale: float) -> None:
    """Add independent ``scale * N(0, 1)`` to every entry, in place.

    The tensors are read as one flat vector; entry k receives normal k of the stream of `key`.
    """
    remaining = sum(tensor.numel() for tensor in tensors)
    lane, block, used = 0, torch.empty(0), 0
    for tensor in tensors:
        flat = tensor.view(-1)
        done = 0
        while done < flat.numel():
            if used == block.numel():
                lanes = min(LANES_AT_ONCE, -(-remaining // LANE))
                block, used = _normal_lanes(key, lane, lanes), 0
                lane += lanes
            take = min(block.numel() - used, flat.numel() - done)
            piece = block[used : used + take].to(flat.device, flat.dtype)
            flat[done : done + take].add_(piece, alpha=scale)
            done, used, remaining = done + take, used + take, remaining - take
