"""Bags of embeddings: rows without a dense gradient, under maps, tied, and refused with offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import Fixed, mapped
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.rows import RowSparseGrad, TiedEmbeddingGrad
from oracle import private_sum, reference_grads, reference_norms, reference_sum, relative_error

BATCH, VOCABULARY, WIDTH = 5, 12, 3


class BagModel(nn.Module):
    def __init__(self, mode: str, tied: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode, padding_idx=0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.bag.weight

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.bag(ids, offsets)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch[:, 0])


@pytest.mark.parametrize("geometry", [None, "A", "diagonal"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_clipped_sums_under_maps(mode: str, tied: bool, geometry: str | None) -> None:
    torch.manual_seed(0)
    model, batch = BagModel(mode, tied).double(), torch.randint(VOCABULARY, (BATCH, 6))
    grads = reference_grads(model, loss_of, batch, BATCH)
    kfc = None
    if geometry is not None:
        options: dict[str, Any] = {"others": "diagonal"} if geometry == "diagonal" else {}
        kfc = dpkfc.KFC(Fixed(torch.randint(VOCABULARY, (7, 6))), damping=0.05, **options)
        private_sum(model, loss_of, batch, BATCH, 1.0, geometry=kfc)  # builds the maps
        grads = mapped(kfc, model, grads)
    clip = float(reference_norms(grads).median())
    want = reference_sum(grads, clip)
    for chunk in (None, 2):
        got = private_sum(model, loss_of, batch, BATCH, clip, chunk, kfc)
        assert got.keys() == want.keys()
        # clipping.ROUNDING makes clipped gradients shorter by 1e-6
        assert all(relative_error(got[name], want[name]) < 1e-5 for name in want)


@pytest.mark.parametrize(("tied", "form"), [(False, RowSparseGrad), (True, TiedEmbeddingGrad)])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_no_dense_gradient_is_formed(mode: str, tied: bool, form: type) -> None:
    model = BagModel(mode, tied)
    capture = GradientCapture(model)
    with capture.accumulating() as grads:
        loss_of(model, torch.randint(VOCABULARY, (BATCH, 6))).backward()
    assert isinstance(grads.take().grads[model.bag.weight,], form)
    capture.remove()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("ids", [8, 9])
def test_offsets_are_refused_by_name(ids: int, mode: str) -> None:
    """The first tensor that the model gets has as many rows as there are ids, not records."""
    model = BagModel(mode)
    capture = GradientCapture(model)
    with pytest.raises(dpkfc.PrivacyError, match=r"module 'bag' .*Pad the ids of each record"):
        model(torch.randint(VOCABULARY, (ids,)), torch.tensor([0, 2, 4, 5]))
    capture.remove()


def test_offsets_are_refused_before_any_budget_is_spent() -> None:
    records = TensorDataset(torch.randint(VOCABULARY, (20, 6)), torch.randint(2, (20,)))

    def with_offsets(model: nn.Module, batch: list[Tensor]) -> Tensor:
        ids, labels = batch
        out = model(ids.flatten(), torch.arange(len(ids)) * ids.shape[1])
        return nn.functional.cross_entropy(out, labels)

    model = BagModel("mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dpkfc.PrivacyError, match=r"module 'bag' .*Pad the ids of each record"):
        dpkfc.make_private(
            model, optimizer, records, noise_multiplier=1.0, delta=1e-3, steps=2, batch_size=5,
            loss=with_offsets,
        )  # fmt: skip


def test_a_subclass_with_its_own_forward_keeps_it() -> None:
    class Doubled(nn.EmbeddingBag):
        def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(input)

    model = nn.Sequential(Doubled(VOCABULARY, WIDTH))
    capture = GradientCapture(model)
    assert [one.kind for one in capture.hooked_modules] == ["vmap"]
    capture.remove()
