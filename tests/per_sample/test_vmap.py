"""Modules without an adapter whose inputs have several rows per sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.capture import GradientCapture
from oracle import largest_error, private_sum, reference_grads, reference_norms, reference_sum

BATCH = 4


class Rows(nn.Module):
    """A module with a parameter of its own and two inputs, one of which may be shared."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        times = len(x) // len(other)
        repeated = other.repeat(times, *[1] * (other.dim() - 1))
        return torch.tanh(x * self.weight) + repeated.cos(), (self.weight * x).sum(-1)


class Windows(nn.Module):
    """Windows folded into the batch, with a table that belongs to the windows of any sample."""

    def __init__(self, windows: int, second: str) -> None:
        super().__init__()
        self.windows, self.second, self.rows = windows, second, Rows()

    def forward(self, x: Tensor) -> Tensor:
        folded = torch.stack([x * (k + 1) for k in range(self.windows)], 1).flatten(0, 1)
        table = torch.linspace(0, 1, self.windows, dtype=x.dtype).unsqueeze(1).expand(-1, 3)
        one, other = self.rows(folded, table if self.second == "shared" else folded.sin())
        return torch.cat([one.reshape(len(x), -1), other.reshape(len(x), -1)], 1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return (out.cos() * torch.linspace(1, 2, out.shape[1], dtype=out.dtype)).sum(1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("second", ["shared", "per row"])
@pytest.mark.parametrize("windows", [1, 2, BATCH, 2 * BATCH])
def test_rows_of_a_sample_stay_together(windows: int, second: str, dtype: torch.dtype) -> None:
    """Also if as many windows as samples make the shared table look like a batch."""
    torch.manual_seed(0)
    model, x = Windows(windows, second).to(dtype), torch.randn(BATCH, 3, dtype=dtype)
    plain = model(x)
    capture = GradientCapture(model)
    torch.testing.assert_close(model(x), plain)
    capture.remove()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    assert largest_error(model, loss_of, x, BATCH) < tolerance


def tiny_swin(window_size: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=2,
        num_channels=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=window_size,
        hidden_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.SwinForImageClassification(config)
    for name, p in model.named_parameters():  # zero at the start
        if "relative_position_bias_table" in name:
            nn.init.normal_(p)
    return model


def swin_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(pixel_values=batch["x"]).logits
    return F.cross_entropy(logits, batch["y"])


@pytest.mark.parametrize("part", ["full", "tables"])
@pytest.mark.parametrize("rows", [1, 3, 4, 16])
def test_swin_with_shifted_windows(rows: int, part: str) -> None:
    """16 and 4 windows per image: also with as many images as windows."""
    model = tiny_swin(window_size=2)
    shifts = [layer.shift_size for stage in model.swin.encoder.layers for layer in stage.blocks]
    assert max(shifts) > 0
    if part == "tables":
        for name, p in model.named_parameters():
            p.requires_grad_("relative_position_bias_table" in name)
    batch = {"x": torch.randn(rows, 2, 16, 16), "y": torch.randint(3, (rows,))}
    assert largest_error(model, swin_loss, batch, rows) < 1e-4


def test_swin_trains_and_its_clipped_sum_is_exact() -> None:
    model = tiny_swin(window_size=4)
    batch = {"x": torch.randn(4, 2, 16, 16), "y": torch.randint(3, (4,))}
    grads = reference_grads(model, swin_loss, batch, 4)
    clip = float(reference_norms(grads).median())
    got = private_sum(model, swin_loss, batch, 4, clip)
    for name, want in reference_sum(grads, clip).items():
        torch.testing.assert_close(got[name].double(), want, rtol=1e-4, atol=1e-5 * clip)
