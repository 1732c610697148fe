"""The functions of a step, each compared with the formula written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkfc.engine.step import (
    add_noise_,
    add_sums_,
    clip_and_sum,
    map_after_noise_,
    sum_per_parameter,
    write_grads,
)
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.noise.independent import Independent
from dpkfc.noise.workload import Workload
from dpkfc.per_sample.base import LinearMap, ParamKey
from dpkfc.per_sample.capture import CapturedGrads
from dpkfc.per_sample.dense import DenseGrad

BATCH = 6


def captured(grads: dict[ParamKey, list[Tensor]], maps: dict[ParamKey, LinearMap]) -> CapturedGrads:
    dense = {key: DenseGrad(list(parts)) for key, parts in grads.items()}
    norms = {key: grad.squared_norms(maps[key]) for key, grad in dense.items()}
    total = torch.stack(list(norms.values())).sum(0)
    return CapturedGrads(dict(dense), norms, total, BATCH, 1e-7)


def two_parameters(seed: int, size: float) -> tuple[dict[ParamKey, list[Tensor]], Any]:
    generator = torch.Generator().manual_seed(seed)
    keys: list[ParamKey] = [
        (nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3))),
        (nn.Parameter(torch.zeros(4)),),
    ]
    grads = {
        key: [size * torch.randn(BATCH, *p.shape, generator=generator) for p in key] for key in keys
    }
    maps: dict[ParamKey, LinearMap] = {
        keys[0]: DiagonalMap([0.1 + torch.rand(p.shape, generator=generator) for p in keys[0]]),
        keys[1]: DiagonalMap(2.5),
    }
    return grads, maps


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1).double() for part in parts], 1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    clip=st.floats(0.05, 20.0),
    gamma=st.none() | st.floats(1e-3, 1.0),
    scale=st.sampled_from([1.0, 6.0, 1 / 128]),
    bad=st.none() | st.integers(0, BATCH - 1),
)
def test_clip_and_sum_is_the_formula(
    seed: int, size: float, clip: float, gamma: float | None, scale: float, bad: int | None
) -> None:
    """``Σ_i c_i U g_i / E[batch]``, and a sample that is not finite contributes exactly zero."""
    grads, maps = two_parameters(seed, size)
    if bad is not None:
        next(iter(grads.values()))[0][bad, 0, 0] = float("nan")
    mapped = {key: maps[key].apply(parts) for key, parts in grads.items()}
    vectors = torch.cat([flat(parts) for parts in mapped.values()], 1) * scale
    norms = vectors.norm(dim=1)
    factors = (clip / norms).clamp(max=1) if gamma is None else clip / (norms + gamma)
    weighted = torch.where(
        torch.isfinite(norms)[:, None], vectors * factors[:, None], torch.zeros_like(vectors)
    )
    batch = clip_and_sum(
        captured(grads, maps),
        lambda key: maps[key],
        clip=clip,
        gamma=gamma,
        grad_scale=scale,
        expected_batch_size=5,
    )
    assert batch is not None
    assert batch.finite.tolist() == torch.isfinite(norms).tolist()
    sums = torch.cat([flat([x[None] for x in batch.sums[key]]) for key in grads], 1)[0]
    torch.testing.assert_close(sums, weighted.sum(0) / 5, rtol=1e-4, atol=1e-6 * clip)
    contributions = weighted.norm(dim=1)
    assert bool((contributions <= clip * (1 + 1e-6)).all())


def test_nothing_captured_is_nothing_to_add() -> None:
    empty = CapturedGrads({}, {}, None, 0, 0.0)
    arguments: dict[str, Any] = {"clip": 1.0, "gamma": None, "grad_scale": 1.0}
    assert (
        clip_and_sum(empty, lambda key: DiagonalMap(1.0), **arguments, expected_batch_size=1)
        is None
    )


def test_parts_of_a_batch_add_up_and_unused_parameters_get_zeros() -> None:
    used, tied, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    total: dict[ParamKey, list[Tensor]] = {}
    add_sums_(total, {(used,): [torch.ones(2)]})
    add_sums_(
        total, {(used,): [torch.ones(2)], (tied, used): [torch.ones(2), torch.full((2,), 5.0)]}
    )
    sums = sum_per_parameter(total, {"used": used, "tied": tied, "unused": unused})
    assert [sums[name].tolist() for name in ("used", "tied", "unused")] == [[7, 7], [1, 1], [0, 0]]
    assert not total, "sums are freed as they are used"


@pytest.mark.parametrize("grid", [0.0, 0.25])
def test_noise_is_added_once_to_every_entry_and_lies_on_the_grid(grid: float) -> None:
    noise = Independent().factorize(Workload.sgd(), 3, 1).stream([range(7)], torch.device("cpu"))
    again = Independent().factorize(Workload.sgd(), 3, 1).stream([range(7)], torch.device("cpu"))
    key = bytes(range(32))
    sums = {"a": torch.ones(2, 2), "b": torch.zeros(3)}
    add_noise_(sums, noise, key, 2.0, 0, grid)
    alone = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    add_noise_(alone, again, key, 2.0, 0, 0.0)
    for name, start in (("a", 1.0), ("b", 0.0)):
        assert bool((alone[name] != 0).all())
        tolerance = grid / 2 + 1e-5
        torch.testing.assert_close(sums[name], alone[name] + start, rtol=0, atol=tolerance)
        if grid:
            assert torch.equal(sums[name], (sums[name] / grid).round() * grid)


def test_maps_after_the_noise_change_the_parameters_that_they_name_only() -> None:
    grads = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    map_after_noise_(grads, {("a", "c"): DiagonalMap(3.0)})
    assert [grads[name].tolist() for name in "abc"] == [[3, 3], [1, 1], [3, 3]]


def test_written_gradients_have_the_dtype_of_the_parameter_and_older_ones_are_removed() -> None:
    trained, frozen = (
        nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2)),
    )
    frozen.grad = torch.ones(2)
    write_grads({trained: "trained", frozen: "frozen"}, {"trained": torch.ones(2)})
    assert trained.grad is not None and trained.grad.dtype == torch.bfloat16
    assert frozen.grad is None
