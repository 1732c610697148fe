"""Layer adapters: one per kind of layer with a fast path, built in or registered by the user."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from dpkfc.per_sample.base import KroneckerForm, LayerAdapter, LayerCall
from dpkfc.sharding import class_of

__all__ = ["KroneckerForm", "LayerAdapter", "LayerCall", "adapter_for", "register_layer"]

_adapters: dict[type[nn.Module] | str, LayerAdapter] = {}
_built_in: set[type[nn.Module] | str] = set()
_structures: list[tuple[Callable[[nn.Module], bool], LayerAdapter]] = []


def register_layer(kind: type[nn.Module] | str, adapter: LayerAdapter) -> None:
    """Give a kind of layer a fast path for its per-sample gradients.

    A module without an adapter runs under `torch.vmap`, which is exact and slower. An adapter is
    used for modules of this class and, if `kind` is a class and not a name, of subclasses that do
    not override ``forward``, as long as they have no child modules and own only the parameters in
    `adapter.params`.

    Args:
        kind: the class; or its qualified name ("package.module.Class"), if the package should not
            be imported for it.
        adapter: how the layer's inputs and output gradients become per-sample gradients.

    Raises:
        TypeError: `kind` is not a module class, or `adapter` is not a `LayerAdapter`.
        ValueError: the kind already has an adapter.

    **Guarantee.** Clipping relies on the adapter: a gradient that is measured too small would
    exceed the clip. So an adapter with `per_sample_grads` that the library does not ship is
    compared with autograd at the first call of every layer, and again at a few secretly chosen
    steps, before anything is released. `PrivacyError` is raised if a norm is too small or a sum
    differs. An adapter with `per_sample_forward` changes how the model computes its output; like
    any model, it is tried for mixing records.

    >>> import torch, dpkfc
    >>> from dpkfc.per_sample.dense import DenseGrad
    >>> from dpkfc.per_sample.registry import LayerAdapter
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self, features):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(features))
    ...
    ...     def forward(self, x):
    ...         return self.weight * x
    >>> def scale_grads(call):
    ...     return {("weight",): DenseGrad([call.backprops * call.activations])}
    >>> dpkfc.register_layer(Scale, LayerAdapter(scale_grads, params=("weight",)))
    """
    if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))):
        raise TypeError(f"register_layer: {kind!r} is neither a torch.nn.Module class nor its name")
    if not isinstance(adapter, LayerAdapter):
        raise TypeError(f"register_layer: adapter is {type(adapter).__name__}: give a LayerAdapter")
    if kind in _adapters:
        name = kind if isinstance(kind, str) else kind.__name__
        raise ValueError(
            f"register_layer: {name} already has an adapter. Register a "
            "subclass with its own forward instead"
        )
    _adapters[kind] = adapter


def register_structure(matches: Callable[[nn.Module], bool], adapter: LayerAdapter) -> None:
    """Give all modules of one structure a built-in adapter, whatever their classes are called.

    Args:
        matches: True only if the adapter computes exactly what the module computes.
        adapter: used for modules whose class has no adapter of its own.
    """
    _structures.append((matches, adapter))


def adapter_for(module: nn.Module) -> tuple[LayerAdapter | None, bool]:
    """The adapter for exactly this module, and whether it is built in.

    None for a subclass whose own forward has no adapter, for a parametrized weight, and for a
    module with children.
    """
    for kind, adapter in _adapters.items():
        if _matches(module, kind):
            fits = _owns_only(module, adapter.params) and not any(True for _ in module.children())
            return (adapter if fits else None), kind in _built_in
    return next((adapter for matches, adapter in _structures if matches(module)), None), True


def mark_built_in() -> None:
    """All adapters so far are the library's own, which its tests compare with autograd."""
    _built_in.update(_adapters)


def _matches(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        own = class_of(module)
        return f"{own.__module__}.{own.__qualname__}" == kind
    return isinstance(module, kind) and type(module).forward is kind.forward


def _owns_only(module: nn.Module, names: tuple[str, ...] | None) -> bool:
    """A parametrized weight is an attribute of the module but not among its own parameters."""
    if names is None:
        return True
    owned = {name for name, p in module._parameters.items() if p is not None}
    return owned == {name for name in names if getattr(module, name, None) is not None}
