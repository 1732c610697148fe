"""Spectra and alignment against factors from curvlinops and against matrices written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import Fixed
from torch import Tensor, nn

import dpkfc
from dpkfc.diagnostics import factor_alignment, kronecker_spectrum
from dpkfc.diagnostics.spectrum import eigenvalues_by_bisection, kronecker_eigenvalues


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2, dilation=2),
        nn.Flatten(),
        nn.Linear(4, 4),
    ).double()


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(12, 2, 6, 6, dtype=torch.float64) * (1 + seed), torch.randint(4, (12,))


def factors(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of every layer; curvlinops' G is a sum over the data, ours the mean."""
    from curvlinops import KFACLinearOperator

    oracle = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    oracle.compute_kronecker_factors()
    of_a, of_g = oracle._input_covariances, oracle._gradient_covariances
    return {name: (of_a[name], of_g[name] / len(x)) for name in of_a}


def test_spectrum_equals_curvlinops() -> None:
    model, (x, y) = network(), inputs(1)
    (layers,) = kronecker_spectrum(model, Fixed(x, y), points=10_000).sources.values()
    wanted = factors(model, x, y)
    assert [layer.layer for layer in layers] == ["0", "2", "4"] and set(wanted) == {"0", "2", "4"}
    for layer in layers:
        block = torch.kron(*wanted[layer.layer])
        values = torch.linalg.eigvalsh(block).flip(0)
        assert layer.ranks == tuple(range(1, len(values) + 1)) and layer.total == len(values)
        torch.testing.assert_close(
            torch.tensor(layer.values, dtype=torch.float64),
            values,
            rtol=1e-6,
            atol=1e-9 * float(values[0]),
        )
        assert layer.trace == pytest.approx(float(block.trace()))
        assert layer.effective_rank == pytest.approx(
            float(block.trace() ** 2 / block.square().sum()), rel=1e-6
        )


def test_alignment_equals_matrices_written_out() -> None:
    model, reference, other = network(), inputs(0), inputs(1)
    found = factor_alignment(
        model, Fixed(*reference), {"other": Fixed(*other), "same": Fixed(*reference)}
    )
    wanted = [factors(model, *one) for one in (reference, other)]
    for row in found.sources["other"]:
        (a, g), (a_hat, g_hat) = (one[row.layer] for one in wanted)
        pairs = ((a, a_hat), (g, g_hat), (torch.kron(a, g), torch.kron(a_hat, g_hat)))
        for cosine, error, (c, c_hat) in zip(row.cosine, row.error, pairs, strict=True):
            assert cosine == pytest.approx(
                float((c.T @ c_hat).trace() / (c.norm() * c_hat.norm())), rel=1e-6
            )
            assert error == pytest.approx(float((c - c_hat).norm() / c.norm()), rel=1e-6)
    for row in found.sources["same"]:
        assert row.cosine == pytest.approx((1, 1, 1)) and row.error == pytest.approx(
            (0, 0, 0), abs=1e-6
        )


def test_groups_are_blocks() -> None:
    """A grouped convolution is as many layers side by side: its factors are block diagonal."""
    torch.manual_seed(0)
    grouped = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.Flatten()).double()
    x, other = torch.randn(2, 9, 4, 1, 1, dtype=torch.float64)
    (layer,) = kronecker_spectrum(grouped, Fixed(x), loss="mse").sources["fixed"]
    assert layer.sizes == (2, 3, 3) and layer.total == len(layer.values) == 18
    a = [
        torch.cat([p[:, 2 * k : 2 * k + 2, 0, 0], torch.ones(9, 1)], 1)
        for p in (x, other)
        for k in range(2)
    ]
    a = [one.T @ one / 9 for one in a]
    (row,) = factor_alignment(grouped, Fixed(x), Fixed(other), loss="mse").sources["fixed"]
    want, found = torch.block_diag(*a[:2]), torch.block_diag(*a[2:])
    assert row.cosine[0] == pytest.approx(
        float((want * found).sum() / (want.norm() * found.norm()))
    )
    assert row.error[0] == pytest.approx(float((want - found).norm() / want.norm()))


