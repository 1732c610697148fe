"""Which run object continues which run, so that the noise of a step is used only once.

A checkpoint holds the keys of the steps that follow. The first object that continues it does so bit
for bit. Any other would use the same noise on other sums, and the difference of the two results
would contain no noise; so fresh entropy is mixed into its key. Who was first is recorded in this
process by the id of the run, and on disk by an empty file in the checkpoint's folder. (A ledger
keeps its own record.) A state from another process that is not in such a folder is continued with
fresh entropy, unless the run has a seed or a ledger.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from dpkfc.errors import PrivacyError
from dpkfc.random import sub_key

_steps: dict[str, int] = {}  # steps per run id that were taken in this process, by any object
_owner: dict[str, str] = {}  # per run id, the object that continues it


def steps_here(run_id: str) -> int | None:
    """Steps of the run that were taken in this process; None if the run is not known here."""
    return _steps.get(run_id)


def steps_of_all_runs() -> int:
    """Steps of all runs in this process."""
    return sum(_steps.values())


def own(run_id: str, handle_id: str, charged: int) -> None:
    """From now on the object `handle_id` continues the run."""
    _owner[run_id] = handle_id
    _steps[run_id] = max(charged, _steps.get(run_id, 0))


def demand_owner(run_id: str, handle_id: str) -> None:
    """Refuse to continue a run whose state was loaded into another object."""
    if _owner.get(run_id, handle_id) != handle_id:
        raise PrivacyError(
            "the state of this run was loaded into another run object. If both continued, they "
            "would use the same noise, and the difference of their results would contain none. Use "
            "the other object, or load a checkpoint into this one"
        )


def count(run_id: str, charged: int) -> None:
    """A step was charged."""
    _steps[run_id] = max(charged, _steps[run_id])


def fresh_key(key: bytes) -> bytes:
    """A key that nobody else has."""
    return sub_key(key + os.urandom(32), "fresh")


def marker(folder: Path, checkpoint_id: str) -> Path:
    """The file whose existence means that the checkpoint was continued."""
    return folder / f"continued.{checkpoint_id}"


def claim(folder: Path, checkpoint_id: str, exists: Callable[[], bool]) -> bool | None:
    """Record that the checkpoint is continued.

    Returns:
        True if this is the first time, False if it was continued before or the record cannot be
        written, None if the checkpoint does not exist any more (``exists()``): it was removed,
        moved, or replaced by a later one.
    """
    if not exists():
        return None
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        os.close(os.open(marker(folder, checkpoint_id), flags, 0o600))
    except OSError:
        return False
    return True


def continued_before(folder: Path) -> str:
    """The warning for a checkpoint that was continued before."""
    return (
        f"the checkpoint '{folder}' was continued before, so this run uses fresh noise. Its "
        "epsilon does not include steps that were taken from this checkpoint elsewhere: use a "
        "ledger to count them"
    )


def warn_unfinished(handle_id: str, planned: int) -> None:
    """Warn that the run object `handle_id` is gone although its plan has steps left.

    A loop that counts batches by another length than ``len(run.loader)`` ends too early, or too
    early for its learning-rate schedule.
    """
    for run_id in [run_id for run_id, owner in _owner.items() if owner == handle_id]:
        taken = _steps[run_id]
        if 0 < taken < planned:
            warnings.warn(
                f"a private run ended after {taken} of its {planned} planned steps. Only the steps "
                "that were taken count against the budget. If the loop counts batches itself, let "
                "it run over len(run.loader) of them. To end a run on purpose, call run.detach()",
                stacklevel=2,
            )
