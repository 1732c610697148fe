"""The Kronecker map ``g -> U_G g U_A`` of one layer (Algorithm 2, line 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkfc.geometry.factors import Root, root_from
from dpkfc.geometry.identity import Workspaces


@dataclass
class KroneckerMap:
    """``g -> U_G g U_A`` for a weight [out, in] (or [in, out] if `transposed`), and its bias as the last column of g.

    A grouped convolution has a block for each group: its outputs see only the inputs of their own group. None
    stands for the identity.
    """

    left_root: Root | None  # U_G
    right_root: Root | None  # U_A
    inputs: int  # in a group, without the bias
    outputs: int  # in a group
    groups: int = 1
    transposed: bool = False

    factored = True

    @property
    def gain(self) -> float:
        return math.prod(
            root.largest for root in (self.left_root, self.right_root) if root is not None
        )

    @property
    def condition(self) -> float:
        roots = [root for root in (self.left_root, self.right_root) if root is not None]
        return math.prod(root.largest / root.smallest for root in roots)

    @property
    def work(self) -> tuple[int, int]:
        left, right = (
            0 if root is None else root.work for root in (self.left_root, self.right_root)
        )
        return left, right

    def factors(
        self, left: Tensor, right: Tensor, last: Tensor | None, workspaces: Workspaces | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(U_G left_t, U_A right_t)``: the factors of ``U_G (Σ_t left_t right_tᵀ) U_A``; one group only."""
        if self.right_root is not None:
            right, last = self.right_root.right(
                right, last, workspaces and workspaces[1](tuple(right.shape), right)
            )
        if self.left_root is not None:
            left, _ = self.left_root.right(
                left, None, workspaces and workspaces[0](tuple(left.shape), left)
            )
        return left, right, last

    def single(self, left: Tensor, right: Tensor, last: Tensor | None) -> Tensor:
        raise NotImplementedError

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        raise NotImplementedError

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        matrix = grads[0].reshape(-1, *self._shape)
        matrix = matrix.transpose(-1, -2) if self.transposed else matrix
        bias = grads[1].reshape(-1, self.groups, self.outputs) if len(grads) > 1 else None
        if self.right_root is not None:
            matrix, bias = self.right_root.right(matrix, bias)
        if self.left_root is not None:
            matrix = self.left_root.left(matrix)
            bias = None if bias is None else self.left_root.left(bias.unsqueeze(-1)).squeeze(-1)
        matrix = (matrix.transpose(-1, -2) if self.transposed else matrix).reshape(grads[0].shape)
        return [matrix] if bias is None else [matrix, bias.reshape(grads[1].shape)]

    @property
    def _shape(self) -> tuple[int, int, int]:
        if self.transposed:
            return (1, self.inputs, self.outputs)
        return (self.groups, self.outputs, self.inputs)

    def state(self) -> dict[str, Any]:
        left, right = (
            None if root is None else root.state() for root in (self.left_root, self.right_root)
        )
        shape = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "groups": self.groups,
            "transposed": self.transposed,
        }
        return {"left_root": left, "right_root": right, **shape}


def kronecker_from(state: dict[str, Any]) -> KroneckerMap:
    """A map from its `state()`."""
    return KroneckerMap(
        **{
            **state,
            "left_root": root_from(state["left_root"]),
            "right_root": root_from(state["right_root"]),
        }
    )
