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
    eps = torch.finfo(call.backprops.dtype).eps
    tolerance = max(TOLERANCE, ROUNDINGS * eps)
    chosen = random.SystemRandom().sample(range(call.batch_size), min(SAMPLES, call.batch_size))
    reference = {i: _autograd(call, i) for i in chosen}
    for key, grad in grads.items():
        preconditioner = preconditioner_of(key)
        norms = grad.squared_norms(preconditioner)
        names = ", ".join(name for name, p in call.params.items() if any(p is q for q in key))
        for i in chosen:
            exact = [at_least_float32(reference[i][id(p)]).unsqueeze(0) for p in key]
            mapped = preconditioner.apply(exact)
            released = mapped if grad.preconditioned else exact
            one_hot = torch.zeros(call.batch_size, device=call.backprops.device)
            one_hot[i] = 1.0
            found = [part.unsqueeze(0) for part in grad.weighted_sum(one_hot)]
            if [part.shape for part in found] != [part.shape for part in released]:
                shapes = [list(part.shape[1:]) for part in found]
                raise _refusal(call, f"gradients of {names} have the shapes {shapes}")
            error = [x - y for x, y in zip(found, released, strict=True)]
            size = float(squared_norm_of_all(released).sqrt())
            if not float(squared_norm_of_all(error).sqrt()) <= tolerance * size + eps:
                raise _refusal(call, f"the gradient of {names} differs from autograd's")
            norm, exact_norm = float(norms[i].sqrt()), float(squared_norm_of_all(mapped).sqrt())
            if not norm >= (1 - tolerance) * exact_norm - eps:
                raise _refusal(
                    call, f"the norm of {names} is {norm:.4g}, but autograd's is {exact_norm:.4g}"
                )


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
