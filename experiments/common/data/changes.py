"""Images made unlike natural ones on purpose: statistics that depend on the place, or grow with frequency.

Each change is one fixed linear map of the pixels, the same for every image and channel, with a seed that is not secret.
Natural images are stationary with a power spectrum near 1/f²: what pink noise assumes. None of these are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.probes.pink import gain

SEED = 0
RANGE = 100.0  # largest scale over the smallest
BLUE = 40.0  # keeps pixels about as large as they were


def permuted(images: Tensor) -> Tensor:
    """Pixels in another, random order: the same values, but neighbours are strangers."""
    height, width = images.shape[2:]
    order = torch.randperm(height * width, generator=torch.Generator().manual_seed(SEED))
    return images.flatten(2)[:, :, order].view_as(images)


def cornered(images: Tensor) -> Tensor:
    """Shrunk to half its sides in the upper left corner; zero elsewhere."""
    height, width = images.shape[2:]
    small = F.interpolate(images, (height // 2, width // 2), mode="bilinear", antialias=True)
    return F.pad(small, (0, width - width // 2, 0, height - height // 2))


def ramped(images: Tensor) -> Tensor:
    """Every column times a factor that falls smoothly from √RANGE at the left to 1/√RANGE at the right."""
    exponents = torch.linspace(0.5, -0.5, images.shape[3], dtype=torch.float64)
    return images * (RANGE**exponents).to(images.dtype)


def scaled_at_random(images: Tensor) -> Tensor:
    """Every pixel times a factor of its own, log-uniform between 1/√RANGE and √RANGE."""
    exponents = (
        torch.rand(
            images.shape[2:], generator=torch.Generator().manual_seed(SEED), dtype=torch.float64
        )
        - 0.5
    )
    return images * (RANGE**exponents).to(images.dtype)


def blued(images: Tensor) -> Tensor:
    """Amplitudes times (f/f₁)²/BLUE, without the mean: a power spectrum of 1/f² becomes one of f²."""
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
