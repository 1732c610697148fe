"""`dpkfc doctor`: does this installation train privately, and what could be mended?"""

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
from dpkfc.app.workflow.fit import devices
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

    what: str
    state: Literal["ok", "note", "wrong"]
    text: str


def examine() -> Iterator[Finding]:
    """Every check in turn; none of them raises."""
    yield Finding("python", "ok", platform.python_version())
    for name in REQUIRED:
        found = _version(name)
        yield (
            Finding(name, "ok", found)
            if found
            else Finding(name, "wrong", f"missing: pip install {name}")
        )
    for name, (extra, purpose) in OPTIONAL.items():
        found = _version(name)
        missing = f"not installed; for {purpose}: pip install 'dpkfc[{extra}]'"
        yield Finding(name, "ok", found) if found else Finding(name, "note", missing)
    yield _threads()
    yield _tried("noise", _noise)
    yield _tried("secret keys", _keys)
    yield _tried("ledger", _ledger)
    yield _tried("private run", _smoke)


def show(console: Console) -> bool:
    """Print the table as it is found; whether nothing is wrong."""
    table = Table(title="dpkfc doctor", title_justify="left", pad_edge=False)
    for heading in ("what", "", "found"):
        table.add_column(heading)
    with console.status("checking"):
        findings = list(examine())
    for one in findings:
        table.add_row(one.what, Text(one.state, style=COLOURS[one.state]), Text(one.text))
    console.print(table)
    wrong = [one.what for one in findings if one.state == "wrong"]
    console.print(f"to mend: {', '.join(wrong)}" if wrong else "ready to train privately")
    return not wrong


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _threads() -> Finding:
    used, cores = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
    )
    cores = cores or os.cpu_count() or 1
    text = f"{used} of {cores} cores; devices: {', '.join(devices())}"
    if used > cores:
        return Finding(
            "threads",
            "note",
            f"{text}. More threads than cores slow each other: OMP_NUM_THREADS={cores}",
        )
    return Finding("threads", "ok", text)


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except Exception as problem:
        return Finding(what, "wrong", f"{type(problem).__name__}: {problem}")


def _noise() -> str:
    """Mean, spread and tails of the noise, each within five standard errors."""
    values = torch.zeros(DRAWS, dtype=torch.float64)
    add_normal_([values], secrets.token_bytes(32), 1.0)
    error = DRAWS**-0.5
    mean, variance = float(values.mean()), float(values.square().mean())
    tail = float((values.abs() > 2).double().mean())
    expected = math.erfc(2 / math.sqrt(2))
    for name, found, wanted, spread in (
        ("mean", mean, 0.0, 1.0),
        ("variance", variance, 1.0, math.sqrt(2)),
        ("share beyond 2", tail, expected, math.sqrt(expected * (1 - expected))),
    ):
        if abs(found - wanted) > 5 * spread * error:
            raise PrivacyError(
                f"the {name} of {DRAWS} draws is {found:.4f}, not {wanted:.4f}: do not train with this"
            )
    return f"{DRAWS:,} draws: mean {mean:+.4f}, variance {variance:.4f}, {tail:.2%} beyond 2 (expected {expected:.2%})"


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


def _smoke() -> str:
    """Two steps of DP-KFC on random numbers."""
    begun = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randint(2, (64,), generator=generator)
    )
    model = torch.nn.Linear(8, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
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
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if (
        private.steps != 2
        or not bool(model.weight.isfinite().all())
        or bool((model.weight == before).any())
    ):
        raise PrivacyError("two private steps did not change every weight to a finite number")
    return f"2 steps of DP-KFC, epsilon = {round_up(private.epsilon())}, in {time.perf_counter() - begun:.1f} s"
