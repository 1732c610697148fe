"""Pink noise for continuous signals (Algorithm 3): the power spectrum of natural images without an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.arguments import real, share, whole
from dpkfc.probes.probe import Probes


@dataclass(frozen=True)
class PinkNoise:
    """Gaussian noise [channels, *grid] on a 1-, 2- or 3-D grid with *power* spectrum ``S(f) ∝ 1/f^alpha``.

    The amplitude is therefore ``f^(-alpha/2)``, as in Eq. 2; alpha = 0 is white noise. Algorithm 3 filters with
    ``r^-α`` and so has twice the exponent in power: its α is alpha = 2α here, and its default α = 1 is alpha = 2.
    f is the radial frequency in cycles per sample, whatever the lengths of the axes.

    Every image has root mean square `std` over its channels and grid, and is then shifted by `mean`. Without
    the DC component (dc=False) each channel of it has mean `mean` exactly; with it (at the power of the
    lowest other frequency) images differ in brightness. `channel_correlation` ρ makes the channels
    ``√ρ shared + √(1-ρ) own``; about 0.9 is natural for RGB. `limits` cuts the result off at the smallest and largest
    value an input can have, such as (0, 1) for pixels.

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
            raise PrivacyError(
                f"PinkNoise: shape={self.shape!r}: give (channels, *grid) with a 1-, 2- or 3-D grid, "
                "such as (3, 32, 32); for flat features use Tabular(features)"
            )
        object.__setattr__(
            self,
            "shape",
            tuple(whole("PinkNoise: each size in shape", size, 1) for size in self.shape),
        )
        real("PinkNoise: alpha", self.alpha, least=0)
        real("PinkNoise: std", self.std, above=0)
        real("PinkNoise: mean", self.mean)
        share("PinkNoise: channel_correlation", self.channel_correlation)
        whole("PinkNoise: count", self.count, 1)
        if self.limits is not None and not (
            len(self.limits) == 2 and self.limits[0] < self.limits[1]
        ):
            raise PrivacyError(
                f"PinkNoise: limits={self.limits!r}: give (smallest, largest), such as (0, 1)"
            )
        if self.classes is not None:
            whole("PinkNoise: classes", self.classes, 1)
        if math.prod(self.shape[1:]) == 1 and not self.dc:
            raise PrivacyError(
                f"PinkNoise: shape={self.shape}: a grid of one point has no frequency but DC. Pass dc=True, "
                "or use Tabular(features)"
            )

    def draw(self, count: int, generator: torch.Generator) -> Probes:
        whole("PinkNoise.draw: count", count, 1)
        grid = self.shape[1:]
        white = torch.randn(count, *self.shape, generator=generator, dtype=torch.float32)
        if self.channel_correlation:
            rho = self.channel_correlation
            shared = torch.randn(count, 1, *grid, generator=generator, dtype=torch.float32)
            white = math.sqrt(rho) * shared + math.sqrt(1 - rho) * white
        axes = tuple(range(2, white.dim()))
        pink = torch.fft.irfftn(
            torch.fft.rfftn(white, dim=axes) * gain(grid, self.alpha, self.dc), s=grid, dim=axes
        )
        size = pink.square().flatten(1).mean(1).sqrt().view(-1, *[1] * len(self.shape))
        images = pink * (self.std / size) + self.mean
        return Probes(images if self.limits is None else images.clamp(*self.limits))


def gain(grid: tuple[int, ...], alpha: float, dc: bool) -> Tensor:
    """``(f₁/f)^(alpha/2)`` on the half grid of `rfftn`, f₁ the lowest frequency above 0; at f = 0 one or zero.

    The filter is real and even, so the spectrum of real noise stays Hermitian for odd and even sizes alike.
    """
    *leading, last = grid
    axes = [torch.fft.fftfreq(size, dtype=torch.float64) for size in leading]
    axes.append(torch.fft.rfftfreq(last, dtype=torch.float64))
    radius = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0).sqrt()
    lowest = 1 / max(grid)
    filtered = (lowest / radius.clamp(min=lowest)) ** (alpha / 2)
    filtered.view(-1)[0] = float(dc)
    return filtered.float()
