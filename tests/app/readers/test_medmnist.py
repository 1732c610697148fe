"""MedMNIST data sets, from small files of the same format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpkfc.app.readers.medmnist import CLASSES, medmnist


def write(
    folder: Path, name: str, channels: tuple[int, ...], parts: tuple[str, ...]
) -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng(0), {}
    for part, count in zip(parts, (7, 3, 5), strict=False):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28, *channels), dtype=np.uint8)
        arrays[f"{part}_labels"] = rng.integers(0, len(CLASSES[name]), (count, 1), dtype=np.uint8)
    np.savez(folder / f"{name}.npz", **arrays)
    return arrays


@pytest.mark.parametrize(("name", "channels"), [("pathmnist", (3,)), ("pneumoniamnist", ())])
def test_images_and_labels_are_those_of_the_file(
    tmp_path: Path, name: str, channels: tuple[int, ...]
) -> None:
    arrays = write(tmp_path, name, channels, ("train", "val", "test"))
    for part, found in zip(("train", "test"), medmnist(name, tmp_path), strict=True):
        x, y = found.tensors
        pixels = arrays[f"{part}_images"].reshape(len(x), 28, 28, -1).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(x.numpy(), pixels / 255, rtol=1e-6)
        assert y.dtype == torch.int64 and y.tolist() == arrays[f"{part}_labels"].flatten().tolist()


def test_a_missing_file_or_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pathmnist\.npz is missing"):
        medmnist("pathmnist", tmp_path)
    write(tmp_path, "pathmnist", (3,), ("train",))
    with pytest.raises(ValueError, match="no test part"):
        medmnist("pathmnist", tmp_path)
