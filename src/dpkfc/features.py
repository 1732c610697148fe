"""Features that need no data: scattering coefficients, standardised by probes.

A private model learns more from fixed features than from pixels (Tramèr & Boneh, ICLR 2021), if the
features have a common scale. Their paper spends budget on private estimates of means and variances.
Probes give both for free: the features of pink noise have means and variances close enough to those
of real images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probe

# Added to the standard deviation of a feature, relative to the root mean square over all features.
FLOOR = 0.03


@dataclass(frozen=True)
class Scattering:
    """Wavelet scattering of order two (Mallat 2012; kymatio).

    Maps images [N, C, H, W] to features [N, D] with
    ``D = C (1 + 8 J + 32 J (J - 1)) (H / 2^J) (W / 2^J)`` for J scales and 8 angles, rounded down:
    3,969 for 28 x 28 pixels, 15,552 for 3 x 32 x 32.

    Args:
        shape: of one image, (C, H, W).
        scales: J.

    >>> Scattering((1, 28, 28))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 3969])
    """

    shape: tuple[int, int, int]
    scales: int = 2

    def __call__(self, images: Tensor, batch: int = 250) -> Tensor:
        """The features of `images`, computed `batch` images at a time."""
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(
                f"Scattering{self.shape}: got images of shape {tuple(images.shape[1:])}. Resize "
                "them, or give the scattering their shape"
            )
        transform = _scattering(self.scales, self.shape[1:])
        with torch.no_grad():
            return torch.cat(
                [transform(part.contiguous()).flatten(1) for part in images.split(batch)]
            )


@cache
def _scattering(scales: int, side: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    try:
        # kymatio.torch also imports its 3-D part, which needs a function that scipy has dropped.
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise ImportError("Scattering needs kymatio: pip install 'dpkfc[features]'") from error
    return ScatteringTorch2D(J=scales, shape=side)  # type: ignore[no-any-return]


def standardised(
    transform: Callable[[Tensor], Tensor], probe: Probe, count: int = 2048, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    """Shift and scale `transform` so that the features of probes have mean 0 and variance 1.

    Args:
        transform: inputs to features, [N, D].
        probe: draws inputs of the same shape as the data.
        count: number of probes.
        seed: of the probes.

    Returns:
        A function from inputs to standardised features.

    Raises:
        PrivacyError: if the probe reads private records.

    **Guarantee.** No record is read, so the features cost no privacy: those of one record depend on
    this record and on the probes only.

    >>> from dpkfc.probes.pink import PinkNoise
    >>> probe = PinkNoise((1, 8, 8), std=0.3, mean=0.3)
    >>> features = standardised(lambda images: images.flatten(1), probe)
    >>> features(torch.full((1, 1, 8, 8), 0.3)).abs().max() < 0.1
    tensor(True)
    """
    if not getattr(probe, "public", False):
        raise PrivacyError(
            "standardised: the probe reads private records, and no epsilon covers their "
            "statistics. Use PinkNoise, Tabular or PublicData"
        )
    inputs = probe.draw(count, torch.Generator().manual_seed(seed)).inputs
    if not isinstance(inputs, Tensor):
        raise TypeError(f"standardised: the probe draws {type(inputs).__name__}, not a tensor")
    features = transform(inputs)
    mean = features.mean(0)
    deviation = features.std(0)
    deviation = deviation + FLOOR * deviation.square().mean().sqrt()
    if not bool((deviation > 0).all()):
        raise ValueError(
            "standardised: the features of all probes are the same: use another probe or transform"
        )
    return lambda inputs: (transform(inputs) - mean) / deviation
