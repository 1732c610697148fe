"""Streams of the noise ``w = C⁻¹ z``, added to the gradient sums in place, step by step.

z_t is the standard normal vector of the key of step t. w_t is a linear combination of z_t and of
the past. The computation goes lane by lane (`dpkfc.random`): a lane fits into the processor's
cache, so that the past is read from memory once.

Coefficients are float64, buffers are float32. Rounding errors do not accumulate: whatever the
computed w_t is, ``C w`` equals z up to the rounding error of each single step, and the privacy
argument is about C w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.noise.series import Array
from dpkfc.random import add_lanes_, add_normal_, is_key, normal_lanes


class Stream(Protocol):
    """The noise of a run."""

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        """Add ``scale · w_step`` to the sums, read as one flat vector.

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
    """Steps come in order, each at most once. After a gap the stream restarts."""

    _next = 0

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
    """Streams that keep vectors of the model's size."""

    def __init__(self, buffers: int, size: int) -> None:
        self._past = torch.zeros(buffers, size)

    def restart(self) -> None:
        self._past.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"past": self._past, "next": self._next} if len(self._past) else {"next": self._next}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_next(state)
        if len(self._past):
            _check_buffers(state.get("past"), self._past)

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
        size: parameters of the model.
        buffers: K, the number of past steps.
        row: maps t to (lead_t, lags_t).
        gain: maps t to gain_t.
        keeps: what the buffers hold.
    """

    def __init__(
        self,
        size: int,
        buffers: int,
        row: Callable[[int], tuple[float, Array]],
        gain: Callable[[int], float],
        keeps: Literal["outputs", "inputs"],
    ) -> None:
        super().__init__(buffers, size)
        self._row = row
        self._gain = gain
        self._keeps = keeps

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        # Without a past, independent noise is added to sums of any size.
        if len(self._past):
            _check_size(sums, self._past.shape[1])
        self._advance(step)
        lead, lags = self._row(step)
        if not len(self._past):
            add_normal_(sums, key, scale * lead * self._gain(step))
        else:
            add_lanes_(sums, self._lanes(key, step, lead, lags), scale * self._gain(step))

    def _lanes(self, key: bytes, step: int, lead: float, lags: Array) -> Iterator[Tensor]:
        rows, size = self._past.shape
        weights = torch.zeros(rows)
        for j, lag in enumerate(lags, start=1):
            weights[(step - j) % rows] = float(lag)
        start = 0
        for z in normal_lanes(key, size):
            past = self._past[:, start : start + len(z)]
            w = torch.addmv(z, past.T, weights, beta=lead)
            past[step % rows] = w if self._keeps == "outputs" else z
            yield w
            start += len(z)


class RegeneratedStream(_OrderedSteps):
    """``w_t = Σ_j d_j z_{t-j}``, with past z recomputed from the last p-1 keys: no buffers.

    Checkpoints contain these keys, where a `RingBufferStream` has the past noise itself.
    """

    def __init__(self, size: int, d: Array) -> None:
        self._size = size
        self._d = d
        self._keys: list[bytes] = []  # of the last steps, newest first

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        _check_size(sums, self._size)
        self._advance(step)
        keys = [key, *self._keys]
        for coefficient, step_key in zip(self._d, keys, strict=False):
            add_lanes_(sums, normal_lanes(step_key, self._size), scale * float(coefficient))
        self._keys = keys[: len(self._d) - 1]

    def restart(self) -> None:
        self._keys = []

    def state_dict(self) -> dict[str, Any]:
        return {"keys": [key.hex() for key in self._keys], "size": self._size, "next": self._next}

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

    def __init__(self, size: int, weights: Array, poles: Array) -> None:
        super().__init__(len(poles), size)
        self._weights = torch.from_numpy(weights).float()
        self._poles = torch.from_numpy(poles).float()[:, None]

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        _check_size(sums, self._past.shape[1])
        self._advance(step)
        add_lanes_(sums, self._lanes(key), scale)

    def _lanes(self, key: bytes) -> Iterator[Tensor]:
        start = 0
        for z in normal_lanes(key, self._past.shape[1]):
            states = self._past[:, start : start + len(z)]
            w = torch.addmv(z, states.T, self._weights, alpha=-1)
            states.mul_(self._poles).add_(w)
            yield w
            start += len(z)


def _check_size(sums: list[Tensor], size: int) -> None:
    given = sum(tensor.numel() for tensor in sums)
    if given != size:
        raise PrivacyError(
            f"this noise is for {size} numbers, not for {given}: the set of trainable parameters "
            "must stay the same"
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
