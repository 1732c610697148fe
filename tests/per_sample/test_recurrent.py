"""Cells and packed sequences: outputs and per-sample gradients are those of torch's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import Fixed, cosine_loss, mapped
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import dpkfc
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.layers.recurrent import _dropout_masks
from oracle import (
    largest_error,
    private_sum,
    reference_grads,
    reference_norms,
    reference_sum,
    relative_error,
)

BATCH, TIME, FEATURES, HIDDEN = 5, 6, 3, 4
LENGTHS = {"sorted": [6, 4, 4, 2, 1], "unsorted": [2, 6, 1, 4, 4]}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "rnn_relu": lambda *size, **options: nn.RNNCell(*size, nonlinearity="relu", **options),
}
SEQUENCES: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(FEATURES, HIDDEN, batch_first=True),
    "lstm_deep": lambda: nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True, bidirectional=True),
    "lstm_projected": lambda: nn.LSTM(
        FEATURES, HIDDEN, 2, batch_first=True, bidirectional=True, proj_size=2
    ),
    "gru": lambda: nn.GRU(FEATURES, HIDDEN, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(FEATURES, HIDDEN, batch_first=True, bidirectional=True, bias=False),
}


class CellOverTime(nn.Module):
    """A cell called at every time step, after an encoder that gives the first state."""

    def __init__(self, cell: nn.Module, given_state: bool) -> None:
        super().__init__()
        self.cell, self.first = cell, nn.Linear(FEATURES, HIDDEN)
        self.given_state = given_state

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        state: Any = None
        if self.given_state:
            state = torch.tanh(self.first(x[:, 0]))
            state = (state, 2 * state) if isinstance(self.cell, nn.LSTMCell) else state
        outputs = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(torch.cat(state, 1) if isinstance(state, tuple) else state)
        return torch.cat(outputs, 1)


class Packed(nn.Module):
    """A recurrent layer over packed sequences; the output holds the final states too."""

    def __init__(self, layer: nn.Module, enforce_sorted: bool, given_state: bool) -> None:
        super().__init__()
        self.layer, self.enforce_sorted = layer, enforce_sorted
        self.given_state = given_state
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.input = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = torch.tanh(self.input(x))
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        out, state = self.layer(packed, self.first_state(x) if self.given_state else None)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([padded.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)

    def first_state(self, x: Tensor) -> Any:
        c = torch.tanh(self.first(x[:, 0]))
        directions = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        c = torch.stack([c * (k + 1) for k in range(directions)])
        return (c[..., : self.layer.proj_size or None], c) if "LSTM" in str(self.layer) else c


class Sentences(nn.Module):
    """Three sequences per sample, folded into the batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        folded = torch.stack([x, x.flip(1), x.cos()], 1).flatten(0, 1)
        return self.layer(folded)[0].reshape(len(x), -1)


def batch_of(order: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": torch.randn(BATCH, TIME, FEATURES, dtype=dtype),
        "lengths": torch.tensor(LENGTHS[order]),
    }


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(**batch)
    return (out.cos() * torch.linspace(1, 2, out.shape[1], dtype=out.dtype)).sum(1).mean()


