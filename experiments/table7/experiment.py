"""A search over the hyperparameters of DP-SGD and DP-KFC.

Each method has the same number of trials on a data set, proposed by TPE to maximise the accuracy
on held-out training records. The best trial is trained on all records, with new seeds, and only
these runs see the test set. The paper adds its damping π to A as it is, which is `stability` here
(`damping` would be relative to the trace). Its α is an exponent of the amplitude, so that it is
``PinkNoise(alpha=2α)``. Its preconditioner steps are the probe batches of a refresh; there is one
refresh per epoch.

Trials are appended to results.jsonl as they come, and a second run continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.readers.idx import Scaling
from dpkfc.app.readers.sources import NAMED
from dpkfc.app.reports.experiment_report import publish
from experiments.common.arguments import EXPECTED_ERRORS, names_among
from experiments.common.options import ReproduceOptions
from experiments.common.setting import PAPER, SCALING, Data, Load, StudySetting, scaled, train
from experiments.common.study import Row, read
from experiments.table7.findings import METHODS, SPACE, ParameterRange, Sweep, study_of
from experiments.table7.plots import plot_analysis, plot_pairs
from experiments.table7.report import PUBLISHED, Pair, markdown

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

SCALINGS: dict[str, Scaling] = {**SCALING, "cifar-10": "centred"}
SEED = 0  # of the search; trials use the default seed
Params = dict[str, float]


@dataclass(frozen=True)
class Protocol:
    """What all trials have in common.

    A larger number of `trials` continues a search; any other change starts a new one.

    Args:
        trials: The number of trials per method and data set.
        records: The number of training records, from the first; None for all.
        validation: How many of them trials hold out.
        epochs: Expected passes over the data.
        probe_batch: The number of probes per preconditioner step.
        seeds: The seeds of the final runs.
    """

    trials: int = 150
    records: int | None = None
    validation: int = 5000
    epochs: float = 5
    batch_size: int = 256
    probe_batch: int = 256
    epsilon: float = 2.0
    delta: float = 1e-5
    seeds: tuple[int, ...] = (1, 2, 3)

    def __post_init__(self) -> None:
        if self.trials < 3:
            raise ValueError(f"trials={self.trials}: at least 3 are needed for a finding")
        if self.records is not None and not 0 < self.validation < self.records:
            raise ValueError(
                f"validation={self.validation}: must be part of the {self.records} records, "
                "and leave some to train on"
            )

    @property
    def contents(self) -> dict[str, Any]:
        """Everything that the result of a trial depends on."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("trials", "seeds")
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.contents, sort_keys=True).encode()).hexdigest()[:16]

    def setting(
        self, dataset: str, method: str, params: Mapping[str, float], records: int
    ) -> StudySetting:
        """Return the setting of a trial on a data set with `records` training records."""
        geometry = None
        if method == "DP-KFC":
            geometry = PAPER | {
                "probe": {**PAPER["probe"], "alpha": 2 * params["alpha"]},
                "every": max(1, round((records - self.validation) / self.batch_size)),
                "probes": int(params["steps"]) * self.probe_batch,
                "chunk": 256,
                "stability": params["damping"],
            }
        return StudySetting(
            dataset,
            method,
            params["lr"],
            geometry,
            clip=params["clip"],
            epsilon=self.epsilon,
            delta=self.delta,
            epochs=self.epochs,
            batch_size=self.batch_size,
            ema=0.0,
            scaling=SCALINGS[dataset],
            validation=self.validation,
        )


FULL = Protocol()
QUICK = Protocol(trials=6, records=1500, validation=500, epochs=1, probe_batch=16, seeds=(1,))


