"""Pink noise has the declared spectrum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpkfc.probes.pink import PinkNoise

TOLERANCE = 0.1  # of the slope; 400 images leave a standard error well below it
SHAPES = [(1, 256), (2, 101), (1, 48, 48), (1, 24, 64), (2, 31, 45), (1, 16, 12, 20)]


def images(probe: PinkNoise, count: int = 400, seed: int = 0) -> np.ndarray:
    drawn = probe.draw(count, torch.Generator().manual_seed(seed)).inputs
    assert isinstance(drawn, torch.Tensor) and drawn.dtype == torch.float32
    return drawn.double().numpy()


def power(x: np.ndarray) -> np.ndarray:
    """The periodogram, averaged over images and channels."""
    return (np.abs(np.fft.fftn(x, axes=tuple(range(2, x.ndim)))) ** 2).mean((0, 1))


def radius(grid: tuple[int, ...]) -> np.ndarray:
    """Cycles per sample: index k of n is k/n or, past the middle, (n-k)/n."""
    index = np.indices(grid)
    return np.sqrt(sum((np.minimum(k, n - k) / n) ** 2 for k, n in zip(index, grid, strict=True)))


def slope(x: np.ndarray) -> float:
    """-d log S / d log f, by least squares over the rings of equal frequency."""
    grid = x.shape[2:]
    f, ring = np.unique(radius(grid).round(9), return_inverse=True)
    mean = np.bincount(ring.ravel(), power(x).ravel()) / np.bincount(ring.ravel())
    return -np.polyfit(np.log(f[1:]), np.log(mean[1:]), 1)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [0, 1, 2, 3])
def test_the_power_falls_as_the_frequency_to_the_alpha(alpha: int, shape: tuple[int, ...]) -> None:
    assert slope(images(PinkNoise(shape, alpha=alpha))) == pytest.approx(alpha, abs=TOLERANCE)


def test_the_default_is_the_default_of_algorithm_3() -> None:
    """Its filter 1/r in amplitude is 1/r² in power."""
    white = np.random.default_rng(0).standard_normal((400, 1, 32, 32))
    r = radius((32, 32))
    theirs = np.real(np.fft.ifft2(np.fft.fft2(white) / (r + 1e9 * (r == 0))))
    assert slope(images(PinkNoise((1, 32, 32)))) == pytest.approx(slope(theirs), abs=TOLERANCE)


@pytest.mark.parametrize("grid", [(32, 64), (64, 16)])
def test_both_axes_of_a_long_image_have_equal_power_at_equal_frequency(
    grid: tuple[int, int],
) -> None:
    spectrum = power(images(PinkNoise((1, *grid), alpha=2), count=2000))
    for period in (16, 8, 4):
        down, across = spectrum[grid[0] // period, 0], spectrum[0, grid[1] // period]
        assert down / across == pytest.approx(1, abs=0.15)


def test_the_law_holds_down_to_the_lowest_frequency_of_the_longer_axis() -> None:
    spectrum = power(images(PinkNoise((1, 8, 64), alpha=1), count=4000))
    for cycles in (1, 2, 4, 16):  # along the 64: S(cycles/64) against S(8/64)
        assert spectrum[0, cycles] / spectrum[0, 8] == pytest.approx(8 / cycles, rel=0.15)


@pytest.mark.parametrize(
    "shape", [*SHAPES, (3, 1, 8), (3, 8, 1), (1, 2), (2, 1, 1, 5), (1, 2, 2)], ids=str
)
@pytest.mark.parametrize("alpha", [0.0, 1.5, 400.0])
def test_every_image_has_the_mean_and_std_asked_for(shape: tuple[int, ...], alpha: float) -> None:
    x = images(PinkNoise(shape, alpha=alpha, std=0.5, mean=3.0), count=5)
    assert x.shape == (5, *shape)
    flat = x.reshape(5, -1)
    np.testing.assert_allclose(flat.std(1), 0.5, rtol=1e-4)
    grid = tuple(range(2, x.ndim))
    np.testing.assert_allclose(x.mean(grid), 3.0, atol=1e-5)  # each channel of each image: no DC


def test_with_dc_brightness_differs_between_images() -> None:
    x = images(PinkNoise((1, 16, 16), dc=True, std=0.5, mean=3.0), count=4000)
    means = x.mean((1, 2, 3))
    assert means.std() > 0.05 and means.mean() == pytest.approx(3.0, abs=0.02)
    np.testing.assert_allclose(np.sqrt(((x - 3) ** 2).mean((1, 2, 3))), 0.5, rtol=1e-4)
    # DC at the power of the lowest frequency: S(0) against the mean over (±1, 0) and (0, ±1)
    spectrum = power(x - 3)
    lowest = (spectrum[1, 0] + spectrum[0, 1] + spectrum[-1, 0] + spectrum[0, -1]) / 4
    assert spectrum[0, 0] / lowest == pytest.approx(1, abs=0.15)
    assert np.isfinite(images(PinkNoise((3, 1, 1), dc=True), count=3)).all()


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_channels_correlate_as_asked(rho: float, alpha: float) -> None:
    x = images(PinkNoise((3, 16, 16), alpha=alpha, channel_correlation=rho), count=2000)
    flat = x.transpose(1, 0, 2, 3).reshape(3, -1)
    found = np.corrcoef(flat)
    np.testing.assert_allclose(found[np.triu_indices(3, 1)], rho, atol=0.03)


def test_images_of_a_batch_are_independent() -> None:
    x = images(PinkNoise((1, 64), alpha=0), count=50).reshape(50, -1)
    found = np.corrcoef(x) - np.eye(50)
    assert np.abs(found).max() < 0.6 and found.std() < 0.15


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shape": 28}, ValueError, r"shape=28: give \(channels, \*grid\)"),
        ({"shape": (784,)}, ValueError, r"shape=\(784,\): give .* use Tabular"),
        ({"shape": (1, 2, 3, 4, 5)}, ValueError, r"1-, 2- or 3-D grid"),
        ({"shape": (1, 0, 4)}, ValueError, r"each size in shape=0: give a whole number, 1 or more"),
        ({"shape": (1, 4.0, 4)}, TypeError, r"each size in shape=4.0"),
        ({"shape": (3, 1, 1)}, ValueError, r"no frequency but DC. Pass dc=True"),
        ({"alpha": -1}, ValueError, r"alpha=-1: give a finite number of at least 0"),
        ({"alpha": float("inf")}, ValueError, r"alpha=inf: give a finite number"),
        ({"std": 0}, ValueError, r"std=0: give a finite number greater than 0"),
        ({"mean": float("nan")}, ValueError, r"mean=nan: give a finite number$"),
        (
            {"channel_correlation": 1.1},
            ValueError,
            r"channel_correlation=1.1: give a number from 0 to 1",
        ),
        ({"classes": 0}, ValueError, r"classes=0: give a whole number"),
        ({"count": 0}, ValueError, r"PinkNoise: count=0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PinkNoise(**{"shape": (1, 8, 8), **arguments})  # type: ignore[arg-type]
