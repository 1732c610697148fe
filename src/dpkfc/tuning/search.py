"""Tuning with its price: free on public data (`tune`), the best of a random number of runs on private data.

Both drive Optuna, whose define-by-run trials say what is tuned: `trial.suggest_float("lr", 1e-3, 1.0, log=True)`.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from dpkfc.accounting.ledger import Ledger
from dpkfc.app.reports.text import as_text
from dpkfc.engine.lineage import steps_of_all_runs
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.noise.grid import round_to_grid_, spacing
from dpkfc.optim.disk import DiSK
from dpkfc.planning.plan import Plan
from dpkfc.random import add_normal_, first_key, sub_key

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

Weights = dict[str, Tensor]
Storage = str | os.PathLike[str]
SHOWN = 5  # tries in the table of the best
BEGUN = "private tuning"  # the attribute of a study that says what was drawn and charged
NOT_PRIVATE = "Not covered by epsilon: how many tries were made, their settings and scores. Do not publish this file."


@dataclass(frozen=True)
class Tuned:
    """The best of all tries, and the Optuna study with the others."""

    settings: dict[str, Any]
    score: float
    study: Study = field(repr=False)

    def __rich__(self) -> Table:
        best = sorted(_tries(self.study, "COMPLETE"), key=_by_score(self.study))[:SHOWN]
        names = sorted({name for trial in best for name in trial.params})
        table = Table(title="The best tries", title_justify="left", pad_edge=False)
        for heading in ("try", "score", *names):
            table.add_column(heading, justify="right")
        for trial in best:
            values = (_short(trial.params[name]) if name in trial.params else "" for name in names)
            table.add_row(str(trial.number), _short(trial.value), *values)
        return table

    def __str__(self) -> str:
        return as_text(self)


def tune(
    objective: Callable[[Trial], float],
    *,
    tries: int,
    storage: Storage | None = None,
    name: str = "tuning",
    seed: int | None = None,
    direction: Literal["maximize", "minimize"] = "maximize",
) -> Tuned:
    """The settings with the best score in `tries` tries, each chosen by what the earlier ones gave (TPE).

    **Only for public or synthetic data.** There it costs nothing. On private records every score is a statistic of
    them that no epsilon covers, and so are the settings that come out: use `tune_privately`.

    Args:
        objective: ``objective(trial) -> score``, with an Optuna trial. A score that is not a number is the worst.
        tries: how many in all, counting those in the `storage`. Interrupted ones do not count; pruned ones do.
        storage: an SQLite file. The same call goes on where the last one stopped.
        name: of the study in the file.
        seed: for the choice of the settings.

    >>> found = tune(lambda trial: -((trial.suggest_float("x", -1, 1) - 0.3) ** 2), tries=30, seed=0)
    >>> abs(found.settings["x"] - 0.3) < 0.2
    True
    """
    optuna = _optuna()
    if not (isinstance(tries, Integral) and tries >= 1):
        raise PrivacyError(f"tries={tries!r}: must be a positive whole number")
    if direction not in ("maximize", "minimize"):
        raise PrivacyError(f"direction={direction!r}: choose 'maximize' or 'minimize'")
    worst = -math.inf if direction == "maximize" else math.inf

    def scored(trial: Trial) -> float:
        score = float(objective(trial))
        return worst if math.isnan(score) else score

    with _without_logs():
        study = _study(storage, name, direction)
        if BEGUN in study.user_attrs:
            raise PrivacyError(
                f"study {name!r} in {storage} belongs to tune_privately: choose another name"
            )
        study.sampler = optuna.samplers.TPESampler(
            seed=None if seed is None else seed + len(study.trials)
        )
        done = len(_tries(study, "COMPLETE", "PRUNED"))
        bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with _progress(TextColumn("{task.description}"), *bar) as progress:
            task = progress.add_task("tuning", total=tries, completed=done)

            def show(study: Study, trial: FrozenTrial) -> None:
                best = _best(study)
                progress.update(
                    task, advance=1, description=f"best {_short(best.value)}" if best else "tuning"
                )

            if done < tries:
                study.optimize(scored, n_trials=tries - done, callbacks=[show])
    best = _best(study)
    if best is None:
        raise PrivacyError(
            f"all {tries} tries were pruned, so there is no best one: prune less, or make more tries"
        )
    return Tuned(dict(best.params), _score(best), study)


@dataclass(frozen=True)
class Selected:
    """What a private tuning releases: the best try, covered as a whole by (`epsilon`, `delta`).

    `settings`, `score` (with its noise, if it has any) and `state_dict` are None if there was no try to choose from: a
    Poisson number of tries may be 0, and tries may all have failed.
    """

    settings: dict[str, Any] | None
    score: float | None
    state_dict: Weights | None = field(repr=False)
    plan: Plan
    run_id: str | None = None  # under which a ledger has the price

    @property
    def epsilon(self) -> float:
        """The price of the whole tuning, however many tries it took."""
        return self.plan.epsilon()

    @property
    def delta(self) -> float:
        return self.plan.delta

    def __rich__(self) -> Table:
        table = Table(
            title="Private tuning", title_justify="left", show_header=False, pad_edge=False
        )
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        found = ", ".join(
            f"{name} {_short(value)}" for name, value in (self.settings or {}).items()
        )
        table.add_row("settings", "nothing was tried" if self.settings is None else found)
        if self.score is not None:
            table.add_row("score", _short(self.score))
        for name, value in self.plan.statement():
            table.add_row(name, value)
        return table

    def __str__(self) -> str:
        return as_text(self)


def tune_privately(
    objective: Callable[[Trial], tuple[PrivateRun, float]],
    *,
    plan: Plan,
    storage: Storage | None = None,
    name: str = "private tuning",
    ledger: Ledger | None = None,
    run_id: str | None = None,
    seed: int | None = None,
) -> Selected:
    """The best of a random number of private runs, with settings drawn at random; epsilon covers the choice.

    **Why it is private.** One try draws its settings s from a fixed distribution, trains on the data D and scores: it
    outputs (s, weights, score). Given s it has at every order λ the same bound ε(λ) on its Rényi divergence, since all
    candidates share the plan's mechanism and their scores the same noise. s does not depend on the data, so that

        exp((λ - 1) D_λ(try(D) ‖ try(D′)))  =  E_s exp((λ - 1) D_λ(try_s(D) ‖ try_s(D′)))  ≤  exp((λ - 1) ε(λ)):

    a try is one mechanism, no worse than its worst candidate. The tries are independent and alike, their number K is
    drawn as `plan.best_of` says, whatever the data, and the one with the highest score is released: that is the
    repetition of theorems 2 and 6 of Papernot and Steinke (2022), whose price `plan.epsilon()` is. Ties are won by the
    first, which is as good as by lot. So there is no TPE, which would choose by earlier scores, and no pruning, which
    would compare with them; both would make tries depend on each other.

    **What is released** is what this returns, and nothing else: not how many tries there were, nor what the others
    gave. What you see while it runs, and the files, are not covered by epsilon: keep them to yourself.

    Args:
        objective: ``objective(trial) -> (private, score)``: draws settings from the Optuna trial, makes a new model,
            trains it with ``make_private(..., options=Options(best_of=plan.best_of))`` and returns that and the score, higher is better.
            The plan's mechanism is fixed: batch size, steps and noise multiplier. All else can be tuned: the learning
            rate, the clip, the model, the geometry. It must not look at earlier tries, nor at the private records but
            through the run and, if `BestOf.score_noise` is set, through the score. The weights are those of
            `private.model`; copy averaged ones into it if they are what was scored.
        plan: of one run, made with `best_of`. Its noise is calibrated for the price of the whole tuning.
        storage: an SQLite file, so that the same call goes on where the last one stopped. The best weights so far are
            kept beside it, in `STORAGE.weights`. Both are secrets, and for one process at a time.
        name: of the study in the file.
        ledger, run_id: where the whole price is charged, before the first try, and once; a tuning that is taken up
            again needs the same ledger. By default the run has a new name.
        seed: for a reproducible number of tries, settings and noise on the scores; for experiments only.

    An error of the objective goes through; with a storage, the same call goes on with the next try. The one that failed
    counts, and loses to all others: the error may have come from the data, and to leave such tries out would be a
    choice that no epsilon covers. A `PrivacyError` before the first step, which is about the set-up, and a kill do not
    count: the try is made anew.
    """
    if plan.best_of is None:
        raise PrivacyError(
            "the plan is that of a single run: make it with best_of, as in Plan.make(best_of=BestOf(10))"
        )
    optuna, key = _optuna(), first_key(seed)
    with (
        _without_logs(),
        _progress(SpinnerColumn(), TextColumn("tuning privately"), TimeElapsedColumn()) as progress,
    ):
        progress.add_task("", total=None)
        study = _study(storage, name, "maximize")
        study.pruner = optuna.pruners.NopPruner()
        begun = _begin(study, plan, ledger, run_id, key)
        folder = None if storage is None else Path(f"{storage}.weights", begun["weights"])
        weights = _read(folder, _best(study))
        while len(counted := _tries(study, "COMPLETE", "FAIL")) < begun["tries"]:
            weights = _try(study, objective, plan, key, folder, weights)
    if len(counted) > begun["tries"]:
        raise PrivacyError(
            f"study {name!r} in {storage} holds more tries than were drawn and paid for: two processes worked on it. "
            "Nothing of it may be released; begin a new tuning"
        )
    if ledger is not None:
        ledger.close_run(begun["run_id"])
    best = _best(study)
    if best is None:
        return Selected(None, None, None, plan, begun["run_id"])
    return Selected(dict(best.params), _score(best), weights, plan, begun["run_id"])


def _begin(
    study: Study, plan: Plan, ledger: Ledger | None, run_id: str | None, key: bytes
) -> dict[str, Any]:
    """What was drawn and paid for: now, or when the study was begun.

    The charge comes first. A kill between the two leaves a charge for nothing; the other order could leave a study that
    was never paid for.
    """
    begun: dict[str, Any] | None = study.user_attrs.get(BEGUN)
    if begun is not None:
        _check_resume(f"study {study.study_name!r}", begun, plan, ledger, run_id)
        return begun
    if study.trials:
        raise PrivacyError(
            f"study {study.study_name!r} holds tries of another tuning: choose another name"
        )
    if ledger is not None:
        run_id = uuid.uuid4().hex if run_id is None else run_id
        if ledger.open_run(run_id, plan.mechanism, delta=plan.delta, unchecked=plan.unchecked):
            raise PrivacyError(
                f"run {run_id!r} in {ledger.path} was charged for another tuning: go on with the storage of that one, "
                "or choose another run_id"
            )
        ledger.charge(run_id, plan.steps)
    assert plan.best_of is not None
    begun = {
        "tries": plan.best_of.draw(
            np.random.default_rng(int.from_bytes(sub_key(key, "number of tries")))
        ),
        "plan": plan.to_json(),
        "run_id": None if ledger is None else run_id,
        "weights": uuid.uuid4().hex,  # the folder of their files
        "note": NOT_PRIVATE,
    }
    study.set_user_attr(BEGUN, begun)
    return begun


def _check_resume(
    study: str, begun: dict[str, Any], plan: Plan, ledger: Ledger | None, run_id: str | None
) -> None:
    """The price of the study was charged for this plan, to this ledger."""
    if changed := [k for k, v in plan.to_json().items() if begun["plan"].get(k) != v]:
        raise PrivacyError(
            f"{study} was begun with another plan: {', '.join(changed)} differ. Go on with the plan that was paid for, "
            "or choose another name"
        )
    if (ledger is None) != (begun["run_id"] is None) or run_id not in (None, begun["run_id"]):
        paid = (
            "without a ledger"
            if begun["run_id"] is None
            else f"as run {begun['run_id']!r} of a ledger"
        )
        raise PrivacyError(
            f"{study} was begun {paid}: go on with the same ledger and run_id, or choose another name"
        )
    if ledger is not None and ledger.charged(begun["run_id"]) < plan.steps:
        raise PrivacyError(
            f"{study} was not charged to {ledger.path}: go on with the ledger that it was charged to"
        )


def _try(
    study: Study,
    objective: Callable[[Trial], tuple[PrivateRun, float]],
    plan: Plan,
    key: bytes,
    folder: Path | None,
    weights: Weights | None,
) -> Weights | None:
    """One more try; `weights`, and what is returned, are those of the best so far.

    Those of a better one are on disk before it is marked complete, and the others are removed after that: whatever
    point the process is killed at, the best complete try has its weights.
    """
    optuna, best, past = _optuna(), _best(study), study.get_trials(deepcopy=False)
    assert plan.best_of is not None
    key = sub_key(key, f"try {len(past)}")  # no number comes twice, also after a resume
    study.sampler = optuna.samplers.RandomSampler(int.from_bytes(sub_key(key, "settings")[:4]))
    trial = study.ask()
    with _counted(study, trial):
        result = objective(trial)
    private, score = _checked(result, plan)
    trial.set_user_attr("noise", _fingerprint(private, past))
    with _counted(study, trial, begun=True):
        score = _noisy(score, plan.best_of.score_noise, sub_key(key, "score"))
    better = best is None or score > _score(best)
    if better:
        weights = _weights(private)
        _write(folder, trial.number, weights)
    study.tell(trial, score)
    if better:
        _tidy(folder, trial.number)
    return weights


@contextmanager
def _counted(study: Study, trial: Trial, begun: bool = False) -> Iterator[None]:
    """An error counts as a try that lost, unless it came before the first step: then it is about the set-up."""
    steps = steps_of_all_runs()
    try:
        yield
    except Exception as error:
        if isinstance(error, PrivacyError) and steps_of_all_runs() == steps and not begun:
            raise
        study.tell(trial, state=_optuna().trial.TrialState.FAIL)
        error.add_note(
            "This try counts, since the error may have come from the data. With a storage, the same call goes on."
        )
        raise


def _checked(result: Any, plan: Plan) -> tuple[PrivateRun, float]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], PrivateRun)):
        raise PrivacyError(
            f"the objective must return (private, score), not {type(result).__name__}"
        )
    private, score = result
    if private.plan.mechanism != plan.mechanism:
        raise PrivacyError(
            f"the try ran {private.plan.mechanism}, but the price is that of {plan.mechanism}: pass best_of, "
            "batch_size, steps or epochs, and epsilon or noise_multiplier as in the plan, and tune the rest"
        )
    if private._ledger is not None:
        raise PrivacyError(
            "the try charged a ledger of its own, beside the price of the whole tuning: pass the ledger to "
            "tune_privately, not to make_private"
        )
    return private, float(score)


def _fingerprint(private: PrivateRun, past: list[FrozenTrial]) -> str:
    """Tells the noise of one try from that of another, and nothing more."""
    found = sub_key(private._group_key, "fingerprint").hex()
    if any(other.user_attrs.get("noise") == found for other in past):
        raise PrivacyError(
            "two tries had the same noise, and tries must be independent: leave out the seed of make_private, or give "
            "each its own, such as trial.number; and make a new run in every try"
        )
    return found


def _noisy(score: float, scale: float | None, key: bytes) -> float:
    """The score that is compared and stored. From public records alone it needs no noise; NaN is the worst."""
    if scale is None:
        return -math.inf if math.isnan(score) else score
    if not math.isfinite(score):
        raise PrivacyError(
            f"the score of a try is {score}: with score_noise it must be finite, since no record may change it by more "
            "than 1. Count right answers, say"
        )
    noisy = torch.tensor([score], dtype=torch.float64)
    add_normal_([noisy], key, scale)
    round_to_grid_([noisy], spacing(scale))
    return float(noisy)


def _weights(private: PrivateRun) -> Weights:
    optimizer = private.optimizer
    with optimizer.iterate() if isinstance(optimizer, DiSK) else nullcontext():
        return {
            name: value.detach().cpu().clone() for name, value in private.model.state_dict().items()
        }


def _write(folder: Path | None, number: int, weights: Weights) -> None:
    if folder is None:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = folder / f"{number}.part"
    with fresh.open("wb") as file:
        file.write(to_bytes(weights))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / f"{number}.safetensors")


def _tidy(folder: Path | None, best: int) -> None:
    for file in () if folder is None else folder.iterdir():
        if file.name != f"{best}.safetensors":
            file.unlink()


def _read(folder: Path | None, best: FrozenTrial | None) -> Weights | None:
    if folder is None or best is None:
        return None
    try:
        return load_file(folder / f"{best.number}.safetensors")
    except OSError as problem:
        raise PrivacyError(
            f"the weights of the best try so far are gone ({problem}): restore {folder}"
        ) from problem


def _study(storage: Storage | None, name: str, direction: str) -> Study:
    if storage is None:
        fresh: Study = _optuna().create_study(study_name=name, direction=direction)
        return fresh
    file = Path(storage).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    study: Study = _optuna().create_study(
        storage=f"sqlite:///{file}", study_name=name, direction=direction, load_if_exists=True
    )
    if study.direction.name != direction.upper():
        raise PrivacyError(
            f"study {name!r} in {file} was begun to {study.direction.name.lower()}, not to {direction}: choose another "
            "name"
        )
    return study


def _best(study: Study) -> FrozenTrial | None:
    return min(_tries(study, "COMPLETE"), key=_by_score(study), default=None)


def _tries(study: Study, *states: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in states]


def _by_score(study: Study) -> Callable[[FrozenTrial], float]:
    """A key that sorts the best first."""
    sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
    return lambda trial: sign * _score(trial)


def _score(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return float(trial.value)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise PrivacyError(
            "tuning needs Optuna, which is not installed: pip install 'dpkfc[tune]'"
        ) from None
    return optuna


@contextmanager
def _without_logs() -> Iterator[None]:
    """Optuna logs every try; what there is to say is said by a progress bar, and by errors."""
    logging = _optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
