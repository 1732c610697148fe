"""Standard normals as a function of key and position: Box-Muller over the ChaCha20 key stream.

For u, v uniform on (0, 1), ``sqrt(-2 ln u) (cos 2πv, sin 2πv)`` are two independent standard
normals. Here u has 32 bits, and 64 where it is small, so that the tail reaches 9.5 standard
deviations (torch's float32 `normal_` stops at 5.8).

**Layout.** The stream is divided into lanes of `PAIRS` pairs. A lane takes `PAIRS` words of the
key stream for u, followed by `PAIRS` words for v. The first half of its normals are the cosines,
the second half the sines. The 32 further bits of a small u are the word of the same pair in a
second stream.

There are two implementations: `cpu_normals` takes the words from `cryptography`, and further bits
only where they are needed. `device_normals` computes the cipher on the device, without a branch on
computed values: nothing is copied from the host, and the host never waits for the device. Both use
the same bits. The last bits of their normals may differ, as float32 functions do between devices.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dpkfc import chacha
from dpkfc.errors import PrivacyError

PAIRS = 2**17  # pairs (u, v) per lane; each makes two normals
LANE = 2 * PAIRS  # normals per lane
TAIL = 2**12  # 32-bit u below this number, one in a million, get 32 more bits
TAIL_NONCE = 1  # the stream of these bits

# A value that is used twice becomes a node of its own, and all nodes become one kernel. With the
# defaults of torch.compile, values would be computed several times, in several kernels.
ONE_KERNEL: dict[str, int] = {"realize_opcount_threshold": 1, "max_fusion_size": 10**6}


class _Workspace(threading.local):
    """Memory for one lane per thread. Allocating it anew would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = bytearray(4 * PAIRS)
        self.words = torch.frombuffer(self.bits, dtype=torch.uint32, count=PAIRS)
        self.uniform = torch.empty(PAIRS)
        self.angle = torch.empty(PAIRS)
        self.normals = torch.empty(LANE)


_workspace = _Workspace()


def cpu_normals(key: bytes, start: int, stop: int) -> Tensor:
    """The normals [start, stop) of the stream of `key`, all in one lane; valid until the next call.

    If they lie in both halves of the lane, the pairs of the whole lane are computed.
    """
    lane, first = divmod(start, LANE)
    last = first + stop - start
    cosines = slice(first, min(last, PAIRS))
    sines = slice(max(first - PAIRS, 0), last - PAIRS)
    used = cosines if last <= PAIRS else sines if first >= PAIRS else slice(0, PAIRS)
    # from the beginning of a cipher block
    used = slice(used.start - used.start % chacha.WORDS, used.stop)
    uniform = _workspace.uniform[used]
    angle = _workspace.angle[used]
    for numbers, offset in ((uniform, 0), (angle, PAIRS)):
        block = (lane * LANE + offset + used.start) // chacha.WORDS
        chacha.fill(_workspace.bits, key, block, 4 * len(numbers))
        numbers.copy_(_workspace.words[: len(numbers)])
    uniform.add_(0.5)
    if float(uniform.min()) < TAIL:
        _refine_tail_(uniform, key, lane * PAIRS + used.start)
    uniform.mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi * 2.0**-32)
    normals = _workspace.normals[first:last]
    if first < PAIRS:
        out = normals[: cosines.stop - first]
        torch.cos(_workspace.angle[cosines], out=out).mul_(_workspace.uniform[cosines])
    if last > PAIRS:
        out = normals[max(PAIRS - first, 0) :]
        torch.sin(_workspace.angle[sines], out=out).mul_(_workspace.uniform[sines])
    return normals


def _refine_tail_(uniform: Tensor, key: bytes, pair: int) -> None:
    """Replace the fraction 0.5 of integers below `TAIL` by 32 random bits, in place.

    The first number is that of the pair number `pair` of the stream.
    """
    buffer = bytearray(chacha.BYTES)
    for column in (uniform < TAIL).nonzero().flatten().tolist():
        block, word = divmod(pair + column, chacha.WORDS)
        chacha.fill(buffer, key, block, chacha.BYTES, nonce=TAIL_NONCE)
        bits = int.from_bytes(buffer[4 * word : 4 * word + 4], "little")
        # Added in float64, so that the smallest fractions are not lost.
        uniform[column] = float(uniform[column]) - 0.5 + (bits + 0.5) / 2**32


