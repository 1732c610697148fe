"""No record leaves the ball by rounding: what it adds to the released sum is at most the clip,
whatever is in it.

Every record here was made for it: its gradient is small, or zero, and yet float32 would let it do
much more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.engine.step import clip_factors
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.per_sample.base import IDENTITY_MAP
from dpkfc.per_sample.combine import combine
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.rounding import full_precision, squared_norm
from dpkfc.per_sample.rows import RowSparseGrad

ULP = 2.0**-23
CLIP = 1.0
Clip = float | dpkfc.AutomaticClipping


def released(
    model: nn.Module,
    loss: Callable[..., Tensor],
    *data: Tensor,
    clip: Clip = CLIP,
    geometry: Any = None,
) -> Tensor:
    """The sum over all records, clipped, without noise."""
    records, optimizer = len(data[0]), torch.optim.SGD(model.parameters(), lr=1.0)
    private = dpkfc.make_private(
        model,
        optimizer,
        TensorDataset(*data),
        noise_multiplier=0.0,
        delta=1e-3,
        steps=1,
        batch_size=records,
        clip=clip,
        geometry=geometry,
        loss=lambda model, batch: loss(model, *batch),
        options=dpkfc.Options(check=False),
        seed=1,
    )
    for batch in private.loader:
        assert len(batch[0]) == records, "at a sampling rate of 1 all of them are drawn"
        loss(model, *batch).backward()
        optimizer.step()
    return torch.cat(
        [p.grad.double().flatten() * records for p in model.parameters() if p.grad is not None]
    )


class Mean(nn.Module):
    """A layer at every position, and the mean over them."""

    def __init__(self, layer: nn.Module, position: int) -> None:
        super().__init__()
        self.layer, self.position = layer, position
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(self.position)


def rounded_one_way(positions: int, width: int, size: float) -> Tensor:
    """Large at both ends, of either sign.

    In between what is rounded up to an ulp, and down to nothing, in turn.
    """
    course = torch.zeros(positions)
    course[0], course[-1] = 1.0, -1.0
    course[1:-1:2], course[2:-1:2] = 0.51 * ULP, -0.49 * ULP
    return course[:, None].expand(-1, width) * size


@pytest.mark.parametrize("size", [2.0**k for k in (12, 16, 19, 21)])
@pytest.mark.parametrize(
    ("kind", "positions", "width"),
    [("linear", 64, 512), ("linear", 256, 512), ("conv1d", 64, 512), ("conv2d", 64, 64)],
)
def test_positions_that_are_rounded_one_way(
    kind: str, positions: int, width: int, size: float
) -> None:
    record = rounded_one_way(positions, width, size)
    if kind == "linear":
        x, model = record, Mean(nn.Linear(width, width, bias=False), 1)
    elif kind == "conv1d":
        x, model = record.T, Mean(nn.Conv1d(width, width, 1, bias=False), 2)
    else:
        side = int(positions**0.5)
        x, model = (
            record.T.reshape(width, side, side),
            Mean(nn.Conv2d(width, width, 1, bias=False), 2),
        )
    data = torch.stack([x, torch.zeros_like(x)])
    total = released(
        model, lambda model, x, y: (model(x).flatten(1) * y).sum(1).mean(), data, torch.ones(2, 1)
    )
    assert total.norm() <= CLIP * (1 + 1e-4)


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("width", [32, 64])
def test_pixels_that_cancel_do_not_swallow_what_others_add(width: int, size: float) -> None:
    """Norms by Gram matrices of pixels, and one kernel call that adds up many records.

    Every place of the kernel sees as much of one sign as of the other: the record has a gradient of
    zero.
    """
    others = torch.full((40, width, 6, 6), 0.01)
    record = torch.zeros(1, width, 6, 6)
    record[0, :, 2, 2], record[0, :, 3, 3] = size, -size

    def total(x: Tensor) -> Tensor:
        model = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Flatten())
        nn.init.zeros_(model[0].weight)
        return released(model, lambda model, x: model(x).sum(1).mean(), x)

    without = total(others)
    assert without.norm() > 4
    assert (total(torch.cat([record, others])) - without).norm() <= CLIP * (1 + 1e-4)


class Weighted(nn.Module):
    """Embeddings, each with a weight of its own; `tied`: and a head with the same weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(12, 8),
            nn.Linear(8, 12, bias=False) if tied else nn.Identity(),
        )
        nn.init.constant_(self.embed.weight, 0.01)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        # type: ignore[no-any-return]
        return self.head((self.embed(ids) * weights.unsqueeze(2)).sum(1, keepdim=True))


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_cancel_do_not_swallow_what_others_add(tied: bool, size: float) -> None:
    """The record has a gradient of zero: with it or without it, the sum is the same."""
    ids, weights = torch.zeros(64, 2, dtype=torch.long), torch.full((64, 2), 0.17)
    with_it = torch.cat([ids, ids[:1]]), torch.cat([weights, torch.tensor([[size, -size]])])

    def total(ids: Tensor, weights: Tensor) -> Tensor:
        return released(
            Weighted(tied), lambda model, i, w: model(i, w).flatten(1).sum(1).mean(), ids, weights
        )

    without = total(ids, weights)
    assert without.norm() > 4
    assert (total(*with_it) - without).norm() <= 1e-4 * CLIP


