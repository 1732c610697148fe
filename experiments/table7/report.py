"""Table 7 of the paper beside what was measured, and its claims with what was found, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from experiments.table7.findings import (
    CLAIMED,
    FAILS,
    HOLDS,
    METHODS,
    SPACE,
    Sweep,
    claims,
    difference,
    evaluator_name,
    importances,
)

from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.text import markdown_table

Pair = tuple[Sweep, Sweep]  # of DP-SGD and DP-KFC
PUBLISHED = {
    "mnist": (94.2, 97.1, 1.80),
    "fashion-mnist": (84.3, 87.1, 1.48),
    "cifar-10": (50.5, 59.1, 1.78),
}


def markdown(sweeps: Mapping[str, Pair], about: str, prefix: str = "") -> str:
    """`about` says how the trials were made; names of pictures begin with `prefix`."""
    parts = ["# Sensitivity to hyperparameters (Table 7, Figures 10 and 11)", about, table7(sweeps)]
    parts += ["## Claims", claims_table(sweeps), REMARK]
    for dataset, (_, kfc) in sweeps.items():
        parts += [f"## {dataset}", settings_table(sweeps[dataset]), importance_table(kfc)]
        parts += [
            f"![clip and learning rate, importances, interactions on {dataset}]({prefix}fig10-{dataset}.png)",
            f"![pairs of parameters of DP-KFC on {dataset}]({prefix}fig11-{dataset}.png)",
        ]
    return "\n\n".join(parts) + "\n"


REMARK = (
    "Where two figures are measured, DP-KFC's is the first. A slope stands with the range of 90 % of resampled trials, "
    "a difference with its standard error: if it is not beyond two of them, it is not resolved. TPE places trials by "
    "what the earlier ones gave, so that shares of trials and plain correlations also tell how it searched. At equal "
    "lr · clip: from the accuracy of a trial the mean of the others near in lr · clip is taken (a Gaussian kernel of "
    ".2 decades). At one learning rate, or lr · clip: within a factor of two of that of the best trial. One seed a "
    "trial."
)


def table7(sweeps: Mapping[str, Pair]) -> str:
    headings = [
        "test %",
        "DP-SGD",
        "DP-KFC",
        "Δ",
        "best α",
        "paper: DP-SGD",
        "DP-KFC",
        "Δ",
        "best α",
    ]
    rows = []
    for dataset, (sgd, kfc) in sweeps.items():
        low, high, alpha = PUBLISHED[dataset]
        measured = [mean_and_spread(sgd.tests), mean_and_spread(kfc.tests)]
        measured += [
            f"{100 * (fmean(kfc.tests) - fmean(sgd.tests)):+.2f}",
            f"{kfc.best['alpha']:.2f}",
        ]
        rows.append(
            [dataset, *measured, f"{low:.1f}", f"{high:.1f}", f"{high - low:+.1f}", f"{alpha:.2f}"]
        )
    return markdown_table(headings, rows)


def claims_table(sweeps: Mapping[str, Pair]) -> str:
    """A line a claim, a column a data set; with all data sets, that the gain is largest on CIFAR-10."""
    found = {dataset: claims(*pair) for dataset, pair in sweeps.items()}
    headings = ["claim", "the paper", *found]
    rows = [
        [same[0].text, same[0].paper, *(f"{claim.measured}: **{claim.verdict}**" for claim in same)]
        for same in zip(*found.values(), strict=True)
    ]
    if len(sweeps) == len(PUBLISHED):
        gains = {
            dataset: difference(kfc.tests, sgd.tests).value
            for dataset, (sgd, kfc) in sweeps.items()
        }
        verdict = HOLDS if max(gains, key=gains.__getitem__) == "cifar-10" else FAILS
        cells = [f"{100 * gain:+.2f}" for gain in gains.values()]
        rows.append(
            ["the gain is largest on CIFAR-10", "+8.6", *cells[:-1], f"{cells[-1]}: **{verdict}**"]
        )
    return markdown_table(headings, rows, left=len(headings))


def settings_table(pair: Pair) -> str:
    names = list(SPACE)
    rows = [
        [
            method,
            f"{100 * of.accuracy.max():.2f}",
            mean_and_spread(of.tests),
            *(f"{of.best[name]:.3g}" if name in of.best else "" for name in names),
        ]
        for method, of in zip(METHODS, pair, strict=True)
    ]
    return markdown_table(["the best trial", "validation %", "test %", *names], rows)


def importance_table(kfc: Sweep) -> str:
    headings = [
        "of DP-KFC",
        "rank correlation",
        "at equal lr · clip",
        evaluator_name(),
        "the paper's importance",
    ]
    rows = [
        [
            name,
            f"{of.correlation:+.2f}",
            f"{of.adjusted:+.2f}",
            f"{of.variance:.2f}",
            f"{CLAIMED[name]:.2f}" if name in CLAIMED else "",
        ]
        for name, of in importances(kfc).items()
    ]
    return markdown_table(headings, rows)
