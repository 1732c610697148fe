"""The CIFAR ResNet of He et al. (2016) with GroupNorm instead of BatchNorm.

Batch statistics mix the records of a batch, so per-sample gradients do not exist under BatchNorm.
Group statistics stay within one image. Shortcuts are the parameter-free "option A" of the paper.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.models.declared import with_input_shape

GROUPS = 8


def groupnorm_resnet(depth: int = 20, classes: int = 10) -> nn.Sequential:
    """A ResNet for images [3, 32, 32] of depth 6n + 2: 20, 32, 44, 56 or 110 in the literature."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth={depth}: a CIFAR ResNet has 6n + 2 layers, such as 20, 32 or 44")
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
    ]
    channels = 16
    for width in (16, 32, 64):
        for _ in range(blocks):
            layers.append(Block(channels, width))
            channels = width
    network = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
    return with_input_shape((3, 32, 32), network)


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))). Where the width doubles, the resolution halves."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride = width // channels
        self.padding = width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return F.relu(y + shortcut)
