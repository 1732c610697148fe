"""The folder of the data sets that are known by name."""

from __future__ import annotations

import os
from pathlib import Path


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """`data_dir`, or $DPKFC_DATA if it is None."""
    folder = data_dir or os.environ.get("DPKFC_DATA")
    if not folder:
        raise FileNotFoundError("where is the data? Give its folder, or set DPKFC_DATA to it")
    return Path(folder)
