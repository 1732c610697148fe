"""A ledger on disk: what was done to which data set, by every run, in every process.

**Guarantee.** A step is charged before its result can be seen; whatever point the process is killed at,
the ledger shows at least what was released. Why: the ledger is an SQLite file with a write-ahead log and
`synchronous=FULL`, so a commit is on disk before `charge()` returns, and the engine calls `charge()`
before the noisy gradient is written to `.grad`. A kill between the two leaves a step that was paid for
and never seen: the error is on the safe side, and is at most one step a kill.

Nobody pays once for two releases either. A ledger object charges only runs that it opened, only upwards,
and only while nobody else has charged the run since: of two processes that run the same `run_id`, one is
refused at its next step, and so is a run that goes on from a checkpoint older than the ledger.

While a process has the ledger open, its newest lines are in a second file, `PATH-wal`: copy both or none. If either
of them is removed or replaced meanwhile, the next call is refused: what it writes would be seen by nobody.

Rows are only added. Triggers in the file refuse SQL that deletes, renames or alters them; only the steps charged, the
closing of a run and its notes on what was not checked may change, and only grow. This stops accidents and hasty
repairs. It does not stop a person who may write the file and removes the triggers first.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sqlite3
import threading
import time
import unicodedata
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path

from dpkfc.accounting.calibrate import Accountant, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.rounding import round_up
from dpkfc.errors import PrivacyError

VERSION = 2  # of the schema below, in the file's `user_version`
APPLICATION = (
    0x64706B66  # "dpkf", in the file's `application_id`: tells a ledger from any other SQLite file
)
PATIENCE = 60.0  # seconds to wait while another process writes
SIMILAR = 0.85  # ratio of difflib.SequenceMatcher from which two names resemble each other

# INSERT OR REPLACE and UPDATE OR REPLACE delete the row in their way without firing DELETE triggers. So inserting over
# a row, by its key or by its rowid, and moving a row to another rowid, have conditions of their own.
SCHEMA = (
    "CREATE TABLE budgets (dataset TEXT PRIMARY KEY, epsilon REAL NOT NULL, delta REAL NOT NULL)",
    """CREATE TABLE runs (
        dataset TEXT NOT NULL,
        run_id TEXT NOT NULL,
        mechanism TEXT NOT NULL,             -- JSON: what was planned
        charged INTEGER NOT NULL DEFAULT 0 CHECK (typeof(charged) = 'integer'),  -- steps
        started TEXT NOT NULL,               -- ISO 8601, UTC
        closed INTEGER NOT NULL DEFAULT 0 CHECK (closed IN (0, 1)),
        writer TEXT NOT NULL DEFAULT '',     -- which process charged last
        delta REAL,                          -- at which the run's own epsilon is stated; NULL if nobody said
        unchecked TEXT NOT NULL DEFAULT '',  -- what nobody checked, a line each
        PRIMARY KEY (dataset, run_id)
    )""",
    """CREATE TRIGGER never_less BEFORE UPDATE ON runs
        WHEN NEW.charged < OLD.charged OR NEW.closed < OLD.closed OR NEW.mechanism IS NOT OLD.mechanism
        BEGIN SELECT RAISE(ABORT, 'what was charged to a ledger stays charged'); END""",
    """CREATE TRIGGER runs_stay_as_they_are BEFORE UPDATE ON runs
        WHEN NEW.rowid IS NOT OLD.rowid OR NEW.dataset IS NOT OLD.dataset OR NEW.run_id IS NOT OLD.run_id
            OR NEW.delta IS NOT OLD.delta OR NEW.started IS NOT OLD.started
            OR substr(NEW.unchecked, 1, length(OLD.unchecked)) IS NOT OLD.unchecked
        BEGIN SELECT RAISE(ABORT, 'a run in a ledger stays as it was entered'); END""",
    """CREATE TRIGGER runs_are_entered_once BEFORE INSERT ON runs
        WHEN EXISTS (SELECT 1 FROM runs WHERE rowid = NEW.rowid OR (dataset = NEW.dataset AND run_id = NEW.run_id))
        BEGIN SELECT RAISE(ABORT, 'a run in a ledger is not replaced'); END""",
    """CREATE TRIGGER runs_are_not_deleted BEFORE DELETE ON runs
        BEGIN SELECT RAISE(ABORT, 'a run in a ledger is not deleted'); END""",
    """CREATE TRIGGER budgets_stay_as_they_are BEFORE UPDATE ON budgets
        BEGIN SELECT RAISE(ABORT, 'a budget in a ledger stays as it is'); END""",
    """CREATE TRIGGER budgets_are_entered_once BEFORE INSERT ON budgets
        WHEN EXISTS (SELECT 1 FROM budgets WHERE rowid = NEW.rowid OR dataset = NEW.dataset)
        BEGIN SELECT RAISE(ABORT, 'a budget in a ledger is not replaced'); END""",
    """CREATE TRIGGER budgets_are_not_deleted BEFORE DELETE ON budgets
        BEGIN SELECT RAISE(ABORT, 'a budget in a ledger is not deleted'); END""",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)


@dataclass(frozen=True)
class LedgerRun:
    """One run as the ledger shows it."""

    run_id: str
    dataset: str
    mechanism: Mechanism  # as planned
    charged: int  # steps of it that may have been seen
    started: str  # ISO 8601, UTC
    closed: bool
    delta: float | None = None  # at which its own epsilon is stated, if that was said
    unchecked: tuple[
        str, ...
    ] = ()  # what its epsilon relies on and nobody checked: keys of dpkfc.planning.plan.NOT_CHECKED

    @property
    def spent(self) -> Mechanism:
        """What may have been seen so far."""
        return self.mechanism.after(self.charged)

    @property
    def committed(self) -> Mechanism:
        """What may still come to be seen: the whole plan, unless the run was closed before its end."""
        return self.spent if self.closed else self.mechanism


class Ledger:
    """The runs on one data set, in a file that several processes may share.

    `dataset` is the user's own name for the private records: runs under one name are composed, so give one
    name to all that touches the same people. `budget=(epsilon, delta)` caps all of them together. It is kept
    in the file when first given; later it may be left out, and must agree when given.

    >>> import tempfile
    >>> ledger = Ledger(tempfile.mkdtemp() + "/privacy.db", "patients", budget=(3.0, 1e-5))
    >>> done = ledger.open_run("first", Mechanism(0.01, 1.0, steps=1000))
    >>> ledger.charge("first", done + 1)  # and only now release step done + 1
    >>> ledger.charged("first")
    1
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dataset: str,
        *,
        budget: tuple[float, float] | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.dataset = _name("dataset", dataset)
        self._token = secrets.token_hex(8)
        self._left: dict[
            str, tuple[int, str]
        ] = {}  # the steps and the writer at which this object last saw a run
        self._closed = False
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which file the path led to when it was opened
        self._log: tuple[int, int] | None = (
            None  # and which write-ahead log belongs to the present connection
        )
        with _LOCK, _explained(self.path):
            self._connect(create=True)
            _LIVE.add(self)
        if budget is not None:
            self._keep_budget(*_sound_budget(budget))

    def open_run(
        self,
        run_id: str,
        mechanism: Mechanism,
        *,
        delta: float | None = None,
        unchecked: Sequence[str] = (),
    ) -> int:
        """Register the run with all the steps it plans, or take it up again; returns the steps already charged.

        Args:
            run_id: the name of the run, unique within the data set.
            mechanism: what it plans. A run that is resumed must plan the same.
            delta: at which the run states its epsilon. A run that is resumed may leave it out, but not change it.
            unchecked: what the run's epsilon relies on and nobody checked, as `Plan.unchecked` has it. Notes of a run
                that is resumed are added to those it has; none is taken back.

        Under a budget, a new run is admitted only if it fits beside what is committed: whole plans of open
        runs, charged steps of closed ones. The analysis can take seconds and would stall the processes that
        charge, so it is done outside the transaction; the run is then entered in one transaction, and only
        if what is committed is still what was analysed.

        The first run of a data set whose name resembles that of another in the file causes a UserWarning: runs under
        different names are not composed, and a misspelt name would make what was spent invisible.
        """
        run_id, mechanism = _name("run_id", run_id), _sound(mechanism)
        delta, notes = _sound_delta(delta), _sound_notes(unchecked)
        admitted: tuple[object, ...] | None = None
        while True:
            with self._transaction() as db:
                run = self._find(db, run_id)
                if run is not None:
                    self._check_resumed(run, mechanism, delta)
                    self._add_notes(db, run, notes)
                    self._left[run_id] = run.charged, self._writer(db, run_id)
                    return run.charged
                budget, others = self._budget(db), self._runs(db)
                committed = [other.committed for other in others]
                if budget is None or admitted == (budget, committed):
                    if not others:
                        self._warn_of_similar_names(db)
                    now = datetime.now(UTC).isoformat(timespec="seconds")
                    db.execute(
                        "INSERT INTO runs (dataset, run_id, mechanism, started, delta, unchecked) "
                        "VALUES (?, ?, ?, ?, ?, ?)",
                        (
                            self.dataset,
                            run_id,
                            json.dumps(mechanism.to_json()),
                            now,
                            delta,
                            _lines(notes),
                        ),
                    )
                    self._left[run_id] = 0, ""
                    return 0
            self._fits(budget, others, [mechanism], f"run {run_id!r}")
            admitted = (budget, committed)

    def charge(self, run_id: str, steps: int) -> None:
        """Charge the run up to `steps` steps in all. On disk before this returns: release the result only then.

        A total that is not above the last one raises: its release would be the second for one charge. After
        a charge that was interrupted (Ctrl-C), nothing was released, and the same total may be charged again.
        """
        steps, me = (
            _count("steps", steps),
            f"{os.getpid()}-{self._token}",
        )  # a child has its parent's token
        with self._transaction() as db:
            run, writer = self._known(db, run_id), self._writer(db, run_id)
            where, left = self._label(run_id), self._left.get(run_id)
            if run.closed:
                raise PrivacyError(f"{where} is closed: open a run of another name to go on")
            if left is None:
                raise PrivacyError(f"{where} was not opened here: call open_run() before charge()")
            if writer != me and (run.charged, writer) != left:
                raise PrivacyError(
                    f"{where} stands at {run.charged} steps, but this process left it at {left[0]}: another process "
                    "runs under the same run_id; give each its own, or go on from what open_run() returns"
                )
            if steps <= left[0]:
                raise PrivacyError(
                    f"{where} is charged up to step {run.charged}, so step {steps} was paid for before and may have "
                    "been seen: go on from what open_run() returns, not from an older checkpoint"
                )
            if steps > run.mechanism.steps:
                raise PrivacyError(
                    f"{where} planned {run.mechanism.steps} steps, so step {steps} cannot be charged: stop here, or "
                    "open another run for the further steps"
                )
            total = max(steps, run.charged)
            db.execute(
                "UPDATE runs SET charged = ?, writer = ? WHERE dataset = ? AND run_id = ?",
                (total, me, self.dataset, run_id),
            )
        self._left[run_id] = total, me

    def charged(self, run_id: str) -> int:
        """The steps charged to the run so far, by whichever process."""
        with self._reading() as db:
            return self._known(db, run_id).charged

    def close_run(self, run_id: str) -> None:
        """No more steps will be charged: a budget counts only what was. There is no way back."""
        with self._transaction() as db:
            self._known(db, run_id)
            db.execute(
                "UPDATE runs SET closed = 1 WHERE dataset = ? AND run_id = ?",
                (self.dataset, run_id),
            )

    def runs(self) -> list[LedgerRun]:
        """Every run on this data set, in the order they were opened."""
        with self._reading() as db:
            return self._runs(db)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """The epsilon at `delta` of all charged steps of all runs on this data set (add-or-remove-one)."""
        return epsilon_spent([run.spent for run in self.runs()], delta, accountant)

    def close(self) -> None:
        """Let go of the file. Runs that are open stay open in it."""
        with _LOCK:
            self._disconnect()
            self._closed = True

    def _keep_budget(self, epsilon: float, delta: float) -> None:
        with self._transaction() as db:
            kept = self._budget(db)
            if kept is None:
                self._fits((epsilon, delta), self._runs(db), [], "the budget")
                db.execute("INSERT INTO budgets VALUES (?, ?, ?)", (self.dataset, epsilon, delta))
            elif kept != (epsilon, delta):
                raise PrivacyError(
                    f"budget=({epsilon:g}, {delta:g}) for data set {self.dataset!r}, but {self.path} keeps epsilon = "
                    f"{kept[0]:g} at delta = {kept[1]:g}: a budget stays; pass budget={kept} or leave it out"
                )

    def _fits(
        self,
        budget: tuple[float, float],
        others: Sequence[LedgerRun],
        wanted: list[Mechanism],
        what: str,
    ) -> None:
        allowed, delta = budget
        total = epsilon_spent([run.committed for run in others] + wanted, delta)
        if total > allowed:
            spent = epsilon_spent([run.spent for run in others], delta)
            raise PrivacyError(
                f"{what} does not fit on data set {self.dataset!r} in {self.path}: epsilon = {round_up(spent)} is "
                f"spent, {round_up(total)} when all that is planned has run, {allowed:g} is allowed at delta = "
                f"{delta:g}; plan fewer steps or more noise, or call close_run() for open runs that will not go on"
            )

    def _check_resumed(self, run: LedgerRun, mechanism: Mechanism, delta: float | None) -> None:
        where = self._label(run.run_id)
        if run.closed:
            raise PrivacyError(f"{where} is closed: open a run of another name to go on")
        if run.mechanism != mechanism:
            raise PrivacyError(
                f"{where} was opened with {run.mechanism}, not {mechanism}: resume it with the settings it began with, "
                "or open a run of another name"
            )
        if delta is not None and delta != run.delta:
            raise PrivacyError(
                f"{where} was opened with delta={run.delta}, not {delta}: resume it with the delta it began with, or "
                "open a run of another name"
            )

    def _add_notes(self, db: sqlite3.Connection, run: LedgerRun, notes: Sequence[str]) -> None:
        if not set(notes) <= set(run.unchecked):
            db.execute(
                "UPDATE runs SET unchecked = ? WHERE dataset = ? AND run_id = ?",
                (_lines((*run.unchecked, *notes)), self.dataset, run.run_id),
            )

    def _warn_of_similar_names(self, db: sqlite3.Connection) -> None:
        known = [
            name
            for (name,) in db.execute("SELECT dataset FROM runs UNION SELECT dataset FROM budgets")
        ]
        similar = [name for name in known if name != self.dataset and _resemble(name, self.dataset)]
        if similar:
            warnings.warn(
                f"data set {self.dataset!r} is new in {self.path}, which knows {', '.join(map(repr, similar))}: runs "
                "under different names are not composed. If these are the same people, use the known name",
                stacklevel=3,
            )

    def _budget(self, db: sqlite3.Connection) -> tuple[float, float] | None:
        row = db.execute(
            "SELECT epsilon, delta FROM budgets WHERE dataset = ?", (self.dataset,)
        ).fetchone()
        return None if row is None else (float(row[0]), float(row[1]))

    def _find(self, db: sqlite3.Connection, run_id: str) -> LedgerRun | None:
        found = _select(db, "WHERE dataset = ? AND run_id = ?", self.dataset, run_id)
        return found[0] if found else None

    def _known(self, db: sqlite3.Connection, run_id: str) -> LedgerRun:
        run = self._find(db, _name("run_id", run_id))
        if run is None:
            raise PrivacyError(
                f"there is no {self._label(run_id)}: call open_run() first, and check the name of the data set"
            )
        return run

    def _runs(self, db: sqlite3.Connection) -> list[LedgerRun]:
        return _select(db, "WHERE dataset = ?", self.dataset)

    def _writer(self, db: sqlite3.Connection, run_id: str) -> str:
        row = db.execute(
            "SELECT writer FROM runs WHERE dataset = ? AND run_id = ?", (self.dataset, run_id)
        ).fetchone()
        return str(row[0])

    def _label(self, run_id: str) -> str:
        return f"run {run_id!r} on data set {self.dataset!r} in {self.path}"

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _LOCK, _explained(self.path):
            yield self._connected()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block, on disk, or nothing of it; no other process writes meanwhile."""
        with self._reading() as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            self._check_same_file()  # once more: whoever releases a result now can rely on the file at this path

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise PrivacyError(f"the ledger {self.path} was closed: make a new Ledger to go on")
        if self._connection is None:  # let go of before a fork
            self._check_same_file()
            self._connect(create=False)
        if self._pid != os.getpid():
            raise PrivacyError(
                f"the ledger {self.path} was carried from process {self._pid} into {os.getpid()} by a fork that Python "
                "was not told of: make a new Ledger in each process"
            )
        self._check_same_file()
        assert self._connection is not None
        return self._connection

    def _connect(self, create: bool) -> None:
        connection = _open(self.path, create)
        if self._file is None:
            self._file = _identity(self.path)
        self._connection, self._log, self._pid = (
            connection,
            _identity(_log_of(self.path)),
            os.getpid(),
        )

    def _check_same_file(self) -> None:
        """Refuse to go on if the path no longer leads to the file that was opened.

        An open file lives on when it is deleted or another one is moved over it, but nobody else sees it: charges
        would be accepted, and forgotten with the process. SQLite keeps the log while any connection is open.
        """
        expected = {self.path: self._file}
        if self._connection is not None:
            expected[_log_of(self.path)] = self._log
        for path, known in expected.items():
            present = _identity(path)
            if present != known:
                what = "removed" if present is None else "replaced by another file"
                raise PrivacyError(
                    f"{path} was {what} while the ledger {self.path} was open: nothing is charged any more, and no "
                    "further result may be released. Restore the file and start again; count what ran since then as "
                    "spent"
                )

    def _disconnect(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
            self._connection = None


def read(path: str | os.PathLike[str]) -> list[LedgerRun]:
    """Every run on every data set in the ledger at `path`, which is not changed and may be in use."""
    file = Path(path).absolute()
    if not file.is_file():
        raise PrivacyError(
            f"no ledger at {file}: check the path; a ledger is made by the first run that names it"
        )
    log = _log_of(file)
    with _LOCK, _explained(file):
        if (
            not log.exists()
        ):  # then nobody has it open: the file is all, and needs nothing beside it to be read
            before = file.stat()
            runs = _read(file, "mode=ro&immutable=1")
            after = file.stat()
            if not log.exists() and (before.st_mtime_ns, before.st_size) == (
                after.st_mtime_ns,
                after.st_size,
            ):
                return runs
        return _read(file, "mode=ro")


def _read(file: Path, how: str) -> list[LedgerRun]:
    with closing(_connect(file, how)) as db:
        if _is_new(db, file):
            raise PrivacyError(f"{file} is empty, not a ledger: check the path")
        return _select(db)


def _select(db: sqlite3.Connection, where: str = "", *values: str) -> list[LedgerRun]:
    rows = db.execute(
        "SELECT run_id, dataset, mechanism, charged, started, closed, delta, unchecked "
        f"FROM runs {where} ORDER BY rowid",
        values,
    )
    return [_run(*row) for row in rows]


def _run(
    run_id: str,
    dataset: str,
    mechanism: str,
    charged: int,
    started: str,
    closed: int,
    delta: float | None,
    unchecked: str,
) -> LedgerRun:
    try:
        planned = Mechanism.from_json(json.loads(mechanism))
    except (TypeError, ValueError) as error:
        raise PrivacyError(
            f"run {run_id!r} on data set {dataset!r} has a mechanism that this dpkfc cannot read, {mechanism}: it was "
            "written by a newer one; upgrade to read it"
        ) from error
    return LedgerRun(
        run_id,
        dataset,
        planned,
        charged,
        started,
        bool(closed),
        delta,
        tuple(unchecked.splitlines()),
    )


def _log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells one file from another at the same path; None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _connect(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?{how}"
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=PATIENCE, check_same_thread=False
    )


def _open(path: Path, create: bool = True) -> sqlite3.Connection:
    """A connection that writes; a file that is not a ledger is left as it was."""
    db = _connect(path, "mode=rwc" if create else "mode=rw")
    try:
        new = _is_new(db, path)
        _write_ahead(db, path)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")  # where fsync() stops at the drive's own cache (macOS)
        if new:
            db.execute("BEGIN IMMEDIATE")
            if _is_new(db, path):  # still: no other process was first
                for statement in SCHEMA:
                    db.execute(statement)
            db.execute("COMMIT")
        db.execute(
            "SELECT count(*) FROM runs"
        ).fetchone()  # from here on the log exists, and nobody else deletes it
    except BaseException:
        db.close()
        raise
    return db


def _is_new(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is empty; raises if it is neither that nor a ledger this version can read."""
    # One statement, so that the three come from one moment.
    application, version, tables = db.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
        "FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application == APPLICATION:
        if version != VERSION:
            raise PrivacyError(
                f"the ledger {path} has schema version {version}, this dpkfc knows {VERSION}: use the dpkfc that "
                "wrote it, or a newer one"
            )
        return False
    if (
        application or version or tables or 0 < path.stat().st_size < 512
    ):  # less than a page is empty to SQLite
        raise PrivacyError(f"{path} is not a ledger: choose another path; it was not touched")
    return True


