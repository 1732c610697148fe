"""A folder with one subfolder for each class; perhaps twice, in `train` and in `test` or `val`."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.readers.records import some
from dpkfc.errors import PrivacyError

IMAGES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
)
TEXTS = frozenset({".txt"})
SPELLINGS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
Parts = dict[str, dict[str, list[Path]]]  # part, class, files


def part_folders(folder: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Where "train" and perhaps "test" are, and a remark if the test part goes by the name of validation.

    A folder named train among others that are no parts is a class: there are pictures of trains.
    """
    found: dict[str, list[Path]] = {}
    inside = _subfolders(folder)
    for entry in inside:
        if part := SPELLINGS.get(entry.name.lower()):
            found.setdefault(part, []).append(entry)
    others = len(inside) - sum(map(len, found.values()))
    if not found or (others and ("train" not in found or len(found) == 1)):
        return {"train": folder}, ()
    for part, entries in found.items():
        if len(entries) > 1:
            names = some([entry.name for entry in entries])
            raise PrivacyError(
                f"{folder}: which is the {part} part, {names}? Rename or remove what is not"
            )
    paths = {part: entries[0] for part, entries in found.items()}
    if "train" not in paths:
        names = some([path.name for path in paths.values()])
        raise PrivacyError(
            f"{folder} has {names}, but no train: add train/, with a subfolder for each class"
        )
    if len(paths) == 1:
        raise PrivacyError(
            f"{folder} holds {paths['train'].name}/ alone: give {paths['train']}, of which a share is then kept for "
            "the test, or add test/"
        )
    if "test" in paths:
        unused = (f"{paths['validation'].name}/ is not used",) if "validation" in paths else ()
        return {part: paths[part] for part in ("train", "test")}, unused
    name = paths["validation"].name
    return {"train": paths["train"], "test": paths["validation"]}, (
        f"{name}/ is taken as the test part",
    )


def class_folders(folder: Path) -> tuple[Parts, bool, tuple[str, ...]]:
    """The files of each class in "train" and perhaps "test", whether they are texts, not images, and remarks."""
    paths, remarks = part_folders(folder)
    files = {part: _classes(path) for part, path in paths.items()}
    every = [file for classes in files.values() for found in classes.values() for file in found]
    images, texts = (sum(file.suffix.lower() in kind for file in every) for kind in (IMAGES, TEXTS))
    if not images and not texts:
        raise PrivacyError(
            f"{folder} holds no data that is known here: it needs a subfolder for each class, with images or .txt "
            "files, or idx files such as train-images-idx3-ubyte"
        )
    if images and texts:
        raise PrivacyError(
            f"{folder} holds {images} images and {texts} .txt files: keep one kind of them"
        )
    kind = TEXTS if texts else IMAGES
    chosen = {
        part: {
            name: [f for f in found if f.suffix.lower() in kind] for name, found in classes.items()
        }
        for part, classes in files.items()
    }
    return chosen, bool(texts), remarks


def class_list(parts: Parts, declared: tuple[str, ...] | None, folder: Path) -> tuple[str, ...]:
    """The declared classes, or the names of the subfolders."""
    found = sorted({name for classes in parts.values() for name, files in classes.items() if files})
    if declared is not None and (unknown := [name for name in found if name not in declared]):
        raise PrivacyError(
            f"{folder}: the subfolders {some(unknown)} are not among the classes {some(declared)}"
        )
    return tuple(found) if declared is None else declared


def _classes(folder: Path) -> dict[str, list[Path]]:
    return {
        entry.name: sorted(file for file in entry.rglob("*") if file.is_file())
        for entry in _subfolders(folder)
    }


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
