"""Where the data sets are that go by a name."""

from __future__ import annotations

import os
from pathlib import Path


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """`data_dir`, or $DPKFC_DATA if none is named."""
    found = data_dir or os.environ.get("DPKFC_DATA")
    if not found:
        raise FileNotFoundError("where is the data? Name its folder, or set DPKFC_DATA to it")
    return Path(found)
