"""Gradients that differ are told from those that agree, whichever record or parameter it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkfc.engine.fingerprint import EXACT, SAME, Fingerprint, difference
from dpkfc.engine.loss_comparison import random_weights
from dpkfc.per_sample.capture import CapturedGrads, GradientCapture

ROWS = 7


def gradients(
    weights: Tensor, dtype: torch.dtype = torch.float32, other: Any = None
) -> CapturedGrads:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    x, y = torch.randn(ROWS, 4).to(dtype), torch.arange(ROWS) % 3
    capture = GradientCapture(model)
    with capture.accumulating() as grads:
        losses = F.cross_entropy(model(x).float(), y, reduction="none")
        (losses * weights).mean().backward()
    found = grads.take()
    capture.remove()
    names = {p: name for name, p in model.named_parameters()}
    # type: ignore[misc]
    found.grads = {tuple(names[p] for p in key): grad for key, grad in found.grads.items()}
    return found


@settings(max_examples=30, deadline=None)
@given(
    row=st.integers(0, ROWS - 1),
    factor=st.sampled_from([0.0, 0.5, 0.98, 1.02, 3.0, -1.0, float("nan")]),
)
def test_one_record_that_differs_is_seen(row: int, factor: float) -> None:
    weights = torch.ones(ROWS)
    signs = random_weights(ROWS)
    one = Fingerprint.of(gradients(weights), signs)
    weights[row] = factor
    other = Fingerprint.of(gradients(weights), signs)
    assert difference(one, one, EXACT) is None
    found = difference(one, other, EXACT)
    assert found is not None
    signs[row] = 0.0  # not looked at
    assert (
        difference(
            Fingerprint.of(gradients(torch.ones(ROWS)), signs),
            Fingerprint.of(gradients(weights), signs),
            EXACT,
        )
        is None
    )


def test_the_ratio_and_the_place_are_told() -> None:
    signs = random_weights(ROWS)
    one, other = (
        Fingerprint.of(gradients(torch.full((ROWS,), scale)), signs) for scale in (0.5, 1.0)
    )
    found = difference(one, other, EXACT)
    assert found is not None and found.norm_ratio == pytest.approx(0.5) and found.key in one.sums
    assert (
        difference(
            Fingerprint.of(gradients(torch.full((ROWS,), 0.5)), signs, scale=2.0), other, EXACT
        )
        is None
    )


@pytest.mark.parametrize(
    ("dtype", "exact", "same"),
    [(torch.float64, 1e-4, 1e-3), (torch.float32, 1e-4, 1e-3), (torch.bfloat16, 1 / 256, 1 / 8)],
)
def test_the_tolerance_fits_the_dtype(dtype: torch.dtype, exact: float, same: float) -> None:
    found = gradients(torch.ones(ROWS), dtype)
    assert EXACT.limit(found.eps) == pytest.approx(exact) and SAME.limit(
        found.eps
    ) == pytest.approx(same)
