"""Streams of the noise ``w = C⁻¹ z``, added to the gradient sums in place, step by step.

z_t is the standard normal vector of the key of step t, over all trainable parameters as one flat
vector. w_t is a linear combination of z_t and of the past, position by position. A stream is made
for the positions that one process owns, on the device where their sums are. The computation goes
lane by lane (`dpkfc.random`): a lane fits into the processor's cache, so that the past is read from
memory once.

Coefficients are float64, buffers are float32. Rounding errors do not accumulate: whatever the
computed w_t is, ``C w`` equals z up to the rounding error of each single step, and the privacy
argument is about C w.

**Guarantee.** On one kind of device, the noise of position k is the same bits whichever process
computes it, and however the positions are divided. Processes that own disjoint ranges add noise to
each position once, and no two positions have the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.noise.series import Array
from dpkfc.random import add_lanes_, is_key, normal_lanes


class Stream(Protocol):
    """The noise of a run."""

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        """Add ``scale · w_step`` to the sums of the stream's positions, read as one flat vector.

        Steps may be skipped, but not repeated. After a skipped step the stream restarts.
        """

    def restart(self) -> None:
        """Forget the past, because some of it was lost.

        **Guarantee.** From step r on, the strategy matrix is then C with the rows from r on of the
        columns before r set to zero. If C ≥ 0, or if p ≤ b, so that bands end before the next
        participation, no inner product of columns grows, and so the sensitivity does not grow
        either: the run stays as private, with somewhat more noise.
        """

    def state_dict(self) -> dict[str, Any]: ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if this stream cannot have written `state`. Nothing is changed."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _OrderedSteps:
    """Steps come in order, each at most once. After a gap the stream restarts.

    Args:
        ranges: the positions that the stream adds noise to, in the order of the sums: stretches of
            the flat vector of all trainable parameters, in the order of the model.
        device: where the noise is computed.
    """

    _next = 0

    def __init__(self, ranges: Sequence[range], device: torch.device) -> None:
        self._ranges = _merged(ranges)
        self._size = sum(len(positions) for positions in self._ranges)
        self._device = device

    def _normals(self, key: bytes) -> Iterator[Tensor]:
        """z of the stream's positions, piece by piece. A piece is valid until the next one."""
        for positions in self._ranges:
            yield from normal_lanes(key, positions.start, positions.stop, self._device)

    def _check_size(self, sums: list[Tensor]) -> None:
        given = sum(tensor.numel() for tensor in sums)
        if given != self._size:
            raise PrivacyError(
                f"this noise is for {self._size} numbers, not for {given}: the set of trainable "
                "parameters must stay the same"
            )

    def _advance(self, step: int) -> None:
        if step < self._next:
            raise PrivacyError(
                f"the noise of step {step} was requested again: it would be used twice"
            )
        if step > self._next:
            self.restart()
        self._next = step + 1

    def restart(self) -> None:
        raise NotImplementedError


class _BufferedSteps(_OrderedSteps):
    """Streams that keep vectors of the size of their positions."""

    def __init__(self, ranges: Sequence[range], device: torch.device, buffers: int) -> None:
        super().__init__(ranges, device)
        self._past = torch.zeros(buffers, self._size, device=device)

    def _normals_and_past(self, key: bytes) -> Iterator[tuple[Tensor, Tensor]]:
        """z, with the buffers of the same positions."""
        start = 0
        for z in self._normals(key):
            yield z, self._past[:, start : start + len(z)]
            start += len(z)

    def restart(self) -> None:
        self._past.zero_()

    def state_dict(self) -> dict[str, Any]:
        if not len(self._past):
            return {"next": self._next}
        return {"past": self._past, "ranges": _bounds(self._ranges), "next": self._next}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_next(state)
        if len(self._past):
            _check_buffers(state.get("past"), self._past)
            _check_ranges(state.get("ranges"), self._ranges)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        if len(self._past):
            self._past.copy_(state["past"])
        self._next = state["next"]


class RingBufferStream(_BufferedSteps):
    """``w_t = gain_t (lead_t z_t + Σ_{j≥1} lags_{t,j} past_{t-j})``.

    A banded C keeps past outputs w (before the gain), a banded C⁻¹ past inputs z. Step s is stored
    in row s mod K of K buffers, so that nothing is moved.

    Args:
        ranges, device: see `Factorization.stream`.
        buffers: K, the number of past steps.
        row: maps t to (lead_t, lags_t).
        gain: maps t to gain_t.
        keeps: what the buffers hold.
    """

    def __init__(
        self,
        ranges: Sequence[range],
        device: torch.device,
        buffers: int,
        row: Callable[[int], tuple[float, Array]],
        gain: Callable[[int], float],
        keeps: Literal["outputs", "inputs"],
    ) -> None:
        super().__init__(ranges, device, buffers)
        self._row = row
        self._gain = gain
        self._keeps = keeps

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self._check_size(sums)
        self._advance(step)
        lead, lags = self._row(step)
        scale *= self._gain(step)
        if not len(self._past):
            add_lanes_(sums, self._normals(key), scale * lead)
        else:
            add_lanes_(sums, self._noise(key, step, lead, lags), scale)

    def _noise(self, key: bytes, step: int, lead: float, lags: Array) -> Iterator[Tensor]:
        rows = len(self._past)
        weights = [0.0] * rows
        for j, lag in enumerate(lags, start=1):
            weights[(step - j) % rows] = float(lag)
        for z, past in self._normals_and_past(key):
            w = _combination(lead, z, weights, past)
            past[step % rows] = w if self._keeps == "outputs" else z
            yield w


