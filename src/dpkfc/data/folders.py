"""A folder with one subfolder for each class; perhaps twice, in `train` and `test`."""

from __future__ import annotations

from pathlib import Path

from dpkfc.data.records import some
from dpkfc.errors import PrivacyError

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
TEXTS = frozenset({".txt"})
Parts = dict[str, dict[str, list[Path]]]  # part, class, files


def class_folders(folder: Path) -> tuple[Parts, bool]:
    """The files of each class in "train" and, if there is one, "test"; and whether they are texts, not images."""
    inside = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    parts = {"train": folder / "train", "test": folder / "test"} if {"train", "test"} <= inside else {"train": folder}
    files = {part: _classes(path) for part, path in parts.items()}
    every = [file for classes in files.values() for found in classes.values() for file in found]
    images, texts = (sum(file.suffix.lower() in kind for file in every) for kind in (IMAGES, TEXTS))
    if not images and not texts:
        raise PrivacyError(
            f"{folder} holds no data that is known here: it needs a subfolder for each class, with images or .txt "
            "files, or idx files such as train-images-idx3-ubyte"
        )
    if images and texts:
        raise PrivacyError(f"{folder} holds {images} images and {texts} .txt files: keep one kind of them")
    kind = TEXTS if texts else IMAGES
    chosen = {
        part: {name: [f for f in found if f.suffix.lower() in kind] for name, found in classes.items()}
        for part, classes in files.items()
    }
    return chosen, bool(texts)


def class_list(parts: Parts, declared: tuple[str, ...] | None, folder: Path) -> tuple[str, ...]:
    """The declared classes, or the names of the subfolders."""
    found = sorted({name for classes in parts.values() for name, files in classes.items() if files})
    if declared is not None and (unknown := [name for name in found if name not in declared]):
        raise PrivacyError(f"{folder}: the subfolders {some(unknown)} are not among the classes {some(declared)}")
    return tuple(found) if declared is None else declared


def _classes(folder: Path) -> dict[str, list[Path]]:
    names = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return {entry.name: sorted(file for file in entry.rglob("*") if file.is_file()) for entry in names}
