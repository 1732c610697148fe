"""What a run keeps in its folder, so that it can be stopped at any step, killed at any point, and taken up again."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from dpkfc.errors import PrivacyError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

SAVE_EVERY, SAVE_SHARE = 60.0, 0.02  # seconds, or of the planned steps, between checkpoints
MOST_SAVING = 0.1  # of the time
LOCK = ".lock"


def check_folder(out: Path) -> None:
    """Refuse an --out that cannot become a folder to write into, before anything slow is done. It makes nothing."""
    try:
        found = next(place for place in (out, *out.absolute().parents) if place.exists())
    except OSError as problem:  # too long a name, say
        raise PrivacyError(
            f"--out {out} cannot be used ({problem.strerror}): choose another folder"
        ) from problem
    if not found.is_dir():
        raise PrivacyError(
            f"--out {out}: {found} is a file, and a folder is needed: choose another"
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise PrivacyError(f"--out {out}: {found} may not be written to: choose another folder")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; what was made and is empty at the end goes again.

    The operating system holds the lock, and lets go of it when the process ends, however it does.
    """
    check_folder(out)
    made = [place for place in (out, *out.parents) if not place.exists()]
    out.mkdir(parents=True, exist_ok=True)
    lock = _lock(out)
    try:
        yield
    finally:
        if lock is not None:
            (out / LOCK).unlink(missing_ok=True)  # while it is held: see the end of `_lock`
            os.close(lock)
        for place in made:
            with suppress(OSError):  # not empty
                place.rmdir()


def _lock(out: Path) -> int | None:
    """An open file with the lock; None where there are none."""
    if fcntl is None:
        return None
    while True:
        file = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise PrivacyError(
                f"another process is training in {out}: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            os.close(file)
            (out / LOCK).unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(out / LOCK)):
                return file
        os.close(
            file
        )  # its owner removed it after it was opened here: the next may have made another


def resumes(out: Path, config: dict[str, Any]) -> bool:
    """Whether the folder holds this run already; if another one, that is an error."""
    if not (out / "config.json").exists():
        if (out / "model.safetensors").exists():
            raise PrivacyError(
                f"{out} holds the model.safetensors of something else: choose another --out"
            )
        return False
    try:
        found = json.loads((out / "config.json").read_text())
    except ValueError as problem:
        raise PrivacyError(
            f"{out}/config.json is damaged ({problem}): choose another --out"
        ) from problem
    config = json.loads(json.dumps(config))
    changed = [
        key
        for key in {**found, **config}
        if key != "settings" and found.get(key) != config.get(key)
    ]
    settings = found.get("settings", {})
    changed += [key for key, value in config["settings"].items() if settings.get(key) != value]
    if changed:
        raise PrivacyError(
            f"{out} holds a run with another {', '.join(changed)}: repeat that run's command to resume it, or choose "
            "another --out"
        )
    return True


@dataclass
class Fingerprint:
    """Of inputs and labels, kept in the checkpoint, which is secret: a run goes on with the records it began with."""

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
                "the records are not those that the run began with: restore them, or begin another --out"
            )


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a request to terminate, waits for the step under way; a second one does not.

    A signal that is ignored stays ignored: that is what nohup, and `&` in a script, ask for. So does a handler that was
    not installed from Python (None): it could not be put back.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only there can signals be handled
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }
    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def worth_saving(steps: int, planned: int, since: float, saving: float, working: float) -> bool:
    """Whether a checkpoint is due, `steps` steps and `since` seconds after the last.

    A kill loses the steps since then, and a ledger does not give them back; so they are few. But of the seconds at
    work, `working`, those that went into checkpoints, `saving`, are to be a small part.
    """
    due = since > SAVE_EVERY or steps >= SAVE_SHARE * planned
    return due and saving <= MOST_SAVING * working


def keep_metrics(out: Path, steps: int) -> None:
    """Without a line that was cut off, and those of steps after the checkpoint: they are taken again, or are lost."""
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
    write_whole(file, lambda fresh: fresh.write_text(json.dumps(content, indent=2) + "\n"))


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """All of the file or nothing of it, whatever the process is killed at."""
    fresh = file.with_name(f".{file.name}.part")
    write(fresh)
    os.replace(fresh, file)
