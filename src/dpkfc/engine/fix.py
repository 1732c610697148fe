"""`fix`: replace layers that mix records by layers that do not, and show what was replaced."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpkfc.tables import Column, TextTable


def fix(model: nn.Module, show: Callable[[TextTable], None] | None = None) -> nn.Module:
    """Replace BatchNorm by GroupNorm, and turn off the running statistics of InstanceNorm.

    Scale and shift are kept. The parameters are new objects: build the optimizer afterwards.

    Args:
        model: is changed in place.
        show: receives the table of replacements; by default it is printed.

    Returns:
        The same model; a new one only if the model itself is a BatchNorm.

    Raises:
        ValueError: if a lazy BatchNorm is not initialised.

    >>> import torch, dpkfc
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> model = dpkfc.fix(model, show=lambda table: None)
    >>> isinstance(model[1], torch.nn.GroupNorm)
    True
    """
    columns = [Column("module"), Column("was", wrap=True), Column("is now", wrap=True)]
    table = TextTable("dpkfc.fix", columns)
    if isinstance(model, _BatchNorm):
        new = _group_norm(model)
        table.add_row("(the model)", str(model), str(new))
        model = new
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}" if name else child_name
            before = str(child)
            if isinstance(child, _BatchNorm):
                new = _group_norm(child, path)
                setattr(module, child_name, new)
                table.add_row(path, before, str(new))
            elif isinstance(child, _InstanceNorm) and child.track_running_stats:
                child.track_running_stats = False
                child.running_mean = child.running_var = child.num_batches_tracked = None
                table.add_row(path, before, str(child))
    if not table.rows:
        table.add_row("-", "nothing to replace", "-")
    (show or print)(table)
    return model


def _group_norm(old: _BatchNorm, path: str = "the model") -> nn.GroupNorm:
    """A GroupNorm with the scale, the shift and the device of `old`."""
    if old.num_features == 0:
        raise ValueError(
            f"'{path}' ({type(old).__name__}) is not initialised: run one forward pass on random "
            "input first"
        )
    groups = math.gcd(32, old.num_features)
    new = nn.GroupNorm(groups, old.num_features, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight.data.copy_(old.weight.data)
        new.bias.data.copy_(old.bias.data)
    new.train(old.training)
    reference = next(iter(old.state_dict().values()), None)
    return new if reference is None else new.to(reference.device)
