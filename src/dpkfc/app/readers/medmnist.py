"""Data sets of MedMNIST (Yang et al., 2023): DATA/pathmnist.npz, DATA/pneumoniamnist.npz."""

from __future__ import annotations

import os

from torch.utils.data import TensorDataset

from dpkfc.app.readers.directory import data_directory
from dpkfc.app.readers.images import read_npz

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
    """Training and test images [C, 28, 28] in [0, 1], with labels. The validation part is ignored.

    `data_dir` is $DPKFC_DATA by default.
    """
    file = data_directory(data_dir) / f"{dataset}.npz"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Put {dataset}.npz of medmnist.com there")
    source = read_npz(file, CLASSES[dataset], None)
    if source.test is None:
        raise ValueError(f"{file} has no test part: fetch it again")
    train = TensorDataset(source.train.x, source.train.y)
    return train, TensorDataset(source.test.x, source.test.y)
