"""Invariant 8: the ledger never under-reports, whatever point the process is killed at.

A child charges step t, then makes it visible by appending t to a file, and so on until SIGKILL. The
next child goes on from what the ledger shows. After every kill, the ledger must show at least what
is visible, and at most one step more. The same harness with the two acts swapped must find the
fault.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import dpkfc
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger, read

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

PLAN = Mechanism(0.1, 1.0, 10**9)

# One process imports the library once, and forks a child for every life.
NURSERY = """
import os, sys, time
from dpkfc.accounting.ledger import Ledger, Mechanism

def live(path, order, nap):
    visible = os.open(path + ".released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ledger = Ledger(path, "people")
    step = ledger.open_run("run", Mechanism(.1, 1., 10**9))
    acts = {"charge": lambda: ledger.charge("run", step),
            "release": lambda: os.write(visible, b"%d\\n" % step)}
    first, second = (acts[name] for name in order.split("-"))
    while True:
        step += 1
        first()
        if nap:
            time.sleep(nap)
        second()

print("ready", flush=True)
while line := sys.stdin.readline():
    path, order, nap = line.rstrip().split("\\t")
    child = os.fork()
    if not child:
        try:
            live(path, order, float(nap))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == "ready"

    def live_and_die(
        self, path: Path, after: float, order: str = "charge-release", nap: float = 0.0
    ) -> None:
        """One child, killed `after` so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\t{order}\t{nap}\n")
        self.process.stdin.flush()
        child = int(self._line())
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        assert self._line() == str(-signal.SIGKILL), "the child ended by itself"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def started() -> Iterator[Nursery]:
    environment = {**os.environ, "PYTHONPATH": str(Path(dpkfc.__path__[0]).parent)}
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with started() as nursery:
        yield nursery


def visible(path: Path) -> list[int]:
    released = Path(f"{path}.released")
    return [int(line) for line in released.read_text().splitlines()] if released.exists() else []


def charged(path: Path) -> int:
    """Through a ledger that opens the file anew, as the next process would."""
    with closing(Ledger(path, "people")) as ledger:
        return ledger.open_run("run", PLAN)


@pytest.mark.parametrize(("kills", "nap", "seed"), [(300, 0.0, 0), (50, 0.003, 1)])
def test_after_any_kill_the_ledger_shows_what_was_released(
    nursery: Nursery, tmp_path: Path, kills: int, nap: float, seed: int
) -> None:
    path, chance = tmp_path / "ledger.db", random.Random(seed)
    before, seen = charged(path), 0
    for kill in range(kills):
        nursery.live_and_die(path, chance.uniform(0.0, 0.05), nap=nap)
        # Every other time by a reader, which must find what is only in the log that the dead left
        # behind.
        now = charged(path) if kill % 2 else read(path)[0].charged
        new = visible(path)[seen:]
        assert new == list(
            range(before + 1, before + 1 + len(new))
        )  # each step once, from where the ledger stood
        assert len(new) <= now - before <= len(new) + 1
        before, seen = now, seen + len(new)
    assert seen > kills / 10  # the children did live


def test_a_kill_while_the_ledger_is_being_made_loses_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    chance, lived = random.Random(2), 0
    for kill in range(60):
        path = tmp_path / f"{kill}.db"
        nursery.live_and_die(path, chance.uniform(0.0, 0.08))
        released = len(visible(path))
        assert released <= charged(path) <= released + 1
        lived += released > 0
    assert lived > 0


@pytest.mark.parametrize("order", ["charge-release", "release-charge"])
def test_the_harness_finds_a_release_that_comes_before_its_charge(
    nursery: Nursery, tmp_path: Path, order: str
) -> None:
    faults, before, seen = 0, 0, 0
    path = tmp_path / "ledger.db"
    for _ in range(5):
        nursery.live_and_die(
            path, after=0.4, order=order, nap=0.15
        )  # almost all of a life is between the two
        now, new = charged(path), len(visible(path)) - seen
        faults += now - before < new
        before, seen = now, seen + new
    assert (faults > 0) == (order == "release-charge")
