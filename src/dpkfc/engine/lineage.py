"""Which handle continues which run: the noise of a step is used by one of them only.

A checkpoint holds the keys of the steps that follow. The first handle that continues it goes on bit for bit. Any other
would use the same noise on other sums, and the difference of the two results would contain none; so fresh entropy is
mixed into its key. Who was first is recorded in this process by the name of the run, and on disk by an empty file in
the checkpoint's folder. (A ledger keeps a record of its own.) A state from another process, which is not in such a
folder, is continued with fresh entropy, unless the run has a seed or a ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dpkfc.errors import PrivacyError
from dpkfc.random import sub_key

_steps: dict[str, int] = {}  # that each run has taken in this process, by whichever handle
_owner: dict[str, str] = {}  # the handle that goes on with it


def steps_here(run: str) -> int | None:
    """Steps of the run that were taken in this process; None if it is not known here."""
    return _steps.get(run)


def own(run: str, handle: str, charged: int) -> None:
    """From now on `handle` continues the run."""
    _owner[run] = handle
    _steps[run] = max(charged, _steps.get(run, 0))


def demand_owner(run: str, handle: str) -> None:
    if _owner.get(run, handle) != handle:
        raise PrivacyError(
            "the state of this run was loaded into another handle. If both continued, they would use the same noise, "
            "and the difference of their results would contain none. Use the other handle, or load a checkpoint into "
            "this one"
        )


def count(run: str, charged: int) -> None:
    """A step was charged."""
    _steps[run] = max(charged, _steps[run])


def fresh_key(key: bytes) -> bytes:
    """A key that nobody else has, from here on."""
    return sub_key(key + os.urandom(32), "fresh")


def marker(folder: Path, checkpoint_id: str) -> Path:
    """The file that says that the checkpoint was continued."""
    return folder / f"continued.{checkpoint_id}"


def claim(folder: Path, checkpoint_id: str, is_there: Callable[[], bool]) -> bool | None:
    """Record that this handle continues the checkpoint.

    Returns:
        True if it is the first, False if another one did so before or the record cannot be written, None if the
        checkpoint is not there any more (``is_there()``): it was removed, moved, or replaced by a later one.
    """
    if not is_there():
        return None
    try:
        os.close(
            os.open(marker(folder, checkpoint_id), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        )
    except OSError:
        return False
    return True


def continued_before(folder: Path) -> str:
    return (
        f"the checkpoint '{folder}' was continued before, so this run uses fresh noise. Its epsilon does not include "
        "steps that were taken from this checkpoint elsewhere: use a ledger to count them"
    )
