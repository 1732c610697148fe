"""Which part of the model accounts for which parameters: every trainable parameter in exactly one way.

A layer with a fast path is a unit. Parameters that a container owns itself (a ViT's `cls_token` and
`pos_embed`) are expanded to one copy a sample if their leading size is 1, as broadcasting over the batch
has it; any other module that owns parameters is run whole under vmap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.layers import conv, embedding, linear
from dpkfc.per_sample.layers import norm as affine
from dpkfc.per_sample.layers.linear import Slots
from dpkfc.per_sample.record import Use, Workspace

Handler = Callable[[Use], Slots]

FAST: dict[type[nn.Module], Handler] = {
    nn.Linear: linear.linear,
    nn.Conv1d: conv.conv,
    nn.Conv2d: conv.conv,
    nn.Conv3d: conv.conv,
    nn.Embedding: embedding.embedding,
    nn.LayerNorm: affine.over_features,
    nn.RMSNorm: affine.over_features,
    nn.GroupNorm: affine.over_channels,
    nn.InstanceNorm1d: affine.over_channels,
    nn.InstanceNorm2d: affine.over_channels,
    nn.InstanceNorm3d: affine.over_channels,
}


@dataclass(eq=False)
class HookedModule:
    """A module and the parameters it accounts for, by their names inside the module."""

    name: str
    module: nn.Module
    kind: Literal["layer", "expanded", "vmap"]
    parameters: dict[str, nn.Parameter]
    handler: Handler | None = None
    joint: bool = True  # no parameter is shared with another unit
    workspace: Workspace = field(default_factory=Workspace)
    lent: list[dict[str, nn.Parameter]] = field(
        default_factory=list
    )  # what each running call took away


def fast_handler(module: nn.Module) -> Handler | None:
    """The fast path of exactly this layer: a subclass with its own forward, or a parametrized weight, has none."""
    for kind, handler in FAST.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            registered = {name for name, p in module._parameters.items() if p is not None}
            expected = {
                name for name in ("weight", "bias") if getattr(module, name, None) is not None
            }
            return (
                handler
                if registered == expected and not any(True for _ in module.children())
                else None
            )
    if (
        type(module).__name__ == "Conv1D"
        and type(module).__module__ == "transformers.pytorch_utils"
    ):
        return linear.conv1d_of_transformers
    return None


def partition(model: nn.Module, vmap_modules: Iterable[str] = ()) -> list[HookedModule]:
    """Split the model into units; `vmap_modules` names modules to be run whole under vmap."""
    vmap_modules = set(vmap_modules)
    unknown = vmap_modules - {name for name, _ in model.named_modules()}
    if unknown:
        raise PrivacyError(
            f"vmap_modules names no module of the model: {', '.join(sorted(unknown))}"
        )
    units = list(_walk(model, "", vmap_modules, set()))
    uses = Counter(id(p) for unit in units for p in unit.parameters.values())
    for unit in units:
        unit.joint = all(uses[id(p)] == 1 for p in unit.parameters.values())
    return units


def _walk(
    module: nn.Module, name: str, vmap_modules: set[str], seen: set[nn.Module]
) -> Iterator[HookedModule]:
    if module in seen:
        return
    seen.add(module)
    own = {key: p for key, p in module._parameters.items() if p is not None}
    handler = None if name in vmap_modules else fast_handler(module)
    if handler is not None:
        if own:
            yield HookedModule(name, module, "layer", own, handler)
        return
    broadcast = all(p.dim() > 1 and p.shape[0] == 1 for p in own.values()) and any(
        True for _ in module.children()
    )
    if name in vmap_modules or (own and not broadcast):
        seen.update(module.modules())
        yield HookedModule(name, module, "vmap", dict(module.named_parameters()))
        return
    if own:
        yield HookedModule(name, module, "expanded", own)
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, vmap_modules, seen)
