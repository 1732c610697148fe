"""No record leaves the ball by rounding: what it adds to the released sum is at most the clip, whatever is in it.

Every record here was made for it: its gradient is small, or zero, and yet float32 would let it do much more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.capture.record import squared_size

ULP = 2.0**-23
CLIP = 1.0


def released(model: nn.Module, loss: object, *data: Tensor, clip: float | dpkfc.Automatic = CLIP) -> Tensor:
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
        check=False,
        seed=1,
    )
    for batch in private.loader:
        assert len(batch[0]) == records, "at a sampling rate of 1 all of them are drawn"
        loss(model, *batch).backward()  # type: ignore[operator]
        optimizer.step()
    return torch.cat([p.grad.double().flatten() * records for p in model.parameters() if p.grad is not None])


class Mean(nn.Module):
    """A layer at every position, and the mean over them."""

    def __init__(self, layer: nn.Module, position: int) -> None:
        super().__init__()
        self.layer, self.position = layer, position
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(self.position)


def rounded_one_way(positions: int, width: int, size: float) -> Tensor:
    """Large at both ends, of either sign; in between what is rounded up to an ulp, and down to nothing, in turn."""
    course = torch.zeros(positions)
    course[0], course[-1] = 1.0, -1.0
    course[1:-1:2], course[2:-1:2] = 0.51 * ULP, -0.49 * ULP
    return course[:, None].expand(-1, width) * size


@pytest.mark.parametrize("size", [2.0**k for k in (12, 16, 19, 21)])
@pytest.mark.parametrize(
    ("kind", "positions", "width"), [("linear", 64, 512), ("linear", 256, 512), ("conv1d", 64, 512), ("conv2d", 64, 64)]
)
def test_positions_that_are_rounded_one_way(kind: str, positions: int, width: int, size: float) -> None:
    record = rounded_one_way(positions, width, size)
    if kind == "linear":
        x, model = record, Mean(nn.Linear(width, width, bias=False), 1)
    elif kind == "conv1d":
        x, model = record.T, Mean(nn.Conv1d(width, width, 1, bias=False), 2)
    else:
        side = int(positions**0.5)
        x, model = record.T.reshape(width, side, side), Mean(nn.Conv2d(width, width, 1, bias=False), 2)
    data = torch.stack([x, torch.zeros_like(x)])
    total = released(model, lambda model, x, y: (model(x).flatten(1) * y).sum(1).mean(), data, torch.ones(2, 1))
    assert total.norm() <= CLIP * (1 + 1e-4)


class Weighted(nn.Module):
    """Embeddings, each with a weight of its own; `tied`: and a head with the same weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False) if tied else nn.Identity()
        nn.init.constant_(self.embed.weight, 0.01)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.head((self.embed(ids) * weights.unsqueeze(2)).sum(1, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_cancel_do_not_swallow_what_others_add(tied: bool, size: float) -> None:
    """The record has a gradient of zero: with it or without it, the sum is the same."""
    ids, weights = torch.zeros(64, 2, dtype=torch.long), torch.full((64, 2), 0.17)
    with_it = torch.cat([ids, ids[:1]]), torch.cat([weights, torch.tensor([[size, -size]])])

    def total(ids: Tensor, weights: Tensor) -> Tensor:
        return released(Weighted(tied), lambda model, i, w: model(i, w).flatten(1).sum(1).mean(), ids, weights)

    without = total(ids, weights)
    assert without.norm() > 4
    assert (total(*with_it) - without).norm() <= 1e-4 * CLIP


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("positions", [1, 16])
@pytest.mark.parametrize("clip", [0.1, 1.0, dpkfc.Automatic(1.0, gamma=1e-4)])
@pytest.mark.parametrize("small", [2.5e-23, 1e-19])
def test_a_factor_whose_square_is_no_number_hides_nothing(
    small: float, clip: float | dpkfc.Automatic, positions: int, flush: bool
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
    assert total.norm() <= (clip.norm if isinstance(clip, dpkfc.Automatic) else clip) * (1 + 1e-4)


@pytest.mark.parametrize("entries", [10, 512, 513, 262_144, 3_000_001])
@pytest.mark.parametrize("value", [0.1, 0.37, 0.83])
def test_equal_entries_are_not_measured_too_short(entries: int, value: float) -> None:
    grads = torch.full((2, entries), value)
    want = float(grads[0].double().norm())
    assert squared_size(grads).double().sqrt().tolist() == pytest.approx([want, want], rel=1e-5)


def test_a_clip_as_small_as_rounding_is_refused() -> None:
    with pytest.raises(dpkfc.PrivacyError, match="clip=1e-09: at least 1e-06"):
        dpkfc.Plan.make(records=100, batch_size=10, steps=1, clip=1e-9, epsilon=1.0, delta=1e-3)
