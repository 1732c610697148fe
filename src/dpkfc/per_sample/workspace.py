"""Memory that is used again at every step.

Fresh pages cost as much as the matrix product itself.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], Tensor], Tensor]


class Workspace:
    """One buffer, handed out at most once between two calls of `release`."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self._in_use = False

    def __call__(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor, valid until `release`. If the buffer is in use: fresh memory."""
        size = math.prod(shape)
        if self._in_use:
            return like.new_empty(shape)
        same_kind = (self._buffer.dtype, self._buffer.device) == (like.dtype, like.device)
        if self._buffer.numel() < size or not same_kind:
            self._buffer = like.new_empty(size)
        self._in_use = True
        return self._buffer[:size].view(shape)

    def release(self) -> None:
        """What was handed out is no longer needed and may be overwritten."""
        self._in_use = False


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.workspaces = Workspace(), Workspace()


_scratch = _Scratch()


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Workspace, Workspace]]:
    """Two workspaces per thread, for mapped factors that are needed only inside the block."""
    try:
        yield _scratch.workspaces
    finally:
        for workspace in _scratch.workspaces:
            workspace.release()
