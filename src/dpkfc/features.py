"""Features that no data was needed for: scattering coefficients, standardised by probes.

A private model learns more from fixed features than from pixels (Tramèr & Boneh, ICLR 2021), if these are on one scale.
They paid for that with private estimates of means and variances. Probes give both for free: the features of pink noise
have means and variances close enough to those of real images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probe

FLOOR = 0.03  # of the standard deviation of a feature, relative to the root mean square over all features


@dataclass(frozen=True)
class Scattering:
    """Wavelet scattering of order two (Mallat 2012; kymatio): images [N, C, H, W] to features [N, D].

    ``D = C (1 + 8 J + 32 J (J - 1)) (H / 2^J) (W / 2^J)`` for J scales and 8 angles, rounded down: 3,969 for 28 x 28,
    15,552 for 3 x 32 x 32.

    >>> Scattering((1, 28, 28))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 3969])
    """

    shape: tuple[int, int, int]
    scales: int = 2

    def __call__(self, images: Tensor, batch: int = 250) -> Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise PrivacyError(
                f"Scattering{self.shape}: images of shape {tuple(images.shape[1:])} were given"
            )
        transform = _scattering(self.scales, self.shape[1:])
        with torch.no_grad():
            return torch.cat(
                [transform(part.contiguous()).flatten(1) for part in images.split(batch)]
            )


@cache
def _scattering(scales: int, side: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    try:
        # kymatio.torch would import its 3-D part too, which needs a function that scipy has dropped
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise PrivacyError("Scattering needs kymatio: pip install 'dpkfc[features]'") from error
    return ScatteringTorch2D(J=scales, shape=side)  # type: ignore[no-any-return]


def standardised(
    transform: Callable[[Tensor], Tensor], probe: Probe, count: int = 2048, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    """`transform`, shifted and scaled: the features of probes have mean 0 and variance 1. No record is read.

    >>> from dpkfc.probes.pink import PinkNoise
    >>> features = standardised(lambda images: images.flatten(1), PinkNoise((1, 8, 8), std=0.3, mean=0.3))
    >>> features(torch.full((1, 1, 8, 8), 0.3)).abs().max() < 0.1
    tensor(True)
    """
    if not getattr(probe, "public", False):
        raise PrivacyError(
            "standardised: the probe reads private records, and their statistics are not covered by any epsilon"
        )
    seen = probe.draw(count, torch.Generator().manual_seed(seed)).inputs
    if not isinstance(seen, Tensor):
        raise PrivacyError(f"standardised: the probe draws {type(seen).__name__}, not a tensor")
    found = transform(seen)
    mean, deviation = found.mean(0), found.std(0)
    deviation = deviation + FLOOR * deviation.square().mean().sqrt()
    if not bool((deviation > 0).all()):
        raise PrivacyError(
            "standardised: the features of all probes are the same: use another probe or transform"
        )
    return lambda inputs: (transform(inputs) - mean) / deviation
