"""Epsilons of earlier `dpkfc ledger` commands, in the user's cache folder.

Loading the accountant takes about a second, and composing the steps of a run about half a second. A
cached value takes neither. It is used only for the same mechanisms, delta and code: the versions of
dp-accounting, SciPy and NumPy, and the files of dpkfc's accounting.

The file belongs to the person who reads the ledger: one that others own or may write is ignored.
A value in it that was changed by hand changes only what that person sees; budgets are always
checked by computation.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dpkfc.accounting
from dpkfc.accounting.calibrate import epsilon_spent
from dpkfc.accounting.events import Mechanism

MOST_ENTRIES = 1000
PACKAGES = ("dp-accounting", "scipy", "numpy")


def cache_file() -> Path:
    """$XDG_CACHE_HOME/dpkfc/epsilons.json, by default below ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "dpkfc" / "epsilons.json"


class EpsilonCache:
    """`epsilon_spent` with a memory on disk. A cache that cannot be used is ignored."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or cache_file()
        self._code = _code_digest()
        self._entries = _read(self.file)

    def epsilon(self, mechanisms: Sequence[Mechanism], delta: float) -> float:
        """The epsilon of all mechanisms at `delta`, from the cache or computed."""
        key = self._key(mechanisms, delta)
        cached = self._entries.get(key)
        if isinstance(cached, float) and 0 <= cached < math.inf:
            return cached
        epsilon = epsilon_spent(mechanisms, delta)
        if math.isfinite(epsilon):
            self._entries[key] = epsilon
            self._write()
        return epsilon

    def _key(self, mechanisms: Sequence[Mechanism], delta: float) -> str:
        content = [[mechanism.to_json() for mechanism in mechanisms], delta, self._code]
        return sha256(json.dumps(content).encode()).hexdigest()

    def _write(self) -> None:
        newest = dict(list(self._entries.items())[-MOST_ENTRIES:])
        part = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.touch(mode=0o600)
            part.write_text(json.dumps(newest))
            os.replace(part, self.file)


def _read(file: Path) -> dict[str, Any]:
    try:
        status = file.stat()
        foreign = hasattr(os, "getuid") and status.st_uid != os.getuid()
        if foreign or status.st_mode & 0o022:
            return {}
        entries = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _code_digest() -> str:
    """A digest of everything that computes an epsilon."""
    digest = sha256()
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}\n".encode())
    for folder in dpkfc.accounting.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
