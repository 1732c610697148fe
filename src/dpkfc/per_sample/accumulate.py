"""Per-sample gradients of the backward passes over one batch, with their norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.base import IDENTITY_MAP, LayerCall, ParamKey, PerSampleGrad, PreconditionerOf
from dpkfc.per_sample.combine import combine
from dpkfc.per_sample.rounding import full_precision
from dpkfc.per_sample.verify import verify_adapter


@dataclass
class CapturedGrads:
    """Per-sample gradients g_i of `batch_size` samples, and their preconditioned norms."""

    grads: dict[ParamKey, PerSampleGrad]
    norms_by_key: dict[ParamKey, Tensor]  # [batch], ‖U g_i‖² of each parameter key
    squared_norms: Tensor | None  # [batch], their sum; None if nothing was captured
    batch_size: int
    eps: float  # relative rounding error of the coarsest dtype that they were computed in


class GradAccumulator:
    """Receives layer calls until `take`; a parameter used several times gets one gradient."""

    def __init__(self, preconditioner_of: PreconditionerOf = lambda key: IDENTITY_MAP) -> None:
        self._preconditioner_of = preconditioner_of
        self.clear()

    def clear(self) -> None:
        """Forget everything that was received."""
        self._grads: dict[ParamKey, list[PerSampleGrad]] = {}
        self._squared_norms: dict[ParamKey, Tensor] = {}  # of parameters with one use so far
        self._batch_sizes: set[int] = set()
        self._eps = 0.0
        # the tensors that the gradients refer to, with their versions when they were measured
        self._versions: list[tuple[Tensor, int, str]] = []

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def receive(self, call: LayerCall) -> None:
        """Measure at once: while δ is in the cache, and so that activations can be freed."""
        with full_precision(call.backprops.device):
            grads = call.per_sample_grads(self._preconditioner_of)
            if not call.hooked.verified:
                verify_adapter(call, grads, self._preconditioner_of)
                call.hooked.verified = True
            for key, grad in grads.items():
                uses = self._grads.setdefault(key, [])
                uses.append(grad)
                name = call.hooked.name
                self._versions += [(tensor, tensor._version, name) for tensor in _tensors(grad)]
                if not call.shared and len(uses) == 1:
                    self._squared_norms[key] = grad.squared_norms(self._preconditioner_of(key))
        self._batch_sizes.add(call.batch_size)
        self._eps = max(self._eps, torch.finfo(call.backprops.dtype).eps)

    def take(self) -> CapturedGrads:
        """The gradients of the backward passes since the last `take`."""
        grads, norms, sizes = self._grads, self._squared_norms, self._batch_sizes
        versions, eps = self._versions, self._eps
        self.clear()
        for tensor, version, name in versions:
            if tensor._version != version:
                raise PrivacyError(
                    f"the input of module '{name}', or its gradient, was changed in place after "
                    "backward(): it was measured before the change and would be released after it. "
                    "Do not change a batch before optimizer.step()"
                )
        if len(sizes) > 1:
            raise PrivacyError(
                f"one backward reached forward passes of {sorted(sizes)} samples: row i must be "
                "the same sample in all of them. Call backward after each forward pass"
            )
        combined = {key: combine(uses, self._preconditioner_of(key)) for key, uses in grads.items()}
        for key, grad in combined.items():
            if key not in norms or len(grads[key]) > 1:
                norms[key] = grad.squared_norms(self._preconditioner_of(key))
        total = torch.stack(list(norms.values())).sum(0) if norms else None
        return CapturedGrads(combined, norms, total, max(sizes, default=0), eps)


def _tensors(grad: Any) -> Iterator[Tensor]:
    """Every tensor that a per-sample gradient refers to."""
    for value in vars(grad).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from value
        elif is_dataclass(value):
            yield from _tensors(value)
