"""Check that the loop computes the loss that was declared.

At the first step of a run, and at a few later ones that are chosen secretly, everything is kept
that is needed to compute the declared loss once more: the batch, the random state and mode of every
forward pass, autocast. After the loop's backward, the declared loss is computed on the same batch
in the same state, and the gradients are compared record by record, before anything is released.
Then half of the records are exchanged, and the gradients of the others must stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.engine.batch import all_equal, copied, pick
from dpkfc.engine.checks import (
    Buffers,
    describe_key,
    get_buffers,
    records_stay_apart,
    restore_buffers,
    same_buffers,
    scalar_loss,
)
from dpkfc.engine.fingerprint import SAME, Difference, Fingerprint, difference
from dpkfc.engine.rng_state import get_generators, kept_generators, set_generators
from dpkfc.errors import PrivacyError
from dpkfc.per_sample.base import PreconditionerOf
from dpkfc.per_sample.capture import CapturedGrads, GradAccumulator, GradientCapture

Loss = Callable[[nn.Module, Any], Tensor]
Backward = Callable[[Callable[[], Tensor]], Any]


@dataclass
class LoopTrace:
    """What the loop did with a batch of `rows` records."""

    batch: Any  # as the loader yielded it
    rows: int
    generators: dict[str, Any]  # when the loader yielded it
    # generators at the forward passes that were not yet compared
    passes: list[dict[str, Any]] = field(default_factory=list)
    # at the last of these passes
    autocast: torch.dtype | None = None
    modes: list[bool] = field(default_factory=list)  # of all modules: training or evaluation
    buffers: Buffers = field(default_factory=list)
    compared: int = 0  # records

    @staticmethod
    def of(batch: Any, rows: int) -> LoopTrace:
        return LoopTrace(copied(batch), rows, get_generators())

    def see_forward(self, model: nn.Module) -> None:
        """The loop is about to call the model."""
        device = next(model.parameters()).device.type
        if not self.passes:
            self.buffers = get_buffers(model)
        self.passes.append(get_generators())
        autocast = torch.is_autocast_enabled(device)
        self.autocast = torch.get_autocast_dtype(device) if autocast else None
        self.modes = [module.training for module in model.modules()]


def random_weights(rows: int) -> Tensor:
    """Secret weights of the gradients in the compared sum: of either sign, between 1/2 and 3/2."""
    secret = random.SystemRandom()
    return torch.tensor(
        [secret.choice((-1.0, 1.0)) * secret.uniform(0.5, 1.5) for _ in range(rows)]
    )


def compare_with_declared_loss(
    trace: LoopTrace,
    loop: Fingerprint,
    model: nn.Module,
    capture: GradientCapture,
    preconditioner_of: PreconditionerOf,
    loss: Loss,
    backward: Backward,
    any_rank: Callable[[bool], bool] = bool,
) -> bool:
    """Refuse a loop whose gradients differ from the declared loss, or a loss that mixes records.

    Args:
        trace: what the loop did.
        loop: the fingerprint of the loop's gradients.
        model, capture, preconditioner_of: of the run.
        loss: the declared loss.
        backward: ``backward(closure)``, what the loop does with its loss.
        any_rank: True on all ranks if its argument is on one. The ranks of a sharded model must run
            the same number of passes.

    Returns:
        False if all records are equal, so that mixing cannot be seen.

    Raises:
        PrivacyError: the gradients differ, or records influence each other.
    """
    rows, first = len(loop.norms), trace.compared
    if first + rows > trace.rows:
        raise PrivacyError(
            f"a forward pass had {rows} records, but the loader yielded a batch of {trace.rows}: "
            "call the model on the batches that run.loader yields, or on consecutive parts of them"
        )
    batch = trace.batch
    if rows != trace.rows:
        batch = pick(batch, trace.rows, list(range(first, first + rows)))
    passes, trace.passes = trace.passes, []
    trace.compared += rows

    def declared(
        batch: Any, skipped: int, weights: list[Tensor]
    ) -> tuple[list[Fingerprint], int, Buffers]:
        """Fingerprints of the declared loss, the passes it used, and the buffers after it."""
        replay = _Replay(passes[skipped:], preconditioner_of)
        with _as_in_loop(trace, model), kept_generators():
            captured = replay.run(batch, trace.generators, model, capture, loss, backward)
            if captured.batch_size != rows:
                raise PrivacyError(
                    f"the loop's forward pass had {rows} records, that of the declared loss "
                    f"{captured.batch_size}: declare the loss of the batches that the loader "
                    "yields. To split batches use max_physical_batch_size"
                )
            fingerprints = [Fingerprint.of(captured, each) for each in weights]
            capture.reuse_workspaces()
            return fingerprints, replay.passes_used, get_buffers(model)

    kept, exchanged = _exchange_half(rows)
    weights = [loop.weights, loop.weights * kept]
    (same, own), used, buffers = declared(batch, 0, weights)
    differs = difference(loop, same, SAME)
    skipped = len(passes) - used
    if skipped > 0 and any_rank(differs is not None):
        # forward passes that the loop did not use for its loss may have come first
        (same, own), _, buffers = declared(batch, skipped, weights)
        differs = difference(loop, same, SAME)
    comparable = rows > 1 and not all_equal(batch, rows)
    if any_rank(comparable and differs is None):
        others = pick(batch, rows, exchanged)
        (other,), _, other_buffers = declared(others, max(skipped, 0), weights[1:])
    if differs is not None:
        raise PrivacyError(_explain(differs, model))
    if comparable:
        records_stay_apart(own, other, model, "the model or the loss")
        same_buffers(model, buffers, other_buffers)
    return comparable or rows < 2


def _exchange_half(rows: int) -> tuple[Tensor, list[int]]:
    """A random half of the records is replaced by others: 1.0 where a row is kept; the new rows."""
    secret = random.SystemRandom()
    replaced = set(secret.sample(range(rows), rows // 2))
    kept = torch.tensor([0.0 if row in replaced else 1.0 for row in range(rows)])
    chosen = [
        (row + secret.randrange(1, rows)) % rows if row in replaced else row for row in range(rows)
    ]
    return kept, chosen


class _Replay(GradAccumulator):
    """Captures the declared loss with the random states that the loop's forward passes had."""

    def __init__(self, passes: list[dict[str, Any]], preconditioner_of: PreconditionerOf) -> None:
        super().__init__(preconditioner_of)
        self._passes, self.passes_used = passes, 0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.passes_used < len(self._passes):
            set_generators(self._passes[self.passes_used])
        self.passes_used += 1

    def run(
        self,
        batch: Any,
        generators: dict[str, Any],
        model: nn.Module,
        capture: GradientCapture,
        loss: Loss,
        backward: Backward,
    ) -> CapturedGrads:
        with capture.delivering_to(self), torch.enable_grad():
            set_generators(generators)
            own_batch = copied(batch)
            backward(lambda: scalar_loss(model, own_batch, loss))
        captured = self.take()
        if captured.squared_norms is None:
            raise PrivacyError(
                "backward() of the declared loss reached no trainable parameter of the model"
            )
        return captured


