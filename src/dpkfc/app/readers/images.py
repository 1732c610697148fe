"""Images, and other arrays, scaled by the range of their format: never by a statistic of the records."""

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
from dpkfc.app.readers.records import Read, Records, joined, mark, numbered, some
from dpkfc.errors import PrivacyError
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.tabular import Tabular

CHANNELS = (1, 3, 4)
NUMBERS = (
    "buif"  # kinds of arrays: truth values, whole numbers with and without a sign, floating point
)
MOST_CLASSES = 100_000  # that have numbers for names
SIZE = 32
PAIRS = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "target"))
Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
Limits = tuple[float, float]


def image_probe(shape: tuple[int, ...], classes: int) -> PinkNoise:
    """Pink noise for pixels in [0, 1]; the channels of photographs are alike."""
    alike = 0.9 if shape[0] == 3 else 0.0
    return PinkNoise(shape, classes, std=0.3, mean=0.3, limits=(0, 1), channel_correlation=alike)


def read_npz(path: Path, declared: tuple[str, ...] | None, limits: Limits | None) -> Read:
    """Arrays named images and labels, or x and y; with train_ and test_ before them, or _train and _test behind."""
    arrays = _arrays(path)
    train, test = _pair(arrays, "train") or _pair(arrays, ""), _pair(arrays, "test")
    if train is None:
        raise PrivacyError(
            f"{path} holds {some(list(arrays))}: name the arrays images and labels, or x and y (train_images, "
            "train_labels, test_images, ... for a test part)"
        )
    remarks = [f"{path.name}: the validation part is not used"] if _pair(arrays, "val") else []
    return read_arrays(train, test, str(path), declared, limits, remarks)


def read_npz_inputs(path: Path, limits: Limits | None) -> Tensor:
    """The inputs alone: the array named images, x, X or data, or the only one there is."""
    arrays = _arrays(path)
    found = [arrays[name] for name, _ in PAIRS if name in arrays] or list(arrays.values())[
        : len(arrays) == 1
    ]
    if not found:
        raise PrivacyError(
            f"{path} holds {some(list(arrays))}: name the array of inputs images or x"
        )
    _check_numbers(found[0], str(path))
    return _inputs(found[0], str(path), limits)


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise PrivacyError(
                f"{path} is one array, an .npy file by its content: save inputs and labels with np.savez"
            )
        with file:
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as problem:
        raise PrivacyError(
            f"{path} is not a readable .npz file of plain arrays ({problem})"
        ) from problem


def _pair(arrays: Mapping[str, NDArray[np.generic]], part: str) -> Arrays | None:
    for x, y in PAIRS:
        for form in ("{part}_{name}", "{name}_{part}") if part else ("{name}",):
            names = [form.format(part=part, name=name) for name in (x, y)]
            if all(name in arrays for name in names):
                return arrays[names[0]], arrays[names[1]]
    return None


def read_idx_folder(folder: Path, declared: tuple[str, ...] | None) -> Read:
    """As MNIST is published: train-images-idx3-ubyte, train-labels-idx1-ubyte, and t10k- or test- for a test part."""
    train = _idx(folder, "train")
    if train is None:
        raise PrivacyError(f"{folder}: no file *train-images*idx3-ubyte[.gz]")
    return read_arrays(
        train, _idx(folder, "t10k") or _idx(folder, "test"), str(folder), declared, None, []
    )


def _idx(folder: Path, part: str) -> Arrays | None:
    files = [
        sorted(folder.glob(f"*{part}-{what}*idx{d}*")) for what, d in (("images", 3), ("labels", 1))
    ]
    if not files[0]:
        return None
    for found, what in zip(files, ("images", "labels"), strict=True):
        if len(found) != 1:
            names = some([file.name for file in found]) if found else "none"
            raise PrivacyError(f"{folder}: one file *{part}-{what}*idx* is needed, found {names}")
    try:
        return read_idx(files[0][0], 3), read_idx(files[1][0], 1)
    except ValueError as problem:
        raise PrivacyError(str(problem)) from problem


