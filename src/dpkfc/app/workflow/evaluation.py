"""Accuracy on held-out records."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH = 1000


@torch.no_grad()
def count_correct(model: nn.Module, data: TensorDataset, device: str, batch: int) -> int:
    """The number of records that the model, in evaluation mode, classifies correctly."""
    model.eval()
    parts = zip(*(tensor.split(batch) for tensor in data.tensors), strict=True)
    return sum(int((model(x.to(device)).argmax(1).cpu() == y.cpu()).sum()) for x, y in parts)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of correctly classified records; the model stays in its present mode."""
    device = next(model.parameters()).device
    parts = zip(x.split(BATCH), y.split(BATCH), strict=True)
    correct = sum(
        int((model(inputs.to(device)).argmax(1).cpu() == labels).sum()) for inputs, labels in parts
    )
    return correct / len(y)
