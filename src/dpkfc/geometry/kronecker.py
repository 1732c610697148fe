"""The Kronecker map ``g -> U_G g U_A`` of one layer (Algorithm 2, line 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkfc.geometry.factors import Root, root_from
from dpkfc.per_sample.workspace import Allocate


@dataclass
class KroneckerMap:
    """``g -> U_G g U_A`` for a weight [out, in] ([in, out] if `transposed`), and its bias.

    The bias gradient is the last column of g. A grouped convolution has one block per group: its
    outputs see only the inputs of their own group. None stands for the identity.
    """

    g_root: Root | None  # U_G
    a_root: Root | None  # U_A
    inputs: int  # per group, without the bias
    outputs: int  # per group
    groups: int = 1
    transposed: bool = False

    factored = True

    @property
    def _roots(self) -> list[Root]:
        return [root for root in (self.g_root, self.a_root) if root is not None]

    @property
    def gain(self) -> float:
        return math.prod(root.largest for root in self._roots)

    @property
    def condition(self) -> float:
        return math.prod(root.largest / root.smallest for root in self._roots)

    @property
    def work(self) -> tuple[int, int]:
        left, right = (0 if root is None else root.work for root in (self.g_root, self.a_root))
        return left, right

    def map_factors(
        self,
        left: Tensor,
        right: Tensor,
        bias_input: Tensor | None,
        workspaces: tuple[Allocate, Allocate] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(U_G left_t, U_A right_t)``, the factors of ``U_G (Σ_t left_t right_tᵀ) U_A``."""
        if self.a_root is not None:
            out = workspaces and workspaces[1](tuple(right.shape), right)
            right, bias_input = self.a_root.right(right, bias_input, out)
        if self.g_root is not None:
            out = workspaces and workspaces[0](tuple(left.shape), left)
            left, _ = self.g_root.right(left, None, out)
        return left, right, bias_input

    def outer_squared_norms(self, left: Tensor, right: Tensor, bias_input: Tensor | None) -> Tensor:
        raise TypeError("a Kronecker map is factored: take the norms of the mapped factors")

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        raise TypeError("embeddings have a diagonal map, not a Kronecker map")

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        matrix = grads[0].reshape(-1, *self._block_shape)
        matrix = matrix.transpose(-1, -2) if self.transposed else matrix
        bias = grads[1].reshape(-1, self.groups, self.outputs) if len(grads) > 1 else None
        if self.a_root is not None:
            matrix, bias = self.a_root.right(matrix, bias)
        if self.g_root is not None:
            matrix = self.g_root.left(matrix)
            bias = None if bias is None else self.g_root.left(bias.unsqueeze(-1)).squeeze(-1)
        matrix = matrix.transpose(-1, -2) if self.transposed else matrix
        matrix = matrix.reshape(grads[0].shape)
        return [matrix] if bias is None else [matrix, bias.reshape(grads[1].shape)]

    @property
    def _block_shape(self) -> tuple[int, int, int]:
        if self.transposed:
            return (1, self.inputs, self.outputs)
        return (self.groups, self.outputs, self.inputs)

    def state(self) -> dict[str, Any]:
        return {
            "g_root": None if self.g_root is None else self.g_root.state(),
            "a_root": None if self.a_root is None else self.a_root.state(),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "groups": self.groups,
            "transposed": self.transposed,
        }


def kronecker_from(state: dict[str, Any]) -> KroneckerMap:
    """A map from its `state()`."""
    roots = {name: root_from(state[name]) for name in ("g_root", "a_root")}
    return KroneckerMap(**{**state, **roots})