def read_arrays(
    train: Arrays,
    test: Arrays | None,
    where: str,
    declared: tuple[str, ...] | None,
    limits: Limits | None,
    remarks: list[str],
) -> Read:
    """Images [N, H, W], [N, H, W, C] or [N, C, H, W], or flat features [N, F]; labels 0, 1, 2, ..."""
    given = [part for part in (train, test) if part is not None]
    for x, _ in given:
        _check_numbers(x, where)
    labels = [_labels(y, len(x), where) for x, y in given]
    if declared is None:
        classes = 1 + max(int(part.max(initial=0)) for part in labels)
        if classes > MOST_CLASSES:
            raise PrivacyError(
                f"{where}: a label is {classes - 1}: classes are numbered 0, 1, 2, ... without gaps: renumber them, or "
                "declare them with --classes"
            )
        names = tuple(map(str, range(classes)))
        remarks = [
            *remarks,
            f"{classes} classes: read off the largest label, and taken as public; --classes declares",
        ]
    else:
        names = declared
    parts = []
    for (x, _), y in zip(given, labels, strict=True):
        inputs = _inputs(x, where, limits)
        numbers = numbered(
            [str(label) for label in y], tuple(map(str, range(len(names)))), [where] * len(y)
        )
        marks = [
            mark(row.tobytes(), bytes(str(label), "ascii")) for row, label in zip(x, y, strict=True)
        ]
        parts.append(Records(inputs, numbers, marks))
    shape = tuple(parts[0].x.shape[1:])
    if any(tuple(part.x.shape[1:]) != shape for part in parts):
        raise PrivacyError(
            f"{where}: training inputs have shape {shape}, test inputs {tuple(parts[1].x.shape[1:])}: they must agree"
        )
    flat = len(shape) == 1
    probe = Tabular(shape[0], std=3**-0.5) if flat else image_probe(shape, len(names))
    remarks = [*remarks, f"the shape {shape} is taken as public"]
    rest = parts[1] if len(parts) > 1 else None
    return Read("tabular" if flat else "images", names, parts[0], rest, probe, tuple(remarks))


def _labels(y: NDArray[np.generic], records: int, where: str) -> NDArray[np.int64]:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise PrivacyError(
            f"{where}: labels of type {y.dtype} and shape {y.shape}: give one whole number, 0, 1, 2, ..., a record"
        )
    if len(y) != records:
        raise PrivacyError(f"{where}: {records} inputs, but {len(y)} labels")
    for label in (int(y.min(initial=0)), int(y.max(initial=0))):
        if not 0 <= label < 2**63:
            raise PrivacyError(f"{where}: a label is {label}: classes are numbered 0, 1, 2, ...")
    return y.astype(np.int64)


def _check_numbers(x: NDArray[np.generic], where: str) -> None:
    if x.dtype.kind not in NUMBERS or not x.ndim:
        raise PrivacyError(
            f"{where}: inputs of type {x.dtype} and shape {x.shape}: give real numbers, one row or image a record"
        )


def _inputs(x: NDArray[np.generic], where: str, limits: Limits | None) -> Tensor:
    if limits is None:
        if x.dtype not in (np.uint8, np.uint16, np.bool_):
            raise PrivacyError(
                f"{where}: inputs of type {x.dtype} have no range of their own, and the records must not tell: declare "
                "it, as in --range 0,1"
            )
        limits = (0.0, 1.0 if x.dtype == np.bool_ else float(np.iinfo(x.dtype).max))  # type: ignore[type-var]
    low, high = limits
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
        raise PrivacyError(
            f"{where}: inputs of shape {tuple(x.shape)}: give images [N, H, W], [N, H, W, C] or [N, C, H, W] with 1, 3 "
            "or 4 channels, or flat features [N, F]"
        )
    return values


def read_image_folders(
    parts: dict[str, dict[str, list[Path]]], names: tuple[str, ...], size: int, grey: bool
) -> Read:
    """Files of each class, for "train" and perhaps "test": see `data.folders`. Each is resized on its own."""
    if size < 2:
        raise PrivacyError(f"size={size}: images of at least 2 x 2 pixels, 32 as a rule")
    found = {part: _read_files(classes, names, size, grey) for part, classes in parts.items()}
    shape = (1 if grey else 3, size, size)
    remark = f"every image is brought to {size} x {size}, {'grey' if grey else 'RGB'}, on its own (--size, --grey)"
    return Read(
        "images",
        names,
        found["train"],
        found.get("test"),
        image_probe(shape, len(names)),
        (remark,),
    )


def _read_files(
    classes: dict[str, list[Path]], names: tuple[str, ...], size: int, grey: bool
) -> Records:
    return joined(
        Records(
            torch.stack([read_image(file, size, grey) for file in files]),
            numbered([label] * len(files), names, [str(file.parent) for file in files]),
            [mark(label.encode(), file.read_bytes()) for file in files],
        )
        for label, files in classes.items()
        if files
    )


def read_image(file: Path, size: int, grey: bool) -> Tensor:
    """An image file, brought to this size."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise PrivacyError("reading image files needs Pillow: pip install 'dpkfc[data]'") from None
    try:
        with Image.open(file) as image:
            return as_tensor(image, size, grey)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as problem:
        raise PrivacyError(
            f"{file} is not a readable image ({problem}): mend or remove it"
        ) from problem


def as_tensor(image: Any, size: int, grey: bool) -> Tensor:
    """An image of Pillow as [1, size, size] or [3, size, size] in [0, 1]."""
    pixels = np.array(image.convert("L" if grey else "RGB").resize((size, size), 2))  # 2: bilinear
    values = torch.from_numpy(pixels).float().div_(255)
    return values.unsqueeze(0) if grey else values.permute(2, 0, 1).contiguous()
