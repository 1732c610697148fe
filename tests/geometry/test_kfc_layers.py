"""Clipped sums in the preconditioned space equal naively mapped single-sample gradients, for every
layer.
"""

from __future__ import annotations

import pytest
import torch
from naive import Fixed, cosine_loss, mapped
from test_layers import ALL, BATCH, Case, loss_of
from torch import Tensor

import dpkfc
from oracle import private_sum, reference_grads, reference_norms, reference_sum, relative_error

GEOMETRIES = {
    "A": {"factors": "A", "rank": None},
    "AG": {"factors": "AG", "rank": None},
    "A, low rank": {"factors": "A", "rank": 2},
    "AG, low rank": {"factors": "AG", "rank": 1},
    "diagonal others": {"factors": "A", "rank": 2, "others": "diagonal"},
    "no others": {"factors": "AG", "rank": None, "others": None},
    "hybrid of the paper": {"factors": "A", "max_factor": 1},
}


# In float64 what remains is the millionth by which every clip is smaller than asked. In float32 the
# maps enlarge
# rounding by their condition number, up to 300 here, and norms are raised by what it may come to at
# worst.
TOLERANCE = {torch.float64: 3e-6, torch.float32: 4e-4}
PRECISIONS = [(name, torch.float64) for name in GEOMETRIES] + [
    ("AG", torch.float32),
    ("A, low rank", torch.float32),
]


def inputs_of(case: Case, dtype: torch.dtype) -> Tensor:
    inputs = case.inputs()
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@pytest.mark.parametrize(
    ("kind", "dtype"), PRECISIONS, ids=[f"{name}, {dtype}" for name, dtype in PRECISIONS]
)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_mapped_clipped_sum_equals_naive(case: Case, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, inputs, probes = case.build().to(dtype), inputs_of(case, dtype), inputs_of(case, dtype)
    settings = {"damping": 0.05, "stability": 1e-4, "chunk": 4, "loss": cosine_loss}
    geometry = dpkfc.KFC(Fixed(probes), **settings, **GEOMETRIES[kind])
    grads = reference_grads(model, loss_of, inputs, BATCH)
    private_sum(
        model, loss_of, inputs, BATCH, 1.0, geometry=geometry
    )  # builds the maps; the weights stay
    want_grads = mapped(geometry, model, grads)
    norms = reference_norms(want_grads)
    clip = float(norms.median())
    want = reference_sum(want_grads, clip)
    scale = torch.stack([w.norm() for w in want.values()]).norm()
    for chunk in (None, 3):
        got = private_sum(model, loss_of, inputs, BATCH, clip, chunk, geometry)
        for name in want:
            error = (got[name].double() - want[name]).norm()
            assert error < TOLERANCE[dtype] * max(float(want[name].norm()), 1e-2 * float(scale)), (
                name,
                chunk,
            )


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_power_zero_is_dp_sgd(case: Case) -> None:
    torch.manual_seed(1)
    model, inputs = case.build(), case.inputs()
    geometry = dpkfc.KFC(Fixed(case.inputs()), loss=cosine_loss, power=0.0, factors="AG")
    want = private_sum(model, loss_of, inputs, BATCH, 1.0)
    got = private_sum(model, loss_of, inputs, BATCH, 1.0, geometry=geometry)
    for name in want:
        if want[name].norm() > 0:
            assert relative_error(got[name], want[name]) < 1e-5
