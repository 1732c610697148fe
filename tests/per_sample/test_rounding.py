"""Norms on an accelerator, which takes upper bounds where the CPU looks for doubtful records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkfc.clipping import MARGIN
from dpkfc.engine import step
from dpkfc.engine.step import clip_and_sum
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.per_sample import outer, rounding
from dpkfc.per_sample.base import IDENTITY_MAP, LinearMap
from dpkfc.per_sample.capture import CapturedGrads
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.rows import RowSparseGrad, TiedEmbeddingGrad


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of an accelerator, on the CPU."""
    for module in (outer, rounding, step):
        monkeypatch.setattr(module, "branches_are_cheap", lambda x: False)


def records(positions: int) -> OuterProductGrad:
    """Ordinary records, then records whose products cancel, and records with extreme factors."""
    generator = torch.Generator().manual_seed(positions)
    left = torch.randn(12, positions, 30, generator=generator)
    right = torch.randn(12, positions, 40, generator=generator)
    if positions > 1:
        left[4, 1:] = 0
        right[5, 1] = right[5, 0]
        left[5, 1] = -left[5, 0]
        left[6], right[6] = left[6, 0], right[6, 0]
        left[6, 0] *= 1 - positions
        left[6, 0] += 1e-6
    for i, (large, small) in enumerate([(1e9, 1e-24), (1e15, 1e-22), (1e-20, 1e12), (1e18, 1e-28)]):
        left[8 + i] *= large
        right[8 + i] *= small
    return OuterProductGrad(left, right)


def exact(grad: OuterProductGrad, scale: Tensor) -> Tensor:
    g = torch.einsum("bto,bti->boi", grad.left.double(), grad.right.double()) * scale.double()
    return g.square().sum((1, 2)).sqrt()


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("kind", ["identity", "diagonal"])
def test_no_norm_is_too_small(accelerator: None, positions: int, kind: str) -> None:
    grad = records(positions)
    scale = torch.rand(30, 40, generator=torch.Generator().manual_seed(0)) + 0.5
    scale = torch.ones(30, 40) if kind == "identity" else scale
    map_: LinearMap = IDENTITY_MAP if kind == "identity" else DiagonalMap([scale])
    norms = grad.squared_norms(map_).double().sqrt()
    want = exact(grad, scale)
    assert bool((norms >= want * (1 - MARGIN)).all())
    ordinary = slice(0, 4)
    torch.testing.assert_close(norms[ordinary], want[ordinary], rtol=1e-3, atol=0)


def test_the_test_of_extreme_factors_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound for underflow, a record of norm 1e-4 would be measured as zero."""
    for module in (outer, rounding):
        monkeypatch.setattr(module, "branches_are_cheap", lambda x: False)
        monkeypatch.setattr(module, "underflow_bound", lambda largest, products: 0 * largest)
    grad = records(1)
    norms = grad.squared_norms(IDENTITY_MAP).double().sqrt()
    assert not bool((norms >= exact(grad, torch.ones(30, 40)) * (1 - MARGIN)).all())


def test_a_tied_weight_that_cancels(accelerator: None) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 2, 8, generator=generator)
    ids = torch.tensor([[1, 4], [2, 3], [0, 5]])
    # the head's gradient is minus that of the embedding, up to 1e-7
    one_hot = torch.nn.functional.one_hot(ids, 6).float()
    head = OuterProductGrad(-one_hot, values * (1 + 1e-7))
    tied = TiedEmbeddingGrad(head, RowSparseGrad.merged(ids, values, 6))
    want = (
        (tied.rows.per_sample()[0].double() + head.double().per_sample()[0]).flatten(1).norm(dim=1)
    )
    assert bool((tied.squared_norms(IDENTITY_MAP).double().sqrt() >= want * (1 - MARGIN)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_dropped_without_asking(
    accelerator: None, bad: float
) -> None:
    grad = records(1)
    grad.left[2, 0, 0] = bad
    p = nn.Parameter(torch.zeros(30, 40))
    captured = CapturedGrads(
        {(p,): grad}, {}, grad.squared_norms(IDENTITY_MAP), len(grad.left), 1e-7
    )
    clipped = clip_and_sum(
        captured,
        lambda key: IDENTITY_MAP,
        clip=1.0,
        gamma=None,
        grad_scale=1.0,
        expected_batch_size=1,
    )
    assert clipped is not None
    assert clipped.finite.tolist() == [i != 2 for i in range(12)]
    kept = [i for i in range(12) if i != 2]
    products = torch.einsum("bto,bti->boi", grad.left, grad.right)[kept].double()
    want = (products * clipped.clip_factors[kept].double()[:, None, None]).sum(0)
    torch.testing.assert_close(clipped.sums[p,][0].double(), want, rtol=1e-4, atol=1e-6)
