"""10. Fast equals slow.

Models put together at random, tied, reused, frozen in part, in chunks of any size.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Fixed, mapped
from torch import Tensor, nn

import dpkfc
from oracle import private_sum, reference_grads, reference_norms, reference_sum, relative_error

WIDTH, LENGTH = 6, 5


class Residual(nn.Module):
    """One layer, used once or twice, added to its input."""

    def __init__(self, layer: nn.Module, twice: bool) -> None:
        super().__init__()
        self.layer, self.twice = layer, twice

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        return x + (torch.tanh(self.layer(y)) if self.twice else y)


class OverTime(nn.Module):
    """A convolution over the positions of [batch, positions, features]."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Offset(nn.Module):
    """A bare parameter beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.offset)


class Gain(nn.Module):
    """A leaf with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "rmsnorm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "groupnorm": lambda: nn.GroupNorm(1, LENGTH),
    "conv": OverTime,
    "depthwise": lambda: OverTime(groups=WIDTH),
    "bare": Offset,
    "gain": Gain,
}


class Random(nn.Module):
    """Token model: embedding, random layers, a head that may be tied to the embedding."""

    def __init__(self, layers: list[tuple[str, bool]], tied: bool, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH, padding_idx=0)
        self.body = nn.Sequential(*(Residual(LAYERS[name](), twice) for name, twice in layers))
        self.head = nn.Linear(WIDTH, vocabulary)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(model(batch).transpose(1, 2), batch, reduction="none")
    return dpkfc.losses.mean_over_records(losses, batch != 0)


GEOMETRIES = {
    "A": {"rank": None},
    "AG": {"factors": "AG", "damping": 0.05, "approx": "reduce"},
    "low rank": {"rank": 2, "damping": 0.05, "others": "diagonal"},
    "AG, low rank": {"factors": "AG", "rank": 1, "damping": 0.05, "others": None},
}


@settings(max_examples=80, deadline=None)
@given(
    layers=st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()), max_size=4),
    tied=st.booleans(),
    vocabulary=st.sampled_from([3, 9, 40]),
    batch=st.integers(1, 6),
    chunk=st.one_of(st.none(), st.integers(1, 6)),
    frozen=st.sets(st.integers(0, 30), max_size=4),
    quantile=st.floats(0.1, 0.9),
    geometry=st.sampled_from([None, *GEOMETRIES]),
    seed=st.integers(0, 10**6),
)
def test_random_models(
    layers: list[tuple[str, bool]],
    tied: bool,
    vocabulary: int,
    batch: int,
    chunk: int | None,
    frozen: set[int],
    quantile: float,
    geometry: str | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dtype = (
        torch.float32 if geometry is None else torch.float64
    )  # maps enlarge rounding by their condition
    model = Random(layers, tied, vocabulary).to(dtype)
    parameters = list(model.parameters())
    for k in frozen:
        parameters[k % len(parameters)].requires_grad_(False)
    if not any(p.requires_grad for p in parameters):
        parameters[0].requires_grad_(True)
    x = torch.randint(vocabulary, (batch, LENGTH))
    grads = reference_grads(model, loss_of, x, batch)
    kfc = None
    if geometry is not None:
        kfc = dpkfc.KFC(Fixed(torch.randint(vocabulary, (7, LENGTH))), **GEOMETRIES[geometry])
        private_sum(
            model, loss_of, x, batch, 1.0, geometry=kfc
        )  # builds the maps; the weights stay
        grads = mapped(kfc, model, grads)
    norms = reference_norms(grads)
    clip = max(float(norms.quantile(quantile)), 1e-3)
    want = reference_sum(grads, clip)

    got = private_sum(model, loss_of, x, batch, clip, chunk, kfc)
    assert got.keys() == want.keys()
    for name, sum_of_clipped in got.items():
        if want[name].norm() > 1e-5 * clip:
            assert relative_error(sum_of_clipped, want[name]) < 2e-5, name
        else:
            assert sum_of_clipped.norm() < 2e-5 * clip, name