@dataclass(frozen=True)
class TrialStore:
    """The results file of a protocol; new trials are computed on `device`."""

    file: Path
    protocol: Protocol
    device: str = "cpu"

    def rows(self, dataset: str, method: str, final: bool) -> list[Row]:
        """Return the trials of this protocol, or its final runs on the test set."""
        wanted = {"key": self.protocol.key, "dataset": dataset, "method": method}
        rows = [
            row
            for row in read(self.file)
            if all(row.get(name) == value for name, value in wanted.items())
        ]
        return [row for row in rows if (row["setting"]["validation"] == 0) == final]

    def trials(self, dataset: str, method: str) -> list[Row]:
        return self.rows(dataset, method, final=False)[: self.protocol.trials]

    def add(self, setting: StudySetting, params: Params, load: Load, console: Console) -> float:
        """Train, append the result to the file, and return its accuracy."""
        result = train(setting, load, device=self.device)
        row = {
            "key": self.protocol.key,
            "protocol": self.protocol.contents,
            "dataset": setting.dataset,
            "method": setting.arm,
            "params": params,
            "setting": asdict(setting),
            "result": asdict(result),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ", ".join(f"{name} {value:.3g}" for name, value in params.items())
        measured = f"{'validation' if setting.validation else 'test'} {100 * result.last:.2f}"
        line = f"{setting.dataset}, {setting.arm}: {shown}: {measured} ({result.seconds:.0f} s)"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        return result.last


def loaders(protocol: Protocol, data_dir: Path | None) -> tuple[Load, Load]:
    """Return two loaders of the protocol's records: for trials without the test set, and with it.

    Only the second one, for final runs, gives access to the test set.
    """

    @cache
    def with_test(dataset: str, scaling: Scaling) -> Data:
        records, test = NAMED[dataset][1](data_dir)
        count = len(records) if protocol.records is None else protocol.records
        if not protocol.validation < count <= len(records):
            raise ValueError(
                f"{dataset} has {len(records)} training records, the protocol asks for {count}, "
                f"of which {protocol.validation} are held out"
            )
        return scaled((first(records, count), test), scaling)

    def without_test(dataset: str, scaling: Scaling) -> Data:
        records, test = with_test(dataset, scaling)
        return records, first(test, 0)

    return without_test, with_test


def first(data: TensorDataset, count: int) -> TensorDataset:
    """Return the first `count` records."""
    return TensorDataset(*(part[:count].clone() for part in data.tensors))


def suggest(trial: Trial, method: str) -> Params:
    """Let Optuna propose a value for every hyperparameter of a method."""

    def suggest_one(name: str, scale: ParameterRange) -> float:
        value: float
        if scale.integer:
            value = trial.suggest_int(name, int(scale.low), int(scale.high), log=scale.log)
        else:
            value = trial.suggest_float(name, scale.low, scale.high, log=scale.log)
        return value

    return {name: suggest_one(name, SPACE[name]) for name in METHODS[method]}


def search(store: TrialStore, dataset: str, method: str, load: Load, console: Console) -> None:
    """Run all trials of a method; the search starts from those that the file holds."""
    done = store.trials(dataset, method)
    console.print(
        f"{dataset}, {method}: {len(done)} of {store.protocol.trials} trials are in {store.file}"
    )
    if len(done) == store.protocol.trials:
        return
    records = len(load(dataset, SCALINGS[dataset])[0])

    def objective(trial: Trial) -> float:
        params = suggest(trial, method)
        return store.add(
            store.protocol.setting(dataset, method, params, records), params, load, console
        )

    storage = store.file.with_suffix(".db")
    name = f"{dataset}, {method}, {store.protocol.key}"
    storage.unlink(missing_ok=True)
    known = [(row["params"], row["result"]["last"]) for row in done]
    study_of(known, distributions(method), f"sqlite:///{storage.absolute()}", name)
    dpkfc.tune(objective, tries=store.protocol.trials, storage=storage, name=name, seed=SEED)
    storage.unlink()


def distributions(method: str) -> dict[str, BaseDistribution]:
    """Return the search space of a method as Optuna's distributions."""
    from optuna.distributions import FloatDistribution, IntDistribution

    def distribution(scale: ParameterRange) -> BaseDistribution:
        if scale.integer:
            return IntDistribution(int(scale.low), int(scale.high), log=scale.log)
        return FloatDistribution(scale.low, scale.high, log=scale.log)

    return {name: distribution(SPACE[name]) for name in METHODS[method]}


def train_best(store: TrialStore, dataset: str, method: str, load: Load, console: Console) -> None:
    """Train the best trial on all records and measure it on the test set, once per seed."""
    best = max(store.trials(dataset, method), key=lambda row: row["result"]["last"])
    chosen = replace(StudySetting(**best["setting"]), validation=0)
    done = {StudySetting(**row["setting"]).key for row in store.rows(dataset, method, final=True)}
    wanted = [replace(chosen, seed=seed) for seed in store.protocol.seeds]
    todo = [setting for setting in wanted if setting.key not in done]
    for setting in track(todo, f"{dataset}, {method}: the best", console=console, disable=not todo):
        store.add(setting, best["params"], load, console)


def sweep_of(store: TrialStore, dataset: str, method: str) -> Sweep | None:
    """Return the trials in the file; None unless all trials and final runs are done."""
    trials = store.trials(dataset, method)
    if len(trials) < store.protocol.trials:
        return None
    accuracy = np.array([row["result"]["last"] for row in trials])
    chosen = replace(StudySetting(**trials[int(accuracy.argmax())]["setting"]), validation=0)
    measured = {
        StudySetting(**row["setting"]).key: row["result"]["last"]
        for row in store.rows(dataset, method, final=True)
    }
    keys = [replace(chosen, seed=seed).key for seed in store.protocol.seeds]
    if not all(key in measured for key in keys):
        return None
    values = {
        name: np.array([row["params"][name] for row in trials], dtype=float)
        for name in METHODS[method]
    }
    return Sweep(values, accuracy, tuple(measured[key] for key in keys))


def collect(store: TrialStore) -> dict[str, Pair]:
    """Return the sweeps of every data set on which both methods are done."""
    pairs: dict[str, Pair] = {}
    for dataset in SCALINGS:
        sgd, kfc = (sweep_of(store, dataset, method) for method in METHODS)
        if sgd is not None and kfc is not None:
            pairs[dataset] = (sgd, kfc)
    return pairs


def command(protocol: Protocol) -> str:
    """Return the command that repeats the results."""
    for preset, quick in ((FULL, ""), (QUICK, " --quick")):
        if protocol == replace(preset, seeds=protocol.seeds):
            seed = "" if protocol.seeds == preset.seeds else f" --seed {protocol.seeds[0]}"
            return f"dpkfc reproduce table7 --data-dir DATA{quick}{seed}"
    options = {
        name: getattr(protocol, name)
        for name in ("trials", "records", "validation", "epochs", "probe_batch")
    }
    given = [
        f"--{name.replace('_', '-')} {value:.10g}"
        for name, value in options.items()
        if value is not None
    ]
    return " ".join(["python -m experiments.table7", *given, "--data-dir DATA --out FOLDER"])


def about(protocol: Protocol) -> str:
    """Describe the protocol for the report."""
    records = (
        "all training records"
        if protocol.records is None
        else f"the first {protocol.records:,} training records"
    )
    full = "as in the paper" if protocol.trials == FULL.trials else f"the paper has {FULL.trials}"
    return f"    {command(protocol)}\n\n" + (
        f"{protocol.trials} trials per method and data set ({full}), TPE, ε = "
        f"{protocol.epsilon:g}, δ = {protocol.delta:g} by PLD, Poisson sampling, the paper's CNN, "
        f"SGD with momentum {StudySetting.momentum:g}, {protocol.epochs:g} epochs at an expected "
        f"batch of {protocol.batch_size}, on {records}. Trials hold out the last "
        f"{protocol.validation:,} of them, and are chosen by the accuracy there; the best is "
        "trained on all of them and measured on the test set, with new seeds "
        f"({len(protocol.seeds)}). Log-uniform: learning rate .001 to .5, clip .1 to 50, damping π "
        f"(`stability` here) 1e-5 to .1, preconditioner steps (batches of {protocol.probe_batch} "
        "probes at a refresh, one refresh per epoch) 1 to 100; uniform: α from 0 to 2, the "
        "exponent of the probes' amplitude, so that it is `PinkNoise(alpha=2α)`. DP-KFC whitens "
        "activations at full rank, as the authors' code does. Epsilon is that of each run; the "
        "search is not charged."
    )


def execute(protocol: Protocol, datasets: Sequence[str], options: ReproduceOptions) -> None:
    """Search and measure on one data set after the other; the report grows with each of them."""
    if not find_spec("optuna"):
        raise ImportError(
            "the search needs Optuna, which is not installed: pip install 'dpkfc[tune]'"
        )
    out = options.out
    console = options.console
    out.mkdir(parents=True, exist_ok=True)
    prefix = "quick-" if options.quick else ""
    store = TrialStore(out / f"{prefix}results.jsonl", protocol, options.device)
    for_trials, for_finals = loaders(protocol, options.data_dir)
    for dataset in datasets:
        for method in METHODS:
            search(store, dataset, method, for_trials, console)
        for method in METHODS:
            train_best(store, dataset, method, for_finals, console)
        sweeps = collect(store)
        publish(
            out / f"{prefix}table7.md",
            markdown(sweeps, about(protocol), prefix),
            console,
            quick=options.quick,
        )
        if not find_spec("matplotlib"):
            console.print("matplotlib is not installed: no pictures")
            continue
        paper = PUBLISHED[dataset][:2]
        plot_analysis(*sweeps[dataset], dataset, paper, out / f"{prefix}fig10-{dataset}.png")
        plot_pairs(sweeps[dataset][1], dataset, out / f"{prefix}fig11-{dataset}.png")


def reproduce(options: ReproduceOptions) -> None:
    """Run the paper's protocol on all data sets; quick: a few short trials on MNIST."""
    protocol, datasets = (QUICK, ["mnist"]) if options.quick else (FULL, list(SCALINGS))
    protocol = replace(protocol, seeds=options.seeds(protocol.seeds))
    execute(protocol, datasets, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a protocol of one's own choice from the command line."""
    module = "experiments.table7"
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Table 7, Figures 10 and 11 of the paper: the importance of hyperparameters.",
    )
    parser.add_argument(
        "--data-dir", type=Path, help="the folder with mnist/, ... (default $DPKFC_DATA)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for results, tables and pictures"
    )
    names = list(SCALINGS)
    parser.add_argument(
        "--datasets",
        type=names_among(names),
        default=names,
        metavar="A,B",
        help=f"a list of {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=FULL.trials,
        help="per method and data set (default %(default)s)",
    )
    parser.add_argument(
        "--records", type=int, help="number of training records, from the first (default: all)"
    )
    parser.add_argument(
        "--validation",
        type=int,
        default=FULL.validation,
        help="records held out in trials (default %(default)s)",
    )
    parser.add_argument("--epochs", type=float, default=FULL.epochs, help="(default %(default)s)")
    parser.add_argument(
        "--probe-batch",
        type=int,
        default=FULL.probe_batch,
        help="probes per preconditioner step (default %(default)s)",
    )
    chosen = vars(parser.parse_args(arguments))
    out, data_dir, datasets = (chosen.pop(name) for name in ("out", "data_dir", "datasets"))
    try:
        execute(Protocol(**chosen), datasets, ReproduceOptions(out, data_dir=data_dir))
    except EXPECTED_ERRORS as error:
        sys.exit(f"{module}: {error}")
