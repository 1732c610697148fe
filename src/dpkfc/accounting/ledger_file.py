"""The file of a ledger: SQLite with durable commits, safe across forks, append-only.

**Durability.** The file has a write-ahead log and `synchronous=FULL`: a transaction is on disk when
it returns. While a process has the file open, the newest rows are in a second file, `PATH-wal`:
copy both or none. If either of them is removed or replaced meanwhile, the next call raises, because
nobody else would see what it writes.

**Append-only.** Triggers in the file refuse SQL that deletes, renames or alters rows. Only the
steps charged, the closing of a run and its notes on unchecked assumptions may change, and only
grow. This stops accidents and hasty repairs. It does not stop a person who may write the file and
removes the triggers first.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from dpkfc.errors import PrivacyError

Result = TypeVar("Result")

VERSION = 2  # of the schema below, in the file's `user_version`
# "dpkf", in the file's `application_id`: distinguishes a ledger from any other SQLite file.
APPLICATION = 0x64706B66
PATIENCE = 60.0  # seconds to wait while another process writes
PAGE = 512  # bytes: SQLite takes a file with less for an empty one

# INSERT OR REPLACE and UPDATE OR REPLACE delete the row in their way without firing DELETE
# triggers. So there are separate conditions for inserting over a row, by its key or by its rowid,
# and for moving a row to another rowid. SQLite keeps the text of these statements in the file.
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
    )""",  # noqa: E501
    """CREATE TRIGGER never_less BEFORE UPDATE ON runs
        WHEN NEW.charged < OLD.charged OR NEW.closed < OLD.closed OR NEW.mechanism IS NOT OLD.mechanism
        BEGIN SELECT RAISE(ABORT, 'what was charged to a ledger stays charged'); END""",  # noqa: E501
    """CREATE TRIGGER runs_stay_as_they_are BEFORE UPDATE ON runs
        WHEN NEW.rowid IS NOT OLD.rowid OR NEW.dataset IS NOT OLD.dataset OR NEW.run_id IS NOT OLD.run_id
            OR NEW.delta IS NOT OLD.delta OR NEW.started IS NOT OLD.started
            OR substr(NEW.unchecked, 1, length(OLD.unchecked)) IS NOT OLD.unchecked
        BEGIN SELECT RAISE(ABORT, 'a run in a ledger stays as it was entered'); END""",  # noqa: E501
    """CREATE TRIGGER runs_are_entered_once BEFORE INSERT ON runs
        WHEN EXISTS (SELECT 1 FROM runs WHERE rowid = NEW.rowid OR (dataset = NEW.dataset AND run_id = NEW.run_id))
        BEGIN SELECT RAISE(ABORT, 'a run in a ledger is not replaced'); END""",  # noqa: E501
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

ADVICE = {
    "SQLITE_BUSY": "another process holds it: wait for that one, or end it if it hangs",
    "SQLITE_CANTOPEN": (
        "check that the path is a file in an existing folder, and that you may write to both"
    ),
    "SQLITE_CORRUPT": (
        "the file is damaged: restore it from a backup, and count what ran since then as spent"
    ),
    "SQLITE_FULL": "the disk is full: free some space; do not release what was not charged",
    "SQLITE_IOERR": "the disk does not respond: put the ledger on a local disk",
    "SQLITE_NOTADB": "the file is not a ledger: choose another path; it was not changed",
    "SQLITE_PERM": "check that you may write to the file and to its folder",
    "SQLITE_READONLY": "check that you may write to the file and to its folder",
}


