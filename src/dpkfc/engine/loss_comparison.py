"""Does the loop compute the loss that was declared?

At the first step of a handle, and at a few later ones that are chosen secretly, everything is kept that is needed to
compute the declared loss once more: the batch, the random state and mode of every forward pass, autocast. After the
loop's backward the declared loss is computed on the same batch in the same state, and the gradients are compared record
by record, before anything is released. Then half of the records are exchanged, and the gradients of the others must
stay as they are.
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
    buffers_of,
    demand_same,
    demand_same_buffers,
    put_buffers,
    scalar_loss,
    where,
)
from dpkfc.engine.fingerprint import SAME, Difference, Fingerprint, difference
from dpkfc.engine.rng_state import get_generators, kept_generators, set_generators
from dpkfc.errors import PrivacyError
from dpkfc.per_sample.capture import CapturedGrads, GradientCapture

Loss = Callable[[nn.Module, Any], Tensor]
Backward = Callable[[Callable[[], Tensor]], Any]


@dataclass
class LoopTrace:
    """What the loop did with a batch of `rows` records."""

    batch: Any  # as the loader handed it out
    rows: int
    generators: dict[str, Any]  # when it did
    passes: list[dict[str, Any]] = field(
        default_factory=list
    )  # generators at forward passes not yet compared
    autocast: torch.dtype | None = None  # at the last of them
    modes: list[bool] = field(default_factory=list)  # of the modules
    buffers: Buffers = field(default_factory=list)
    compared: int = 0  # records

    @staticmethod
    def of(batch: Any, rows: int) -> LoopTrace:
        return LoopTrace(copied(batch), rows, get_generators())

    def see_forward(self, model: nn.Module) -> None:
        """The loop is about to call the model."""
        device = next(model.parameters()).device.type
        if not self.passes:
            self.buffers = buffers_of(model)
        self.passes.append(get_generators())
        self.autocast = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        )
        self.modes = [module.training for module in model.modules()]


def random_weights(rows: int) -> Tensor:
    """Secret weights of either sign, between 1/2 and 3/2, of the gradients in the sum that is compared."""
    secret = random.SystemRandom()
    return torch.tensor(
        [secret.choice((-1.0, 1.0)) * secret.uniform(0.5, 1.5) for _ in range(rows)]
    )


def compare(
    seen: LoopTrace,
    loop: Fingerprint,
    model: nn.Module,
    capture: GradientCapture,
    loss: Loss,
    backward: Backward,
) -> bool:
    """Raise if the loop's gradients differ from those of the declared loss, or if the declared loss mixes records.

    `loop` is the fingerprint of the loop's gradients; ``backward(closure)`` is what the loop does with a loss.
    Returns False if all records are equal, so that mixing cannot be seen.
    """
    rows, first = len(loop.norms), seen.compared
    if first + rows > seen.rows:
        raise PrivacyError(
            f"a forward pass had {rows} records, but the loader yielded a batch of {seen.rows}: call the model on the "
            "batches that private.loader yields, or on consecutive parts of them"
        )
    whole = rows == seen.rows
    batch = seen.batch if whole else pick(seen.batch, seen.rows, list(range(first, first + rows)))
    passes, seen.passes = seen.passes, []
    seen.compared += rows
    kept, chosen = _exchanged(rows)

    def declared(
        batch: Any, skipped: int, weights: list[Tensor]
    ) -> tuple[list[Fingerprint], int, Buffers]:
        with _as_in_loop(seen, model), kept_generators():
            captured, used = _replay(
                batch, passes[skipped:], seen.generators, model, capture, loss, backward
            )
            if captured.batch != rows:
                raise PrivacyError(
                    f"the loop's forward pass had {rows} records, that of the declared loss {captured.batch}: declare "
                    "the loss of the batches that the loader yields. To split batches use max_physical_batch_size"
                )
            found = [Fingerprint.of(captured, each) for each in weights]
            capture.recycle()
            return found, used, buffers_of(model)

    (same, own), used, buffers = declared(batch, 0, [loop.weights, loop.weights * kept])
    found = difference(loop, same, SAME)
    skipped = len(passes) - used
    if (
        found is not None and skipped > 0
    ):  # forward passes that the loop did not use for its loss may have come first
        (same, own), _, buffers = declared(batch, skipped, [loop.weights, loop.weights * kept])
        found = difference(loop, same, SAME)
    if found is not None:
        raise PrivacyError(_in_words(found, model))
    if rows < 2 or all_equal(batch, rows):
        return rows < 2
    (other,), _, other_buffers = declared(
        pick(batch, rows, chosen), max(skipped, 0), [loop.weights * kept]
    )
    demand_same(own, other, model, "the model or the loss")
    demand_same_buffers(model, buffers, other_buffers)
    return True


def _exchanged(rows: int) -> tuple[Tensor, list[int]]:
    """A random half of the records is replaced by other ones; where the kept ones are, and which stands where."""
    secret = random.SystemRandom()
    replaced = set(secret.sample(range(rows), rows // 2))
    kept = torch.tensor([0.0 if row in replaced else 1.0 for row in range(rows)])
    chosen = [
        (row + secret.randrange(1, rows)) % rows if row in replaced else row for row in range(rows)
    ]
    return kept, chosen


def _replay(
    batch: Any,
    passes: list[dict[str, Any]],
    generators: dict[str, Any],
    model: nn.Module,
    capture: GradientCapture,
    loss: Loss,
    backward: Backward,
) -> tuple[CapturedGrads, int]:
    """The gradients of the declared loss, and the number of forward passes that it took."""
    used = 0

    def before_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal used
        if used < len(passes):
            set_generators(passes[used])
        used += 1

    with capture.replaying(before_forward), torch.enable_grad():
        set_generators(generators)
        own = copied(batch)
        backward(lambda: scalar_loss(model, own, loss))
        captured = capture.drain()
    if captured.squared_norms is None:
        raise PrivacyError(
            "backward() of the declared loss reached no trainable parameter of the model"
        )
    return captured, used


@contextmanager
def _as_in_loop(seen: LoopTrace, model: nn.Module) -> Iterator[None]:
    """Modes, buffers and autocast as they were when the loop called the model; afterwards as they are now."""
    device = next(model.parameters()).device.type
    modes = [module.training for module in model.modules()]
    buffers = buffers_of(model)

    def put(modes: list[bool], buffers: Buffers) -> None:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        put_buffers(buffers)

    put(seen.modes, seen.buffers)
    try:
        with torch.autocast(device, dtype=seen.autocast, enabled=seen.autocast is not None):
            yield
    finally:
        put(modes, buffers)


def _in_words(found: Difference, model: nn.Module) -> str:
    how = (
        f"{found.ratio:.3g} times as long"
        if abs(found.ratio - 1) > SAME.least
        else f"different by {found.share:.2g} of their length"
    )
    return (
        "the loop does not compute the loss that was declared as loss=: on the same batch and random state its "
        f"gradients are {how} (most at {where(model, found.slot)}). Nothing was released. Change the loop or loss= so "
        "that they agree. Common causes: the loss is divided by the number of parts of a batch (take the mean of each "
        "part, or use max_physical_batch_size); class weights; a mean over all tokens (num_items_in_batch of Hugging "
        "Face's Trainer); the loop changes its inputs; the loss has a random generator of its own, which cannot be "
        "repeated"
    )
