"""Forward and backward passes over a batch of records, or over probes, of which the user's model sees nothing.

They run on a copy. So weights, buffers, gradients, modes and hooks of the model itself cannot change, and a model in
the middle of a private run can be looked at: hooks do not follow a copy. The global generators are put back.

Examples come in two kinds, each with the loss that belongs to it:

* a probe (`PinkNoise`, `PublicData`, `Oracle`, ...): the name of a probe loss, or a function ``(output, probes,
  generator) -> [batch]``, as in `KFC`;
* anything else is a batch of records: a function ``loss(model, batch) -> scalar``, as in `make_private`, the mean (or
  sum) over the records.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpkfc.diagnostics.result import is_probe
from dpkfc.engine.checks import check_model
from dpkfc.errors import PrivacyError
from dpkfc.geometry.probing import Probing
from dpkfc.per_sample.capture import GradientCapture, LayerCall
from dpkfc.per_sample.registry import HookedModule, partition
from dpkfc.probes.arguments import check_integer
from dpkfc.probes.targets import Loss

AnyLoss = Loss | Callable[[nn.Module, Any], Tensor]
Reduction = Literal["mean", "sum"]


def copy_of(model: nn.Module) -> nn.Module:
    """The model without its gradients; hooks of a private run do nothing in a copy."""
    if not isinstance(model, nn.Module):
        raise PrivacyError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    try:
        return copy.deepcopy(model)
    except Exception as problem:
        raise PrivacyError(
            f"the diagnostics look at a copy of the model, and {type(model).__name__} cannot be copied: {problem}. "
            "Keep tensors with a graph, open files and the like out of the model's attributes"
        ) from problem


@contextlib.contextmanager
def watched(
    model: nn.Module, vmap_modules: Iterable[str] = ()
) -> Iterator[tuple[nn.Module, GradientCapture]]:
    """A copy of the model and a tape on it; the global generators are afterwards as they were."""
    copied = copy_of(model)
    check_model(copied)
    with torch.random.fork_rng():
        yield copied, GradientCapture(copied, partition(copied, vmap_modules))


def layers_of(units: Iterable[HookedModule]) -> dict[nn.Parameter, str]:
    """The name of the layer that each parameter belongs to; what a container owns itself goes by its own name."""
    found: dict[nn.Parameter, str] = {}
    for unit in units:
        for key, p in unit.parameters.items():
            name = f"{unit.name}.{key}".lstrip(".") if unit.kind == "expanded" else unit.name
            found.setdefault(p, name or "(model)")
    return found


@dataclass(frozen=True)
class Examples:
    """What a diagnostic looks at, and the loss of it. It can be gone through several times, each time the same."""

    source: Any
    loss: AnyLoss
    reduction: Reduction = "mean"  # of a loss of records; probe losses are apart
    count: int | None = None  # of probes
    seed: int = 0

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise PrivacyError(
                f"loss_reduction={self.reduction!r}: must be 'mean' or 'sum' over the records"
            )
        if not is_probe(self.source) and not callable(self.loss):
            raise PrivacyError(
                f"loss={self.loss!r} is for probes. For a batch of records give loss=, a function (model, batch) -> "
                "scalar as in make_private; or pass the records as dpkfc.probes.Oracle(records, labels=True)"
            )
        if self.count is not None:
            check_integer("probes", self.count, 1)

    def passes(
        self, model: nn.Module, capture: GradientCapture
    ) -> Iterator[tuple[list[LayerCall], float]]:
        """The calls (a, δ) of each pass, and the number that makes their gradients those of single examples."""
        if is_probe(self.source):
            probing = Probing(self.count, None, self.loss, self.seed)  # type: ignore[arg-type]
            for calls in probing.passes(
                model, capture, self.source, probing.generator(0, "diagnostics")
            ):
                yield _checked(calls), 1.0
            return
        torch.manual_seed(self.seed)
        with capture.recording() as calls, torch.enable_grad():
            self.value_of_records(model, lambda: capture.batch is not None).backward()
        yield _checked(calls), float(calls[0].batch) if self.reduction == "mean" else 1.0

    def value_of_records(self, model: nn.Module, ran: Callable[[], bool]) -> Tensor:
        """``loss(model, batch)``, refused if it did not run the model that it was given."""
        value = self.loss(model, self.source)  # type: ignore[operator, call-arg]
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise PrivacyError(
                "loss(model, batch) must return a scalar tensor, as the training loop's loss"
            )
        if not ran() or not value.requires_grad:
            raise PrivacyError(
                "loss(model, batch) did not run the model that it was given, with gradients: it is a copy. Write "
                "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
            )
        return value


def _checked(calls: list[LayerCall]) -> list[LayerCall]:
    """The calls of one pass, which must be of the same examples."""
    batches = {call.batch for call in calls}
    if len(batches) != 1:
        ran = (
            f"on batches of {sorted(batches)} examples"
            if batches
            else "without using a trainable parameter"
        )
        raise PrivacyError(
            f"the loss ran the model {ran}: row i must be the same example in all forward passes of the loss, and the "
            "loss must depend on the model's output"
        )
    return calls
