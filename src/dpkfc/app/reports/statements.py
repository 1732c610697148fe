"""Sentences about the privacy of a run, for readers who do not know the theory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpkfc.accounting.rounding import round_up
from dpkfc.accounting.unchecked import NOT_CHECKED, Unchecked

TUNABLE = ("lr", "rho", "clip", "epochs", "batch_size")
LARGE_EPSILON = 20.0  # above, epsilon promises nothing: e^20 is half a billion


def in_plain_words(epsilon: float, delta: float) -> list[str]:
    """What epsilon means.

    For any guess about a person with prior odds o, the odds after seeing the model are at most
    e^ε o, except with probability δ.

    >>> in_plain_words(math.log(2.995), 1e-5)[1].split("odds")[1].split(":")[0]
    ' of any guess about one record at most 3.00-fold'
    """
    if not math.isfinite(epsilon):
        return ["This run is NOT private: no guarantee covers what it released."]
    if epsilon > LARGE_EPSILON:
        return [
            f"An epsilon this large ({round_up(epsilon)}) promises nothing: whoever sees the model "
            "may be practically certain whether a given record was used. For a meaningful promise "
            "train with a smaller epsilon, at most 10.",
        ]
    odds = math.ceil(100 * math.exp(epsilon)) / 100  # rounded up: the printed number is a bound
    percent = math.ceil(100 * odds / (1 + odds))
    return [
        "The model was trained so that it would have come out nearly the same if any one record "
        "had been left out.",
        "Whatever somebody already knows, seeing the model changes the odds of any guess about one "
        f"record at most {odds:.2f}-fold: a 50:50 guess whether a given record was used is right "
        f"at most {percent} % of the time (epsilon = {round_up(epsilon)}), except for a "
        f"probability of {delta:.1g} (delta) that the promise fails.",
        "It protects one record at a time: people with several records, and facts that many "
        "records share, are not hidden.",
    ]


def not_charged(
    result: Mapping[str, Any], settings: Mapping[str, Any], unchecked: Sequence[Unchecked] = ()
) -> list[str]:
    """What epsilon does not cover in this run."""
    sentences = []
    if result.get("selection"):
        sentences.append("The choice of the best try is charged: epsilon covers the whole tuning.")
    if given := [name for name in TUNABLE if settings.get(name) is not None]:
        sentences.append(
            f"Settings were given by hand ({', '.join(given)}). If they were chosen by looking at "
            "these records, for example in earlier runs, that choice is not charged here."
        )
    else:
        sentences.append(
            "No setting was given by hand; a recipe that looks at no record chose them, so there "
            "is no charge."
        )
    count = "number of records" if settings.get("records") is None else "stated number of records"
    sentences.append(
        f"The {count}, the shape of the inputs and the list of classes are treated as public. "
        "Earlier work on the records, such as cleaning or drafting a schema from them, is not "
        "charged."
    )
    if result["test"]:
        sentences.append(
            "Accuracy on the test records is exact, and so is the share of their most frequent "
            "class: both numbers are released without a charge."
        )
    if settings.get("ledger"):
        sentences.append(
            f"The run is charged in the ledger {settings['ledger']}, as {settings['dataset']}."
        )
    else:
        sentences.append(
            "The run is in no ledger: the cost of other runs on the same people is not added to "
            "its epsilon."
        )
    if settings.get("seed") is not None:
        sentences.append(
            "The noise comes from a seed, and whoever knows the seed can remove the noise."
        )
    already_said = {
        "ledger": True,
        "records": settings.get("records") is None,
        "seed": settings.get("seed") is not None,
    }
    sentences += [f"{NOT_CHECKED.get(key, key)}." for key in unchecked if not already_said.get(key)]
    return sentences


def lost_steps(count: int) -> str:
    """A sentence about steps that were charged and lost.

    >>> lost_steps(1)
    '1 step after the last checkpoint was charged, and the result was lost: the charge stays'
    """
    steps = "1 step" if count == 1 else f"{count:,} steps"
    verb = "was" if count == 1 else "were"
    return (
        f"{steps} after the last checkpoint {verb} charged, and the result was lost: the charge "
        "stays"
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of `count` trials.

    >>> [round(bound, 3) for bound in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
