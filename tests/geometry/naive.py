"""The geometry the slow way.

Every matrix written out, every gradient mapped on its own, in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot, Root
from dpkfc.geometry.kfc import KFC
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.probes.probe import Probes


class Fixed:
    """A probe that is always the same batch."""

    name, public = "fixed", True

    def __init__(self, inputs: Tensor, targets: Tensor | None = None) -> None:
        self.inputs, self.targets, self.count = inputs, targets, len(inputs)

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        return Probes(self.inputs, self.targets)


def cosine_loss(output: Any, probes: Probes, generator: torch.Generator) -> Tensor:
    flat = output.flatten(1)
    return (flat.cos() * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype)).sum(1)


def written_out(root: Root | None, groups: int, size: int) -> Tensor:
    """The matrices U of a root: [groups, size, size]."""
    if root is None:
        return torch.eye(size, dtype=torch.float64).repeat(groups, 1, 1)
    if isinstance(root, FullRoot):
        return root.matrix.double()
    vectors = root.vectors.double()
    return (
        root.base * torch.eye(size, dtype=torch.float64)
        + vectors @ torch.diag(root.weights.double()) @ vectors.T
    )[None]


def mapped(
    geometry: KFC, model: nn.Module, grads: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """``U_G g U_A`` of every gradient, one by one."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    out = [{name: g.double().clone() for name, g in one.items()} for one in grads]
    for names, rule in geometry._maps.items():
        for one in out:
            if isinstance(rule, DiagonalMap):
                for k, name in enumerate(names):
                    scale = (
                        rule.scale
                        if isinstance(rule.scale, float)
                        else rule.scale[k].double().view(shapes[name])
                    )
                    one[name] = one[name] * scale
            else:
                assert isinstance(rule, KroneckerMap)
                one.update(zip(names, _kronecker(rule, [one[name] for name in names]), strict=True))
    return out


def _kronecker(rule: KroneckerMap, grads: list[Tensor]) -> list[Tensor]:
    weight, *bias = grads
    matrix = weight.T if rule.transposed else weight.reshape(weight.shape[0], -1)
    if bias:
        matrix = torch.cat([matrix, bias[0][:, None]], 1)
    right = written_out(rule.a_root, rule.groups, matrix.shape[1])
    left = written_out(rule.g_root, rule.groups, rule.outputs)
    blocks = [left[k] @ block @ right[k] for k, block in enumerate(matrix.chunk(rule.groups, 0))]
    matrix = torch.cat(blocks, 0)
    bias = [matrix[:, -1]] if bias else []
    matrix = matrix[:, : matrix.shape[1] - len(bias)]
    return [(matrix.T if rule.transposed else matrix).reshape(weight.shape), *bias]