def test_eigenvalues_without_forming_the_products() -> None:
    torch.manual_seed(0)
    a, g = torch.rand(2, 40, dtype=torch.float64) ** 8, torch.rand(2, 30, dtype=torch.float64) ** 8
    a[:, 25:], g[0, 20:] = 0, 0
    ranks = torch.tensor([1, 2, 17, 500, 1000, 1249, 1250, 1251, 2400])
    every = (a[:, :, None] * g[:, None]).flatten().sort(descending=True).values
    assert int((every > 0).sum()) == 25 * 20 + 25 * 30
    torch.testing.assert_close(
        eigenvalues_by_bisection(a, g, ranks), every[ranks - 1], rtol=1e-9, atol=0
    )
    assert eigenvalues_by_bisection(0 * a, g, ranks).tolist() == [0.0] * len(ranks)
    many = torch.linspace(1, 2, 2100, dtype=torch.float64)[None]
    ends = kronecker_eigenvalues(many, many, torch.tensor([1, 2100**2]))
    torch.testing.assert_close(ends, torch.tensor([4.0, 1.0], dtype=torch.float64))


def test_few_points_of_many() -> None:
    (layer,) = kronecker_spectrum(nn.Linear(30, 20), dpkfc.probes.Tabular(30), points=16).sources[
        "Gaussian features"
    ]
    assert (
        layer.ranks[0] == 1 and layer.ranks[-1] == layer.total == 31 * 20 and len(layer.ranks) <= 16
    )
    assert list(layer.values) == sorted(layer.values, reverse=True)


def test_a_factor_that_is_zero_has_no_direction() -> None:
    """A loss that is flat leaves G zero."""
    model = nn.Linear(3, 2)
    (row,) = factor_alignment(
        model,
        dpkfc.probes.Tabular(3),
        dpkfc.probes.Tabular(3),
        loss=lambda output, probes, generator: 0 * output.sum(1),
    ).sources["Gaussian features"]
    assert row.cosine[0] == pytest.approx(1) and row.cosine[1] != row.cosine[1]


def test_shown_as_table_plot_and_json(tmp_path: Path) -> None:
    sources = {
        "pink": dpkfc.probes.PinkNoise((2, 6, 6), count=16),
        "public": dpkfc.probes.PublicData(torch.randn(20, 2, 6, 6)),
    }
    found: list[Any] = [kronecker_spectrum(network(), sources)]
    found.append(factor_alignment(network(), sources["pink"], sources))
    for one in found:
        assert "public" in str(one) and "public: probes and weights only" in str(one)
        assert json.loads(json.dumps(one.to_json()))["privacy"] == one.privacy
        one.plot(tmp_path / "it.png")
        assert (tmp_path / "it.png").stat().st_size > 10_000


def test_refused() -> None:
    probe = dpkfc.probes.Tabular(3)
    with pytest.raises(TypeError, match="source 'a' is Tensor: give a probe"):
        kronecker_spectrum(nn.Linear(3, 2), {"a": torch.randn(4, 3)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no source was given"):
        kronecker_spectrum(nn.Linear(3, 2), {})
    with pytest.raises(ValueError, match="points=1"):
        kronecker_spectrum(nn.Linear(3, 2), probe, points=1)
    with pytest.raises(ValueError, match="does not run on the probe"):
        kronecker_spectrum(nn.Linear(4, 2), probe)
    with pytest.raises(ValueError, match="no trainable layer with Kronecker factors of at most 2"):
        kronecker_spectrum(nn.Linear(3, 2), probe, max_factor=2)
    with pytest.raises(TypeError, match="reference is dict: give one probe"):
        factor_alignment(nn.Linear(3, 2), {"a": probe}, probe)  # type: ignore[arg-type]
