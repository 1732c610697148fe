"""Table 7, Figures 10 and 11 of the paper: how sensitive DP-SGD and DP-KFC are to their hyperparameters, by Optuna.

    dpkfc reproduce table7 --data-dir DATA
    python -m experiments.sensitivity --trials 30 --records 10000 --validation 2000 --epochs 2 --probe-batch 32 \\
        --datasets mnist,fashion-mnist --data-dir DATA --out runs/table7

Each method has the same number of trials on a data set, chosen by TPE for the accuracy on held-out training records.
The best one is trained on all records, with new seeds, and only these runs see the test set. The paper's damping π is
added to A as it is, which is `stability` here (`damping` would be relative to the trace). Its α is an exponent of the
amplitude, so that ``PinkNoise(alpha=2α)``. Its preconditioner steps are probe batches of a refresh, one in an epoch.

Trials are appended to results.jsonl as they come, and a second run goes on from there.
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
from experiments.common.arguments import names_among
from experiments.common.options import ReproduceOptions
from experiments.common.setting import PAPER, Data, Load, Setting, scaled, train
from experiments.common.study import Row, read
from experiments.geometry.experiment import SCALING
from experiments.table7.findings import METHODS, SPACE, Range, Sweep, study_of
from experiments.table7.plots import plot_analysis, plot_pairs
from experiments.table7.report import PUBLISHED, Pair, markdown
from rich.console import Console
from rich.progress import track
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.readers.idx import Scaling
from dpkfc.app.readers.sources import NAMED
from dpkfc.app.reports.experiment_report import publish

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

SCALINGS: dict[str, Scaling] = {**SCALING, "cifar-10": "centred"}
SEED = 0  # of the search; trials have the default seed
Params = dict[str, float]


@dataclass(frozen=True)
class Protocol:
    """All that trials have in common. More `trials` go on with a search; any other change begins a new one."""

    trials: int = 150
    records: int | None = None  # the first ones of the training set; None for all
    validation: int = 5000  # of them held out in trials
    epochs: float = 5
    batch_size: int = 256
    probe_batch: int = 256
    epsilon: float = 2.0
    delta: float = 1e-5
    seeds: tuple[int, ...] = (1, 2, 3)

    def __post_init__(self) -> None:
        if self.trials < 3:
            raise ValueError(f"trials={self.trials}: nothing can be told from fewer than 3")
        if self.records is not None and not 0 < self.validation < self.records:
            raise ValueError(
                f"validation={self.validation}: must be part of the {self.records} records"
            )

    @property
    def contents(self) -> dict[str, Any]:
        """What results depend on."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("trials", "seeds")
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.contents, sort_keys=True).encode()).hexdigest()[:16]

    def setting(
        self, dataset: str, method: str, params: Mapping[str, float], records: int
    ) -> Setting:
        """A trial on a data set with so many training records."""
        geometry = None
        if method == "DP-KFC":
            geometry = PAPER | {
                "probe": {**PAPER["probe"], "alpha": 2 * params["alpha"]},
                "every": max(1, round((records - self.validation) / self.batch_size)),
                "probes": int(params["steps"]) * self.probe_batch,
                "chunk": 256,
                "stability": params["damping"],
            }
        return Setting(
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
class Place:
    """Where results are kept, whose, and where they are computed."""

    file: Path
    protocol: Protocol
    device: str = "cpu"

    def rows(self, dataset: str, method: str, final: bool) -> list[Row]:
        """Those of this protocol: trials, or runs on the test set."""
        whose = {"key": self.protocol.key, "dataset": dataset, "method": method}
        found = [
            row
            for row in read(self.file)
            if all(row.get(name) == value for name, value in whose.items())
        ]
        return [row for row in found if (row["setting"]["validation"] == 0) == final]

    def trials(self, dataset: str, method: str) -> list[Row]:
        return self.rows(dataset, method, final=False)[: self.protocol.trials]

    def add(self, setting: Setting, params: Params, load: Load, console: Console) -> float:
        """Train, and append what came of it."""
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
    """The protocol's records for trials, without the test set, and for final runs, with it."""

    @cache
    def with_test(dataset: str, scaling: Scaling) -> Data:
        records, test = NAMED[dataset][1](data_dir)
        count = len(records) if protocol.records is None else protocol.records
        if not protocol.validation < count <= len(records):
            raise ValueError(
                f"{dataset} has {len(records)} training records, the protocol asks for {count}, of which "
                f"{protocol.validation} are held out"
            )
        return scaled((first(records, count), test), scaling)

    def without_test(dataset: str, scaling: Scaling) -> Data:
        records, test = with_test(dataset, scaling)
        return records, first(test, 0)

    return without_test, with_test


def first(data: TensorDataset, count: int) -> TensorDataset:
    return TensorDataset(*(part[:count].clone() for part in data.tensors))


def suggest(trial: Trial, method: str) -> Params:
    def one(name: str, of: Range) -> float:
        value: float
        if of.whole:
            value = trial.suggest_int(name, int(of.low), int(of.high), log=of.log)
        else:
            value = trial.suggest_float(name, of.low, of.high, log=of.log)
        return value

    return {name: one(name, SPACE[name]) for name in METHODS[method]}


def search(place: Place, dataset: str, method: str, load: Load, console: Console) -> None:
    """All trials of a method. Those in the file are told to the search first, the others are appended to it."""
    done = place.trials(dataset, method)
    console.print(
        f"{dataset}, {method}: {len(done)} of {place.protocol.trials} trials are in {place.file}"
    )
    if len(done) == place.protocol.trials:
        return
    records = len(load(dataset, SCALINGS[dataset])[0])

    def objective(trial: Trial) -> float:
        params = suggest(trial, method)
        return place.add(
            place.protocol.setting(dataset, method, params, records), params, load, console
        )

    storage, name = place.file.with_suffix(".db"), f"{dataset}, {method}, {place.protocol.key}"
    storage.unlink(missing_ok=True)
    told = [(row["params"], row["result"]["last"]) for row in done]
    study_of(told, distributions(method), f"sqlite:///{storage.absolute()}", name)
    dpkfc.tune(objective, tries=place.protocol.trials, storage=storage, name=name, seed=SEED)
    storage.unlink()


def distributions(method: str) -> dict[str, BaseDistribution]:
    from optuna.distributions import FloatDistribution, IntDistribution

    def one(of: Range) -> BaseDistribution:
        if of.whole:
            return IntDistribution(int(of.low), int(of.high), log=of.log)
        return FloatDistribution(of.low, of.high, log=of.log)

    return {name: one(SPACE[name]) for name in METHODS[method]}


def finish(place: Place, dataset: str, method: str, load: Load, console: Console) -> None:
    """Train the best trial on all records, and measure it on the test set, once a seed."""
    best = max(place.trials(dataset, method), key=lambda row: row["result"]["last"])
    chosen = replace(Setting(**best["setting"]), validation=0)
    done = {Setting(**row["setting"]).key for row in place.rows(dataset, method, final=True)}
    wanted = [replace(chosen, seed=seed) for seed in place.protocol.seeds]
    todo = [setting for setting in wanted if setting.key not in done]
    for setting in track(todo, f"{dataset}, {method}: the best", console=console, disable=not todo):
        place.add(setting, best["params"], load, console)


def sweep(place: Place, dataset: str, method: str) -> Sweep | None:
    """What the file holds; None unless all trials and final runs are done."""
    trials = place.trials(dataset, method)
    if len(trials) < place.protocol.trials:
        return None
    accuracy = np.array([row["result"]["last"] for row in trials])
    chosen = replace(Setting(**trials[int(accuracy.argmax())]["setting"]), validation=0)
    measured = {
        Setting(**row["setting"]).key: row["result"]["last"]
        for row in place.rows(dataset, method, final=True)
    }
    keys = [replace(chosen, seed=seed).key for seed in place.protocol.seeds]
    if not all(key in measured for key in keys):
        return None
    values = {
        name: np.array([row["params"][name] for row in trials], dtype=float)
        for name in METHODS[method]
    }
    return Sweep(values, accuracy, tuple(measured[key] for key in keys))


def collect(place: Place) -> dict[str, Pair]:
    """Every data set on which both methods are done."""
    found: dict[str, Pair] = {}
    for dataset in SCALINGS:
        sgd, kfc = (sweep(place, dataset, method) for method in METHODS)
        if sgd is not None and kfc is not None:
            found[dataset] = sgd, kfc
    return found


def command(protocol: Protocol) -> str:
    """What makes the results."""
    for known, quick in ((FULL, ""), (QUICK, " --quick")):
        if protocol == replace(known, seeds=protocol.seeds):
            seed = "" if protocol.seeds == known.seeds else f" --seed {protocol.seeds[0]}"
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
    return " ".join(["python -m experiments.sensitivity", *given, "--data-dir DATA --out FOLDER"])


def about(protocol: Protocol) -> str:
    records = (
        "all training records"
        if protocol.records is None
        else f"the first {protocol.records:,} training records"
    )
    full = "as in the paper" if protocol.trials == FULL.trials else f"the paper has {FULL.trials}"
    return f"    {command(protocol)}\n\n" + (
        f"{protocol.trials} trials a method and data set ({full}), TPE, ε = {protocol.epsilon:g}, δ = "
        f"{protocol.delta:g} by PLD, Poisson sampling, the paper's CNN, SGD with momentum {Setting.momentum:g}, "
        f"{protocol.epochs:g} epochs at an expected batch of {protocol.batch_size}, on {records}. Trials hold out the "
        f"last {protocol.validation:,} of them, and are chosen by the accuracy there; the best is trained on all of "
        f"them and measured on the test set, with new seeds ({len(protocol.seeds)}). Log-uniform: learning rate .001 "
        "to .5, clip .1 to 50, damping π (`stability` here) 1e-5 to .1, preconditioner steps (batches of "
        f"{protocol.probe_batch} probes at a refresh, one in an epoch) 1 to 100; uniform: α from 0 to 2, the exponent "
        "of the probes' amplitude, so that `PinkNoise(alpha=2α)`. DP-KFC whitens activations at full rank, as the "
        "authors' code does. Epsilon is that of each run; the search is not charged."
    )


def execute(protocol: Protocol, datasets: Sequence[str], order: ReproduceOptions) -> None:
    """Search and measure, data set by data set; the report grows with each of them."""
    out, console, quick = order.out, order.console, order.quick
    if not find_spec("optuna"):
        raise dpkfc.PrivacyError(
            "the search needs Optuna, which is not installed: pip install 'dpkfc[tune]'"
        )
    out.mkdir(parents=True, exist_ok=True)
    prefix = "quick-" if quick else ""
    place = Place(out / f"{prefix}results.jsonl", protocol, order.device)
    for_trials, for_finals = loaders(protocol, order.data_dir)
    for dataset in datasets:
        for method in METHODS:
            search(place, dataset, method, for_trials, console)
        for method in METHODS:
            finish(place, dataset, method, for_finals, console)
        sweeps = collect(place)
        publish(
            out / f"{prefix}table7.md",
            markdown(sweeps, about(protocol), prefix),
            console,
            quick=quick,
        )
        if not find_spec("matplotlib"):
            console.print("matplotlib is not installed: no pictures")
            continue
        paper = PUBLISHED[dataset][:2]
        plot_analysis(*sweeps[dataset], dataset, paper, out / f"{prefix}fig10-{dataset}.png")
        plot_pairs(sweeps[dataset][1], dataset, out / f"{prefix}fig11-{dataset}.png")


def run(order: ReproduceOptions) -> None:
    """The paper's protocol on all data sets: many hours. Quick: a few short trials on MNIST."""
    protocol, datasets = (QUICK, ["mnist"]) if order.quick else (FULL, list(SCALINGS))
    try:
        execute(replace(protocol, seeds=order.seeds(protocol.seeds)), datasets, order)
    except (OSError, ValueError) as error:
        raise dpkfc.PrivacyError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    prog = "experiments.sensitivity"
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data-dir", type=Path, help="the folder with mnist/, ... (default $DPKFC_DATA)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for results, tables and pictures"
    )
    names = list(SCALINGS)
    parser.add_argument(
        "--datasets", type=names_among(names), default=names, metavar="A,B", help=", ".join(names)
    )
    parser.add_argument(
        "--trials", type=int, default=FULL.trials, help="of each method and data set (%(default)s)"
    )
    parser.add_argument("--records", type=int, help="the first ones of the training set (all)")
    parser.add_argument(
        "--validation", type=int, default=FULL.validation, help="of them held out (%(default)s)"
    )
    parser.add_argument("--epochs", type=float, default=FULL.epochs, help="(%(default)s)")
    parser.add_argument(
        "--probe-batch", type=int, default=FULL.probe_batch, help="probes a step (%(default)s)"
    )
    chosen = vars(parser.parse_args(arguments))
    out, data_dir, datasets = (chosen.pop(name) for name in ("out", "data_dir", "datasets"))
    try:
        execute(Protocol(**chosen), datasets, ReproduceOptions(out, data_dir=data_dir))
    except (dpkfc.PrivacyError, OSError, ValueError) as error:
        sys.exit(f"{prog}: {error}")


if __name__ == "__main__":
    main()
