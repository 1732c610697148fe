"""The slow, obvious way: one autograd pass a sample. Every fast path is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dpkfc
from dpkfc.per_sample.capture import GradientCapture

Loss = Callable[[nn.Module, Any], Tensor]


def sample(batch: Any, i: int) -> Any:
    """Record i of a batch, as a batch of one.

    Leaves whose leading size is 1 are shared by all records.
    """
    return tree_map(
        lambda x: x[i : i + 1] if isinstance(x, Tensor) and x.shape[0] != 1 else x, batch
    )


def reference_grads(model: nn.Module, loss: Loss, batch: Any, rows: int) -> list[dict[str, Tensor]]:
    """Per-sample gradients of the trainable parameters, with the plain model (no hook may be
    attached).
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    out = []
    for i in range(rows):
        value = loss(model, sample(batch, i))
        grads = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        out.append(
            {
                name: (torch.zeros_like(p) if g is None else g).detach()
                for (name, p), g in zip(trainable.items(), grads, strict=True)
            }
        )
    return out


def reference_norms(grads: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack(
        [
            torch.stack([g.double().square().sum() for g in one.values()]).sum().sqrt()
            for one in grads
        ]
    )


def reference_sum(grads: list[dict[str, Tensor]], clip: float) -> dict[str, Tensor]:
    """``Σ_i g_i min(1, C / ‖g_i‖)``."""
    weights = (clip / reference_norms(grads)).clamp(max=1)
    return {
        name: sum(w * one[name].double() for w, one in zip(weights, grads, strict=True))
        for name in grads[0]
    }


def captured_norms(
    model: nn.Module, loss: Loss, batch: Any, rows: int, vmap_modules: tuple[str, ...] = ()
) -> Tensor:
    """Per-sample norms as the engine computes them, from one mean loss over the batch."""
    capture = GradientCapture(model, vmap_modules)
    try:
        with capture.accumulating() as grads:
            loss(model, batch).backward()
        captured = grads.take()
    finally:
        capture.remove()
    assert captured.batch_size == rows and captured.squared_norms is not None
    return captured.squared_norms.detach().sqrt() * rows


def captured_grads(
    model: nn.Module, loss: Loss, batch: Any, vmap_modules: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Per-sample gradients of a mean loss as they are captured, [rows, *shape] by parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    capture = GradientCapture(model, vmap_modules)
    try:
        with capture.accumulating() as grads:
            loss(model, batch).backward()
        captured = grads.take()
    finally:
        capture.remove()
    return {
        names[id(p)]: g * captured.batch_size
        for key, grad in captured.grads.items()
        for p, g in zip(key, grad.per_sample(), strict=True)
    }


def largest_error(model: nn.Module, loss: Loss, batch: Any, rows: int) -> float:
    """The largest relative error of a captured gradient, over samples and parameters.

    Gradients below 1e-6 of the sample's are compared on that scale.
    """
    want = reference_grads(model, loss, batch, rows)
    got = captured_grads(model, loss, batch)
    errors = []
    for i, (one, norm) in enumerate(zip(want, reference_norms(want), strict=True)):
        for name, exact in one.items():
            found = got[name][i] if name in got else torch.zeros_like(exact)
            scale = exact.double().norm().clamp(min=1e-6 * float(norm))
            errors.append(float((found.double() - exact.double()).norm() / scale))
    return max(errors)


def private_sum(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    rows: int,
    clip: float,
    chunk: int | None = None,
    geometry: Any = None,
) -> dict[str, Tensor]:
    """The clipped sum through the whole pipeline, without noise, in physical chunks."""
    records = [tree_map(lambda x, i=i: x[i], batch) for i in range(rows)]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=0.0)
    settings = {
        "noise_multiplier": 0.0,
        "delta": 1e-5,
        "steps": 1,
        "batch_size": rows,
        "clip": clip,
    }
    private = dpkfc.make_private(
        model,
        optimizer,
        records,
        max_physical_batch_size=chunk,
        geometry=geometry,
        loss=loss,
        **settings,
    )
    for part in private.loader:
        loss(model, part).backward()
        optimizer.step()
    private.detach()
    assert private.steps == 1
    sums = {name: p.grad * rows for name, p in trainable.items()}
    optimizer.zero_grad()
    return sums


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
