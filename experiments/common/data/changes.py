"""Images changed so that they are unlike natural ones.

Natural images are stationary, with a power spectrum near 1/f²; pink noise assumes both. After
these changes the statistics depend on the position, or power grows with frequency. Each change is
one fixed linear map of the pixels, the same for every image and channel, with a public seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.probes.pink import gain

SEED = 0
RANGE = 100.0  # ratio of the largest scale to the smallest
BLUE = 40.0  # keeps the magnitude of pixels about the same


def permuted(images: Tensor) -> Tensor:
    """Put the pixels in a random order, so that neighbours are unrelated."""
    height, width = images.shape[2:]
    order = torch.randperm(height * width, generator=torch.Generator().manual_seed(SEED))
    return images.flatten(2)[:, :, order].view_as(images)


def cornered(images: Tensor) -> Tensor:
    """Shrink the image to half its sides in the upper left corner; zero elsewhere."""
    height, width = images.shape[2:]
    small = F.interpolate(images, (height // 2, width // 2), mode="bilinear", antialias=True)
    return F.pad(small, (0, width - width // 2, 0, height - height // 2))


def ramped(images: Tensor) -> Tensor:
    """Scale columns by a factor that falls smoothly from √RANGE (left) to 1/√RANGE (right)."""
    exponents = torch.linspace(0.5, -0.5, images.shape[3], dtype=torch.float64)
    return images * (RANGE**exponents).to(images.dtype)


def scaled_at_random(images: Tensor) -> Tensor:
    """Scale every pixel by its own factor, log-uniform between 1/√RANGE and √RANGE."""
    exponents = (
        torch.rand(
            images.shape[2:], generator=torch.Generator().manual_seed(SEED), dtype=torch.float64
        )
        - 0.5
    )
    return images * (RANGE**exponents).to(images.dtype)


def blued(images: Tensor) -> Tensor:
    """Scale amplitudes by (f/f₁)²/BLUE and remove the mean: power 1/f² becomes f²."""
    response = gain(tuple(images.shape[2:]), 4.0, dc=True).reciprocal()
    response.view(-1)[0] = 0.0
    return torch.cat([_filtered(part, response) for part in images.split(4096)]) / BLUE


def _filtered(images: Tensor, response: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.rfftn(images, dim=(2, 3)) * response
    filtered: Tensor = torch.fft.irfftn(spectrum, s=images.shape[2:], dim=(2, 3))
    return filtered


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": permuted,
    "cornered": cornered,
    "ramped": ramped,
    "scaled at random": scaled_at_random,
    "blue": blued,
}
