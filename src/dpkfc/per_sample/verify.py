"""Compare a registered adapter with autograd before anything that it measures is released."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.base import LayerCall, ParamKey, PerSampleGrad, PreconditionerOf
from dpkfc.per_sample.rounding import at_least_float32, squared_norm_of_all

SAMPLES = 8  # of a batch that are compared, chosen secretly
TOLERANCE = 1e-3  # relative; in units of the dtype's eps if that is coarser
ROUNDINGS = 16
# smaller gradients are compared on the scale of this fraction of the largest compared one
SMALL = 1e-2


def verify_adapter(
    call: LayerCall, grads: dict[ParamKey, PerSampleGrad], preconditioner_of: PreconditionerOf
) -> None:
    """Refuse an adapter whose norms are too small or whose gradients are wrong.

    **Guarantee.** For the compared samples i and a random one-hot choice of weights,
    ``squared_norms`` is not below ``‖U g_i‖²`` and ``weighted_sum`` is g_i (or U g_i), where g_i is
    the gradient that autograd computes for the module on sample i alone.

    Raises:
        PrivacyError: measured norms or sums differ from autograd's, or a trainable parameter is
            missing.
    """
    expected = {id(p) for p in call.params.values()}
    given = [id(p) for key in grads for p in key]
    if set(given) != expected or len(given) != len(expected):
        raise _refusal(
            call,
            f"it returned gradients of {len(given)} parameters instead of "
            f"{len(expected)}: {', '.join(call.params)}",
        )
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(call.backprops.dtype).eps)
    chosen = random.SystemRandom().sample(range(call.batch_size), min(SAMPLES, call.batch_size))
    reference = {i: _autograd(call, i) for i in chosen}
    # a gradient that is not finite cannot be compared; training drops such a sample
    chosen = [i for i in chosen if all(bool(g.isfinite().all()) for g in reference[i].values())]
    for key, grad in grads.items():
        preconditioner = preconditioner_of(key)
        norms = grad.squared_norms(preconditioner)
        # as in training: 0 · NaN of another sample must not reach the sum
        grad = grad.masked(torch.isfinite(norms))
        names = ", ".join(name for name, p in call.params.items() if any(p is q for q in key))
        exact = {
            i: [at_least_float32(reference[i][id(p)]).unsqueeze(0) for p in key] for i in chosen
        }
        mapped = {i: preconditioner.apply(parts) for i, parts in exact.items()}
        released = mapped if grad.preconditioned else exact
        sizes = {i: _norm(parts) for i, parts in released.items()}
        exact_norms = {i: _norm(parts) for i, parts in mapped.items()}
        for i in chosen:
            one_hot = torch.zeros(call.batch_size, device=call.backprops.device)
            one_hot[i] = 1.0
            found = [part.unsqueeze(0) for part in grad.weighted_sum(one_hot)]
            if [part.shape for part in found] != [part.shape for part in released[i]]:
                shapes = [list(part.shape[1:]) for part in found]
                raise _refusal(call, f"gradients of {names} have the shapes {shapes}")
            error = _norm([x - y for x, y in zip(found, released[i], strict=True)])
            if not error <= tolerance * max(sizes[i], SMALL * max(sizes.values())):
                raise _refusal(call, f"the gradient of {names} differs from autograd's")
            norm, exact_norm = float(norms[i].sqrt()), exact_norms[i]
            missing = tolerance * max(exact_norm, SMALL * max(exact_norms.values()))
            if not norm >= exact_norm - missing:
                raise _refusal(
                    call, f"the norm of {names} is {norm:.4g}, but autograd's is {exact_norm:.4g}"
                )


def _norm(parts: list[Tensor]) -> float:
    return float(squared_norm_of_all(parts).sqrt())


def _autograd(call: LayerCall, i: int) -> dict[int, Tensor]:
    """Gradients of the module's parameters on sample i alone, by id of the parameter."""
    assert call.activations is not None
    a, delta = call.activations, call.backprops
    rows_in, rows_out = len(a) // call.batch_size, len(delta) // call.batch_size
    params = list(call.params.values())
    with torch.enable_grad():
        try:
            out = call.module.forward(a[i * rows_in : (i + 1) * rows_in])
        except TypeError as problem:
            raise _refusal(
                call, f"the module must be a function of one tensor to be compared ({problem})"
            ) from problem
        part = delta[i * rows_out : (i + 1) * rows_out].to(out.dtype)
        grads = torch.autograd.grad(out, params, part, allow_unused=True)
    return {
        id(p): torch.zeros_like(p) if grad is None else grad
        for p, grad in zip(params, grads, strict=True)
    }


def _refusal(call: LayerCall, problem: str) -> PrivacyError:
    return PrivacyError(
        f"the registered adapter of {type(call.module).__name__} (module '{call.hooked.name}') is "
        f"wrong: {problem}. Clipping relies on it, so nothing was released. Correct the function "
        "given to dpkfc.register_layer, or do not register the layer: it then runs under vmap"
    )
