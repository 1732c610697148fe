"""DP-SGD and DP-KFC on scikit-learn's digits, as in `dpkfc demo`, once per seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial

from dpkfc.app.reports.experiment_report import publish
from dpkfc.app.workflow.demo import Outcome, markdown, plot, run_demo
from experiments.common.options import ReproduceOptions
from experiments.common.study import read

EPSILON = 3.0
DELTA = 1e-5
EPOCHS = 40.0
QUICK_EPOCHS = 4.0
SEEDS = (0, 1, 2, 3, 4)


def reproduce(options: ReproduceOptions) -> None:
    """Run the demo once per seed; quick: one seed, a tenth as long."""
    seeds = options.seeds(SEEDS)
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    file = options.out / ("quick.jsonl" if options.quick else "demo.jsonl")
    options.out.mkdir(parents=True, exist_ok=True)
    done = {row["seed"]: [Outcome(**outcome) for outcome in row["methods"]] for row in read(file)}
    for seed in seeds:
        if seed not in done:
            done[seed] = run_demo(EPSILON, DELTA, epochs, seed, options.console, options.device)
            row = {"seed": seed, "methods": [asdict(outcome) for outcome in done[seed]]}
            with file.open("a") as results:
                results.write(json.dumps(row) + "\n")
    outcomes = [done[seed] for seed in seeds]
    text = markdown(outcomes, DELTA, file.stem)
    publish(file, text, options.console, partial(plot, outcomes), options.quick)
