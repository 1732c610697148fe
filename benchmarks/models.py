"""Which Hugging Face architectures train privately, and how exact their per-sample gradients are.

    python -m benchmarks.models
    python -m benchmarks.models --only BERT --only T5
    python -m benchmarks.models --json models.json --markdown docs/how-to/models.md

Every architecture of `benchmarks.architectures` is trained for one step without noise through
`dpkfc.make_private`, trial included. The reference is one autograd pass per record of an untouched
copy of the model. A cell holds the largest relative error of the records' gradient norms and of the
clipped sum of a parameter, or the beginning of the refusal. `--markdown` replaces the table of a
page.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpkfc
from benchmarks.architectures import ADAPTERS, ARCHITECTURES, ROWS, TRAINED, Batch, Loss

EXACT = 1e-4  # largest relative error
SMALL = 1e-3  # parameters below this part of the whole gradient are compared on its scale
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """What was measured for one model."""

    error: float | None = None  # None: refused
    vmap: list[str] = field(default_factory=list)  # classes of modules that run under vmap
    refusal: str = ""

    @property
    def verdict(self) -> str:
        """Exact, wrong or refused."""
        if self.error is None:
            return "refused"
        return "exact" if self.error <= EXACT else "wrong"

    @property
    def short(self) -> str:
        """For the page, whose notes say why a model is refused."""
        return "refused: [why](#notes)" if self.error is None else str(self)

    def __str__(self) -> str:
        if self.error is None:
            return f"refused: {self.refusal}"
        figure = f"{self.error:.0e}".replace("e-0", "e-")
        return f"{self.verdict}{', vmap: ' * bool(self.vmap)}{', '.join(self.vmap)} ({figure})"


def measure(build: Callable[[], nn.Module], records: Callable[[], Batch], loss: Loss) -> Cell:
    """Compare one private step with one autograd pass per record.

    Refusals are errors in the words of the library; others are raised.
    """
    torch.manual_seed(0)
    model, batch = build(), records()
    grads = reference_grads(copy.deepcopy(model), batch, loss)
    norms = torch.stack([norm(each) for each in grads])
    clip = float(norms.median())
    try:
        got, captured, vmap_modules = private_step(model, batch, loss, clip)
    except dpkfc.PrivacyError as refusal:
        return Cell(refusal=str(refusal))
    factors = (clip / norms).clamp(max=1)
    clipped = {
        name: torch.stack([c * each[name] for c, each in zip(factors, grads, strict=True)])
        for name in grads[0]
    }
    # a sum may cancel: its error is relative to what it adds
    least = SMALL * norm(clipped)
    errors = [
        norm({name: got[name] - parts.sum(0)}) / norm({name: parts}).clamp(min=least)
        for name, parts in clipped.items()
    ]
    error = float(torch.stack([*errors, ((captured - norms) / norms).abs().max()]).max())
    kinds = {type(model.get_submodule(name)).__name__ for name in vmap_modules}
    return Cell(error, sorted(kinds))


def reference_grads(model: nn.Module, batch: Batch, loss: Loss) -> list[Grads]:
    """The gradient of each record alone, in float64."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    out = []
    for row in range(ROWS):
        value = loss(model, {name: x[row : row + 1] for name, x in batch.items()})
        grads = torch.autograd.grad(value, list(trainable.values()), materialize_grads=True)
        out.append({name: g.double() for name, g in zip(trainable, grads, strict=True)})
    return out


def norm(grads: Grads) -> Tensor:
    """The L2 norm of all parameters together."""
    norms: Tensor = torch.stack([g.double().norm() for g in grads.values()]).norm()
    return norms


def private_step(
    model: nn.Module, batch: Batch, loss: Loss, clip: float
) -> tuple[Grads, Tensor, tuple[str, ...]]:
    """The clipped sum and the records' norms of a step without noise; modules under vmap."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=0.0)
    run = dpkfc.make_private(
        model,
        optimizer,
        [{name: x[row] for name, x in batch.items()} for row in range(ROWS)],
        loss=loss,
        noise_multiplier=0.0,
        delta=1e-5,
        steps=1,
        batch_size=ROWS,
        clip=clip,
    )
    for part in run.loader:
        loss(model, part).backward()
        optimizer.step()
    sums = {name: p.grad.double() * ROWS for name, p in trainable.items() if p.grad is not None}
    optimizer.zero_grad()
    with run._capture.accumulating() as grads:
        loss(model, batch).backward()
    squared_norms = grads.take().squared_norms
    assert squared_norms is not None
    run.detach()
    return sums, squared_norms.double().sqrt() * ROWS, run.vmap_modules


Case = Callable[[], Cell]


def cases() -> dict[str, dict[str, Case]]:
    """The rows of the matrix with their columns."""
    matrix: dict[str, dict[str, Case]] = {}
    for name, architecture in ARCHITECTURES.items():
        matrix[name] = {
            column: lambda a=architecture, t=trained: measure(lambda: t(a), a.records, a.loss)  # type: ignore[misc]
            for column, trained in TRAINED.items()
        }
    for name, adapter in ADAPTERS.items():
        matrix[name] = {
            base: lambda a=adapter, b=base: measure(  # type: ignore[misc]
                lambda: a.build(b), ARCHITECTURES[b].records, ARCHITECTURES[b].loss
            )
            for base in ("BERT", "GPT-2")
        }
    return matrix


def markdown(results: dict[str, dict[str, Cell]]) -> str:
    """The matrix as two tables."""
    lines = []
    for names, columns in ((ARCHITECTURES, TRAINED), (ADAPTERS, ("BERT", "GPT-2"))):
        rows = [name for name in names if name in results]
        if rows:
            lines += ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            lines += [
                f"| {name} | " + " | ".join(results[name][c].short for c in columns) + " |"
                for name in rows
            ]
            lines.append("")
    return "\n".join(lines)


def write_table(file: Path, table: str) -> None:
    """Replace the table of a page, or write a page that is nothing but the table."""
    page = file.read_text() if file.exists() else f"{BEGIN}{END}"
    before, _, rest = page.partition(BEGIN)
    file.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    matrix = cases()
    parser.add_argument("--json", type=Path, help="write all figures and messages to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--only", action="append", choices=list(matrix), help="only this row")
    chosen = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, Cell]] = {}
    for name in chosen.only or matrix:
        results[name] = {}
        for column, case in matrix[name].items():
            results[name][column] = cell = case()
            print(f"{name}, {column}: {cell}", flush=True)
    if chosen.json is not None:
        cells: dict[str, Any] = {
            name: {column: asdict(cell) for column, cell in row.items()}
            for name, row in results.items()
        }
        chosen.json.write_text(json.dumps(cells, indent=1) + "\n")
    if chosen.markdown is not None:
        write_table(chosen.markdown, markdown(results))


if __name__ == "__main__":
    main()
