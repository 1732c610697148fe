"""Random numbers from ChaCha20 in counter mode, with keys of their own.

torch's CPU generator keeps 32 bits of its seed, and its Mersenne twister can be run backwards.
Anyone who guesses the seed, or reads the generator's state from a checkpoint, can subtract the
noise. Here every step has a 256-bit key, and the generator is a cipher (`dpkfc.chacha`): without
the key, its output cannot be distinguished from random bits. It is faster than torch's `normal_`
(`benchmarks/noise.py`).

**Keys** form a one-way chain, ``key[t+1] = SHA-256("dpkfc next" ‖ key[t])``. A checkpoint of step
t contains key[t], from which the noise of *earlier* steps cannot be computed. The noise of later
steps can: a checkpoint must stay secret until the run that continues from it has been discarded.
Without a seed, the first key comes from the operating system (`os.urandom`).

**Lanes.** A key defines one endless stream of standard normals, divided into lanes of `LANE`
numbers. The counter of the cipher is the position in the stream, so

* any stretch can be computed on its own, on any device, from the key and its position;
* normal k of the stream is the same bits however long the stream is, and however it is cut into
  tensors, physical batches or ranks;
* a lane fits into the processor's cache, so correlated noise reads its past from memory once.

**Devices.** The bits of the cipher are the same everywhere. Normals are float32 functions of them
(log, sqrt, cos, sin), whose last bits may differ between kinds of devices: a run that moves from
the CPU to a GPU continues with the same noise up to rounding.

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
import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from dpkfc import chacha
from dpkfc.normals import LANE, PAIRS, cpu_normals, device_normals

LANES_AT_ONCE = 64  # on a device that is not the CPU: 17 million normals, 64 MB


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


def uniform_bits(key: bytes, count: int) -> np.ndarray:
    """`count` independent uniform 64-bit integers."""
    buffer = bytearray(8 * count)
    chacha.fill(buffer, key, block=0, length=8 * count)
    return np.frombuffer(buffer, dtype="<u8", count=count)


def normal_lanes(key: bytes, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the normals [start, stop) of the stream of `key`, as float32 on `device`.

    The pieces follow each other without gaps. A piece is valid until the next one is computed.

    **Guarantee.** On one kind of device, normal k is the same bits for every `start` and `stop`.
    """
    if device.type == "cpu":
        for first, last in _pieces(start, stop, lanes=1):
            yield cpu_normals(key, first, last)
    else:
        words = chacha.key_words(key, device)
        for first, last in _pieces(start, stop, LANES_AT_ONCE):
            yield device_normals(words, first, last)


def _pieces(start: int, stop: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into whole lanes, up to `lanes` at a time, and parts of a lane.

    A part lies in one half of a lane, or it contains both numbers of some pair. Then the whole
    lane is computed, which takes no longer than both halves on their own.
    """
    while start < stop:
        lane, first = divmod(start, LANE)
        whole = (stop - start) // LANE if first == 0 else 0
        if whole:
            end = start + min(whole, lanes) * LANE
        else:
            last = min(first + stop - start, LANE)
            if first < PAIRS < last and last - PAIRS <= first:
                last = PAIRS
            end = lane * LANE + last
        yield start, end
        start = end


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

    The tensors are read as one flat vector. Entry k receives normal k of the stream of `key`,
    computed on the device of the first tensor.
    """
    if tensors:
        size = sum(tensor.numel() for tensor in tensors)
        add_lanes_(tensors, normal_lanes(key, 0, size, tensors[0].device), scale)
