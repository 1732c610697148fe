"""Which module accounts for which parameters: every trainable parameter in exactly one way.

A layer with an adapter accounts for its own parameters. Parameters that a container owns itself (a
ViT's `cls_token` and `pos_embed`) are expanded to one copy per sample if their leading size is 1,
as in broadcasting over the batch. Any other module that owns parameters runs as a whole under vmap.
Frozen parameters of a module without an adapter are not captured: they stay frozen.

Parameters of a submodule that never sees a sample belong to the module that contains it: one
without a forward, as `nn.ParameterDict` and `nn.ParameterList`, or one whose forward takes no
input, as a table of relative positions.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from dpkfc.per_sample.base import HookedModule
from dpkfc.per_sample.registry import adapter_for


def partition(
    model: nn.Module, vmap_modules: Iterable[str] = (), expand_scalars: bool = False
) -> list[HookedModule]:
    """Divide the model's parameters among modules.

    Args:
        model: the whole model.
        vmap_modules: names of modules to run as a whole under vmap.
        expand_scalars: the model's own scalars (a temperature of its logits) become one copy per
            sample, [batch, 1]. That this is how the model uses them must be checked.

    Raises:
        ValueError: `vmap_modules` names no module of the model.
    """
    names = set(vmap_modules)
    unknown = names - {name for name, _ in model.named_modules()}
    if unknown:
        raise ValueError(f"vmap_modules names no module of the model: {', '.join(sorted(unknown))}")
    hooked_modules = list(_walk(model, "", names, set(), expand_scalars))
    uses = Counter(id(p) for hooked in hooked_modules for p in hooked.params.values())
    for hooked in hooked_modules:
        hooked.shared = any(uses[id(p)] > 1 for p in hooked.params.values())
    return hooked_modules


def _walk(
    module: nn.Module,
    name: str,
    vmap_modules: set[str],
    seen: set[nn.Module],
    expand_scalars: bool = False,
) -> Iterator[HookedModule]:
    if module in seen:
        return
    seen.add(module)
    own = _own_parameters(module)
    adapter, built_in = (None, True) if name in vmap_modules else adapter_for(module)
    if adapter is not None and adapter.per_sample_grads is not None:
        if own:
            yield HookedModule(name, module, "layer", own, adapter, built_in)
        return
    # what a container owns and does not train does not concern how its children are captured
    own = {key: p for key, p in own.items() if p.requires_grad}
    has_children = any(True for _ in module.children())
    broadcast = has_children and all(
        key in module._parameters
        and ((p.dim() > 1 and p.shape[0] == 1) or (p.dim() == 0 and expand_scalars))
        for key, p in own.items()
    )
    if name in vmap_modules or (own and not broadcast):
        seen.update(module.modules())
        params = dict(module.named_parameters())
        yield HookedModule(name, module, "vmap", params, adapter, built_in)
        return
    if own:
        yield HookedModule(name, module, "expanded", own)
    for child_name, child in module.named_children():
        child_path = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, child_path, vmap_modules, seen)


def _own_parameters(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """The module's own parameters, and those of its submodules that never see a sample."""
    own = {prefix + key: p for key, p in module._parameters.items() if p is not None}
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        forward = getattr(type(child), "forward", None)  # a scripted module's class has none
        if forward is nn.Module.forward:
            own |= _own_parameters(child, path)
        elif inspect.isfunction(forward) and list(inspect.signature(forward).parameters) == [
            "self"
        ]:
            own |= {path + key: p for key, p in child.named_parameters()}
    return own
