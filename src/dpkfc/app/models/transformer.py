"""A small vision transformer (Dosovitskiy et al., 2021) with mean pooling, of ordinary layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.models.declared import with_input_shape


def tiny_vit(
    image: int = 32,
    patch: int = 4,
    channels: int = 3,
    classes: int = 10,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
) -> nn.Sequential:
    """A ViT classifier of images [channels, image, image].

    By default it has 64 tokens and 2.7 million weights.
    """
    if image % patch or width % heads:
        raise ValueError(
            f"patch={patch} must divide image={image}, and heads={heads} must divide width={width}"
        )
    network = nn.Sequential(
        PatchEmbedding(channels, width, patch, tokens=(image // patch) ** 2),
        *(Block(width, heads) for _ in range(depth)),
        nn.LayerNorm(width),
        MeanPool(),
        nn.Linear(width, classes),
    )
    return with_input_shape((channels, image, image), network)


class PatchEmbedding(nn.Module):
    """Images to tokens [batch, tokens, width]: a linear map per patch plus a position vector."""

    def __init__(self, channels: int, width: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.project(x).flatten(2).transpose(1, 2)
        return tokens + self.position


class Block(nn.Module):
    """One pre-norm layer: attention, then an MLP four times as wide, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.mlp(self.norm2(x))
        return x + y


class Attention(nn.Module):
    """Multi-head self-attention with four `nn.Linear` layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y: Tensor = self.out(mixed)
        return y


class MeanPool(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)