@pytest.mark.parametrize("others", [511, 2047])
def test_a_head_that_undoes_its_embedding_does_not_drown_many_others(others: int) -> None:
    """Head and embedding of a record are of 30,000 times the clip, and opposite.

    Others meet only what is left.
    """
    ids = torch.zeros(2, 1, dtype=torch.long).expand(2, 1)

    def total(extra: float, count: int) -> Tensor:
        head = OuterProductGrad(torch.zeros(count, 1, 4), torch.zeros(count, 1, 8))
        head.left[:, 0, 0], head.right[:, 0] = 1.0, 3e-4
        values = torch.zeros(count, 1, 8)
        if extra:
            head.right[0], values[0] = extra, -extra
        tied = combine([head, RowSparseGrad.merged(ids[:1].expand(count, 1), values, 4)])
        weights, _ = clip_factors(tied.squared_norms(IDENTITY_MAP), CLIP)
        return tied.weighted_sum(weights)[0].double()

    with_it = total(1e4, 1 + others)
    assert (with_it - total(0.0, others)).norm() <= CLIP * (1 + 1e-3)


class Pointwise(nn.Module):
    input_shape = (16, 8)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(16, 16, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(2)


def test_a_record_along_what_the_map_shrinks_does_not_round_what_others_add() -> None:
    """Unmapped it is 30,000 times the clip.

    What others add to that is rounded, and the map enlarges the difference.
    """
    torch.manual_seed(0)
    probe = dpkfc.probes.PublicData((1 + 0.01 * torch.randn(256, 16, 8), torch.zeros(256).long()))

    def total(x: Tensor, y: Tensor) -> tuple[Tensor, KroneckerMap]:
        geometry = dpkfc.KFC(probe, damping=1e-4, factors="AG", rank=None)
        loss = lambda model, x, y: (model(x) * y).sum(1).mean()  # noqa: E731
        released_sum = released(Pointwise(), loss, x, y, geometry=geometry)
        return released_sum, geometry.map_of(("layer.weight",))  # type: ignore[return-value]

    _, found = total(torch.zeros(2, 16, 8), torch.zeros(2, 16))
    assert isinstance(found.g_root, FullRoot) and isinstance(found.a_root, FullRoot)
    of_left, left = torch.linalg.eigh(found.g_root.matrix[0].double())
    of_right = torch.linalg.eigvalsh(found.a_root.matrix[0].double())
    bright, striped = torch.full((16,), 0.25), torch.tensor([0.25, -0.25] * 8)
    x = (bright / float(of_right[0]) * 3).view(1, 16, 1).expand(1, 16, 8)
    y = (left[:, 0].float() / float(of_left[0])).unsqueeze(0)
    for power in range(23, 27):
        small = 2.0**-power / float(of_left[0] * of_right[0])
        others = (
            (small * striped).view(1, 16, 1).expand(4096, 16, 8),
            left[:, -1].float().expand(4096, 16),
        )
        without = total(*others)[0]
        with_it = total(torch.cat([x, others[0]]), torch.cat([y, others[1]]))[0]
        assert (with_it - without).norm() <= CLIP * (1 + 1e-4)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("positions", [1, 16])
@pytest.mark.parametrize("clip", [0.1, 1.0, dpkfc.AutomaticClipping(1.0, gamma=1e-4)])
@pytest.mark.parametrize("small", [2.5e-23, 1e-19])
def test_a_factor_whose_square_is_no_number_hides_nothing(
    small: float, clip: float | dpkfc.AutomaticClipping, positions: int, flush: bool
) -> None:
    """‖δ‖² is less than any float32, ‖a‖² nearly more than any: their product is not zero."""
    width, records = 64, 16
    x, y = torch.zeros(records, positions, width), torch.zeros(records, width)
    x[0], y[0] = 1.8e19 / (width * positions) ** 0.5, small * records
    if not torch.set_flush_denormal(flush) and flush:
        pytest.skip("this processor keeps denormal numbers")
    try:
        model = Mean(nn.Linear(width, width, bias=False), 1)
        total = released(model, lambda model, x, y: (model(x) * y).sum(1).mean(), x, y, clip=clip)
    finally:
        torch.set_flush_denormal(False)
    assert total.norm() <= (clip.norm if isinstance(clip, dpkfc.AutomaticClipping) else clip) * (
        1 + 1e-4
    )


@pytest.mark.parametrize("entries", [10, 512, 513, 262_144, 3_000_001])
@pytest.mark.parametrize("value", [0.1, 0.37, 0.83])
def test_equal_entries_are_not_measured_too_short(entries: int, value: float) -> None:
    grads = torch.full((2, entries), value)
    want = float(grads[0].double().norm())
    assert squared_norm(grads).double().sqrt().tolist() == pytest.approx([want, want], rel=1e-5)


def test_a_map_that_enlarges_much_does_not_hide_what_it_enlarges() -> None:
    """The squares of the factors are lost, or ordinary.

    Those of the entries that the map makes of them are not.
    """
    outer = OuterProductGrad(torch.full((1, 1, 8), 2.4e-23), torch.full((1, 1, 8), 1.7e4))
    norm = outer.squared_norms(DiagonalMap([torch.full((8, 8), 2.5e18)])).sqrt()
    assert float(norm) == pytest.approx(2.4e-23 * 1.7e4 * 2.5e18 * 8, rel=1e-4)


def test_a_clip_as_small_as_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="clip=1e-09: at least 1e-06"):
        dpkfc.Plan.make(records=100, batch_size=10, steps=1, clip=1e-9, epsilon=1.0, delta=1e-3)


def test_norms_ignore_a_low_precision_of_products() -> None:
    """2. `set_float32_matmul_precision("medium")` lets some processors multiply in bfloat16."""
    backend = torch.backends.mkldnn.matmul
    assert backend.fp32_precision != "bf16"
    try:
        torch.set_float32_matmul_precision("medium")
        assert backend.fp32_precision == "bf16"
        with full_precision(torch.device("cpu")):
            assert backend.fp32_precision == "ieee"
        assert backend.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")