class RegeneratedStream(_OrderedSteps):
    """``w_t = Σ_j d_j z_{t-j}``, with past z recomputed from the last p-1 keys: no buffers.

    Checkpoints contain these keys, where a `RingBufferStream` has the past noise itself.
    """

    def __init__(self, ranges: Sequence[range], device: torch.device, d: Array) -> None:
        super().__init__(ranges, device)
        self._d = d
        self._keys: list[bytes] = []  # of the last steps, newest first

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self._check_size(sums)
        self._advance(step)
        keys = [key, *self._keys]
        for coefficient, step_key in zip(self._d, keys, strict=False):
            add_lanes_(sums, self._normals(step_key), scale * float(coefficient))
        self._keys = keys[: len(self._d) - 1]

    def restart(self) -> None:
        self._keys = []

    def state_dict(self) -> dict[str, Any]:
        keys = [key.hex() for key in self._keys]
        return {"keys": keys, "size": self._size, "next": self._next}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_next(state)
        if state.get("size") != self._size:
            raise PrivacyError(
                f"the checkpoint has noise for {state.get('size')} numbers, the run needs "
                f"{self._size}: load it into the model that it was saved from"
            )
        keys = state.get("keys")
        if (
            not isinstance(keys, list)
            or len(keys) >= len(self._d)
            or not all(is_key(key) for key in keys)
        ):
            raise PrivacyError(
                f"the checkpoint should have up to {len(self._d) - 1} keys of past noise: it is "
                "damaged or was changed. Restore it from a backup"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._keys = [bytes.fromhex(key) for key in state["keys"]]
        self._next = state["next"]


class RecurrentStream(_BufferedSteps):
    """``w_t = z_t - Σ_i ω_i s_i``, then ``s_i ← λ_i s_i + w_t``: one state buffer s_i per pole."""

    def __init__(
        self, ranges: Sequence[range], device: torch.device, weights: Array, poles: Array
    ) -> None:
        super().__init__(ranges, device, len(poles))
        self._weights = [-float(weight) for weight in weights]
        self._poles = torch.from_numpy(poles).float().to(device)[:, None]

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self._check_size(sums)
        self._advance(step)
        add_lanes_(sums, self._noise(key), scale)

    def _noise(self, key: bytes) -> Iterator[Tensor]:
        for z, states in self._normals_and_past(key):
            w = _combination(1.0, z, self._weights, states)
            states.mul_(self._poles).add_(w)
            yield w


def _combination(lead: float, z: Tensor, weights: list[float], past: Tensor) -> Tensor:
    """``lead z + Σ_i weights_i past_i``, rounded alike at every position.

    On the CPU, one pass of BLAS over the buffers; that its rounding does not depend on where a
    stretch begins and ends is tested. On other devices the weights are sent as arguments of
    kernels, because a copy of host memory would wait for the device.
    """
    if z.device.type == "cpu":
        return torch.addmv(z, past.T, torch.tensor(weights), beta=lead)
    w = z * lead
    for weight, row in zip(weights, past, strict=True):
        w.add_(row, alpha=weight)
    return w


def _merged(ranges: Sequence[range]) -> list[range]:
    """The same positions in the same order, in as few ranges as possible.

    >>> _merged([range(0, 2), range(2, 2), range(2, 5), range(7, 8)])
    [range(0, 5), range(7, 8)]
    """
    merged: list[range] = []
    for positions in ranges:
        if positions.step != 1 or positions.start < 0:
            raise ValueError(f"{positions}: positions must be consecutive and not negative")
        if merged and merged[-1].stop == positions.start:
            merged[-1] = range(merged[-1].start, max(positions.stop, positions.start))
        elif len(positions):
            merged.append(positions)
    ordered = sorted(merged, key=lambda positions: positions.start)
    for before, after in pairwise(ordered):
        if before.stop > after.start:
            raise PrivacyError(
                f"{before} and {after} overlap: these positions would have the same noise twice"
            )
    return merged


def _bounds(ranges: Sequence[range]) -> list[list[int]]:
    """The ranges as they are written to a checkpoint."""
    return [[positions.start, positions.stop] for positions in ranges]


def _check_ranges(given: Any, own: Sequence[range]) -> None:
    if given != _bounds(own):
        raise PrivacyError(
            f"the checkpoint has the noise of the positions {given}, this process needs those of "
            f"{_bounds(own)}: the noise of other positions would not cancel. Resume with as many "
            "processes as the run was saved with"
        )


def _check_next(state: dict[str, Any]) -> None:
    step = state.get("next")
    if type(step) is not int or step < 0:
        raise PrivacyError(
            f"the noise of the checkpoint continues at step {step!r}, which is not a step: it is "
            "damaged or was changed. Restore it from a backup"
        )


def _check_buffers(given: Any, own: Tensor) -> None:
    if (
        not isinstance(given, Tensor)
        or given.shape != own.shape
        or not bool(torch.isfinite(given).all())
    ):
        is_tensor = isinstance(given, Tensor)
        description = f"of shape {tuple(given.shape)}" if is_tensor else type(given).__name__
        raise PrivacyError(
            f"the checkpoint has noise buffers {description}, the run needs finite ones of shape "
            f"{tuple(own.shape)}: the set of trainable parameters or the noise has changed, or the "
            "checkpoint is damaged"
        )
