"""Roots of factors against numpy, factors against curvlinops, and how white the whitened is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Fixed, written_out
from torch import Tensor, nn

import dpkfc
from dpkfc.geometry.factors import FullRoot, LowRankRoot, Moment
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.probes.probe import Probes


def moment_of(rows: Tensor, piece: int = 1000) -> Moment:
    moment = Moment()
    for part in rows.split(piece):
        moment.add(part[None])
    return moment


def power_of(matrix: np.ndarray, power: float, damping: float, stability: float) -> np.ndarray:
    """``(A + (π tr/d + γ) I)^(-power/2)`` by numpy's own eigendecomposition."""
    size = len(matrix)
    values, vectors = np.linalg.eigh(
        matrix + (damping * np.trace(matrix) / size + stability) * np.eye(size)
    )
    return (vectors * values ** (-power / 2)) @ vectors.T


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    count=st.integers(1, 60),
    piece=st.integers(1, 20),
    power=st.floats(0, 2),
    damping=st.floats(0, 1),
    stability=st.floats(1e-3, 1),
    seed=st.integers(0, 10**6),
)
def test_exact_roots_are_numpys(
    size: int, count: int, piece: int, power: float, damping: float, stability: float, seed: int
) -> None:
    """From fewer vectors than the size (Gram matrix) and from more, in pieces of any length."""
    torch.manual_seed(seed)
    rows = torch.randn(count, size, dtype=torch.float64) @ torch.randn(
        size, size, dtype=torch.float64
    )
    spectrum = moment_of(rows, piece).spectrum(count, None, torch.Generator())
    root = spectrum.root(power, damping, stability, like=rows, bias=False)
    want = power_of((rows.T @ rows / count).numpy(), power, damping, stability)
    got = written_out(root, 1, size)[0].numpy()
    assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("size", "count"), [(600, 2000), (600, 100), (80, 500)])
