"""`fix`: replace layers that mix records by their private relatives, and show what was replaced."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpkfc.errors import PrivacyError
from dpkfc.tables import Column, TextTable


def fix(model: nn.Module, show: Callable[[TextTable], None] | None = None) -> nn.Module:
    """Replace BatchNorm by GroupNorm, and turn off the running statistics of InstanceNorm.

    Works in place and returns the model (a new one if the model itself is a BatchNorm). Scale and shift
    are kept. Parameters are new objects: build the optimizer afterwards. `show` receives the table of
    replacements; by default it is printed.

    >>> import torch, dpkfc
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> model = dpkfc.fix(model, show=lambda table: None)
    >>> isinstance(model[1], torch.nn.GroupNorm)
    True
    """
    headings = (Column("module"), Column("was", wrap=True), Column("is now", wrap=True))
    table = TextTable("dpkfc.fix", headings)
    if isinstance(model, _BatchNorm):
        replaced = _group_norm(model)
        table.add_row("(the model)", str(model), str(replaced))
        model = replaced
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}" if name else child_name
            if isinstance(child, _BatchNorm):
                new = _group_norm(child, path)
                setattr(module, child_name, new)
                table.add_row(path, str(child), str(new))
            elif isinstance(child, _InstanceNorm) and child.track_running_stats:
                before = str(child)
                child.track_running_stats = False
                child.running_mean = child.running_var = child.num_batches_tracked = None
                table.add_row(path, before, str(child))
    if not table.rows:
        table.add_row("-", "nothing to replace", "-")
    (show or print)(table)
    return model


def _group_norm(old: _BatchNorm, path: str = "the model") -> nn.GroupNorm:
    if old.num_features == 0:
        raise PrivacyError(
            f"'{path}' ({type(old).__name__}) is not initialised: run one forward pass on random input first"
        )
    new = nn.GroupNorm(
        math.gcd(32, old.num_features), old.num_features, eps=old.eps, affine=old.affine
    )
    if old.affine:
        new.weight.data.copy_(old.weight.data)
        new.bias.data.copy_(old.bias.data)
    new.train(old.training)
    reference = next(iter(old.state_dict().values()), None)
    return new if reference is None else new.to(reference.device)