def _write_ahead(db: sqlite3.Connection, path: Path) -> None:
    # Turning the log on takes the whole file for a moment, and SQLite does not wait for that by itself.
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if not _code(error).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise PrivacyError(
            f"the file system of {path} cannot keep a write-ahead log: put the ledger on a local disk"
        )


ADVICE = {
    "SQLITE_BUSY": "another process holds it: wait for that one, or end it if it hangs",
    "SQLITE_CANTOPEN": "check that the path is a file in an existing folder, and that you may write to both",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, and count what ran since then as spent",
    "SQLITE_FULL": "the disk is full: free some space; what was not charged must not be released",
    "SQLITE_IOERR": "the disk does not answer: put the ledger on a local disk",
    "SQLITE_NOTADB": "the file is not a ledger: choose another path; it was not touched",
    "SQLITE_PERM": "check that you may write to the file and to its folder",
    "SQLITE_READONLY": "check that you may write to the file and to its folder",
}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        advice = next(
            (text for start, text in ADVICE.items() if _code(error).startswith(start)),
            "nothing was charged",
        )
        raise PrivacyError(f"the ledger {path} cannot be used ({error}): {advice}") from error


def _code(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


def _name(what: str, value: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or value != value.strip():
        raise PrivacyError(
            f"{what}={value!r}: must be printable text, not empty, without spaces at its ends"
        )
    return value


def _resemble(one: str, other: str) -> bool:
    """Whether two names may be meant for one data set: equal but for case, spaces and punctuation, or nearly equal.

    >>> _resemble("Patients 2024", "patients-2024"), _resemble("patients", "patient"), _resemble("people", "digits")
    (True, True, False)
    """
    folded = [unicodedata.normalize("NFKC", name).casefold() for name in (one, other)]
    bare = ["".join(letter for letter in name if letter.isalnum()) for name in folded]
    pairs = [folded, bare] if all(bare) else [folded]
    return any(SequenceMatcher(None, a, b, autojunk=False).ratio() >= SIMILAR for a, b in pairs)


def _lines(notes: Sequence[str]) -> str:
    """Each of them once, in a line of its own."""
    return "".join(f"{note}\n" for note in dict.fromkeys(notes))


def _sound_notes(unchecked: Sequence[str]) -> tuple[str, ...]:
    if isinstance(unchecked, str):
        raise PrivacyError(
            f"unchecked={unchecked!r}: must be a sequence of texts, such as ({unchecked!r},)"
        )
    return tuple(_name("unchecked", note) for note in unchecked)


def _sound_delta(delta: float | None) -> float | None:
    if delta is None:
        return None
    try:
        number = float(delta)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < 1:
        raise PrivacyError(f"delta={delta!r}: must be a number strictly between 0 and 1")
    return number


def _count(what: str, value: int, least: int = 1) -> int:
    try:
        number = -1 if isinstance(value, bool) else value.__index__()
    except AttributeError:
        number = -1
    if not least <= number < 2**63:
        raise PrivacyError(f"{what}={value!r}: must be a whole number, at least {least}")
    return number


def _sound(mechanism: Mechanism) -> Mechanism:
    """The mechanism in Python's own numbers, which JSON can write and give back."""
    return Mechanism(
        float(mechanism.sampling_rate),
        float(mechanism.noise_multiplier),
        _count("steps", mechanism.steps, least=0),
        bool(mechanism.public_geometry),
        _count("cycle", mechanism.cycle),
        tuple(float(factor) for factor in mechanism.growth),
        mechanism.best_of,  # has Python's own already
    )


def _sound_budget(budget: tuple[float, float]) -> tuple[float, float]:
    try:
        epsilon, delta = map(float, budget)
    except (TypeError, ValueError):
        raise PrivacyError(f"budget={budget!r}: must be a pair (epsilon, delta)") from None
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1):
        raise PrivacyError(
            f"budget={budget!r}: epsilon must be positive and finite, delta strictly between 0 and 1"
        )
    return epsilon, delta


# An SQLite connection must not cross a fork: the locks do not, but the library in the child believes that
# they did, for new connections to the same file too. So every ledger lets go of its file before a fork (of
# data loader workers, say) and takes it up again, in either process, when it is next used. The lock keeps
# a fork out of the middle of another thread's transaction.
_LOCK = threading.RLock()
_LIVE: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _before_fork() -> None:
    _LOCK.acquire()
    for ledger in _LIVE:
        ledger._disconnect()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )
