"""Norms and clipped sums of every layer equal one autograd pass a sample."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from oracle import (
    captured_norms,
    private_sum,
    reference_grads,
    reference_norms,
    reference_sum,
    relative_error,
)

BATCH = 7


def floats(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def ids(*shape: int, high: int = 11) -> Tensor:
    return torch.randint(high, (BATCH, *shape))


class Twice(nn.Module):
    """A layer used twice on different inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)) + x)


class TiedTokens(nn.Module):
    """Embedding and head share their weight, as in GPT-2; the head may have a bias, as in BERT."""

    def __init__(self, vocabulary: int = 11, width: int = 6, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


class TiedLinears(nn.Module):
    """Two layers share a weight but have their own biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class TiedTransposed(nn.Module):
    """A weight used as it is by one layer and transposed by a module of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.scale = Scale(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale(self.embed(x)))


class Scale(nn.Module):
    """A leaf module that owns a parameter of its own (LayerScale)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Bare(nn.Module):
    """cls_token and pos_embed of a ViT, owned by a container."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 6))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 6))
        self.project = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.project(x)], 1)
        return torch.tanh(x + self.pos_embed)


class Positions(nn.Module):
    """Position ids of shape [1, L], which broadcast over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.register_buffer("position_ids", torch.arange(9).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.tokens(x) + self.positions(self.position_ids[:, : x.shape[1]]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(
            1
        )  # [L, L], with L equal to the batch
        return self.attention(x, x, x, attn_mask=mask)[0]


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x)
        h = state[0] if isinstance(state, tuple) else state
        return torch.cat([out.flatten(1), h.transpose(0, 1).flatten(1)], 1)


class Folded(nn.Module):
    """Windows folded into the batch, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.GroupNorm(2, 4)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.layer(x.reshape(-1, 2, 4)).transpose(1, 2)
        return self.conv(self.norm(windows)).reshape(len(x), -1)


class Bag(nn.Module):
    """A bag of ids per sample, or several bags folded into the batch, before a layer."""

    def __init__(self, mode: str, padding_idx: int | None = None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode=mode, padding_idx=padding_idx)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag(x.reshape(-1, x.shape[-1]))
        return self.head(torch.tanh(bags)).reshape(len(x), -1)


class WeightedBag(nn.Module):
    """The weights of the ids are computed from the ids."""

    def __init__(self, padding_idx: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode="sum", padding_idx=padding_idx)
        self.scores = nn.Embedding(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.scores(x).squeeze(2), 1)
        return torch.tanh(self.bag(x, per_sample_weights=weights))


class Doubled(nn.Linear):
    """A subclass with a forward of its own must not take Linear's fast path."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) * self.weight.sum()


@dataclass
class Case:
    name: str
    build: object
    inputs: object


CASES = [
    Case("linear", lambda: nn.Linear(5, 3), lambda: floats(5)),
    Case("linear_no_bias", lambda: nn.Linear(5, 3, bias=False), lambda: floats(5)),
    Case("linear_tokens", lambda: nn.Linear(5, 3), lambda: floats(4, 5)),
    Case("linear_gram", lambda: nn.Linear(30, 20), lambda: floats(3, 30)),
    Case("linear_gram_no_bias", lambda: nn.Linear(30, 20, bias=False), lambda: floats(3, 30)),
    Case("linear_two_shared", lambda: nn.Linear(5, 3), lambda: floats(2, 3, 5)),
    Case("linear_three_shared", lambda: nn.Linear(40, 30), lambda: floats(1, 2, 2, 40)),
    Case("linear_long", lambda: nn.Linear(9, 8), lambda: floats(50, 9)),
    Case("embedding", lambda: nn.Embedding(11, 4), lambda: ids(5)),
    Case("embedding_padding", lambda: nn.Embedding(11, 4, padding_idx=0), lambda: ids(9, high=3)),
    Case("embedding_grid", lambda: nn.Embedding(11, 4), lambda: ids(3, 2)),
    Case("embedding_single", lambda: nn.Embedding(11, 4), lambda: ids()),
    Case("bag_sum", lambda: nn.EmbeddingBag(11, 4, mode="sum"), lambda: ids(5)),
    Case("bag_mean", lambda: nn.EmbeddingBag(11, 4), lambda: ids(5)),
    Case("bag_max", lambda: nn.EmbeddingBag(11, 4, mode="max"), lambda: ids(5)),
    Case("bag_sum_padding", lambda: Bag("sum", padding_idx=0), lambda: ids(9, high=3)),
    Case("bag_mean_padding", lambda: Bag("mean", padding_idx=0), lambda: ids(2, high=2)),
    Case("bag_max_padding", lambda: Bag("max", padding_idx=0), lambda: ids(4, high=3)),
    Case("bag_weighted", lambda: WeightedBag(padding_idx=0), lambda: ids(9, high=3)),
    Case("bags_in_the_batch", lambda: Bag("mean", padding_idx=0), lambda: ids(3, 4, high=3)),
    Case("layernorm", lambda: nn.LayerNorm(6), lambda: floats(6)),
    Case("layernorm_tokens", lambda: nn.LayerNorm(6), lambda: floats(3, 6)),
    Case("layernorm_two_dims", lambda: nn.LayerNorm((3, 6)), lambda: floats(2, 3, 6)),
    Case("layernorm_no_bias", lambda: nn.LayerNorm(6, bias=False), lambda: floats(3, 6)),
    Case("rmsnorm", lambda: nn.RMSNorm(6), lambda: floats(3, 6)),
    Case("rmsnorm_eps", lambda: nn.RMSNorm((3, 6), eps=0.1), lambda: floats(3, 6)),
    Case("groupnorm", lambda: nn.GroupNorm(2, 6), lambda: floats(6, 5, 4)),
    Case("groupnorm_flat", lambda: nn.GroupNorm(2, 6), lambda: floats(6)),
    Case("instancenorm1d", lambda: nn.InstanceNorm1d(4, affine=True), lambda: floats(4, 6)),
    Case("instancenorm2d", lambda: nn.InstanceNorm2d(4, affine=True), lambda: floats(4, 5, 3)),
    Case("instancenorm3d", lambda: nn.InstanceNorm3d(2, affine=True), lambda: floats(2, 3, 3, 2)),
    Case("twice_linear", lambda: Twice(nn.Linear(5, 5)), lambda: floats(5)),
    Case("twice_linear_tokens", lambda: Twice(nn.Linear(25, 25)), lambda: floats(3, 25)),
    Case("twice_conv", lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), lambda: floats(3, 5, 5)),
    Case("twice_norm", lambda: Twice(nn.LayerNorm(5)), lambda: floats(2, 5)),
    Case("tied_head", lambda: TiedTokens(), lambda: ids(5)),
    Case("tied_head_bias", lambda: TiedTokens(bias=True), lambda: ids(5)),
    Case("tied_head_wide", lambda: TiedTokens(60, 40), lambda: ids(4)),
    Case("tied_head_repeats", lambda: TiedTokens(60, 40, bias=True), lambda: ids(6, high=2)),
    Case("tied_linears", TiedLinears, lambda: floats(4, 5)),
    Case("leaf_with_parameter", TiedTransposed, lambda: ids(4)),
    Case("bare_parameters", Bare, lambda: floats(4, 3)),
    Case("broadcast_positions", Positions, lambda: ids(5)),
    Case("attention", Attention, lambda: floats(BATCH, 6)),
    Case(
        "lstm",
        lambda: Recurrent(nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)),
        lambda: floats(5, 3),
    ),
    Case(
        "lstm_no_bias",
        lambda: Recurrent(nn.LSTM(3, 4, batch_first=True, bias=False)),
        lambda: floats(5, 3),
    ),
    Case(
        "gru", lambda: Recurrent(nn.GRU(3, 4, num_layers=2, batch_first=True)), lambda: floats(5, 3)
    ),
    Case(
        "rnn",
        lambda: Recurrent(nn.RNN(3, 4, batch_first=True, bidirectional=True)),
        lambda: floats(5, 3),
    ),
    Case(
        "rnn_relu",
        lambda: Recurrent(nn.RNN(3, 4, batch_first=True, nonlinearity="relu")),
        lambda: floats(5, 3),
    ),
    Case(
        "encoder_layer",
        lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
        lambda: floats(4, 6),
    ),
    Case("windows_in_the_batch", Folded, lambda: floats(6, 4)),
    Case("subclass", lambda: Doubled(5, 3), lambda: floats(5)),
    Case("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(5, 3)), lambda: floats(5)),
    Case("bilinear", lambda: nn.Sequential(SelfBilinear()), lambda: floats(4)),
    Case("prelu", lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU()), lambda: floats(4)),
    Case(
        "inplace_relu",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        lambda: floats(4),
    ),
]


class SelfBilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def _conv_cases() -> list[Case]:
    cases = []
    for dims, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        space = {1: (9,), 2: (7, 6), 3: (5, 4, 5)}[dims]
        for label, options in {
            "plain": {"kernel_size": 3},
            "no_bias": {"kernel_size": 2, "bias": False},
            "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
            "stride_past_the_end": {"kernel_size": 2, "stride": 3},
            "dilation": {"kernel_size": 2, "dilation": 2, "padding": 2},
            "groups": {"kernel_size": 2, "groups": 2},
            "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
            "same": {"kernel_size": 2, "padding": "same"},
            "valid": {"kernel_size": 2, "padding": "valid"},
            "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
            "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
            "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
        }.items():

            def build(kind=kind, options=options):
                return kind(4, 8, **options)

            cases.append(Case(f"conv{dims}d_{label}", build, lambda space=space: floats(4, *space)))
    cases.append(
        Case(
            "conv2d_one_channel",
            lambda: nn.Conv2d(1, 5, 3, stride=2, padding=1),
            lambda: floats(1, 8, 7),
        )
    )
    cases.append(
        Case("conv2d_few_positions", lambda: nn.Conv2d(24, 32, 3), lambda: floats(24, 4, 4))
    )
    cases.append(
        Case("conv2d_one_position", lambda: nn.Conv2d(24, 32, 3), lambda: floats(24, 3, 3))
    )
    cases.append(
        Case(
            "conv2d_uneven_kernel",
            lambda: nn.Conv2d(3, 4, (1, 3), stride=(2, 1), padding=(0, 2)),
            lambda: floats(3, 6, 5),
        )
    )
    cases.append(
        Case(
            "conv2d_grouped_wide", lambda: nn.Conv2d(32, 64, 3, groups=2), lambda: floats(32, 4, 4)
        )
    )
    return cases


ALL = CASES + _conv_cases()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Not linear in the output, so that backprops differ between samples."""
    out = model(batch)
    return (
        (out.flatten(1).cos() * torch.linspace(1, 2, out[0].numel(), dtype=out.dtype)).sum(1).mean()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_norms_and_clipped_sum_equal_one_pass_a_sample(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = case.build().to(dtype)
    inputs = case.inputs()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    grads = reference_grads(model, loss_of, inputs, BATCH)
    norms = reference_norms(grads)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    torch.testing.assert_close(
        captured_norms(model, loss_of, inputs, BATCH).double(), norms, rtol=tolerance, atol=0
    )

    clip = float(norms.median())  # some samples are clipped and some are not
    want = reference_sum(grads, clip)
    for chunk in (None, 3, 1):
        got = private_sum(model, loss_of, inputs, BATCH, clip, chunk)
        assert got.keys() == want.keys()
        for name in want:
            if want[name].norm() > 0:
                assert relative_error(got[name], want[name]) < 1e-5, (name, chunk)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in ALL
        if c.name
        in (
            "linear_tokens",
            "linear_gram",
            "conv2d_plain",
            "conv2d_few_positions",
            "embedding",
            "bag_mean",
            "layernorm_tokens",
            "groupnorm",
            "tied_head_wide",
            "bare_parameters",
            "attention",
        )
    ],
    ids=lambda case: case.name,
)
def test_bfloat16_models_are_clipped_in_float32(case: Case) -> None:
    """The contribution of every sample, taken alone, has norm at most C, whatever dtype the model
    computes in.
    """
    torch.manual_seed(1)
    model = case.build().to(torch.bfloat16)
    inputs = case.inputs()
    inputs = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
    norms = captured_norms(model, loss_of, inputs, BATCH)
    assert norms.dtype == torch.float32
    reference = reference_norms(reference_grads(model, loss_of, inputs, BATCH))
    torch.testing.assert_close(
        norms.double(), reference, rtol=0.05, atol=0
    )  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_output_and_input_gradient_are_those_of_the_plain_model(case: Case) -> None:
    from dpkfc.per_sample.capture import GradientCapture

    torch.manual_seed(1)
    model, inputs = case.build(), case.inputs()
    if inputs.is_floating_point():
        inputs.requires_grad_()

    def run() -> list[Tensor]:
        loss = loss_of(model, inputs)
        leaves = [inputs] if inputs.is_floating_point() else []
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return [loss.detach(), *[leaf.grad for leaf in leaves]]

    plain = run()
    model.zero_grad()
    capture = GradientCapture(model)
    captured = run()
    assert all(p.grad is None for p in model.parameters()), "autograd formed a weight gradient"
    capture.remove()
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-5)
    again = run()
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    assert all(p.grad is not None for p in model.parameters()), (
        "detaching must give the plain model back"
    )
