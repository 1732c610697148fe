"""Pink noise for continuous signals (Algorithm 3): the power spectrum of natural images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.probes.arguments import check_fraction, check_integer, check_number
from dpkfc.probes.probe import Probes


@dataclass(frozen=True)
class PinkNoise:
    """Gaussian noise [channels, *grid] with *power* spectrum ``S(f) ∝ 1/f^alpha``.

    The amplitude is ``f^(-alpha/2)``, as in Eq. 2. Algorithm 3 filters with ``r^-α`` and so has
    twice the exponent in power: its α is alpha = 2α here, and its default α = 1 is alpha = 2. f is
    the radial frequency in cycles per sample, for axes of any length.

    Args:
        shape: (channels, *grid), with a 1-, 2- or 3-D grid.
        classes: the number of classes of the model, which is compared with its output.
        alpha: the exponent of the power spectrum; 0 is white noise.
        std: the root mean square of every image over its channels and grid.
        mean: added to every image.
        channel_correlation: ρ. The channels are ``√ρ shared + √(1-ρ) own``; about 0.9 is natural
            for RGB.
        dc: with the DC component (at the power of the lowest other frequency) images differ in
            brightness. Without it every channel has the mean `mean` exactly.
        count: probes per refresh.
        limits: clamp the result to the smallest and largest value of an input, such as (0, 1) for
            pixels.

    >>> import torch
    >>> noise = PinkNoise(shape=(3, 32, 32), classes=10, channel_correlation=0.9)
    >>> noise.draw(8, torch.Generator().manual_seed(0)).inputs.shape
    torch.Size([8, 3, 32, 32])
    """

    shape: tuple[int, ...]
    classes: int | None = None
    alpha: float = 2.0
    std: float = 1.0
    mean: float = 0.0
    channel_correlation: float = 0.0
    dc: bool = False
    count: int = 256
    limits: tuple[float, float] | None = None

    name = "pink noise"
    public = True

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list) or not 2 <= len(self.shape) <= 4:
            raise ValueError(
                f"PinkNoise: shape={self.shape!r}: give (channels, *grid) with a 1-, 2- or 3-D "
                "grid, such as (3, 32, 32); for flat features use Tabular(features)"
            )
        sizes = tuple(check_integer("PinkNoise: each size in shape", n, 1) for n in self.shape)
        object.__setattr__(self, "shape", sizes)
        check_number("PinkNoise: alpha", self.alpha, least=0)
        check_number("PinkNoise: std", self.std, above=0)
        check_number("PinkNoise: mean", self.mean)
        check_fraction("PinkNoise: channel_correlation", self.channel_correlation)
        check_integer("PinkNoise: count", self.count, 1)
        if self.limits is not None and not (
            len(self.limits) == 2 and self.limits[0] < self.limits[1]
        ):
            raise ValueError(
                f"PinkNoise: limits={self.limits!r}: give (smallest, largest), such as (0, 1)"
            )
        if self.classes is not None:
            check_integer("PinkNoise: classes", self.classes, 1)
        if math.prod(self.shape[1:]) == 1 and not self.dc:
            raise ValueError(
                f"PinkNoise: shape={self.shape}: a grid of one point has no frequency but DC. Pass "
                "dc=True, or use Tabular(features)"
            )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        """`count` images."""
        check_integer("PinkNoise.draw: count", count, 1)
        grid = self.shape[1:]
        white = torch.randn(count, *self.shape, generator=generator, dtype=torch.float32)
        if self.channel_correlation:
            rho = self.channel_correlation
            shared = torch.randn(count, 1, *grid, generator=generator, dtype=torch.float32)
            white = math.sqrt(rho) * shared + math.sqrt(1 - rho) * white
        axes = tuple(range(2, white.dim()))
        spectrum = torch.fft.rfftn(white, dim=axes) * gain(grid, self.alpha, self.dc)
        pink = torch.fft.irfftn(spectrum, s=grid, dim=axes)
        rms = pink.square().flatten(1).mean(1).sqrt().view(-1, *[1] * len(self.shape))
        images = pink * (self.std / rms) + self.mean
        return Probes(images if self.limits is None else images.clamp(*self.limits))


def gain(grid: tuple[int, ...], alpha: float, dc: bool) -> Tensor:
    """``(f₁/f)^(alpha/2)`` on the half grid of `rfftn`, f₁ the lowest frequency above 0.

    At f = 0 it is 1 if `dc`, else 0. The filter is real and even, so the spectrum of real noise
    stays Hermitian for odd and even sizes.
    """
    *leading, last = grid
    axes = [torch.fft.fftfreq(size, dtype=torch.float64) for size in leading]
    axes.append(torch.fft.rfftfreq(last, dtype=torch.float64))
    radius = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0).sqrt()
    lowest = 1 / max(grid)
    gains = (lowest / radius.clamp(min=lowest)) ** (alpha / 2)
    gains.view(-1)[0] = float(dc)
    return gains.float()
