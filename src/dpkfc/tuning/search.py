"""Hyperparameter tuning: free on public data, at a price in epsilon on private data.

`tune` searches on public data. `tune_privately` releases the best of a random number of private
runs. Both use Optuna, whose trials define the search space as they run:
``trial.suggest_float("lr", 1e-3, 1.0, log=True)``.
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
from torch import Tensor

from dpkfc.accounting.ledger import Ledger
from dpkfc.engine.lineage import steps_of_all_runs
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.noise.grid import round_to_grid_, spacing
from dpkfc.optim.base import KeepsIterate
from dpkfc.planning.plan import Plan
from dpkfc.random import add_normal_, first_key, sub_key
from dpkfc.tables import Column, ShownAsTable, TextTable

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

Weights = dict[str, Tensor]
Storage = str | os.PathLike[str]
Progress = Callable[[int, int, float | None], None]
SHOWN_TRIES = 5  # rows of the table of the best tries
STATE_ATTRIBUTE = "private tuning"  # of a study: what was drawn and charged for it
NOT_PRIVATE = (
    "Not covered by epsilon: how many tries were made, their settings and scores. "
    "Do not publish this file."
)


@dataclass(frozen=True)
class Tuned(ShownAsTable):
    """The settings and the score of the best try, and the Optuna study with all tries."""

    settings: dict[str, Any]
    score: float
    study: Study = field(repr=False)

    def table(self) -> TextTable:
        best = sorted(_tries(self.study, "COMPLETE"), key=_by_score(self.study))[:SHOWN_TRIES]
        names = sorted({name for trial in best for name in trial.params})
        headings = ("try", "score", *names)
        table = TextTable("The best tries", [Column(heading, "right") for heading in headings])
        for trial in best:
            values = (_short(trial.params[name]) if name in trial.params else "" for name in names)
            table.add_row(str(trial.number), _short(trial.value), *values)
        return table


def tune(
    objective: Callable[[Trial], float],
    *,
    tries: int,
    storage: Storage | None = None,
    name: str = "tuning",
    seed: int | None = None,
    direction: Literal["maximize", "minimize"] = "maximize",
    on_progress: Progress | None = None,
) -> Tuned:
    """Search for the settings with the best score; each try learns from earlier ones (TPE).

    **Only for public or synthetic data.** There it costs nothing. On private records every score is
    a statistic of the records that no epsilon covers, and so are the resulting settings: use
    `tune_privately`.

    Args:
        objective: ``objective(trial) -> score``, with an Optuna trial. A NaN score is the worst.
        tries: total number, including those in `storage`. Pruned tries count, interrupted ones
            do not.
        storage: an SQLite file. The same call resumes an interrupted search.
        name: of the study in the file.
        seed: of the sampler that proposes settings.
        direction: whether a high or a low score is better.
        on_progress: called as ``on_progress(finished, tries, best_score)`` before the first try
            and after every try; ``best_score`` is None while there is none.

    Returns:
        The best settings, their score, and the study.

    >>> result = tune(
    ...     lambda trial: -((trial.suggest_float("x", -1, 1) - 0.3) ** 2), tries=30, seed=0
    ... )
    >>> abs(result.settings["x"] - 0.3) < 0.2
    True
    """
    optuna = _optuna()
    if not (isinstance(tries, Integral) and tries >= 1):
        raise ValueError(f"tries={tries!r}: must be a positive whole number")
    if direction not in ("maximize", "minimize"):
        raise ValueError(f"direction={direction!r}: choose 'maximize' or 'minimize'")
    worst = -math.inf if direction == "maximize" else math.inf

    def scored(trial: Trial) -> float:
        score = float(objective(trial))
        return worst if math.isnan(score) else score

    def report(study: Study, _: FrozenTrial | None = None) -> None:
        if on_progress is not None:
            best = _best(study)
            finished = len(_tries(study, "COMPLETE", "PRUNED"))
            on_progress(finished, tries, None if best is None else _score(best))

    with _without_logs():
        study = _open_study(storage, name, direction)
        if STATE_ATTRIBUTE in study.user_attrs:
            raise PrivacyError(
                f"study {name!r} in {storage} belongs to tune_privately: choose another name"
            )
        sampler_seed = None if seed is None else seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=sampler_seed)
        report(study)
        finished = len(_tries(study, "COMPLETE", "PRUNED"))
        if finished < tries:
            study.optimize(scored, n_trials=tries - finished, callbacks=[report])
    best = _best(study)
    if best is None:
        raise RuntimeError(
            f"all {tries} tries were pruned, so there is no best one: prune less, or make more "
            "tries"
        )
    return Tuned(dict(best.params), _score(best), study)


@dataclass(frozen=True)
class Selected(ShownAsTable):
    """The output of a private tuning: the best try, covered as a whole by (`epsilon`, `delta`).

    `settings`, `score` (including its noise, if any) and `state_dict` are None if there is no try
    to choose from: a Poisson number of tries can be 0, and all tries may have failed.
    """

    settings: dict[str, Any] | None
    score: float | None
    state_dict: Weights | None = field(repr=False)
    plan: Plan
    run_id: str | None = None  # under which a ledger was charged

    @property
    def epsilon(self) -> float:
        """The price of the whole tuning, whatever the number of tries."""
        return self.plan.epsilon()

    @property
    def delta(self) -> float:
        return self.plan.delta

    def table(self) -> TextTable:
        settings = "nothing was tried"
        if self.settings is not None:
            settings = ", ".join(f"{name} {_short(value)}" for name, value in self.settings.items())
        rows = [("settings", settings)]
        if self.score is not None:
            rows.append(("score", _short(self.score)))
        return TextTable.statement("Private tuning", [*rows, *self.plan.statement()])


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
    """Release the best of a random number of private runs with randomly drawn settings.

    **Guarantee.** The returned object is (`plan.epsilon()`, `plan.delta`)-differentially private
    under adding or removing one record, given that `objective` keeps to the rules below. *Proof.*
    One try draws its settings s from a fixed distribution, trains on the data D and computes a
    score; its output is (s, weights, score). Given s, its Rényi divergence of order λ has the same
    bound ε(λ) for every s, since all candidates share the plan's mechanism and their scores the
    same noise. The distribution of s does not depend on the data, so that

        exp((λ - 1) D_λ(try(D) ‖ try(D′)))  =  E_s exp((λ - 1) D_λ(try_s(D) ‖ try_s(D′)))
                                            ≤  exp((λ - 1) ε(λ)):

    one try is a single mechanism, no worse than its worst candidate. The tries are independent and
    identically distributed. Their number K is drawn as `plan.best_of` says, independently of the
    data, and the one with the highest score is released: this is the repetition of theorems 2 and 6
    of Papernot and Steinke (2022), and `plan.epsilon()` is its price. The first of several equal
    scores wins, which has the same distribution as a random choice among them. For this reason
    there is no TPE, which chooses by earlier scores, and no pruning, which compares with them: both
    would make tries depend on each other.

    **What is released** is the returned object and nothing else: neither the number of tries nor
    the results of the others. What is visible while it runs, and the files, are not covered by
    epsilon: keep them secret. For the same reason there is no progress callback.

    Args:
        objective: ``objective(trial) -> (run, score)``: draws settings from the Optuna trial,
            builds a new model, trains it with
            ``make_private(..., options=Options(best_of=plan.best_of))`` and returns the run and the
            score; higher is better. The plan's mechanism is fixed: batch size, steps and noise
            multiplier. Everything else can be tuned: learning rate, clip, model, geometry. The
            objective must not use earlier tries. It may use the private records only through the
            run and, if `BestOf.score_noise` is set, through the score. The weights are those of
            `run.model`; if averaged weights were scored, copy them into it.
        plan: of one run, made with `best_of`. Its noise is calibrated for the price of the whole
            tuning.
        storage: an SQLite file, so that the same call resumes an interrupted tuning. The best
            weights so far are stored beside it, in `STORAGE.weights`. Both are secret, and only one
            process at a time may use them.
        name: of the study in the file.
        ledger: is charged the whole price once, before the first try. A resumed tuning needs the
            same ledger.
        run_id: under which the ledger is charged; a new name by default.
        seed: for a reproducible number of tries, settings and noise on the scores; for experiments
            only.

    Returns:
        The best settings, their score and weights, and the plan.

    Raises:
        PrivacyError: if the tuning would cost more than the plan says.

    An error of the objective is raised again; with a storage, the same call continues with the next
    try. The failed try counts, and loses to all others: the error may have come from the data, and
    leaving out such tries would be a choice that no epsilon covers. Two cases do not count, and the
    try is repeated: a `PrivacyError` before the first step, which is about the set-up, and a killed
    process.
    """
    if plan.best_of is None:
        raise PrivacyError(
            "the plan is that of a single run: make it with best_of, as in "
            "Plan.make(best_of=BestOf(10))"
        )
    optuna = _optuna()
    key = first_key(seed)
    with _without_logs():
        study = _open_study(storage, name, "maximize")
        study.pruner = optuna.pruners.NopPruner()
        state = _begin(study, plan, ledger, run_id, key)
        folder = None if storage is None else Path(f"{storage}.weights", state["weights"])
        weights = _read(folder, _best(study))
        while len(counted := _tries(study, "COMPLETE", "FAIL")) < state["tries"]:
            weights = _try(study, objective, plan, key, folder, weights)
    if len(counted) > state["tries"]:
        raise PrivacyError(
            f"study {name!r} in {storage} holds more tries than were drawn and paid for: two "
            "processes worked on it. Nothing of it may be released; begin a new tuning"
        )
    if ledger is not None:
        ledger.close_run(state["run_id"])
    best = _best(study)
    if best is None:
        return Selected(None, None, None, plan, state["run_id"])
    return Selected(dict(best.params), _score(best), weights, plan, state["run_id"])


def _begin(
    study: Study, plan: Plan, ledger: Ledger | None, run_id: str | None, key: bytes
) -> dict[str, Any]:
    """Charge the ledger and draw the number of tries, or read what an earlier call stored.

    The charge comes first. A kill between the two leaves a charge for nothing; the opposite order
    could leave a study that was never paid for.
    """
    stored: dict[str, Any] | None = study.user_attrs.get(STATE_ATTRIBUTE)
    if stored is not None:
        _check_resume(f"study {study.study_name!r}", stored, plan, ledger, run_id)
        return stored
    if study.trials:
        raise PrivacyError(
            f"study {study.study_name!r} holds tries of another tuning: choose another name"
        )
    if ledger is not None:
        run_id = uuid.uuid4().hex if run_id is None else run_id
        if ledger.open_run(run_id, plan.mechanism, delta=plan.delta, unchecked=plan.unchecked):
            raise PrivacyError(
                f"run {run_id!r} in {ledger.path} was charged for another tuning: resume that one "
                "with its storage, or choose another run_id"
            )
        ledger.charge(run_id, plan.steps)
    assert plan.best_of is not None
    generator = np.random.default_rng(int.from_bytes(sub_key(key, "number of tries")))
    state = {
        "tries": plan.best_of.draw(generator),
        "plan": plan.to_json(),
        "run_id": None if ledger is None else run_id,
        "weights": uuid.uuid4().hex,  # the folder of their files
        "note": NOT_PRIVATE,
    }
    study.set_user_attr(STATE_ATTRIBUTE, state)
    return state


def _check_resume(
    study: str, stored: dict[str, Any], plan: Plan, ledger: Ledger | None, run_id: str | None
) -> None:
    """Refuse to resume unless the study was charged for this plan, to this ledger."""
    if changed := [k for k, v in plan.to_json().items() if stored["plan"].get(k) != v]:
        raise PrivacyError(
            f"{study} was begun with another plan: {', '.join(changed)} differ. Resume it with the "
            "plan that was paid for, or choose another name"
        )
    if (ledger is None) != (stored["run_id"] is None) or run_id not in (None, stored["run_id"]):
        paid = f"as run {stored['run_id']!r} of a ledger"
        if stored["run_id"] is None:
            paid = "without a ledger"
        raise PrivacyError(
            f"{study} was begun {paid}: resume it with the same ledger and run_id, or choose "
            "another name"
        )
    if ledger is not None and ledger.charged(stored["run_id"]) < plan.steps:
        raise PrivacyError(
            f"{study} was not charged to {ledger.path}: resume it with the ledger that was charged"
        )


def _try(
    study: Study,
    objective: Callable[[Trial], tuple[PrivateRun, float]],
    plan: Plan,
    key: bytes,
    folder: Path | None,
    best_weights: Weights | None,
) -> Weights | None:
    """Make one try; return the weights of the best try so far.

    The weights of a better try are on disk before the try is marked complete, and the earlier ones
    are removed afterwards. So the best complete try has its weights wherever the process is killed.
    """
    best = _best(study)
    past = study.get_trials(deepcopy=False)
    assert plan.best_of is not None
    # The number of past trials never repeats, also after a resume.
    key = sub_key(key, f"try {len(past)}")
    sampler_seed = int.from_bytes(sub_key(key, "settings")[:4])
    study.sampler = _optuna().samplers.RandomSampler(sampler_seed)
    trial = study.ask()
    with _counted_if_failed(study, trial):
        result = objective(trial)
    run, score = _check_result(result, plan)
    trial.set_user_attr("noise", _noise_fingerprint(run, past))
    with _counted_if_failed(study, trial, trained=True):
        score = _noisy_score(score, plan.best_of.score_noise, sub_key(key, "score"))
    better = best is None or score > _score(best)
    if better:
        best_weights = _weights(run)
        _write(folder, trial.number, best_weights)
    study.tell(trial, score)
    if better:
        _remove_others(folder, trial.number)
    return best_weights


@contextmanager
def _counted_if_failed(study: Study, trial: Trial, trained: bool = False) -> Iterator[None]:
    """Count an error as a lost try, unless it is about the set-up: before the first step."""
    steps = steps_of_all_runs()
    try:
        yield
    except Exception as error:
        stepped = trained or steps_of_all_runs() != steps
        if isinstance(error, PrivacyError) and not stepped:
            raise
        study.tell(trial, state=_optuna().trial.TrialState.FAIL)
        error.add_note(
            "This try counts, since the error may have come from the data. With a storage, the "
            "same call continues with the next try."
        )
        raise


def _check_result(result: Any, plan: Plan) -> tuple[PrivateRun, float]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], PrivateRun)):
        raise TypeError(f"the objective must return (run, score), not {type(result).__name__}")
    run, score = result
    if run.plan.mechanism != plan.mechanism:
        raise PrivacyError(
            f"the try ran {run.plan.mechanism}, but the price is that of {plan.mechanism}: pass "
            "best_of, batch_size, steps or epochs, and epsilon or noise_multiplier as in the plan, "
            "and tune the rest"
        )
    if run._ledger is not None:
        raise PrivacyError(
            "the try charged its own ledger, in addition to the price of the whole tuning: pass "
            "the ledger to tune_privately, not to make_private"
        )
    return run, float(score)


def _noise_fingerprint(run: PrivateRun, past: list[FrozenTrial]) -> str:
    """A hash that differs between tries with independent noise and reveals nothing else."""
    fingerprint = sub_key(run._group_key, "fingerprint").hex()
    if any(other.user_attrs.get("noise") == fingerprint for other in past):
        raise PrivacyError(
            "two tries had the same noise, and tries must be independent: leave out the seed of "
            "make_private, or give each try its own, such as trial.number; and make a new run in "
            "every try"
        )
    return fingerprint


def _noisy_score(score: float, scale: float | None, key: bytes) -> float:
    """The score that is compared and stored.

    A score from public records alone (scale=None) needs no noise; there, NaN is the worst.
    """
    if scale is None:
        return -math.inf if math.isnan(score) else score
    if not math.isfinite(score):
        raise PrivacyError(
            f"the score of a try is {score}: with score_noise it must be finite, since no record "
            "may change it by more than 1. Use, for example, the number of correct predictions"
        )
    noisy = torch.tensor([score], dtype=torch.float64)
    add_normal_([noisy], key, scale)
    round_to_grid_([noisy], spacing(scale))
    return float(noisy)


def _weights(run: PrivateRun) -> Weights:
    optimizer = run.optimizer
    with optimizer.iterate() if isinstance(optimizer, KeepsIterate) else nullcontext():
        return {name: x.detach().cpu().clone() for name, x in run.model.state_dict().items()}


def _write(folder: Path | None, number: int, weights: Weights) -> None:
    """Store the weights of try `number`; the file appears complete or not at all."""
    if folder is None:
        return
    from safetensors.torch import save

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = folder / f"{number}.part"
    with unfinished.open("wb") as file:
        file.write(save(weights))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / f"{number}.safetensors")


def _remove_others(folder: Path | None, best: int) -> None:
    for file in () if folder is None else folder.iterdir():
        if file.name != f"{best}.safetensors":
            file.unlink()


def _read(folder: Path | None, best: FrozenTrial | None) -> Weights | None:
    if folder is None or best is None:
        return None
    from safetensors.torch import load_file

    try:
        return load_file(folder / f"{best.number}.safetensors")
    except OSError as problem:
        raise OSError(
            f"the weights of the best try so far are gone ({problem}): restore {folder}"
        ) from problem


def _open_study(storage: Storage | None, name: str, direction: str) -> Study:
    if storage is None:
        in_memory: Study = _optuna().create_study(study_name=name, direction=direction)
        return in_memory
    file = Path(storage).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    study: Study = _optuna().create_study(
        storage=f"sqlite:///{file}", study_name=name, direction=direction, load_if_exists=True
    )
    if study.direction.name != direction.upper():
        raise ValueError(
            f"study {name!r} in {file} was begun to {study.direction.name.lower()}, not to "
            f"{direction}: choose another name"
        )
    return study


def _best(study: Study) -> FrozenTrial | None:
    return min(_tries(study, "COMPLETE"), key=_by_score(study), default=None)


def _tries(study: Study, *states: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in states]


def _by_score(study: Study) -> Callable[[FrozenTrial], float]:
    """A sort key that puts the best try first."""
    sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
    return lambda trial: sign * _score(trial)


def _score(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return float(trial.value)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError(
            "tuning needs Optuna, which is not installed: pip install 'dpkfc[tune]'"
        ) from None
    return optuna


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence Optuna, which logs every try."""
    logging = _optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
