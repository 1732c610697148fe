"""Small data sets for the tests of experiments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write 80 training and 30 test records of noise, as idx files."""
    rng = np.random.default_rng(0)
    for dataset in ("mnist", "fashion-mnist"):
        (tmp_path / dataset).mkdir()
        for part, count in (("train", 80), ("t10k", 30)):
            images, labels = rng.integers(0, 256, (count, 28, 28)), rng.integers(0, 10, count)
            for array, name in (
                (images, f"{part}-images-idx3-ubyte"),
                (labels, f"{part}-labels-idx1-ubyte"),
            ):
                header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                (tmp_path / dataset / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return tmp_path
