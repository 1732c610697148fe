"""Images and other arrays, scaled by the range of their format, never by statistics of records."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.app.readers.idx import read_idx
from dpkfc.app.readers.records import (
    ParsedSource,
    Records,
    class_numbers,
    concatenate,
    content_digest,
    preview,
)
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.tabular import Tabular

CHANNELS = (1, 3, 4)
REAL_NUMBERS = "buif"  # NumPy's kinds: bool, unsigned, signed, floating point
MOST_CLASSES = 100_000  # with numbers for names
SIZE = 32
BILINEAR = 2  # Pillow's number
PAIRS = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "target"))
Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
Limits = tuple[float, float]


def image_probe(shape: tuple[int, ...], classes: int) -> PinkNoise:
    """Pink noise for pixels in [0, 1]; the channels of photographs are correlated."""
    correlation = 0.9 if shape[0] == 3 else 0.0
    return PinkNoise(
        shape, classes, std=0.3, mean=0.3, limits=(0, 1), channel_correlation=correlation
    )


def read_npz(path: Path, declared: tuple[str, ...] | None, limits: Limits | None) -> ParsedSource:
    """Read the arrays images and labels, or x and y.

    They may have the prefix train_ and test_, or the suffix _train and _test.
    """
    arrays = _load_arrays(path)
    train = _pair(arrays, "train") or _pair(arrays, "")
    if train is None:
        raise ValueError(
            f"{path} holds {preview(list(arrays))}: name the arrays images and labels, or x and y "
            "(train_images, train_labels, test_images, ... for a test part)"
        )
    remarks = [f"{path.name}: the validation part is not used"] if _pair(arrays, "val") else []
    return read_arrays(train, _pair(arrays, "test"), str(path), declared, limits, remarks)


def read_npz_inputs(path: Path, limits: Limits | None) -> Tensor:
    """Read the inputs alone: the array images, x, X or data, or the only array of the file."""
    arrays = _load_arrays(path)
    named = [arrays[name] for name, _ in PAIRS if name in arrays]
    if not named and len(arrays) == 1:
        named = list(arrays.values())
    if not named:
        raise ValueError(
            f"{path} holds {preview(list(arrays))}: name the array of inputs images or x"
        )
    _check_numbers(named[0], str(path))
    return _inputs(named[0], str(path), limits)


def _load_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, NpzFile):
            with file:
                return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as problem:
        raise ValueError(
            f"{path} is not a readable .npz file of plain arrays ({problem})"
        ) from problem
    raise ValueError(
        f"{path} is one array, an .npy file by its content: save inputs and labels with np.savez"
    )


def _pair(arrays: Mapping[str, NDArray[np.generic]], part: str) -> Arrays | None:
    for x, y in PAIRS:
        for form in ("{part}_{name}", "{name}_{part}") if part else ("{name}",):
            names = [form.format(part=part, name=name) for name in (x, y)]
            if all(name in arrays for name in names):
                return arrays[names[0]], arrays[names[1]]
    return None


def read_idx_folder(folder: Path, declared: tuple[str, ...] | None) -> ParsedSource:
    """Read a folder like that of MNIST.

    It has train-images-idx3-ubyte and train-labels-idx1-ubyte, and t10k- or test- for a test part.
    """
    train = _idx(folder, "train")
    if train is None:
        raise ValueError(f"{folder}: no file *train-images*idx3-ubyte[.gz]")
    test = _idx(folder, "t10k") or _idx(folder, "test")
    return read_arrays(train, test, str(folder), declared, None, [])


def _idx(folder: Path, part: str) -> Arrays | None:
    images = sorted(folder.glob(f"*{part}-images*idx3*"))
    labels = sorted(folder.glob(f"*{part}-labels*idx1*"))
    if not images:
        return None
    for files, content in ((images, "images"), (labels, "labels")):
        if len(files) != 1:
            names = preview([file.name for file in files]) if files else "none"
            raise ValueError(f"{folder}: one file *{part}-{content}*idx* is needed, found {names}")
    return read_idx(images[0], 3), read_idx(labels[0], 1)


def read_arrays(
    train: Arrays,
    test: Arrays | None,
    where: str,
    declared: tuple[str, ...] | None,
    limits: Limits | None,
    remarks: list[str],
) -> ParsedSource:
    """Arrays as records.

    Inputs are images [N, H, W], [N, H, W, C] or [N, C, H, W], or flat features [N, F]. Labels are
    0, 1, 2, ...
    """
    given = [part for part in (train, test) if part is not None]
    for x, _ in given:
        _check_numbers(x, where)
    labels = [_labels(y, len(x), where) for x, y in given]
    names = declared
    if names is None:
        names = _count_classes(labels, where)
        remark = f"{len(names)} classes: read from the largest label, and treated as public; "
        remarks = [*remarks, f"{remark}--classes declares them"]
    parts = [
        _array_records(x, y, len(names), where, limits)
        for (x, _), y in zip(given, labels, strict=True)
    ]
    shape = tuple(parts[0].x.shape[1:])
    if any(tuple(part.x.shape[1:]) != shape for part in parts):
        raise ValueError(
            f"{where}: training inputs have shape {shape}, test inputs "
            f"{tuple(parts[1].x.shape[1:])}: they must agree"
        )
    flat = len(shape) == 1
    return ParsedSource(
        "tabular" if flat else "images",
        names,
        parts[0],
        parts[1] if len(parts) > 1 else None,
        Tabular(shape[0], std=3**-0.5) if flat else image_probe(shape, len(names)),
        (*remarks, f"the shape {shape} is treated as public"),
    )


def _count_classes(labels: list[NDArray[np.int64]], where: str) -> tuple[str, ...]:
    """Numbers for names, up to the largest label."""
    classes = 1 + max(int(part.max(initial=0)) for part in labels)
    if classes > MOST_CLASSES:
        raise ValueError(
            f"{where}: a label is {classes - 1}: classes are numbered 0, 1, 2, ... without gaps: "
            "renumber them, or declare them with --classes"
        )
    return tuple(map(str, range(classes)))


def _array_records(
    x: NDArray[np.generic],
    y: NDArray[np.int64],
    classes: int,
    where: str,
    limits: Limits | None,
) -> Records:
    inputs = _inputs(x, where, limits)
    names = tuple(map(str, range(classes)))
    numbers = class_numbers([str(label) for label in y], names, [where] * len(y))
    digests = [
        content_digest(row.tobytes(), bytes(str(label), "ascii"))
        for row, label in zip(x, y, strict=True)
    ]
    return Records(inputs, numbers, digests)


def _labels(y: NDArray[np.generic], records: int, where: str) -> NDArray[np.int64]:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"{where}: labels of type {y.dtype} and shape {y.shape}: give one whole number, 0, 1, "
            "2, ..., per record"
        )
    if len(y) != records:
        raise ValueError(f"{where}: {records} inputs, but {len(y)} labels")
    for label in (int(y.min(initial=0)), int(y.max(initial=0))):
        if not 0 <= label < 2**63:
            raise ValueError(f"{where}: a label is {label}: classes are numbered 0, 1, 2, ...")
    return y.astype(np.int64)


def _check_numbers(x: NDArray[np.generic], where: str) -> None:
    if x.dtype.kind not in REAL_NUMBERS or not x.ndim:
        raise ValueError(
            f"{where}: inputs of type {x.dtype} and shape {x.shape}: give real numbers, one row or "
            "image per record"
        )


def _inputs(x: NDArray[np.generic], where: str, limits: Limits | None) -> Tensor:
    """Images in [0, 1] with the channels first, or flat features in [-1, 1]."""
    low, high = _format_limits(x, where) if limits is None else limits
    values = torch.from_numpy(x.astype(np.float32))
    values = (
        values.nan_to_num_((low + high) / 2, high, low).clamp_(low, high).sub_(low).div_(high - low)
    )
    if values.dim() == 2:
        return values.mul_(2).sub_(1)
    if values.dim() == 3:
        values = values.unsqueeze(1)
    elif values.dim() == 4 and values.shape[3] in CHANNELS:
        values = values.permute(0, 3, 1, 2).contiguous()
    if values.dim() != 4 or values.shape[1] not in CHANNELS or min(values.shape[2:]) < 2:
        raise ValueError(
            f"{where}: inputs of shape {tuple(x.shape)}: give images [N, H, W], [N, H, W, C] or "
            "[N, C, H, W] with 1, 3 or 4 channels, or flat features [N, F]"
        )
    return values


def _format_limits(x: NDArray[np.generic], where: str) -> Limits:
    """The range of a format of bounded numbers."""
    if x.dtype == np.bool_:
        return 0.0, 1.0
    if x.dtype in (np.uint8, np.uint16):
        return 0.0, float(np.iinfo(x.dtype).max)  # type: ignore[type-var]
    raise ValueError(
        f"{where}: inputs of type {x.dtype} have no range of their own, and reading it from the "
        "records would not be private: declare it, as in --range 0,1"
    )


def read_image_folders(
    parts: dict[str, dict[str, list[Path]]], names: tuple[str, ...], size: int, grey: bool
) -> ParsedSource:
    """Read the files of each class in "train" and perhaps "test", from `folders.class_folders`.

    Each image is resized on its own.
    """
    if size < 2:
        raise ValueError(f"size={size}: give at least 2 (pixels); 32 is usual")
    records = {part: _read_files(classes, names, size, grey) for part, classes in parts.items()}
    shape = (1 if grey else 3, size, size)
    colours = "grey" if grey else "RGB"
    remark = f"every image is resized to {size} x {size}, {colours}, on its own (--size, --grey)"
    return ParsedSource(
        "images",
        names,
        records["train"],
        records.get("test"),
        image_probe(shape, len(names)),
        (remark,),
    )


def _read_files(
    classes: dict[str, list[Path]], names: tuple[str, ...], size: int, grey: bool
) -> Records:
    return concatenate(
        Records(
            torch.stack([read_image(file, size, grey) for file in files]),
            class_numbers([label] * len(files), names, [str(file.parent) for file in files]),
            [content_digest(label.encode(), file.read_bytes()) for file in files],
        )
        for label, files in classes.items()
        if files
    )


def read_image(file: Path, size: int, grey: bool) -> Tensor:
    """An image file as [1, size, size] or [3, size, size] in [0, 1]."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("reading image files needs Pillow: pip install 'dpkfc[data]'") from None
    try:
        with Image.open(file) as image:
            return as_tensor(image, size, grey)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as problem:
        raise ValueError(
            f"{file} is not a readable image ({problem}): repair or remove it"
        ) from problem


def as_tensor(image: Any, size: int, grey: bool) -> Tensor:
    """A Pillow image as [1, size, size] or [3, size, size] in [0, 1]."""
    pixels = np.array(image.convert("L" if grey else "RGB").resize((size, size), BILINEAR))
    values = torch.from_numpy(pixels).float().div_(255)
    return values.unsqueeze(0) if grey else values.permute(2, 0, 1).contiguous()
