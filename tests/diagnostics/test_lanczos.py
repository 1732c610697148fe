"""Lanczos quadrature against dense Hessians from torch.func."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import Fixed
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import dpkfc
from dpkfc.diagnostics import Quadrature, hessian_density
from dpkfc.diagnostics.lanczos import quadrature, tridiagonal


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def dense(matrix: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def of_flat(theta: Tensor) -> Tensor:
        parts = zip(parameters.items(), theta.split(sizes), strict=True)
        return functional_call(model, {name: part.view_as(p) for (name, p), part in parts}, (x,))

    theta = torch.cat([p.flatten() for p in parameters.values()])
    if matrix == "hessian":
        return hessian(lambda theta: F.cross_entropy(of_flat(theta), y))(theta)
    logits = of_flat(theta)
    curved = hessian(lambda z: F.cross_entropy(z.view_as(logits), y))(logits.flatten())
    jacobian = jacrev(of_flat)(theta).flatten(0, 1)
    return jacobian.T @ curved @ jacobian


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_all_steps_find_the_whole_spectrum(matrix: Any) -> None:
    """With as many steps as eigenvalues, the nodes of one start vector are the eigenvalues."""
    wanted = torch.linalg.eigvalsh(dense(matrix, network(), *batch()))
    found = hessian_density(
        network(), batch(), loss=loss, matrix=matrix, steps=100, vectors=1
    ).sources["records"]
    assert found.size == len(wanted) == 43 and math.fsum(found.weights) == pytest.approx(1)
    assert found.extremes == pytest.approx(
        (float(wanted[0]), float(wanted[-1])), rel=1e-4, abs=1e-9
    )
    large = wanted.abs() > 1e-6  # the rest is a null space, which a single vector sees once
    nodes = torch.tensor(found.nodes, dtype=torch.float64)
    torch.testing.assert_close(nodes[nodes.abs() > 1e-6], wanted[large], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_few_steps_keep_the_moments_and_find_the_extremes(matrix: Any) -> None:
    h = dense(matrix, network(), *batch())
    found = hessian_density(
        network(), batch(), loss=loss, matrix=matrix, steps=25, vectors=1
    ).sources["records"]
    v = torch.randn(43, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, power = v / v.norm(), v / v.norm()
    for k in range(8):  # Σ ω θ^k = vᵀ H^k v, exactly
        assert found.moment(k) == pytest.approx(float(v @ power), rel=1e-8, abs=1e-12)
        power = h @ power
    wanted = torch.linalg.eigvalsh(h)
    assert found.extremes[1] == pytest.approx(float(wanted[-1]), rel=1e-4)
    assert found.extremes[0] == pytest.approx(float(wanted[0]), rel=1e-4, abs=1e-4)


def test_many_vectors_estimate_trace_density_and_magnitudes() -> None:
    torch.manual_seed(0)
    values = torch.cat(
        [
            torch.linspace(1, 2, 190, dtype=torch.float64),
            torch.full((10,), -20.0, dtype=torch.float64),
        ]
    )
    found = quadrature(lambda v: values * v, 200, 20, 60, values)
    for k in (1, 2):
        assert found.moment(k) == pytest.approx(float((values**k).mean()), rel=0.1)
    assert found.negative == pytest.approx(200 / (200 + 285), rel=0.1)
    places, density = found.density(points=2000, width=0.05)
    step = places[1] - places[0]
    assert sum(density) * step == pytest.approx(1, rel=1e-3)
    below = sum(y for x, y in zip(places, density, strict=True) if x < -10) * step
    assert below == pytest.approx(10 / 200, rel=0.2)
    ranks, sizes = found.magnitudes(points=400)
    assert ranks[0] == 1 and ranks[-1] == 200
    by_rank = dict(zip(ranks, sizes, strict=True))
    assert by_rank[1] == pytest.approx(20, rel=1e-6) and by_rank[5] == pytest.approx(20, rel=1e-3)
    middle = min(ranks, key=lambda rank: abs(rank - 100))
    assert by_rank[middle] == pytest.approx(2 - (middle - 11) / 189, abs=0.05)
    assert sizes[-1] == pytest.approx(1, abs=0.05)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_orthogonality_is_kept() -> None:
    """Without reorthogonalisation, copies of the largest eigenvalue appear at this condition."""
    values = torch.logspace(-8, 8, 60, dtype=torch.float64)
    start = torch.ones(60, dtype=torch.float64)
    diagonal, beside = tridiagonal(lambda v: values * v, start, 30)
    nodes = torch.linalg.eigvalsh(
        torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
    )
    assert float(nodes[-1]) == pytest.approx(1e8, rel=1e-10)
    assert float(nodes[-2]) == pytest.approx(float(values[-2]), rel=1e-6)
    assert int((nodes > 0.9e8).sum()) == 1


def test_it_stops_where_nothing_is_left() -> None:
    assert quadrature(lambda v: 3.0 * v, 7, 5, 2, torch.zeros(())).nodes == pytest.approx(
        (3.0, 3.0)
    )
    zero = quadrature(lambda v: 0.0 * v, 7, 5, 1, torch.zeros(()))
    assert zero.nodes == (0.0,) and zero.negative == 0 and len(zero.density()[0]) == 512


def test_probes_by_name_with_the_mean_of_their_losses() -> None:
    x, y = batch()
    options = {"steps": 10, "vectors": 1}
    records = hessian_density(network(), (x, y), loss=loss, **options).sources["records"]
    found = hessian_density(
        network(), {"one": Fixed(x, y), "two": dpkfc.probes.Tabular(4, count=8)}, **options
    )
    assert list(found.sources) == ["one", "two"]
    assert found.sources["one"].nodes == pytest.approx(records.nodes)


def test_attention_is_differentiated_twice() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))

    torch.manual_seed(0)
    source = Fixed(torch.randn(6, 3, 4))
    assert hessian_density(Attention(), source, steps=4, vectors=1).sources["fixed"].extremes[1] > 0


def test_shown_as_table_plot_and_json(tmp_path: Path) -> None:
    found = hessian_density(network(), batch(), loss=loss, steps=8, vectors=2)
    assert "43 eigenvalues" in str(found) and "not private: computed from the given records" in str(
        found
    )
    again = json.loads(json.dumps(found.to_json()))
    assert Quadrature(
        **{
            k: tuple(v) if isinstance(v, list) else v
            for k, v in again["sources"]["records"].items()
        }
    )
    found.plot(tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_refused() -> None:
    with pytest.raises(ValueError, match="matrix='fisher'"):
        hessian_density(network(), batch(), loss=loss, matrix="fisher")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps=0"):
        hessian_density(network(), batch(), loss=loss, steps=0)
    with pytest.raises(TypeError, match="vectors=1.5"):
        hessian_density(network(), batch(), loss=loss, vectors=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is for probes"):
        hessian_density(network(), batch())
    with pytest.raises(ValueError, match="no trainable parameter"):
        hessian_density(network().requires_grad_(False), batch(), loss=loss)
    with pytest.raises(ValueError, match="is not finite"):
        hessian_density(network(), (batch()[0] * math.nan, batch()[1]), loss=loss)
    outer = network()
    with pytest.raises(ValueError, match="did not run the model that it was given"):
        hessian_density(outer, batch(), loss=lambda model, batch: loss(outer, batch))
    with pytest.raises(ValueError, match="the model ran 2 times"):
        hessian_density(network(), batch(), loss=lambda m, b: loss(m, b) + loss(m, b), matrix="ggn")
