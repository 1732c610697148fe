"""Norms of records made to cancel, and forms that join."""

from __future__ import annotations

import pytest
import torch

from dpkfc.geometry.identity import Identity
from dpkfc.per_sample.combine import combine
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.rows import RowSparseGrad, TiedEmbeddingGrad

METRIC = Identity().map_of(())
EPS = 2.0**-24


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-6])
def test_positions_that_cancel_do_not_hide_a_norm(size: float, ones: bool) -> None:
    """Half of the positions cancel the other half up to a small rest, which is the gradient."""
    torch.manual_seed(0)
    left, right = torch.randn(5, 8, 200), torch.randn(5, 8, 300)
    rest = torch.randn(5, 8, 200) * size
    last = torch.ones(5, 16) if ones else None
    outer = OuterProductGrad(torch.cat([left + rest, -left], 1), torch.cat([right, right], 1), last)
    exact = OuterProductGrad(outer.left.double(), outer.right.double(), last).per_sample()
    want = sum(g.flatten(1).square().sum(1) for g in exact).sqrt()
    got = outer.squared_norms(METRIC).double().sqrt()
    products = (
        outer.left.flatten(1).norm(dim=1).double() * outer.right.flatten(1).norm(dim=1).double()
    )
    workspace = 5 * 16 * EPS * products  # as many products are added up at a time
    assert (got >= want * (1 - 1e-4)).all() and (got <= want * (1 + 1e-4) + 1.1 * workspace).all()
    # what the sample adds to the sum, clipped to 1 by that norm
    for i in range(5):
        alone = torch.zeros(5)
        alone[i] = 1 / got[i]
        added = sum(g.double().square().sum() for g in outer.weighted_sum(alone)).sqrt()
        assert added <= 1 + 1e-4


@pytest.mark.parametrize("width", [3, 200], ids=["formed", "gram"])
def test_a_position_with_zero_input_adds_nothing(width: int) -> None:
    """Padding whose input is zero has no gradient, however large what flows back (as through
    RMSNorm at zero).
    """
    torch.manual_seed(0)
    left, right = torch.randn(5, 4, width), torch.randn(5, 4, width)
    right[:, 0] = 0.0
    left[:, 0] *= 1e8
    want = OuterProductGrad(left[:, 1:], right[:, 1:]).squared_norms(METRIC)
    torch.testing.assert_close(OuterProductGrad(left, right).squared_norms(METRIC), want)


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_head_that_undoes_its_embedding_does_not_hide_a_norm(size: float) -> None:
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(60)[:4] for _ in range(3)])
    values = torch.randn(3, 4, 40)
    one_hot = torch.nn.functional.one_hot(ids, 60).float()
    head = OuterProductGrad(-one_hot, values + size * torch.randn(3, 4, 40))
    tied = combine([head, RowSparseGrad.merged(ids, values, 60)])
    assert isinstance(tied, TiedEmbeddingGrad)
    exact = head.right.double() - values.double()
    want, got = exact.flatten(1).norm(dim=1), tied.squared_norms(METRIC).double().sqrt()
    products = (
        head.left.flatten(1).norm(dim=1).double() * head.right.flatten(1).norm(dim=1).double()
    )
    workspace = (
        (3 * 4 + 4) * EPS * 2 * products
    )  # those of the head, and as much again of the embedding
    assert (got >= want * (1 - 1e-4)).all() and (got <= want * (1 + 1e-4) + 1.1 * workspace).all()
