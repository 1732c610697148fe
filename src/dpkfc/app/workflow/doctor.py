"""`dpkfc doctor`: does this installation train privately, and what should be fixed?"""

from __future__ import annotations

import math
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.data import TensorDataset

from dpkfc.accounting.events import Mechanism
from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.rounding import round_up
from dpkfc.app.workflow.settings import devices
from dpkfc.engine.make_private import make_private
from dpkfc.errors import PrivacyError
from dpkfc.geometry.kfc import KFC
from dpkfc.losses import cross_entropy
from dpkfc.random import add_normal_, first_key

REQUIRED = (
    "torch",
    "numpy",
    "scipy",
    "dp-accounting",
    "cryptography",
    "safetensors",
    "typer",
    "rich",
)
OPTIONAL = {
    "kymatio": ("features", "scattering features, the default for images"),
    "pillow": ("data", "image folders"),
    "pyarrow": ("data", "Parquet tables"),
    "scikit-learn": ("demo", "dpkfc demo and the digits"),
    "optuna": ("tune", "tuning"),
}
DRAWS = 200_000
COLOURS = {"ok": "green", "note": "yellow", "wrong": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    subject: str
    state: Literal["ok", "note", "wrong"]
    text: str


def show(console: Console) -> bool:
    """Print all findings; returns whether nothing is wrong."""
    table = Table(title="dpkfc doctor", title_justify="left", pad_edge=False)
    for heading in ("check", "state", "finding"):
        table.add_column(heading)
    with console.status("checking"):
        findings = list(examine())
    for finding in findings:
        state = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(finding.subject, state, Text(finding.text))
    console.print(table)
    wrong = [finding.subject for finding in findings if finding.state == "wrong"]
    console.print(f"to fix: {', '.join(wrong)}" if wrong else "ready to train privately")
    return not wrong


def examine() -> Iterator[Finding]:
    """Run all checks. None of them raises."""
    yield Finding("python", "ok", platform.python_version())
    for name in REQUIRED:
        yield _package(name, Finding(name, "wrong", f"missing: pip install {name}"))
    for name, (extra, purpose) in OPTIONAL.items():
        missing = f"not installed; for {purpose}: pip install 'dpkfc[{extra}]'"
        yield _package(name, Finding(name, "note", missing))
    yield _threads()
    yield _try("noise", _noise)
    yield _try("secret keys", _keys)
    yield _try("ledger", _ledger)
    yield _try("private run", _private_run)


def _package(name: str, missing: Finding) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return missing


def _threads() -> Finding:
    threads = torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    cores = usable or os.cpu_count() or 1
    text = f"{threads} threads on {cores} cores; devices: {', '.join(devices())}"
    if threads <= cores:
        return Finding("threads", "ok", text)
    advice = f"{text}. More threads than cores slow each other down: OMP_NUM_THREADS={cores}"
    return Finding("threads", "note", advice)


def _try(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", check())
    except Exception as problem:
        return Finding(subject, "wrong", f"{type(problem).__name__}: {problem}")


def _noise() -> str:
    """Mean, variance and tails of the noise, each within five standard errors."""
    values = torch.zeros(DRAWS, dtype=torch.float64)
    add_normal_([values], secrets.token_bytes(32), 1.0)
    standard_error = DRAWS**-0.5
    mean = float(values.mean())
    variance = float(values.square().mean())
    tail = float((values.abs() > 2).double().mean())
    tail_expected = math.erfc(2 / math.sqrt(2))
    for name, value, expected, deviation in (
        ("mean", mean, 0.0, 1.0),
        ("variance", variance, 1.0, math.sqrt(2)),
        ("share beyond 2", tail, tail_expected, math.sqrt(tail_expected * (1 - tail_expected))),
    ):
        if abs(value - expected) > 5 * deviation * standard_error:
            raise PrivacyError(
                f"the {name} of {DRAWS} draws is {value:.4f}, not {expected:.4f}: do not train "
                "with this"
            )
    return (
        f"{DRAWS:,} draws: mean {mean:+.4f}, variance {variance:.4f}, {tail:.2%} beyond 2 "
        f"(expected {tail_expected:.2%})"
    )


def _keys() -> str:
    if first_key(None) == first_key(None):
        raise PrivacyError("the operating system gave the same key twice: do not train here")
    return "from the operating system, new for every run"


def _ledger() -> str:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.db", "doctor")
        ledger.open_run("try", Mechanism(0.5, 1.0, 2))
        ledger.charge("try", 1)
        charged = ledger.charged("try")
        ledger.close()
    if charged != 1:
        raise PrivacyError(f"one step was charged, but the ledger shows {charged}")
    return "a step was charged on disk"


def _private_run() -> str:
    """Two steps of DP-KFC on random data."""
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randint(2, (64,), generator=generator)
    )
    model = torch.nn.Linear(8, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.0,
        delta=1e-3,
        steps=2,
        batch_size=32,
        geometry=KFC(),
        loss=cross_entropy,
    )
    for x, y in run.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    finite = bool(model.weight.isfinite().all())
    unchanged = bool((model.weight == before).any())
    if run.steps != 2 or not finite or unchanged:
        raise PrivacyError("two private steps did not change every weight to a finite number")
    seconds = time.perf_counter() - started
    return f"2 steps of DP-KFC, epsilon = {round_up(run.epsilon())}, in {seconds:.1f} s"
