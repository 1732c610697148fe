"""Flat features, dense and sparse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dpkfc.probes.tabular import SparseTabular, Tabular


def rows(probe: Tabular | SparseTabular, count: int, seed: int = 0) -> np.ndarray:
    inputs = probe.draw(count, torch.Generator().manual_seed(seed)).inputs
    assert isinstance(inputs, torch.Tensor) and inputs.dtype == torch.float32
    return inputs.double().numpy()


def test_gaussian_rows_have_the_moments_asked_for() -> None:
    mean, std = torch.tensor([0.0, 5.0, -2.0]), torch.tensor([1.0, 0.1, 4.0])
    x = rows(Tabular(3, mean=mean, std=std, correlation=0.6), 40_000)
    np.testing.assert_allclose(x.mean(0), mean, atol=0.06)
    np.testing.assert_allclose(x.std(0), std, rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(x.T)[np.triu_indices(3, 1)], 0.6, atol=0.02)
    plain = rows(Tabular(3), 40_000)
    np.testing.assert_allclose(np.cov(plain.T), np.eye(3), atol=0.03)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_sparse_rows_are_sparse_positive_and_of_length_one(exponent: float) -> None:
    x = rows(Tabular.sparse(200, nonzeros=13, exponent=exponent), 500)
    assert x.shape == (500, 200) and np.isfinite(x).all()
    assert (x >= 0).all() and ((x > 0).sum(1) == 13).all()
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-5)


def test_the_first_feature_drawn_follows_the_law() -> None:
    """With one non-zero entry per row, its column has exactly p ∝ 1/(rank + 2.7)."""
    often = (rows(Tabular.sparse(20, nonzeros=1), 20_000) > 0).sum(0)
    weight = np.array([1 / (rank + 2.7) for rank in range(1, 21)])
    assert chisquare(often, 20_000 * weight / weight.sum()).pvalue > 1e-3


def test_frequent_features_weigh_less() -> None:
    x = rows(Tabular.sparse(300, nonzeros=10, normalise=False), 5000)
    typical = [np.median(column[column > 0]) for column in x.T]
    often = (x > 0).mean(0)
    assert often[0] > 5 * often[200]
    assert typical[200] > 1.5 * typical[0]
    # The median of a log-normal count is 1, so the median value is the weight 1 + log(1/π).
    for j in (0, 5, 50):
        assert typical[j] == pytest.approx(1 - np.log(often[j]), rel=0.12)


def test_the_order_of_columns_can_be_given() -> None:
    x = rows(Tabular.sparse(10, nonzeros=2, exponent=2.0, order=[9, 4, 7, 0]), 2000)
    often = (x > 0).sum(0)
    assert often[9] > often[4] > often[7] > often[0] > 0 and often[[9, 4, 7, 0]].sum() == 4000


def test_a_single_feature_is_enough() -> None:
    assert rows(Tabular.sparse(1, nonzeros=1), 3).tolist() == [[1.0]] * 3
    assert rows(Tabular(1), 3).shape == (3, 1)
    assert (rows(Tabular.sparse(6, nonzeros=6, exponent=5.0), 50) > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tabular(0), r"Tabular: features=0: give a whole number, 1 or more"),
        (lambda: Tabular(3, correlation=-0.1), r"correlation=-0.1: give a number from 0 to 1"),
        (
            lambda: Tabular(3, mean=torch.zeros(2)),
            r"mean has shape \(2,\): give one number, or features=3",
        ),
        (lambda: Tabular(3, mean=float("inf")), r"mean: give finite numbers$"),
        (
            lambda: Tabular(3, std=torch.tensor([1.0, 0.0, 1.0])),
            r"std: give finite numbers above 0",
        ),
        (lambda: Tabular(3, count=0), r"Tabular: count=0"),
        (lambda: Tabular(3, classes=-1), r"Tabular: classes=-1"),
        (lambda: Tabular.sparse(0, 1), r"SparseTabular: features=0"),
        (lambda: Tabular.sparse(5, 0), r"nonzeros=0: give a whole number"),
        (lambda: Tabular.sparse(5, 6), r"nonzeros=6: a row has only 5 features to use"),
        (lambda: Tabular.sparse(5, 3, order=[1, 2]), r"nonzeros=3: a row has only 2 features"),
        (
            lambda: Tabular.sparse(5, 3, order=[1, 5, 2]),
            r"order holds 5: give different whole numbers from 0 to 4",
        ),
        (
            lambda: Tabular.sparse(5, 3, exponent=-1),
            r"exponent=-1: give a finite number of at least 0",
        ),
        (lambda: Tabular.sparse(5, 3, classes=0), r"classes=0"),
        (lambda: Tabular.sparse(5, 3, count=0), r"SparseTabular: count=0"),
    ],
)
def test_bad_arguments_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
