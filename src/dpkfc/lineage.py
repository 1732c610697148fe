"""Which handle continues which run: the noise of a step is used by one of them only.

A checkpoint holds the key of the steps that follow. Whoever continues it first goes on bit for bit. Whoever continues
it after that would use the same noise on other sums, and the difference of the two results would be free of noise; so
fresh entropy is mixed into the key. Who was first is recorded in this process by the name of the run, and on disk by
an empty file in the checkpoint's folder. (A ledger keeps a record of its own.) What cannot be known, the states that
another process kept by itself, is continued with fresh entropy, unless the run has a seed.
"""

from __future__ import annotations

import os
from pathlib import Path

from dpkfc.errors import PrivacyError
from dpkfc.noise.rng import sub_key

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
            "the state of this run was loaded into another handle, which goes on with its noise: if both did, their "
            "difference would be free of noise. Go on with the other one, or load a checkpoint into this one"
        )


def count(run: str, charged: int) -> None:
    """A step was charged."""
    _steps[run] = max(charged, _steps[run])


def fresh_key(key: bytes) -> bytes:
    """A key that nobody else has, from here on."""
    return sub_key(key + os.urandom(32), "fresh")


def marker(folder: Path, checkpoint_id: str) -> Path:
    return folder / f"continued.{checkpoint_id}"


def claim(folder: Path, checkpoint_id: str) -> bool:
    """Be the one that continues the checkpoint; False if somebody else does, or if that cannot be recorded."""
    try:
        os.close(os.open(marker(folder, checkpoint_id), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileNotFoundError:  # removed, or replaced by a later one
        return True
    except OSError:
        return False
    return True


def continued_before(folder: Path) -> str:
    return (
        f"the checkpoint '{folder}' was continued before, so this run goes on with fresh noise. Steps that were taken "
        "from it elsewhere are not part of its epsilon: a ledger would add them up"
    )
