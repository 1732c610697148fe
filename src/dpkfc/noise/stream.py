"""The stream ``w = C⁻¹ z``, step by step, added to the sums in place.

z_t is the standard normal vector of the step's key, w_t a combination of it and of the past. Everything goes by
lanes of the generator, small enough to stay in the processor's cache, so that the past is read from memory once.

Coefficients are float64, buffers float32. Rounding does not add up: whatever w_t is in the end, ``C w`` is z but for
the rounding of each single step, and it is C w that the privacy argument is about.
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
        """Add ``scale · w_step`` to the sums, read as one flat vector. Steps may be left out, never repeated."""

    def restart(self) -> None:
        """Forget the past, because some of it was lost.

        From step r on the matrix is then C without the rows from r on of the columns before r. If C ≥ 0,
        or if its bands reach no further than the next participation, each inner product
        of columns gets smaller or stays, and so does the sensitivity: private as before, with somewhat more noise.
        """

    def state_dict(self) -> dict[str, Any]: ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that this stream cannot have written; nothing is changed."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Order:
    """Steps come in order, each once; after a gap the stream starts anew."""

    _next = 0

    def _take(self, step: int) -> None:
        if step < self._next:
            raise PrivacyError(f"noise of step {step} was asked for again: it would be used twice")
        if step > self._next:
            self.restart()
        self._next = step + 1

    def restart(self) -> None:
        raise NotImplementedError


class _Buffers(_Order):
    """Streams that keep vectors of the size of the model."""

    def __init__(self, buffers: int, size: int) -> None:
        self._past = torch.zeros(buffers, size)

    def restart(self) -> None:
        self._past.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"past": self._past, "next": self._next} if len(self._past) else {"next": self._next}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_next(state)
        if len(self._past):
            _same_shape(state.get("past"), self._past)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        if len(self._past):
            self._past.copy_(state["past"])
        self._next = state["next"]


class Ring(_Buffers):
    """``w_t = lead z_t + Σ_{j≥1} lags_j past_{t-j}``: banded C keeps outputs w, banded C⁻¹ inputs z.

    Past step s is in row s mod K of the buffer, so that nothing is moved.
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
        self._row, self._gain, self._keeps = row, gain, keeps

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        if len(self._past):  # without a past, independent noise goes to sums of any size
            _check_size(sums, self._past.shape[1])
        self._take(step)
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


class Regenerated(_Order):
    """``w_t = Σ_j d_j z_{t-j}`` with the past z computed anew from the last p-1 keys: no buffers.

    The keys of past noise are kept (and go into checkpoints) where the ring keeps past noise itself.
    """

    def __init__(self, size: int, d: Array) -> None:
        self._size, self._d = size, d
        self._keys: list[bytes] = []  # of the last steps, newest first

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        _check_size(sums, self._size)
        self._take(step)
        for coefficient, old in zip(self._d, [key, *self._keys], strict=False):
            add_lanes_(sums, normal_lanes(old, self._size), scale * float(coefficient))
        self._keys = [key, *self._keys][: len(self._d) - 1]

    def restart(self) -> None:
        self._keys = []

    def state_dict(self) -> dict[str, Any]:
        return {"keys": [key.hex() for key in self._keys], "size": self._size, "next": self._next}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_next(state)
        if state.get("size") != self._size:
            raise PrivacyError(
                f"the checkpoint holds noise for {state.get('size')} numbers, the run has {self._size}"
            )
        keys = state.get("keys")
        if (
            not isinstance(keys, list)
            or len(keys) >= len(self._d)
            or not all(is_key(key) for key in keys)
        ):
            raise PrivacyError(
                f"the checkpoint should hold up to {len(self._d) - 1} keys of past noise: it is damaged or was "
                "changed. Restore it from a backup"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._keys = [bytes.fromhex(key) for key in state["keys"]]
        self._next = state["next"]


class States(_Buffers):
    """``w_t = z_t - Σ_i ω_i s_i`` and then ``s_i ← λ_i s_i + w_t``: one buffer a pole."""

    def __init__(self, size: int, weights: Array, poles: Array) -> None:
        super().__init__(len(poles), size)
        self._weights = torch.from_numpy(weights).float()
        self._poles = torch.from_numpy(poles).float()[:, None]

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        _check_size(sums, self._past.shape[1])
        self._take(step)
        add_lanes_(sums, self._lanes(key), scale)

    def _lanes(self, key: bytes) -> Iterator[Tensor]:
        start = 0
        for z in normal_lanes(key, self._past.shape[1]):
            past = self._past[:, start : start + len(z)]
            w = torch.addmv(z, past.T, self._weights, alpha=-1)
            past.mul_(self._poles).add_(w)
            yield w
            start += len(z)


def _check_size(sums: list[Tensor], size: int) -> None:
    given = sum(tensor.numel() for tensor in sums)
    if given != size:
        raise PrivacyError(
            f"this noise is for {size} numbers, not for {given}: the set of trainable parameters must stay the same"
        )


def _check_next(state: dict[str, Any]) -> None:
    following = state.get("next")
    if type(following) is not int or following < 0:
        raise PrivacyError(
            f"the noise of the checkpoint goes on at step {following!r}, which is no step: it is damaged or was "
            "changed. Restore it from a backup"
        )


def _same_shape(given: Any, own: Tensor) -> None:
    if (
        not isinstance(given, Tensor)
        or given.shape != own.shape
        or not bool(torch.isfinite(given).all())
    ):
        found = (
            f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        )
        raise PrivacyError(
            f"the checkpoint holds noise buffers {found}, the run needs finite ones of shape {tuple(own.shape)}: the "
            "set of trainable parameters or the noise has changed, or the checkpoint is damaged"
        )
