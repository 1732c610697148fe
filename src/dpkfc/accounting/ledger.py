"""A ledger on disk: what was done to which data set, by every run, in every process.

**Guarantee.** A step is charged before its result can be seen. At whatever point the process is
killed, the ledger shows at least what was released. Why: a charge is on disk before `charge()`
returns (`dpkfc.accounting.ledger_file`), and the engine calls `charge()` before it writes the noisy
gradient to `.grad`. A kill between the two leaves a step that was paid for and never seen: the
error is on the safe side, and is at most one step per kill.

No charge pays for two releases either. A `Ledger` object charges only runs that it opened, only
upwards, and only while nobody else has charged the run since. If two processes use the same
`run_id`, one of them is refused at its next step, and so is a run that continues from a checkpoint
older than the ledger.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sqlite3
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from dpkfc.accounting.calibrate import Accountant, epsilon_spent
from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger_file import LedgerFile, read_only
from dpkfc.accounting.rounding import round_up
from dpkfc.errors import PrivacyError

SIMILAR = 0.85  # ratio of difflib.SequenceMatcher from which two names are called similar


@dataclass(frozen=True)
class LedgerRun:
    """One run in a ledger.

    Args:
        run_id: the name of the run, unique within the data set.
        dataset: the name of the data set.
        mechanism: what was planned.
        charged: steps whose results may have been seen.
        started: date and time, ISO 8601, UTC.
        closed: whether no more steps will be charged.
        delta: the delta at which the run states its epsilon, if known.
        unchecked: assumptions of epsilon that were not checked, keys of
            `dpkfc.accounting.unchecked.NOT_CHECKED`.
    """

    run_id: str
    dataset: str
    mechanism: Mechanism
    charged: int
    started: str
    closed: bool
    delta: float | None = None
    unchecked: tuple[str, ...] = ()

    @property
    def spent(self) -> Mechanism:
        """What may have been seen so far."""
        return self.mechanism.after(self.charged)

    @property
    def committed(self) -> Mechanism:
        """What may still be seen: the whole plan, unless the run was closed before its end."""
        return self.spent if self.closed else self.mechanism


class Ledger:
    """The runs on one data set, in a file that several processes may share.

    Args:
        path: the file. It is created if it does not exist.
        dataset: your own name for the private records. Runs under one name are composed, so use one
            name for everything that involves the same people.
        budget: (epsilon, delta), an upper bound for all runs on the data set together. It is stored
            in the file when first given. Later it may be omitted, and must agree if given.

    Raises:
        PrivacyError: the file is not a ledger or cannot be used, the budget differs from the stored
            one, or it is exceeded already.

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
        self.dataset = _check_text("dataset", dataset)
        self._token = secrets.token_hex(8)
        # The steps charged, and by whom, when this object last saw a run.
        self._last_seen: dict[str, tuple[int, str]] = {}
        self._file = LedgerFile(self.path)
        if budget is not None:
            self._store_budget(*_check_budget(budget))

    def open_run(
        self,
        run_id: str,
        mechanism: Mechanism,
        *,
        delta: float | None = None,
        unchecked: Sequence[str] = (),
    ) -> int:
        """Register a run with all its planned steps, or resume it.

        Args:
            run_id: the name of the run, unique within the data set.
            mechanism: the plan. A resumed run must have the same plan.
            delta: the delta at which the run states its epsilon. A resumed run may omit it, but not
                change it.
            unchecked: assumptions of epsilon that were not checked (`Plan.unchecked`). A resumed
                run adds to its notes; none is removed.

        Returns:
            The number of steps charged so far.

        Raises:
            PrivacyError: the run does not fit the budget, was closed, or is resumed with other
                settings.

        **Guarantee.** Under a budget, a new run is admitted only if it fits together with what is
        committed: whole plans of open runs, charged steps of closed runs. The analysis can take
        seconds and would block processes that charge, so it is done outside the transaction. The
        run is then entered in one transaction, and only if the committed runs are still those that
        were analysed.

        The first run of a data set whose name is similar to another one in the file causes a
        UserWarning: runs under different names are not composed, and a misspelt name would hide
        what was spent.
        """
        run_id = _check_text("run_id", run_id)
        mechanism = _python_numbers(mechanism)
        delta = _check_delta(delta)
        notes = _check_notes(unchecked)
        admitted: tuple[object, ...] | None = None
        while True:
            with self._file.transaction() as db:
                run = self._find(db, run_id)
                if run is not None:
                    self._check_resumed(run, mechanism, delta)
                    self._add_notes(db, run, notes)
                    self._last_seen[run_id] = run.charged, self._writer(db, run_id)
                    return run.charged
                budget = self._budget(db)
                others = self._runs(db)
                committed = [other.committed for other in others]
                if budget is None or admitted == (budget, committed):
                    if not others:
                        self._warn_of_similar_names(db)
                    self._insert(db, run_id, mechanism, delta, notes)
                    self._last_seen[run_id] = 0, ""
                    return 0
            self._check_fits(budget, others, [mechanism], f"run {run_id!r}")
            admitted = (budget, committed)

    def charge(self, run_id: str, steps: int) -> None:
        """Charge the run up to `steps` steps in total.

        **Guarantee.** The charge is on disk before this returns; release the result only then. A
        total that is not above the last one raises: its release would be the second for one charge.
        After an interrupted charge (Ctrl-C) nothing was released, and the same total may be charged
        again.

        Raises:
            PrivacyError: the step was charged before, exceeds the plan, or another process charges
                the same run.
        """
        steps = _check_integer("steps", steps)
        # A forked child has its parent's token, but another process id.
        writer = f"{os.getpid()}-{self._token}"
        with self._file.transaction() as db:
            run = self._known(db, run_id)
            last_writer = self._writer(db, run_id)
            last_seen = self._last_seen.get(run_id)
            label = self._label(run_id)
            if run.closed:
                raise PrivacyError(f"{label} is closed: open a run of another name to continue")
            if last_seen is None:
                raise PrivacyError(f"{label} was not opened here: call open_run() before charge()")
            if last_writer != writer and (run.charged, last_writer) != last_seen:
                raise PrivacyError(
                    f"{label} is charged up to step {run.charged}, but this process last saw step "
                    f"{last_seen[0]}: another process runs under the same run_id. Give each its "
                    "own, or continue from what open_run() returns"
                )
            if steps <= last_seen[0]:
                raise PrivacyError(
                    f"{label} is charged up to step {run.charged}, so step {steps} was paid for "
                    "before and may have been seen: continue from what open_run() returns, not "
                    "from an older checkpoint"
                )
            if steps > run.mechanism.steps:
                raise PrivacyError(
                    f"{label} planned {run.mechanism.steps} steps, so step {steps} cannot be "
                    "charged: stop here, or open another run for the further steps"
                )
            total = max(steps, run.charged)
            db.execute(
                "UPDATE runs SET charged = ?, writer = ? WHERE dataset = ? AND run_id = ?",
                (total, writer, self.dataset, run_id),
            )
        self._last_seen[run_id] = total, writer

    def charged(self, run_id: str) -> int:
        """The steps charged to the run so far, by any process."""
        with self._file.reading() as db:
            return self._known(db, run_id).charged

    def close_run(self, run_id: str) -> None:
        """Declare that no more steps will be charged, so that a budget counts only charged steps.

        This cannot be undone.
        """
        with self._file.transaction() as db:
            self._known(db, run_id)
            db.execute(
                "UPDATE runs SET closed = 1 WHERE dataset = ? AND run_id = ?",
                (self.dataset, run_id),
            )

    def runs(self) -> list[LedgerRun]:
        """All runs on this data set, in the order in which they were opened."""
        with self._file.reading() as db:
            return self._runs(db)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """The epsilon at `delta` of all charged steps of all runs on this data set.

        **Guarantee.** As `dpkfc.accounting.calibrate.epsilon_spent`.
        """
        return epsilon_spent([run.spent for run in self.runs()], delta, accountant)

    def close(self) -> None:
        """Close the file. Open runs stay open in it."""
        self._file.close()

    def _store_budget(self, epsilon: float, delta: float) -> None:
        with self._file.transaction() as db:
            stored = self._budget(db)
            if stored is None:
                self._check_fits((epsilon, delta), self._runs(db), [], "the budget")
                db.execute("INSERT INTO budgets VALUES (?, ?, ?)", (self.dataset, epsilon, delta))
            elif stored != (epsilon, delta):
                raise PrivacyError(
                    f"budget=({epsilon:g}, {delta:g}) for data set {self.dataset!r}, but "
                    f"{self.path} keeps epsilon = {stored[0]:g} at delta = {stored[1]:g}: a budget "
                    f"is never changed; pass budget={stored} or omit it"
                )

    def _check_fits(
        self,
        budget: tuple[float, float],
        others: Sequence[LedgerRun],
        added: list[Mechanism],
        subject: str,
    ) -> None:
        allowed, delta = budget
        total = epsilon_spent([run.committed for run in others] + added, delta)
        if total > allowed:
            spent = epsilon_spent([run.spent for run in others], delta)
            raise PrivacyError(
                f"{subject} does not fit on data set {self.dataset!r} in {self.path}: epsilon = "
                f"{round_up(spent)} is spent, {round_up(total)} when all planned steps have run, "
                f"{allowed:g} is allowed at delta = {delta:g}; plan fewer steps or more noise, or "
                "call close_run() for open runs that will not continue"
            )

    def _check_resumed(self, run: LedgerRun, mechanism: Mechanism, delta: float | None) -> None:
        label = self._label(run.run_id)
        if run.closed:
            raise PrivacyError(f"{label} is closed: open a run of another name to continue")
        if run.mechanism != mechanism:
            raise PrivacyError(
                f"{label} was opened with {run.mechanism}, not {mechanism}: resume it with its "
                "original settings, or open a run of another name"
            )
        if delta is not None and delta != run.delta:
            raise PrivacyError(
                f"{label} was opened with delta={run.delta}, not {delta}: resume it with its "
                "original delta, or open a run of another name"
            )

    def _insert(
        self,
        db: sqlite3.Connection,
        run_id: str,
        mechanism: Mechanism,
        delta: float | None,
        notes: Sequence[str],
    ) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        plan = json.dumps(mechanism.to_json())
        db.execute(
            "INSERT INTO runs (dataset, run_id, mechanism, started, delta, unchecked) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (self.dataset, run_id, plan, now, delta, _lines(notes)),
        )

    def _add_notes(self, db: sqlite3.Connection, run: LedgerRun, notes: Sequence[str]) -> None:
        if not set(notes) <= set(run.unchecked):
            db.execute(
                "UPDATE runs SET unchecked = ? WHERE dataset = ? AND run_id = ?",
                (_lines((*run.unchecked, *notes)), self.dataset, run.run_id),
            )

    def _warn_of_similar_names(self, db: sqlite3.Connection) -> None:
        rows = db.execute("SELECT dataset FROM runs UNION SELECT dataset FROM budgets")
        names = [name for (name,) in rows]
        similar = [name for name in names if name != self.dataset and _similar(name, self.dataset)]
        if similar:
            warnings.warn(
                f"data set {self.dataset!r} is new in {self.path}, which knows "
                f"{', '.join(map(repr, similar))}: runs under different names are not composed. If "
                "these are the same people, use the known name",
                stacklevel=3,
            )

    def _budget(self, db: sqlite3.Connection) -> tuple[float, float] | None:
        row = db.execute(
            "SELECT epsilon, delta FROM budgets WHERE dataset = ?", (self.dataset,)
        ).fetchone()
        return None if row is None else (float(row[0]), float(row[1]))

    def _find(self, db: sqlite3.Connection, run_id: str) -> LedgerRun | None:
        runs = _select_runs(db, "WHERE dataset = ? AND run_id = ?", self.dataset, run_id)
        return runs[0] if runs else None

    def _known(self, db: sqlite3.Connection, run_id: str) -> LedgerRun:
        run = self._find(db, _check_text("run_id", run_id))
        if run is None:
            names = [known.run_id for known in self._runs(db)]
            nearest = get_close_matches(run_id, names, n=1)
            suggestion = f"did you mean {nearest[0]!r}? If not, " if nearest else ""
            raise PrivacyError(
                f"there is no {self._label(run_id)}: {suggestion}call open_run() first, and check "
                "the name of the data set"
            )
        return run

    def _runs(self, db: sqlite3.Connection) -> list[LedgerRun]:
        return _select_runs(db, "WHERE dataset = ?", self.dataset)

    def _writer(self, db: sqlite3.Connection, run_id: str) -> str:
        """The process that charged the run last."""
        row = db.execute(
            "SELECT writer FROM runs WHERE dataset = ? AND run_id = ?", (self.dataset, run_id)
        ).fetchone()
        return str(row[0])

    def _label(self, run_id: str) -> str:
        return f"run {run_id!r} on data set {self.dataset!r} in {self.path}"