def check_exact(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Outputs, and the gradients of every sample and parameter."""
    tolerance = 2e-5 if batch["x"].dtype is torch.float32 else 1e-10
    plain = model(**batch)
    capture = GradientCapture(model)
    torch.testing.assert_close(model(**batch), plain, rtol=tolerance, atol=tolerance)
    capture.remove()
    assert largest_error(model, loss_of, batch, BATCH) < tolerance


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])


@DTYPES
@pytest.mark.parametrize("given_state", [False, True], ids=["zero state", "given state"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_called_many_times(kind: str, given_state: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = CellOverTime(CELLS[kind](FEATURES, HIDDEN), given_state).to(dtype)
    check_exact(model, batch_of("unsorted", dtype))


@pytest.mark.parametrize("kind", CELLS)
def test_cells_without_bias_and_frozen_in_part(kind: str) -> None:
    torch.manual_seed(0)
    model = CellOverTime(CELLS[kind](FEATURES, HIDDEN, bias=False), given_state=True)
    model.cell.weight_ih.requires_grad_(False)
    check_exact(model, batch_of("unsorted", torch.float32))


@DTYPES
@pytest.mark.parametrize("given_state", [False, True], ids=["zero state", "given state"])
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_packed_sequences(kind: str, order: str, given_state: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Packed(SEQUENCES[kind](), order == "sorted", given_state).to(dtype)
    check_exact(model, batch_of(order, dtype))


@pytest.mark.parametrize("geometry", [None, "diagonal"])
@pytest.mark.parametrize("layer", ["cell", "packed"])
def test_clipped_sums_in_chunks_and_with_a_geometry(layer: str, geometry: str | None) -> None:
    torch.manual_seed(0)
    model = (
        CellOverTime(nn.GRUCell(FEATURES, HIDDEN), True)
        if layer == "cell"
        else Packed(SEQUENCES["lstm_deep"](), False, True)
    ).double()
    batch = batch_of("unsorted", torch.float64)
    grads = reference_grads(model, loss_of, batch, BATCH)
    kfc = None
    if geometry is not None:
        probe = Fixed(batch_of("unsorted", torch.float64))
        probe.count = BATCH
        kfc = dpkfc.KFC(probe, damping=0.05, others="diagonal", loss=cosine_loss)
        private_sum(model, loss_of, batch, BATCH, 1.0, geometry=kfc)  # builds the maps
        grads = mapped(kfc, model, grads)
    clip = float(reference_norms(grads).median())
    want = reference_sum(grads, clip)
    for chunk in (None, 2):
        got = private_sum(model, loss_of, batch, BATCH, clip, chunk, kfc)
        assert got.keys() == want.keys()
        assert all(relative_error(got[name], want[name]) < 1e-5 for name in want)


@pytest.mark.parametrize("kind", ["lstm_deep", "gru"])
def test_packed_sequences_frozen_in_part(kind: str) -> None:
    torch.manual_seed(0)
    model = Packed(SEQUENCES[kind](), False, True)
    for name, p in model.layer.named_parameters():
        p.requires_grad_("weight_hh" in name)
    check_exact(model, batch_of("unsorted", torch.float32))


@pytest.mark.parametrize("kind", SEQUENCES)
def test_several_sequences_per_sample(kind: str) -> None:
    torch.manual_seed(0)
    check_exact(Sentences(SEQUENCES[kind]()), batch_of("unsorted", torch.float32))


@pytest.mark.parametrize("order", LENGTHS)
def test_the_packing_of_the_output_is_that_of_the_input(order: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(FEATURES, HIDDEN, batch_first=True))
    batch = batch_of(order, torch.float32)
    packed = pack_padded_sequence(
        batch["x"], batch["lengths"], batch_first=True, enforce_sorted=order == "sorted"
    )
    want, _ = model[0](packed)
    capture = GradientCapture(model)
    capture.batch_size = BATCH  # as after the model's own forward was entered
    got, _ = model[0](packed)
    assert isinstance(got, PackedSequence)
    torch.testing.assert_close(tuple(got), tuple(want))


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_between_layers_of_a_packed_sequence(p: float) -> None:
    """With p = 1 nothing is random, and the layers above see zeros, as in torch's kernel."""
    torch.manual_seed(0)
    layer = nn.LSTM(FEATURES, HIDDEN, 3, batch_first=True, dropout=p, bidirectional=True)
    model, batch = Packed(layer, False, False), batch_of("unsorted", torch.float32)
    if p == 1.0:
        check_exact(model, batch)
        return
    capture = GradientCapture(model)
    assert not torch.equal(model(**batch), model(**batch))
    capture.remove()
    masks = _dropout_masks(layer, torch.randn(40, 50, FEATURES))
    assert masks.shape == (40, 50, 2, 2 * HIDDEN)
    torch.testing.assert_close(masks.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert abs(float(masks.mean()) - 1) < 0.02  # 32 000 draws: four standard deviations
    check_exact(model.eval(), batch)


def test_masks_do_not_depend_on_the_longest_sequence_of_a_batch() -> None:
    """Otherwise a record's gradient would change with the records beside it, and be refused."""
    layer = nn.GRU(FEATURES, HIDDEN, 3, batch_first=True, dropout=0.5)

    def draw(length: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return _dropout_masks(layer, torch.zeros(BATCH, length, FEATURES)), torch.rand(3)

    (short, after_short), (long, after_long) = draw(2), draw(TIME)
    assert torch.equal(short, long[:, :2]) and torch.equal(after_short, after_long)
    model = Packed(layer, False, True)
    private_sum(model, loss_of, batch_of("unsorted", torch.float32), BATCH, 1.0)


@pytest.mark.parametrize("kind", ["packed", "unbatched"])
def test_what_is_no_batch_of_sequences_is_refused_by_name(kind: str) -> None:
    """The samples of a packed sequence cannot be told from its first tensor."""
    model = nn.Sequential(nn.LSTM(FEATURES, HIDDEN, batch_first=True))
    capture = GradientCapture(model)
    x = torch.randn(BATCH, TIME, FEATURES)
    lengths = torch.tensor(LENGTHS["sorted"])
    inputs = pack_padded_sequence(x, lengths, batch_first=True) if kind == "packed" else x[0]
    with pytest.raises(dpkfc.PrivacyError, match=r"module '0' \(LSTM\).*pack_padded_sequence ins"):
        model(inputs)
    capture.remove()


class SortedInside(nn.Module):
    """Sorts the samples by length itself, so that row j of the layer is not sample j."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(FEATURES, HIDDEN, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
        return self.layer(packed)[1][0][order.argsort()]


def test_a_model_that_sorts_the_samples_itself_is_refused() -> None:
    torch.manual_seed(0)
    model, batch = SortedInside(), batch_of("unsorted", torch.float32)
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        private_sum(model, loss_of, batch, BATCH, 1.0)
