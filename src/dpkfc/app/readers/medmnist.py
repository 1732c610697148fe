"""Data sets of MedMNIST (Yang et al., 2023) from their files: DATA/pathmnist.npz, DATA/pneumoniamnist.npz."""

from __future__ import annotations

import os

from torch.utils.data import TensorDataset

from dpkfc.app.readers.directory import data_directory
from dpkfc.app.readers.images import read_npz
from dpkfc.errors import PrivacyError

CLASSES = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "pneumoniamnist": ("normal", "pneumonia"),
}


def medmnist(
    dataset: str, data_dir: str | os.PathLike[str] | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [C, 28, 28] in [0, 1] with their labels. The validation part is left aside."""
    file = data_directory(data_dir) / f"{dataset}.npz"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Put there {dataset}.npz of medmnist.com")
    read = read_npz(file, CLASSES[dataset], None)
    if read.test is None:
        raise PrivacyError(f"{file} has no test part: fetch it again")
    return TensorDataset(read.train.x, read.train.y), TensorDataset(read.test.x, read.test.y)