def read(path: str | os.PathLike[str]) -> list[LedgerRun]:
    """All runs on all data sets in the ledger at `path`, which is not changed and may be in use.

    Raises:
        FileNotFoundError: there is no such file.
        PrivacyError: the file is not a ledger, or cannot be read.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise FileNotFoundError(
            f"no ledger at {file}: check the path; a ledger is created by the first run that names "
            "it"
        )
    return read_only(file, _select_runs)


def _select_runs(db: sqlite3.Connection, where: str = "", *values: str) -> list[LedgerRun]:
    rows = db.execute(
        "SELECT run_id, dataset, mechanism, charged, started, closed, delta, unchecked "
        f"FROM runs {where} ORDER BY rowid",
        values,
    )
    return [_parse_run(*row) for row in rows]


def _parse_run(
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
            f"run {run_id!r} on data set {dataset!r} has a mechanism that this dpkfc cannot read, "
            f"{mechanism} ({error}): it was written by a newer one; upgrade to read it"
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


def _similar(name: str, other: str) -> bool:
    """Whether two names may mean one data set.

    They are equal except for case, spaces and punctuation, or nearly equal.

    >>> _similar("Patients 2024", "patients-2024"), _similar("patients", "patient")
    (True, True)
    >>> _similar("people", "digits")
    False
    """
    folded = [unicodedata.normalize("NFKC", text).casefold() for text in (name, other)]
    letters = ["".join(letter for letter in text if letter.isalnum()) for text in folded]
    pairs = [folded, letters] if all(letters) else [folded]
    return any(SequenceMatcher(None, a, b, autojunk=False).ratio() >= SIMILAR for a, b in pairs)


def _lines(notes: Sequence[str]) -> str:
    """One line per note, without duplicates."""
    return "".join(f"{note}\n" for note in dict.fromkeys(notes))


def _check_text(argument: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{argument}={value!r}: must be text")
    if not value or not value.isprintable() or value != value.strip():
        raise ValueError(
            f"{argument}={value!r}: must be printable text, not empty, without spaces at its ends"
        )
    return value


def _check_notes(unchecked: Sequence[str]) -> tuple[str, ...]:
    if isinstance(unchecked, str):
        raise TypeError(
            f"unchecked={unchecked!r}: must be a sequence of texts, such as ({unchecked!r},)"
        )
    return tuple(_check_text("unchecked", note) for note in unchecked)


def _check_delta(delta: float | None) -> float | None:
    if delta is None:
        return None
    try:
        number = float(delta)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < 1:
        raise ValueError(f"delta={delta!r}: must be a number strictly between 0 and 1")
    return number


def _check_integer(argument: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{argument}={value!r}: must be a whole number, at least {least}")
    number = value.__index__()
    if not least <= number < 2**63:
        raise ValueError(f"{argument}={value!r}: must be a whole number, at least {least}")
    return number


def _python_numbers(mechanism: Mechanism) -> Mechanism:
    """The mechanism in Python's own numbers, which JSON preserves."""
    return Mechanism(
        float(mechanism.sampling_rate),
        float(mechanism.noise_multiplier),
        _check_integer("steps", mechanism.steps, least=0),
        bool(mechanism.public_geometry),
        _check_integer("cycle", mechanism.cycle),
        tuple(float(factor) for factor in mechanism.growth),
        mechanism.best_of,  # converts its numbers itself
    )


def _check_budget(budget: tuple[float, float]) -> tuple[float, float]:
    try:
        epsilon, delta = map(float, budget)
    except (TypeError, ValueError):
        raise ValueError(f"budget={budget!r}: must be a pair (epsilon, delta)") from None
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1):
        raise ValueError(
            f"budget={budget!r}: epsilon must be positive and finite, delta strictly between 0 and "
            "1"
        )
    return epsilon, delta
