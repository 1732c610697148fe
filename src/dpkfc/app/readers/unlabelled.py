"""New records without classes, read in the same way as those of a run.

The schema, the columns, the range, the tokenizer and the shape come from the run's config.json.
Only the path of the records is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkfc.app.readers import folders, images, tables, texts
from dpkfc.app.readers.records import Kind
from dpkfc.app.readers.sources import TABLES
from dpkfc.probes.probe import Probe
from dpkfc.probes.tabular import Tabular

EXPECTED = {
    "images": "an .npz file, an image, or a folder of images",
    "text": "a table with the column of texts, a .txt file, or a folder of them",
    "tabular": "a table with the columns of the schema, or an .npz file if the run had one",
}


@dataclass(frozen=True)
class Inputs:
    """Inputs [N, ...], and the file or the row number of each."""

    x: Tensor
    names: list[str]


def kind_of(config: Mapping[str, Any]) -> Kind:
    """The kind of data of the run with this config.json."""
    source = config["source"]
    if len(config["shape"]) == 3:
        return "images"
    if source.get("text") is not None or source.get("tokenizer") is not None:
        return "text"
    is_file = Path(source.get("path", "a.npz")).suffix.lower() in (*TABLES, ".npz")
    # Folders and names that are neither images nor tables are texts, as hashed words.
    return "tabular" if is_file or source.get("schema") is not None else "text"


def probe_of(config: Mapping[str, Any]) -> Probe:
    """The probe with which the run's model was built."""
    kind = kind_of(config)
    shape = tuple(config["shape"])
    if kind == "images":
        return images.image_probe(shape, len(config["classes"]))
    return _encoding(config).probe if kind == "text" else Tabular(shape[0])


def read_inputs(source: str | Path, config: Mapping[str, Any]) -> Inputs:
    """Read a file or folder as inputs of the run's model."""
    path = Path(source)
    kind = kind_of(config)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give {EXPECTED[kind]}")
    try:
        inputs = _read(path, kind, config)
    except OSError as problem:
        raise OSError(f"{path} cannot be read: {problem}") from problem
    except UnicodeError as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from problem
    if inputs is None:
        raise ValueError(f"{path} cannot be used for a run on {kind} data: give {EXPECTED[kind]}")
    shape = tuple(inputs.x.shape[1:])
    if shape != tuple(config["shape"]):
        raise ValueError(
            f"{path}: inputs of shape {shape}, but the run was trained on {tuple(config['shape'])}"
        )
    return inputs


def _read(path: Path, kind: Kind, config: Mapping[str, Any]) -> Inputs | None:
    """None if the file or folder is of another kind."""
    ending = path.suffix.lower()
    if ending in TABLES and kind != "images":
        return _table(path, kind, config)
    if ending == ".npz" and kind != "text":
        limits = config["source"].get("limits")
        x = images.read_npz_inputs(path, None if limits is None else (limits[0], limits[1]))
        return Inputs(x, _rows(len(x)))
    if kind == "images":
        return _images(path, tuple(config["shape"]))
    return _texts(path, config) if kind == "text" else None


def _table(path: Path, kind: Kind, config: Mapping[str, Any]) -> Inputs:
    source = config["source"]
    table = tables.read_table(path)
    if kind == "text":
        x = _encoding(config).encode(table.column(source.get("text") or "text", "the text"))
    else:
        if source.get("schema") is None:
            raise ValueError(
                f"{path}: the run was trained on arrays and has no schema for a table: give .npz"
            )
        columns = tables.declared_columns(source["schema"], source["target"])
        x = tables.encode(table, columns, bool(source.get("indicators")))[0]
    return Inputs(x, _rows(len(table.rows)))


def _images(path: Path, shape: tuple[int, ...]) -> Inputs | None:
    files = _files(path, folders.IMAGES)
    if not files:
        return None
    if shape[1] != shape[2] or shape[0] not in (1, 3):
        raise ValueError(
            f"{path}: the run was trained on arrays of shape {shape}, not on image files: give an "
            ".npz file"
        )
    x = torch.stack([images.read_image(file, shape[1], grey=shape[0] == 1) for file in files])
    return Inputs(x, _relative(files, path))


def _texts(path: Path, config: Mapping[str, Any]) -> Inputs | None:
    files = _files(path, folders.TEXTS)
    if not files:
        return None
    contents = [file.read_bytes().decode("utf-8", errors="replace") for file in files]
    return Inputs(_encoding(config).encode(contents), _relative(files, path))


def _encoding(config: Mapping[str, Any]) -> texts.Encoding:
    tokenizer = config["source"].get("tokenizer")
    return texts.words(config["shape"][0]) if tokenizer is None else texts.tokens(tokenizer)


def _files(path: Path, endings: frozenset[str]) -> list[Path]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in files if file.suffix.lower() in endings]


def _relative(files: list[Path], path: Path) -> list[str]:
    return [file.name if file == path else str(file.relative_to(path)) for file in files]


def _rows(count: int) -> list[str]:
    return [str(row) for row in range(1, count + 1)]
