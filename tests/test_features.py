"""Features without data: their values, one image at a time, and the statistics they use."""

from __future__ import annotations

import pytest
import torch

from dpkfc.errors import PrivacyError
from dpkfc.features import Scattering, standardised
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.public import Oracle
from dpkfc.probes.tokens import Tokens

SHAPE = (2, 16, 12)
PINK = PinkNoise(SHAPE, std=0.3, mean=0.3)


def images(count: int = 5) -> torch.Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scales", [1, 2])
def test_the_number_of_features_is_the_documented_one(scales: int) -> None:
    paths = 1 + 8 * scales + 32 * scales * (scales - 1)
    assert Scattering(SHAPE, scales)(images()).shape == (
        5,
        2 * paths * (16 >> scales) * (12 >> scales),
    )


def test_every_image_is_seen_alone() -> None:
    """In whatever batches; other images of the batch do not matter."""
    transform = Scattering(SHAPE)
    whole, parts = transform(images()), transform(images(), batch=2)
    alone = transform(images()[3:4])
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(whole[3:4], alone)


def test_the_lowest_path_is_a_local_mean() -> None:
    """Of a constant image the order-zero coefficients are its value, and wavelets see nothing."""
    features = Scattering((1, 16, 16))(torch.full((1, 1, 16, 16), 0.7)).view(81, 16)
    torch.testing.assert_close(features[0], torch.full((16,), 0.7), atol=1e-4, rtol=0)
    assert features[1:].abs().max() < 1e-4


def test_probes_have_mean_zero_and_variance_one() -> None:
    transform = standardised(Scattering(SHAPE), PINK, count=300, seed=3)
    # type: ignore[arg-type]
    features = transform(PINK.draw(300, torch.Generator().manual_seed(3)).inputs)
    assert features.mean(0).abs().max() < 1e-4
    assert 0.5 < features.std(0).median() <= 1.0  # a little below 1: the floor


def test_the_scale_does_not_depend_on_what_is_transformed() -> None:
    """The features of a record do not depend on other records: none of their statistics is used."""
    transform = standardised(Scattering(SHAPE), PINK, count=50)
    torch.testing.assert_close(transform(images(5))[:2], transform(images(5)[:2]))


def test_statistics_of_private_records_are_refused() -> None:
    with pytest.warns(UserWarning, match="PRIVATE"):
        oracle = Oracle(images())
    with pytest.raises(PrivacyError, match="private records"):
        standardised(Scattering(SHAPE), oracle)


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="images of shape"):
        Scattering((1, 28, 28))(images())
    with pytest.raises(TypeError, match="not a tensor"):
        standardised(Scattering(SHAPE), Tokens(50, 8))
    with pytest.raises(ValueError, match="the same"):
        standardised(lambda x: torch.ones(len(x), 3), PINK)