class LedgerFile:
    """A connection to a ledger's file that writes. The file is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None
        self._closed = False
        self._pid = os.getpid()
        # Which file the path led to when it was opened, and the log of the present connection.
        self._file_id: tuple[int, int] | None = None
        self._log_id: tuple[int, int] | None = None
        with _LOCK, _explained(path):
            self._connect(create=True)
            _LIVE.add(self)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for SELECT statements."""
        with _LOCK, _explained(self.path):
            yield self._connected()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All statements of the block are on disk at its end, or none of them.

        No other process writes meanwhile.
        """
        with self.reading() as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            # Once more: the caller may now release a result, relying on the file at this path.
            self._check_same_file()

    def close(self) -> None:
        """Disconnect for good."""
        with _LOCK:
            self.disconnect()
            self._closed = True

    def disconnect(self) -> None:
        """Close the connection; the next use opens another one."""
        if self.connection is not None and self._pid == os.getpid():
            self.connection.close()
            self.connection = None

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise PrivacyError(f"the ledger {self.path} was closed: make a new Ledger to continue")
        if self.connection is None:  # disconnected before a fork
            self._check_same_file()
            self._connect(create=False)
        if self._pid != os.getpid():
            raise PrivacyError(
                f"the ledger {self.path} was carried from process {self._pid} into {os.getpid()} "
                "by a fork that bypassed Python: make a new Ledger in each process"
            )
        self._check_same_file()
        assert self.connection is not None
        return self.connection

    def _connect(self, create: bool) -> None:
        connection = _open(self.path, create)
        if self._file_id is None:
            self._file_id = _identity(self.path)
        self.connection = connection
        self._log_id = _identity(_log_of(self.path))
        self._pid = os.getpid()

    def _check_same_file(self) -> None:
        """Raise if the path no longer leads to the file that was opened.

        An open file lives on when it is deleted or another one is moved over it, but nobody else
        sees it: charges would be accepted, and lost with the process. SQLite keeps the log while
        any connection is open.
        """
        expected = {self.path: self._file_id}
        if self.connection is not None:
            expected[_log_of(self.path)] = self._log_id
        for path, known in expected.items():
            present = _identity(path)
            if present != known:
                event = "removed" if present is None else "replaced by another file"
                raise PrivacyError(
                    f"{path} was {event} while the ledger {self.path} was open: nothing is charged "
                    "any more, and no further result may be released. Restore the file and start "
                    "again; count what ran since then as spent"
                )


def read_only(path: Path, query: Callable[[sqlite3.Connection], Result]) -> Result:
    """The result of `query` on the ledger at `path`, which is not changed and may be in use."""
    log = _log_of(path)
    with _LOCK, _explained(path):
        # Without a log nobody has the file open. It is then complete and can be read as it is,
        # also in a folder in which no log can be created.
        if not log.exists():
            before = path.stat()
            result = _query(path, "mode=ro&immutable=1", query)
            after = path.stat()
            is_unchanged = (before.st_mtime_ns, before.st_size) == (
                after.st_mtime_ns,
                after.st_size,
            )
            if not log.exists() and is_unchanged:
                return result
        return _query(path, "mode=ro", query)


def _query(path: Path, options: str, query: Callable[[sqlite3.Connection], Result]) -> Result:
    with closing(_sqlite(path, options)) as db:
        if _is_empty(db, path):
            raise PrivacyError(f"{path} is empty, not a ledger: check the path")
        return query(db)


def _sqlite(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?{options}",
        uri=True,
        isolation_level=None,
        timeout=PATIENCE,
        check_same_thread=False,
    )


def _open(path: Path, create: bool) -> sqlite3.Connection:
    """A connection that writes. A file that is not a ledger is not changed."""
    db = _sqlite(path, "mode=rwc" if create else "mode=rw")
    try:
        is_new = _is_empty(db, path)
        _enable_write_ahead_log(db, path)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")  # for macOS, where fsync() stops at the drive's cache
        if is_new:
            db.execute("BEGIN IMMEDIATE")
            if _is_empty(db, path):  # no other process was faster
                for statement in SCHEMA:
                    db.execute(statement)
            db.execute("COMMIT")
        # Reading creates the log. From now on no other process deletes it.
        db.execute("SELECT count(*) FROM runs").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _is_empty(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is empty. Raises if it is neither empty nor a ledger of this version."""
    # One statement, so that the three numbers come from the same moment.
    application, version, tables = db.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
        "FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application == APPLICATION:
        if version != VERSION:
            raise PrivacyError(
                f"the ledger {path} has schema version {version}, this dpkfc knows {VERSION}: use "
                "the dpkfc that wrote it, or a newer one"
            )
        return False
    if application or version or tables or 0 < path.stat().st_size < PAGE:
        raise PrivacyError(f"{path} is not a ledger: choose another path; it was not changed")
    return True


def _enable_write_ahead_log(db: sqlite3.Connection, path: Path) -> None:
    # This locks the whole file for a moment, and SQLite does not wait for that by itself.
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if not _error_name(error).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise PrivacyError(
            f"the file system of {path} cannot keep a write-ahead log: put the ledger on a local "
            "disk"
        )


def _log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, which distinguish files at the same path; None if there is no file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into a `PrivacyError` with advice."""
    try:
        yield
    except sqlite3.Error as error:
        name = _error_name(error)
        advice = next(
            (text for start, text in ADVICE.items() if name.startswith(start)),
            "nothing was charged",
        )
        raise PrivacyError(f"the ledger {path} cannot be used ({error}): {advice}") from error


def _error_name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


# An SQLite connection must not cross a fork: the locks do not, but the library in the child
# believes that they did, also for new connections to the same file. So every file is disconnected
# before a fork (of data loader workers, for example) and connected again, in either process, at its
# next use. The lock prevents a fork in the middle of another thread's transaction.
_LOCK = threading.RLock()
_LIVE: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _before_fork() -> None:
    _LOCK.acquire()
    for file in _LIVE:
        file.disconnect()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )
