"""Table 7 as Markdown: the measured and the published accuracies, and the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from dpkfc.app.reports.accuracy_table import mean_and_spread
from dpkfc.app.reports.text import markdown_table
from experiments.table7.findings import (
    CLAIMED,
    FAILS,
    HOLDS,
    METHODS,
    SPACE,
    Sweep,
    claims,
    evaluator_name,
    importances,
    mean_difference,
)

Pair = tuple[Sweep, Sweep]  # DP-SGD, DP-KFC
# The paper's accuracies of DP-SGD and DP-KFC in percent, and its best α.
PUBLISHED = {
    "mnist": (94.2, 97.1, 1.80),
    "fashion-mnist": (84.3, 87.1, 1.48),
    "cifar-10": (50.5, 59.1, 1.78),
}


def markdown(sweeps: Mapping[str, Pair], about: str, prefix: str = "") -> str:
    """Return the report.

    Args:
        sweeps: The trials by data set.
        about: A description of the protocol.
        prefix: How the names of the pictures begin.
    """
    parts = ["# Importance of hyperparameters (Table 7, Figures 10 and 11)", about, table7(sweeps)]
    parts += ["## Claims", claims_table(sweeps), REMARK]
    for dataset, (_, kfc) in sweeps.items():
        parts += [f"## {dataset}", settings_table(sweeps[dataset]), importance_table(kfc)]
        parts += [
            f"![clip and learning rate, importances, interactions on {dataset}]"
            f"({prefix}fig10-{dataset}.png)",
            f"![pairs of parameters of DP-KFC on {dataset}]({prefix}fig11-{dataset}.png)",
        ]
    return "\n\n".join(parts) + "\n"


REMARK = (
    "Where two figures are measured, DP-KFC's is the first. A slope has the range of 90 % of "
    "resampled trials, a difference has its standard error; a difference within two standard "
    "errors is not resolved. TPE places trials according to the earlier ones, so shares of trials "
    "and plain correlations also reflect how it searched. At equal lr · clip: from the accuracy of "
    "a trial, the mean of the other trials near in lr · clip is subtracted (a Gaussian kernel of "
    ".2 decades). At one learning rate, or lr · clip: within a factor of two of that of the best "
    "trial. One seed per trial."
)


def table7(sweeps: Mapping[str, Pair]) -> str:
    """Format the test accuracies of the best trials, with those of the paper."""
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
    """Format one line per claim and one column per data set.

    With all data sets there is one more claim: the gain is largest on CIFAR-10.
    """
    by_dataset = {dataset: claims(*pair) for dataset, pair in sweeps.items()}
    headings = ["claim", "the paper", *by_dataset]
    rows = [
        [same[0].text, same[0].paper, *(f"{claim.measured}: **{claim.verdict}**" for claim in same)]
        for same in zip(*by_dataset.values(), strict=True)
    ]
    if len(sweeps) == len(PUBLISHED):
        gains = {
            dataset: mean_difference(kfc.tests, sgd.tests).value
            for dataset, (sgd, kfc) in sweeps.items()
        }
        verdict = HOLDS if max(gains, key=gains.__getitem__) == "cifar-10" else FAILS
        cells = [f"{100 * gain:+.2f}" for gain in gains.values()]
        rows.append(
            ["the gain is largest on CIFAR-10", "+8.6", *cells[:-1], f"{cells[-1]}: **{verdict}**"]
        )
    return markdown_table(headings, rows, left=len(headings))


def settings_table(pair: Pair) -> str:
    """Format the best trial of either method."""
    names = list(SPACE)
    rows = [
        [
            method,
            f"{100 * sweep.accuracy.max():.2f}",
            mean_and_spread(sweep.tests),
            *(f"{sweep.best[name]:.3g}" if name in sweep.best else "" for name in names),
        ]
        for method, sweep in zip(METHODS, pair, strict=True)
    ]
    return markdown_table(["the best trial", "validation %", "test %", *names], rows)


def importance_table(kfc: Sweep) -> str:
    """Format the importance of each hyperparameter of DP-KFC."""
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
            f"{importance.correlation:+.2f}",
            f"{importance.adjusted:+.2f}",
            f"{importance.variance:.2f}",
            f"{CLAIMED[name]:.2f}" if name in CLAIMED else "",
        ]
        for name, importance in importances(kfc).items()
    ]
    return markdown_table(headings, rows)