def test_a_cut_root_keeps_the_largest_directions_and_averages_the_rest(
    size: int, count: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(count, size) * torch.arange(1, size + 1) ** -0.7
    rank, damping, stability = 12, 0.01, 1e-4
    root = (
        moment_of(rows)
        .spectrum(count, rank, torch.Generator())
        .root(1.0, damping, stability, rows, bias=False)
    )
    assert isinstance(root, LowRankRoot) and root.rank == rank
    matrix = (rows.double().T @ rows.double() / count).numpy()
    values, vectors = np.linalg.eigh(matrix)
    values, vectors = values[::-1], vectors[:, ::-1]
    mu = damping * np.trace(matrix) / size + stability
    rest = values[rank:].sum() / (size - rank)
    base = (rest + mu) ** -0.5
    top = vectors[:, :rank]
    want = base * np.eye(size) + (top * ((values[:rank] + mu) ** -0.5 - base)) @ top.T
    got = written_out(root, 1, size)[0].numpy()
    assert np.linalg.norm(got - want, 2) < 1e-2 * np.linalg.norm(
        want, 2
    )  # subspace iteration in float32


def test_the_map_after_the_noise_keeps_the_energy_of_the_probes() -> None:
    """``tr(A U²) = tr(A)``, whole or cut."""
    torch.manual_seed(0)
    rows = torch.randn(400, 90, dtype=torch.float64) * torch.arange(1, 91) ** -1.0
    matrix = rows.T @ rows / 400
    for rank in (None, 7):
        spectrum = moment_of(rows).spectrum(400, rank, torch.Generator())
        root = spectrum.trace_keeping_root(0.5, 0.01, 1e-3, rows, bias=False)
        u = written_out(root, 1, 90)[0]
        assert float((matrix @ u @ u).trace()) == pytest.approx(float(matrix.trace()), rel=1e-9)


def test_a_factor_without_information_is_no_map() -> None:
    spectrum = moment_of(torch.zeros(5, 3)).spectrum(5, None, torch.Generator())
    assert spectrum.root(1.0, 0.1, 0.0, torch.zeros(1), bias=False) is None
    assert spectrum.trace_keeping_root(1.0, 0.1, 0.0, torch.zeros(1), bias=False) is None


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_roots_map_rows_and_columns_as_their_matrix_does(groups: int, bias: bool) -> None:
    torch.manual_seed(0)
    size = 9
    x, last = torch.randn(4, groups, 5, size - bias), torch.randn(4, groups, 5) if bias else None
    square = torch.randn(groups, size, size)
    square = square @ square.transpose(1, 2) + 0.1 * torch.eye(size)
    sizes = torch.linalg.eigvalsh(square)
    roots: list[FullRoot | LowRankRoot] = [
        FullRoot(square, bias, float(sizes.max()), float(sizes.min()))
    ]
    if groups == 1:
        roots.append(
            LowRankRoot(
                1.7, torch.linalg.qr(torch.randn(size, 3)).Q, torch.tensor([2.0, -1.0, -1.5]), bias
            )
        )
    for root in roots:
        matrix = written_out(root, groups, size)
        whole = x if last is None else torch.cat([x, last[..., None]], -1)
        want = torch.stack([whole[:, k].double() @ matrix[k] for k in range(groups)], 1)
        got, got_last = root.right(x, last)
        torch.testing.assert_close(got.double(), want[..., : size - bias], rtol=1e-4, atol=1e-4)
        if got_last is not None:
            torch.testing.assert_close(got_last.double(), want[..., -1], rtol=1e-4, atol=1e-4)
        if not bias:
            torch.testing.assert_close(
                root.left(x.transpose(-1, -2)).double(),
                want.transpose(-1, -2),
                rtol=1e-4,
                atol=1e-4,
            )
        sizes = torch.linalg.eigvalsh(matrix).abs()
        assert root.largest == pytest.approx(float(sizes.max()), rel=1e-4)
        assert root.smallest == pytest.approx(float(sizes.min()), rel=1e-4)


class Tokenwise(nn.Module):
    """A linear layer that its positions share, and a classifier on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(x)).mean(1))


NETWORKS = {
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, stride=2),
            nn.Tanh(),
            nn.Conv2d(3, 4, 2, dilation=2),
            nn.Flatten(),
            nn.Linear(4, 4),
        ),
        lambda: torch.randn(12, 2, 6, 6),
    ),
    "conv without bias": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(12, 4, bias=False)
        ),
        lambda: torch.randn(12, 2, 4, 4),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)),
        lambda: torch.randn(12, 5),
    ),
    "tokens": (Tokenwise, lambda: torch.randn(12, 3, 5)),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("network", NETWORKS)
def test_factors_equal_curvlinops(network: str, approx: str) -> None:
    """The empirical Fisher of the summed cross entropy.

    Curvlinops' G is a sum over the data, ours the mean.
    """
    from curvlinops import KFACLinearOperator

    torch.manual_seed(0)
    build, inputs = NETWORKS[network]
    model, x, y = build().double(), inputs().double(), torch.randint(4, (12,))
    oracle = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        kfac_approx=approx,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    oracle.compute_kronecker_factors()
    geometry = dpkfc.KFC(Fixed(x, y), factors="AG", approx=approx, rank=None, chunk=5)
    capture = GradientCapture(model)
    geometry.refresh(model, capture, 0)
    capture.remove()
    layers = [names for names in geometry._spectra]
    assert len(layers) == len(oracle._input_covariances)
    for names in layers:
        module = names[0].removesuffix(".weight")
        wanted = oracle._input_covariances[module], oracle._gradient_covariances[module] / len(x)
        for spectrum, want in zip(geometry._spectra[names], wanted, strict=True):
            got = (spectrum.vectors[0] * spectrum.values[0]) @ spectrum.vectors[0].T
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_whitened_probe_gradients_have_covariance_close_to_the_identity() -> None:
    """Appendix B. Where a and δ are independent, ``Cov(U g) = (U_A A U_A) ⊗ (U_G G U_G)``.

    Each factor of that has eigenvalues ``λ/(λ+μ)``, so on the probes themselves it is within
    ``μ/(λ_min+μ)`` of I (exactly). Fresh gradients deviate from it by sampling: for D-dimensional
    gradients and n of them the spectral norm of the difference is about ``κ sqrt(D/n)``, κ a small
    constant for products of Gaussians (their fourth moments are nine times, not three times, the
    square of the second): 6 sqrt(D/n) is allowed.
    """
    torch.manual_seed(0)
    inputs, outputs, damping = 6, 4, 0.02
    model = nn.Linear(inputs, outputs).double()
    mix_a = torch.randn(inputs, inputs, dtype=torch.float64) * torch.tensor(
        [3, 1, 1, 0.3, 0.1, 0.1], dtype=torch.float64
    )
    mix_d = torch.randn(outputs, outputs, dtype=torch.float64) * torch.tensor(
        [2, 1, 0.5, 0.1], dtype=torch.float64
    )

    def independent_delta(output: Tensor, probes: Probes, generator: torch.Generator) -> Tensor:
        return (
            output * (torch.randn(output.shape, generator=generator, dtype=output.dtype) @ mix_d.T)
        ).sum(1)

    many = 20_000
    x = torch.randn(many, inputs, dtype=torch.float64) @ mix_a.T
    geometry = dpkfc.KFC(
        Fixed(x),
        factors="AG",
        damping=damping,
        stability=0.0,
        rank=None,
        loss=independent_delta,
        chunk=many,
    )
    capture = GradientCapture(model)
    geometry.refresh(model, capture, 0)
    capture.remove()
    ((names, rule),) = geometry._maps.items()
    u_a, u_g = (
        written_out(rule.a_root, 1, inputs + 1)[0],
        written_out(rule.g_root, 1, outputs)[0],
    )
    for spectrum, u in zip(geometry._spectra[names], (u_a, u_g), strict=True):
        factor = (spectrum.vectors[0] * spectrum.values[0]) @ spectrum.vectors[0].T
        mu = damping * float(factor.trace()) / len(factor)
        smallest = float(torch.linalg.eigvalsh(factor).min())
        off = float(
            torch.linalg.matrix_norm(
                u @ factor @ u - torch.eye(len(factor), dtype=torch.float64), 2
            )
        )
        assert off == pytest.approx(mu / (smallest + mu), rel=1e-6)

    fresh = torch.cat(
        [torch.randn(many, inputs, dtype=torch.float64) @ mix_a.T, torch.ones(many, 1).double()], 1
    )
    delta = torch.randn(many, outputs, dtype=torch.float64) @ mix_d.T
    whitened = torch.einsum("no,nd->nod", delta @ u_g, fresh @ u_a).flatten(1)
    raw = torch.einsum("no,nd->nod", delta, fresh).flatten(1)
    expected = torch.kron(u_g @ mix_d @ mix_d.T @ u_g, u_a @ second_moment(mix_a) @ u_a)
    covariance = whitened.T @ whitened / many
    size = covariance.shape[0]
    assert float(torch.linalg.matrix_norm(covariance - expected, 2)) < 6 * (size / many) ** 0.5
    before = torch.linalg.eigvalsh(raw.T @ raw / many)
    after = torch.linalg.eigvalsh(covariance)
    assert before.max() / before.min() > 1e4 * (after.max() / after.min()) ** 0.5 > 1e4


def second_moment(mix: Tensor) -> Tensor:
    """Of (x, 1) with x = mix z, z standard normal."""
    size = len(mix)
    out = torch.eye(size + 1, dtype=mix.dtype)
    out[:size, :size] = mix @ mix.T
    return out
