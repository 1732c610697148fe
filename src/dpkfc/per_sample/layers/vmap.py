"""Modules without an adapter run under vmap, with one copy of the parameters per sample.

The copies are expanded views, so they take no memory, and their gradients are the per-sample
gradients. The module runs once, in the forward pass, so random masks (dropout) are drawn once,
independently for each sample.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkfc.errors import CaptureError, PrivacyError
from dpkfc.per_sample.base import HookedModule
from dpkfc.sharding import is_sharded


@contextlib.contextmanager
def params_replaced(module: nn.Module, replacement: dict[int, Tensor]) -> Iterator[None]:
    """Inside the block, a parameter whose id is a key of `replacement` is the given tensor."""
    places = [
        (submodule, name, p)
        for submodule in module.modules()
        for name, p in submodule._parameters.items()
        if id(p) in replacement
    ]
    for submodule, name, p in places:
        submodule._parameters[name] = replacement[id(p)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for submodule, name, p in places:
            submodule._parameters[name] = p


def run_under_vmap(
    hooked: HookedModule,
    forward: Callable[..., Any],
    copies: dict[str, Tensor],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The module's output with parameters ``copies[name][i]`` for sample i.

    Args:
        hooked: the module and its parameters.
        forward: the module's own forward.
        copies: [batch, *shape] for each trainable parameter.
        batch_size: the samples of this forward pass.
        args, kwargs: of the call, whose tensors `_rows_per_sample` splits by sample. A sample sees
            its own rows in the first dimension.
    """
    module = hooked.module
    if hooked.adapter is not None and hooked.adapter.per_sample_forward is not None:
        try:
            return hooked.adapter.per_sample_forward(module, copies, batch_size, args, kwargs)
        except PrivacyError as problem:
            where = f"module '{hooked.name}' ({type(module).__name__})"
            raise PrivacyError(f"{where}: {problem}") from problem
    tensors = list(copies.values())
    # FSDP2 replaces a sharded parameter by the gathered one while the module runs
    present = [
        module.get_parameter(name) if is_sharded(hooked.params[name]) else hooked.params[name]
        for name in copies
    ]
    leaves, spec = tree_flatten((args, kwargs))
    shared_mask = _shared_attention_mask(module, args, kwargs)
    is_shared = [
        not isinstance(x, Tensor)
        or x is shared_mask
        or (len(leaves), place) in hooked.shared_inputs
        for place, x in enumerate(leaves)
    ]
    candidates = [None if shared else x for x, shared in zip(leaves, is_shared, strict=True)]
    rows = _rows_per_sample(candidates, batch_size)
    # a table of relative positions stays one in a batch of as many samples as it has rows
    hooked.shared_inputs.update(
        (len(leaves), place)
        for place, (x, k) in enumerate(zip(candidates, rows, strict=True))
        if x is not None and k == 0 and x.dim() > 0 and x.shape[0] > 1
    )
    most = max(rows, default=0)
    inputs = [x.unflatten(0, (batch_size, k)) for x, k in zip(leaves, rows, strict=True) if k]
    # leaves and structure of the module's output, which may hold more than tensors
    output_tree: list[Any] = []
    folded: list[bool] = []  # for each output tensor: it has several rows per sample

    def sample_forward(params: list[Tensor], sample: list[Tensor]) -> list[Tensor]:
        own = iter(sample)
        call_args, call_kwargs = tree_unflatten(
            [next(own) if k else x for x, k in zip(leaves, rows, strict=True)], spec
        )
        replacement = {id(before): p for before, p in zip(present, params, strict=True)}
        with params_replaced(module, replacement):
            out = forward(*call_args, **call_kwargs)
        output_tree[:] = tree_flatten(out)
        outputs = [x for x in output_tree[0] if isinstance(x, Tensor)]
        folded[:] = [most > 1 and x.dim() > 0 and x.shape[0] == most for x in outputs]
        return [x if fold else x.squeeze(0) for x, fold in zip(outputs, folded, strict=True)]

    try:
        # the fused attention kernels have no batching rule
        with sdpa_kernel(SDPBackend.MATH):
            mapped = torch.vmap(sample_forward, in_dims=(0, 0), randomness="different")
            outputs = mapped(tensors, inputs)
        by_row = (x.flatten(0, 1) if fold else x for x, fold in zip(outputs, folded, strict=True))
        output_leaves, output_spec = output_tree
        return tree_unflatten(
            [next(by_row) if isinstance(x, Tensor) else x for x in output_leaves], output_spec
        )
    except PrivacyError:
        raise
    except Exception as problem:
        raise CaptureError(
            f"module '{hooked.name}' ({type(module).__name__}) owns parameters, has no adapter, "
            f"and does not run under torch.vmap: {problem}. Build it from standard layers, move "
            "its own parameters into a submodule of their own, freeze it, or give it an adapter "
            "with dpkfc.register_layer",
            hooked.name,
        ) from problem


def by_sample(x: Tensor, batch_size: int, *form: str, hint: str = "") -> Tensor:
    """[rows, ...] to [batch, rows per sample, ...].

    Args:
        x: batch-major.
        batch_size: the samples of this forward pass.
        form: what the dimensions of x should be.
        hint: what else to do if they are not.
    """
    if x.dim() != len(form) or len(x) % batch_size:
        raise PrivacyError(
            f"got an input of shape {list(x.shape)} in a batch of {batch_size} samples: its first "
            f"dimension must hold the samples. Give it [{', '.join(form)}]{hint}"
        )
    rows: Tensor = x.unflatten(0, (batch_size, -1))
    return rows


def _rows_per_sample(leaves: list[Tensor | None], batch_size: int) -> list[int]:
    """How many rows of each tensor belong to one sample; 0 if all samples share the tensor.

    The module's first input has k rows per sample, batch-major: one, or as many as windows (Swin)
    or tokens of a sample were folded into the batch. Tensors with as many rows are split like it,
    and tensors with one row per sample by sample. A tensor of k > 1 rows is a table of the rows of
    any sample, such as the mask of shifted windows, even if k is the batch size.

    >>> windows, mask, labels = torch.zeros(12, 9, 4), torch.zeros(4, 9, 9), torch.zeros(3)
    >>> _rows_per_sample([windows, mask, labels, None], batch_size=3)
    [4, 0, 1, 0]
    """
    sizes = [0 if x is None or x.dim() == 0 else x.shape[0] for x in leaves]
    first = next((size for size in sizes if size and size % batch_size == 0), batch_size)
    k = first // batch_size

    def rows(size: int) -> int:
        if size == first:
            return k
        return 1 if size == batch_size and size != k else 0

    return [rows(size) for size in sizes]


def _shared_attention_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A two-dimensional attn_mask of MultiheadAttention is shared by the samples, whatever its
    size.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return None
    signature = inspect.signature(nn.MultiheadAttention.forward)
    mask = signature.bind(module, *args, **kwargs).arguments.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dim() == 3:
        raise PrivacyError(
            "MultiheadAttention with a three-dimensional attn_mask is not supported: pass one mask "
            "for all samples ([L, S]) and the padding of each sample as key_padding_mask ([batch, "
            "S])"
        )
    return mask
