"""The files of a run's folder: locks, atomic writes, checkpoints on time, resuming."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

SAVE_SECONDS = 60.0  # between checkpoints
SAVE_SHARE = 0.02  # of the planned steps, between checkpoints
MOST_SAVING = 0.1  # share of the time that may be spent on checkpoints
LOCK = ".lock"


def check_folder(out: Path) -> None:
    """Raise OSError if --out cannot be a folder to write into. Nothing is created."""
    try:
        existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    except OSError as problem:  # a name that is too long, say
        raise OSError(
            f"--out {out} cannot be used ({problem.strerror}): choose another folder"
        ) from problem
    if not existing.is_dir():
        raise NotADirectoryError(
            f"--out {out}: {existing} is a file, and a folder is needed: choose another"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"--out {out}: {existing} is not writable: choose another folder")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the folder and lock it for this process.

    At the end, folders that were created here and are still empty are removed. The operating
    system holds the lock, and releases it when the process ends, however it ends.
    """
    check_folder(out)
    created = [place for place in (out, *out.parents) if not place.exists()]
    out.mkdir(parents=True, exist_ok=True)
    lock = _lock(out)
    try:
        yield
    finally:
        if lock is not None:
            (out / LOCK).unlink(missing_ok=True)  # while it is held: see the end of `_lock`
            os.close(lock)
        for place in created:
            with suppress(OSError):  # not empty
                place.rmdir()


def _lock(out: Path) -> int | None:
    """An open file with the lock; None where locks are not supported."""
    if fcntl is None:
        return None
    while True:
        file = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BlockingIOError(
                f"another process is training in {out}: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            os.close(file)
            (out / LOCK).unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(out / LOCK)):
                return file
        # The owner removed the file after it was opened here: another process may have a new one.
        os.close(file)


def is_resumed(out: Path, config: dict[str, Any]) -> bool:
    """Whether the folder already holds the run with this config.json.

    Raises:
        PrivacyError: it holds a run with other settings. Its noise and its plan are not those of
            this run.
        ValueError: config.json is damaged, or the folder holds the weights of something else.
    """
    if not (out / "config.json").exists():
        if (out / "model.safetensors").exists():
            raise ValueError(
                f"{out} holds the model.safetensors of something else: choose another --out"
            )
        return False
    try:
        existing = json.loads((out / "config.json").read_text())
    except ValueError as problem:
        raise ValueError(
            f"{out}/config.json is damaged ({problem}): choose another --out"
        ) from problem
    config = json.loads(json.dumps(config))
    changed = [
        key
        for key in {**existing, **config}
        if key != "settings" and existing.get(key) != config.get(key)
    ]
    settings = existing.get("settings", {})
    changed += [key for key, value in config["settings"].items() if settings.get(key) != value]
    if changed:
        raise PrivacyError(
            f"{out} holds a run with another {', '.join(changed)}: repeat the command of that run "
            "to resume it, or choose another --out"
        )
    return True


@dataclass
class Fingerprint:
    """A digest of the inputs and labels: a resumed run must have the records it began with.

    It is part of the checkpoint, which is secret.
    """

    digest: str

    @staticmethod
    def of(data: TensorDataset) -> Fingerprint:
        digest = sha256()
        for tensor in data.tensors:
            digest.update(tensor.contiguous().numpy().reshape(-1).data)
        return Fingerprint(digest.hexdigest())

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        if state["digest"] != self.digest:
            raise PrivacyError(
                "the records are not those that the run began with: restore them, or begin a new "
                "run with another --out"
            )


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C, or SIGTERM, wait for the current step; a second signal interrupts at once.

    Yields a function that says whether the run was asked to stop. An ignored signal stays ignored,
    as nohup and `&` in a script expect. A handler that was not installed from Python (None) is
    left alone: Python could not install it again.
    """
    stop_requested = False

    def request_stop(number: int, frame: Any) -> None:
        nonlocal stop_requested
        if stop_requested:
            raise KeyboardInterrupt
        stop_requested = True

    # Only the main thread can handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }
    for number in replaced:
        signal.signal(number, request_stop)
    try:
        yield lambda: stop_requested
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


class SaveSchedule:
    """When the next checkpoint is due.

    A kill loses the steps since the last checkpoint, and a ledger does not refund them: so there
    are few steps between checkpoints. But checkpoints may take only a small share of the time.
    """

    def __init__(self, planned: int, step: int) -> None:
        self.planned = planned
        self.saved_step = step
        self.started = self.saved_at = time.monotonic()
        self.seconds_saving = 0.0

    def is_due(self, step: int) -> bool:
        now = time.monotonic()
        return worth_saving(
            step - self.saved_step,
            self.planned,
            now - self.saved_at,
            self.seconds_saving,
            now - self.started,
        )

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Time the checkpoint that is written inside."""
        before = time.monotonic()
        yield
        self.saved_step = step
        self.saved_at = time.monotonic()
        self.seconds_saving += self.saved_at - before


def worth_saving(steps: int, planned: int, since: float, saving: float, working: float) -> bool:
    """Whether a checkpoint is due, `steps` steps and `since` seconds after the last one.

    Of the `working` seconds of the run so far, `saving` went into checkpoints.
    """
    due = since > SAVE_SECONDS or steps >= SAVE_SHARE * planned
    return due and saving <= MOST_SAVING * working


def keep_metrics(out: Path, steps: int) -> None:
    """Drop lines of metrics.jsonl that were cut off, and those of steps after the checkpoint."""
    file = out / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    kept = "".join(f"{line}\n" for line in lines if _step_of(line) <= steps)
    write_whole(file, lambda fresh: fresh.write_text(kept))


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def write_json(file: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_whole(file, lambda fresh: fresh.write_text(json.dumps(content, indent=2) + "\n"))


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically: after a kill at any point, all of it or the old one is there."""
    fresh = file.with_name(f".{file.name}.part")
    write(fresh)
    os.replace(fresh, file)