@contextmanager
def _as_in_loop(trace: LoopTrace, model: nn.Module) -> Iterator[None]:
    """Modes, buffers and autocast as when the loop called the model; restored afterwards."""
    device = next(model.parameters()).device.type
    modes = [module.training for module in model.modules()]
    buffers = get_buffers(model)

    def restore(modes: list[bool], buffers: Buffers) -> None:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        restore_buffers(buffers)

    restore(trace.modes, trace.buffers)
    try:
        with torch.autocast(device, dtype=trace.autocast, enabled=trace.autocast is not None):
            yield
    finally:
        restore(modes, buffers)


def _explain(differs: Difference, model: nn.Module) -> str:
    if abs(differs.norm_ratio - 1) > SAME.least:
        how = f"{differs.norm_ratio:.3g} times as long"
    else:
        how = f"different by {differs.share:.2g} of their length"
    return (
        "the loop does not compute the loss that was declared as loss=: on the same batch and "
        f"random state its gradients are {how} (most at {describe_key(model, differs.key)}). "
        "Nothing was released. Change the loop or loss= so that they agree. Common causes: the "
        "loss is divided by the number of parts of a batch (take the mean of each part, or use "
        "max_physical_batch_size); class weights; a mean over all tokens (num_items_in_batch of "
        "Hugging Face's Trainer); the loop changes its inputs; the loss has a random generator of "
        "its own, which cannot be repeated"
    )
