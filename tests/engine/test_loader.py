"""The loader: its length, its two ways to iterate, and a run that is dropped with steps left."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.losses import cross_entropy

STEPS = 12
Loop = Callable[[dpkfc.PrivateRun], None]


def begin(batch_size: int, at_most: int | None) -> dpkfc.PrivateRun:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(60, 4), torch.randint(3, (60,)))
    return dpkfc.make_private(
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        data,
        loss=cross_entropy,
        noise_multiplier=1.0,
        delta=1e-3,
        steps=STEPS,
        batch_size=batch_size,
        max_physical_batch_size=at_most,
        seed=3,
    )


def by_batch(run: dpkfc.PrivateRun) -> None:
    for batch in run.loader:
        cross_entropy(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def by_step(run: dpkfc.PrivateRun) -> None:
    for parts in run.loader.by_step(STEPS):
        for batch in parts:
            cross_entropy(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def weights_after(loop: Loop, batch_size: int, at_most: int | None) -> tuple[Tensor, float]:
    run = begin(batch_size, at_most)
    loop(run)
    assert run.steps == STEPS
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]), run.epsilon()


# batches of one record are often empty
SIZES = [(20, None), (20, 7), (1, None), (1, 1)]


@pytest.mark.parametrize(("batch_size", "at_most"), SIZES)
def test_both_ways_to_iterate_take_the_same_steps(batch_size: int, at_most: int | None) -> None:
    one, epsilon = weights_after(by_batch, batch_size, at_most)
    other, same = weights_after(by_step, batch_size, at_most)
    assert torch.equal(one, other) and epsilon == same


@pytest.mark.parametrize(("batch_size", "at_most"), SIZES)
def test_the_length_is_the_number_of_batches_also_while_iterating(
    batch_size: int, at_most: int | None
) -> None:
    run = begin(batch_size, at_most)
    planned, lengths = len(run.loader), []
    for batch in run.loader:
        lengths.append(len(run.loader))
        cross_entropy(run.model, batch).backward()
        run.optimizer.step()
    assert lengths == [planned] * planned and run.steps == STEPS


def test_a_step_that_is_not_taken_is_refused() -> None:
    run = begin(20, 7)
    steps = run.loader.by_step(STEPS)
    next(steps)  # its batches are never asked for
    with pytest.raises(dpkfc.PrivacyError, match=r"step\(\) was not called for the last batch"):
        list(next(steps))
    run = begin(20, 7)
    parts = next(run.loader.by_step(STEPS))
    cross_entropy(run.model, next(parts)).backward()
    run.optimizer.step()  # no more than a part of the batch: nothing is released
    assert run.steps == 0 and all(p.grad is None for p in run.model.parameters())


def dropped(steps: int, detach: bool = False) -> list[str]:
    """What is said when a run is dropped after `steps` steps."""
    gc.collect()  # runs of other tests
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = begin(20, None)
        for batch in run.loader.take(steps):
            cross_entropy(run.model, batch).backward()
            run.optimizer.step()
        if detach:
            run.detach()
        del run
        gc.collect()
        gc.collect()
    return [str(w.message) for w in caught if "a private run ended" in str(w.message)]


def test_a_run_dropped_with_steps_left_says_so_once() -> None:
    (said,) = dropped(5)
    assert f"after 5 of its {STEPS} planned steps" in said and "run.detach()" in said
    assert dropped(STEPS) == dropped(0) == dropped(5, detach=True) == []


def test_it_says_so_at_the_end_of_the_program_too() -> None:
    program = """
import torch, dpkfc
model = torch.nn.Linear(2, 2)
data = torch.utils.data.TensorDataset(torch.randn(20, 2), torch.zeros(20, dtype=torch.long))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = dpkfc.make_private(model, optimizer, data, loss=dpkfc.losses.cross_entropy,
                         noise_multiplier=1.0, delta=1e-3, steps=3, batch_size=10)
for batch in run.loader.take(1):
    dpkfc.losses.cross_entropy(model, batch).backward()
    optimizer.step()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stderr.count("ended after 1 of its 3 planned steps") == 1
