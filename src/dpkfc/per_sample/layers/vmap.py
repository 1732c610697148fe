"""Any other module: every sample gets its own copy of the parameters, and the module runs under vmap.

The copies are expanded views, so they cost no memory; their gradients are the per-sample gradients. The
module runs once, in the forward pass, so random masks (dropout) are drawn once, independently for each sample.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.layers import recurrent

if TYPE_CHECKING:
    from dpkfc.per_sample.registry import HookedModule


@contextlib.contextmanager
def parameters_replaced(module: nn.Module, replacement: dict[int, Tensor]) -> Iterator[None]:
    """While this lasts, every parameter of the module whose id is a key is the given tensor instead."""
    places = [
        (m, name, p)
        for m in module.modules()
        for name, p in m._parameters.items()
        if id(p) in replacement
    ]
    for m, name, p in places:
        m._parameters[name] = replacement[id(p)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, name, p in places:
            m._parameters[name] = p


def run_under_vmap(
    unit: HookedModule,
    original: Callable[..., Any],
    copies: dict[str, Tensor],
    batch: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The module's output with parameters ``copies[name][i]`` for sample i; batch dimension in front."""
    module = unit.module
    if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
        return recurrent.run(module, copies, batch, args, kwargs)
    names, tensors = list(copies), list(copies.values())
    leaves, spec = tree_flatten((args, kwargs))
    whole_mask = _position_of_unbatched_mask(module, args, kwargs)
    batched = [
        isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == batch and x is not whole_mask
        for x in leaves
    ]
    inputs = [x for x, is_batched in zip(leaves, batched, strict=True) if is_batched]

    layout: list[Any] = []  # of the module's output, which may hold more than tensors

    def one(parameters: list[Tensor], sample: list[Tensor]) -> list[Tensor]:
        own = iter(sample)
        call_args, call_kwargs = tree_unflatten(
            [
                next(own).unsqueeze(0) if is_batched else x
                for x, is_batched in zip(leaves, batched, strict=True)
            ],
            spec,
        )
        replacement = {
            id(unit.parameters[name]): p for name, p in zip(names, parameters, strict=True)
        }
        with parameters_replaced(module, replacement):
            out = original(*call_args, **call_kwargs)
        layout[:] = tree_flatten(out)
        return [x.squeeze(0) for x in layout[0] if isinstance(x, Tensor)]

    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
            outputs = iter(torch.vmap(one, in_dims=(0, 0), randomness="different")(tensors, inputs))
        return tree_unflatten(
            [next(outputs) if isinstance(x, Tensor) else x for x in layout[0]], layout[1]
        )
    except PrivacyError:
        raise
    except Exception as problem:
        raise PrivacyError(
            f"module '{unit.name}' ({type(module).__name__}) owns parameters, has no fast path, and does not run under "
            f"torch.vmap: {problem}. Build it from standard layers, move its own parameters into a submodule of their "
            "own, or freeze it"
        ) from problem


def _position_of_unbatched_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A MultiheadAttention's two-dimensional attn_mask is shared by the samples, whatever its size."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    mask = (
        inspect.signature(nn.MultiheadAttention.forward)
        .bind(module, *args, **kwargs)
        .arguments.get("attn_mask")
    )
    if isinstance(mask, Tensor) and mask.dim() == 3:
        raise PrivacyError(
            "MultiheadAttention with a three-dimensional attn_mask is not supported: pass one mask for "
            "all samples ([L, S]) and the padding of each sample as key_padding_mask ([batch, S])"
        )
    return mask
