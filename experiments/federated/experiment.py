"""Accuracy of ten federated clients, with DP-SGD and with DP-KFC, at the same epsilon per client.

Both methods have the same tries of the learning rate, on one seed, compared on training records
that no client has. The chosen rate is then run with three other seeds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from dpkfc.accounting.rounding import round_up
from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.reports.figures import finish, new_figure
from experiments.common.options import ReproduceOptions
from experiments.common.study import read
from experiments.federated.simulation import (
    HIDDEN,
    METHODS,
    Federation,
    FederationResult,
    Simulate,
    in_simulation,
)

RATES = (2.0, 4.0, 8.0, 16.0)
ALPHAS = (None,)  # splits at random
QUICK_ALPHA = 0.5
QUICK_RATE = 0.5
SEEDS = (1, 2, 3)
TRY_SEED = 0
DATASET = "fashion-mnist"
COLOURS = {"DP-SGD": "#999999", "DP-KFC": "#3b5bdb"}


@dataclass(frozen=True)
class Row:
    """A line of the table: one method on one split."""

    split: str
    method: str
    rate: float
    validation: float
    tests: tuple[float, ...]
    epsilon: float

    @property
    def spread(self) -> str:
        deviation = statistics.stdev(self.tests) if len(self.tests) > 1 else 0.0
        return f"{100 * statistics.mean(self.tests):.2f} ± {100 * deviation:.2f}"


def reproduce(options: ReproduceOptions) -> None:
    """Simulate all federations; quick: one per method, with scikit-learn's digits, two rounds."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("quick.jsonl" if options.quick else "federated.jsonl")
    first = Federation(DATASET, METHODS[0], RATES[0], TRY_SEED, None)
    alphas: tuple[float | None, ...] = ALPHAS
    rates: tuple[float, ...] = RATES
    seeds = options.seeds(SEEDS)
    if options.quick:
        alphas, rates, seeds = (QUICK_ALPHA,), (QUICK_RATE,), (TRY_SEED,)
        first = replace(
            first,
            dataset="digits",
            clients=2,
            rounds=2,
            local_steps=3,
            batch_size=64,
            held_out=300,
            epsilon=8.0,
            delta=1e-4,
        )
    results = Results(file, options.console)
    rows: list[Row] = []

    def work(simulate: Simulate) -> None:
        rows.clear()
        for alpha in alphas:
            for method in METHODS:
                tries = [replace(first, alpha=alpha, method=method, lr=rate) for rate in rates]
                best = max(tries, key=lambda one: results.of(one, simulate).validation)
                finals = [replace(best, seed=seed) for seed in seeds]
                tests = [results.of(setting, simulate) for setting in finals]
                rows.append(_row(best, results.of(best, simulate).validation, tests))

    if not _is_recorded(work):
        in_simulation(work, first.clients, options.data_dir)
    command = options.command("federated") + ("" if options.quick else " --data-dir DATA")
    text = markdown(rows, first, len(rates), command)
    publish(file, text, options.console, partial(plot, rows), options.quick)


def _is_recorded(work: Callable[[Simulate], None]) -> bool:
    """Whether `work` needs no simulation, because the file holds all results."""

    def missing(setting: Federation) -> FederationResult:
        raise LookupError(setting)

    try:
        work(missing)
    except LookupError:
        return False
    return True


class Results:
    """The results in a file. A federation that it does not hold is simulated and added."""

    def __init__(self, file: Path, console: Console) -> None:
        self.file, self.console = file, console
        self.done = {
            Federation(**row["setting"]): FederationResult(**row["result"]) for row in read(file)
        }

    def of(self, setting: Federation, simulate: Simulate) -> FederationResult:
        if setting not in self.done:
            result = self.done[setting] = simulate(setting)
            with self.file.open("a") as file:
                row = {"setting": asdict(setting), "result": asdict(result)}
                file.write(json.dumps(row) + "\n")
            self.console.print(
                f"alpha {setting.alpha}, {setting.method}, lr {setting.lr:g}, seed {setting.seed}: "
                f"test {100 * result.test:.2f} ({result.seconds:.0f} s)",
                highlight=False,
            )
        return self.done[setting]


def _row(best: Federation, validation: float, results: Sequence[FederationResult]) -> Row:
    expected = best.clients * best.rounds
    for result in results:
        if result.replies != expected or result.epsilon > best.epsilon:
            raise ValueError(
                f"{best}: {result.replies} of {expected} replies, epsilon {result.epsilon}: a "
                "client was lost, so the result cannot be compared"
            )
    return Row(
        split="at random" if best.alpha is None else f"Dirichlet({best.alpha:g}) labels",
        method=best.method,
        rate=best.lr,
        validation=validation,
        tests=tuple(result.test for result in results),
        epsilon=max(result.epsilon for result in results),
    )


def markdown(rows: list[Row], setting: Federation, tries: int, command: str) -> str:
    quick = setting.dataset == "digits"
    network = "A small CNN" if quick else f"A perceptron with {HIDDEN} hidden units"
    lines = [
        f"# Federated clients on {setting.dataset}, epsilon = {setting.epsilon:g} per client",
        "",
        "| split | method | tries | chosen lr | validation % | test % |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.split} | {row.method} | {tries} | {row.rate:g} | {100 * row.validation:.2f} "
            f"| {row.spread} ({len(row.tests)}) |"
            for row in rows
        ),
        "",
        f"{network}. {setting.clients} clients, {setting.rounds} rounds of {setting.local_steps} "
        f"local steps, expected batch size {setting.batch_size}, clip 1, plain SGD at the "
        "clients, FedAvg at the server, simulated by Flower. Every client has ε = "
        f"{setting.epsilon:g} at δ = {setting.delta:g} for all rounds together, charged to its own "
        f"ledger (at the end: {round_up(max(row.epsilon for row in rows))}). Test: mean ± standard "
        "deviation over the seeds (their number). The tries, and the choice among them by records "
        "that no client has, are not charged.",
        "",
        f"`{command}`",
        "",
    ]
    return "\n".join(lines)


def plot(rows: list[Row], file: Path) -> None:
    """One bar per split and method, with a mark per seed."""
    splits = list(dict.fromkeys(row.split for row in rows))
    figure, panels = new_figure(1, 1, 5.5, 3.4)
    panel = panels[0][0]
    for row in rows:
        place = splits.index(row.split) + 0.36 * (METHODS.index(row.method) - 0.5)
        label = row.method if row.split == splits[0] else None
        percent = [100 * test for test in row.tests]
        panel.bar(place, statistics.mean(percent), 0.32, color=COLOURS[row.method], label=label)
        panel.plot([place] * len(percent), percent, "k.", markersize=4)
    panel.set_ylim(0, 100)
    panel.set_xticks(range(len(splits)), splits)
    panel.set_ylabel("test accuracy, %")
    finish(figure, panel, file)
