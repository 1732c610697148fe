"""Forward and backward passes over records or over probes, on a copy of the user's model.

Because they run on a copy, weights, buffers, gradients, modes and hooks of the model itself cannot
change, and a model can be inspected in the middle of a private run: hooks do nothing in a copy. The
global generators are restored.

Examples come in two kinds, each with its own kind of loss:

* a probe (`PinkNoise`, `PublicData`, `Oracle`, ...): the name of a probe loss, or a function
  ``(output, probes, generator) -> [batch]``, as in `KFC`;
* anything else is a batch of records: a function ``loss(model, batch) -> scalar``, as in
  `make_private`, the mean (or sum) over the records.
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
from dpkfc.geometry.probing import Probing
from dpkfc.per_sample.base import HookedModule, LayerCall
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.probes.arguments import check_integer
from dpkfc.probes.targets import Loss

AnyLoss = Loss | Callable[[nn.Module, Any], Tensor]
Reduction = Literal["mean", "sum"]


def copy_of(model: nn.Module) -> nn.Module:
    """The model without its gradients; hooks of a private run do nothing in a copy."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    try:
        return copy.deepcopy(model)
    except Exception as problem:
        raise ValueError(
            f"diagnostics run on a copy of the model, and {type(model).__name__} cannot be copied: "
            f"{problem}. Keep tensors with a graph, open files and the like out of the model's "
            "attributes"
        ) from problem


@contextlib.contextmanager
def captured_copy(
    model: nn.Module, vmap_modules: Iterable[str] = ()
) -> Iterator[tuple[nn.Module, GradientCapture]]:
    """A copy of the model with its gradients captured; the global generators are restored."""
    copied = copy_of(model)
    check_model(copied)
    with torch.random.fork_rng():
        yield copied, GradientCapture(copied, vmap_modules)


def layer_names(hooked_modules: Iterable[HookedModule]) -> dict[nn.Parameter, str]:
    """The layer of each parameter; a parameter that a container owns itself has its own name."""
    names: dict[nn.Parameter, str] = {}
    for hooked in hooked_modules:
        for key, p in hooked.params.items():
            own = hooked.kind == "expanded"
            name = f"{hooked.name}.{key}".lstrip(".") if own else hooked.name
            names.setdefault(p, name or "(model)")
    return names


@dataclass(frozen=True)
class Examples:
    """What a diagnostic examines, and its loss. Every pass over it gives the same examples."""

    source: Any
    loss: AnyLoss
    reduction: Reduction = "mean"  # of a loss of records; probe losses are per example
    count: int | None = None  # of probes
    seed: int = 0

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction={self.reduction!r}: must be 'mean' or 'sum' over the records"
            )
        if not is_probe(self.source) and not callable(self.loss):
            raise TypeError(
                f"loss={self.loss!r} is for probes. For a batch of records give loss=, a function "
                "(model, batch) -> scalar as in make_private; or pass the records as "
                "dpkfc.probes.Oracle(records, labels=True)"
            )
        if self.count is not None:
            check_integer("probes", self.count, 1)

    def passes(
        self, model: nn.Module, capture: GradientCapture
    ) -> Iterator[tuple[list[LayerCall], float]]:
        """The layer calls of each pass, and the factor that scales gradients to one example."""
        if is_probe(self.source):
            probing = Probing(self.count, None, self.loss, self.seed)  # type: ignore[arg-type]
            for calls in probing.passes(model, capture, self.source, 0, "diagnostics"):
                yield _of_same_examples(calls), 1.0
            return
        torch.manual_seed(self.seed)
        with capture.recording() as calls, torch.enable_grad():
            self.value_of_records(model, lambda: capture.batch_size is not None).backward()
        batch_size = float(_of_same_examples(calls)[0].batch_size)
        yield calls, batch_size if self.reduction == "mean" else 1.0

    def value_of_records(self, model: nn.Module, ran: Callable[[], bool]) -> Tensor:
        """``loss(model, batch)``; refused if it did not run the model that it was given."""
        value = self.loss(model, self.source)  # type: ignore[operator, call-arg]
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise TypeError("loss(model, batch) must return a scalar tensor, as the loop's loss is")
        if not ran() or not value.requires_grad:
            raise ValueError(
                "loss(model, batch) did not run the model that it was given, with gradients: it is "
                "a copy. Write lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
            )
        return value


def _of_same_examples(calls: list[LayerCall]) -> list[LayerCall]:
    """The calls of one pass, which must all have the same examples."""
    sizes = {call.batch_size for call in calls}
    if len(sizes) != 1:
        ran = f"on batches of {sorted(sizes)} examples" if sizes else "without using a parameter"
        raise ValueError(
            f"the loss ran the model {ran}: row i must be the same example in all forward passes "
            "of the loss, and the loss must depend on the model's output"
        )
    return calls