def device_normals(key: Tensor, start: int, stop: int) -> Tensor:
    """The normals [start, stop) of the stream of `key`, on the device of `key`.

    Args:
        key: the words of the key, from `chacha.key_words`.
        start, stop: in one half of a lane; or else whole lanes are computed.
    """
    lane, first = divmod(start, LANE)
    last = first + stop - start
    half, offset = divmod(first, PAIRS)
    if offset + stop - start <= PAIRS:
        block = (lane * PAIRS + offset) // chacha.WORDS
        count = -(-(offset + stop - start) // chacha.WORDS) - offset // chacha.WORDS
        normals = _normals_of_blocks(key, block, 1, count)[:, half]
        first = offset % chacha.WORDS
        last = first + stop - start
    else:
        block = lane * PAIRS // chacha.WORDS
        normals = _normals_of_blocks(key, block, -(-last // LANE), PAIRS // chacha.WORDS)
    return normals.reshape(-1)[first:last]


def _normals_of_blocks(key: Tensor, start: int, rows: int, columns: int) -> Tensor:
    """The normals of ``rows * columns`` blocks of pairs, as [rows, 2, columns, 16].

    Args:
        key: the words of the key.
        start: the number of the first block of pairs in the stream.
        rows: lanes, or 1 for a part of a lane.
        columns: blocks per row.
    """
    first = torch.full((), start, dtype=torch.int64, device=key.device)
    block = first + torch.arange(rows * columns, device=key.device)
    normals = box_muller_on(key.device)(key, block)
    return normals.view(2, chacha.WORDS, rows, columns).permute(2, 0, 3, 1)


def box_muller_on(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`box_muller`, on an accelerator as one compiled kernel.

    Compiling takes a minute or two, once per machine: torch keeps the result on disk. The first
    normals of a device are compared with those of the CPU.
    """
    return box_muller if device.type == "cpu" else _compiled_on(device.type)


@cache
def _compiled_on(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    device = torch.device(kind)
    function = compiled()
    try:
        function(chacha.key_words(bytes(32), device), torch.arange(2, device=device))
    except Exception as problem:
        warnings.warn(
            f"torch.compile cannot make the noise kernel for {kind} ({problem}). The noise is "
            "computed by separate kernels: it is the same, but takes many times longer",
            stacklevel=2,
        )
        function = box_muller
    check_against_cpu(function, device)
    return function


def compiled() -> Callable[[Tensor, Tensor], Tensor]:
    """`box_muller` as one kernel, which is made when it is called for the first time."""
    return torch.compile(box_muller, dynamic=True, fullgraph=True, options=dict(ONE_KERNEL))


def check_against_cpu(function: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
    """Raise if the device's normals are not those of the CPU, up to rounding."""
    key, blocks = os.urandom(32), 64
    got = function(chacha.key_words(key, device), torch.arange(blocks, device=device))
    cosines = got[: chacha.WORDS].cpu().T.reshape(-1)
    sines = got[chacha.WORDS :].cpu().T.reshape(-1)
    for start, normals in ((0, cosines), (PAIRS, sines)):
        error = (normals - cpu_normals(key, start, start + len(normals))).abs().max()
        # NaN is not below the bound. Where u is close to 1, the radius is half the digits of u
        if not float(error) < 1e-3:
            raise PrivacyError(
                f"the noise that {device} computes differs by {float(error):.2g} from that of the "
                "CPU: its kernels are wrong. Update torch and its compiler, or train on the CPU"
            )


def box_muller(key: Tensor, block: Tensor) -> Tensor:
    """The normals of blocks of 16 pairs: [32, ...], 16 cosines and then 16 sines.

    Args:
        key: eight int32 words of the key.
        block: int64, the numbers of the blocks of pairs in the stream.
    """
    per_half = PAIRS // chacha.WORDS
    radii = block + block // per_half * per_half  # the number of the block in the key stream
    words = chacha.blocks(key, radii)
    angles = chacha.blocks(key, radii + per_half)
    tails = chacha.blocks(key, block, nonce=TAIL_NONCE)
    cosines, sines = [], []
    for word, angle, tail in zip(words, angles, tails, strict=True):
        fraction = (_as_float(tail) + 0.5) * 2.0**-32
        in_tail = (word >= 0) & (word < TAIL)
        uniform = _as_float(word) + torch.where(in_tail, fraction, 0.5)
        # not below 0, in case a device's log(1) is
        radius = ((uniform * 2.0**-32).log() * -2).clamp(min=0).sqrt()
        # 2π as a literal: torch.compile would take math.pi as an argument
        turn = _as_float(angle) * (6.283185307179586 * 2.0**-32)
        cosines.append(radius * turn.cos())
        sines.append(radius * turn.sin())
    return torch.stack(cosines + sines)


def _as_float(word: Tensor) -> Tensor:
    """An int32 read as an unsigned number, rounded to float32 once, in the sum."""
    high = (word >> 16) & 0xFFFF
    low = word & 0xFFFF
    return high.to(torch.float32) * 2.0**16 + low.to(torch.float32)
