"""A folder with one subfolder per class; or two of them, in `train` and in `test` or `val`."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.readers.records import preview

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
Parts = dict[str, dict[str, list[Path]]]  # files by part and class


def part_folders(folder: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The folders of "train" and perhaps "test", and remarks about validation folders.

    A folder named train beside others that are no parts is a class: there are pictures of trains.
    """
    candidates: dict[str, list[Path]] = {}
    subfolders = _subfolders(folder)
    for entry in subfolders:
        if part := SPELLINGS.get(entry.name.lower()):
            candidates.setdefault(part, []).append(entry)
    others = len(subfolders) - sum(map(len, candidates.values()))
    if not candidates or (others and ("train" not in candidates or len(candidates) == 1)):
        return {"train": folder}, ()
    for part, entries in candidates.items():
        if len(entries) > 1:
            names = preview([entry.name for entry in entries])
            raise ValueError(
                f"{folder}: which is the {part} part, {names}? Rename or remove the others"
            )
    paths = {part: entries[0] for part, entries in candidates.items()}
    if "train" not in paths:
        names = preview([path.name for path in paths.values()])
        raise ValueError(
            f"{folder} has {names}, but no train: add train/, with one subfolder per class"
        )
    if len(paths) == 1:
        raise ValueError(
            f"{folder} holds only {paths['train'].name}/: give {paths['train']}, of which a share "
            "is then kept for the test, or add test/"
        )
    if "test" in paths:
        unused = (f"{paths['validation'].name}/ is not used",) if "validation" in paths else ()
        return {part: paths[part] for part in ("train", "test")}, unused
    remark = f"{paths['validation'].name}/ is taken as the test part"
    return {"train": paths["train"], "test": paths["validation"]}, (remark,)


def class_folders(folder: Path) -> tuple[Parts, bool, tuple[str, ...]]:
    """Find the files of each class.

    Returns:
        The files by part and class, whether they are texts rather than images, and remarks.
    """
    paths, remarks = part_folders(folder)
    parts = {part: _classes(path) for part, path in paths.items()}
    every = [file for classes in parts.values() for files in classes.values() for file in files]
    images = sum(file.suffix.lower() in IMAGES for file in every)
    texts = sum(file.suffix.lower() in TEXTS for file in every)
    if not images and not texts:
        raise ValueError(
            f"{folder} holds no data of a known kind: it needs one subfolder per class, with "
            "images or .txt files, or idx files such as train-images-idx3-ubyte"
        )
    if images and texts:
        raise ValueError(
            f"{folder} holds {images} images and {texts} .txt files: keep one kind of them"
        )
    kind = TEXTS if texts else IMAGES
    chosen = {
        part: {
            name: [file for file in files if file.suffix.lower() in kind]
            for name, files in classes.items()
        }
        for part, classes in parts.items()
    }
    return chosen, bool(texts), remarks


def class_list(parts: Parts, declared: tuple[str, ...] | None, folder: Path) -> tuple[str, ...]:
    """The declared classes, or the names of the subfolders."""
    names = sorted({name for classes in parts.values() for name, files in classes.items() if files})
    if declared is None:
        return tuple(names)
    if unknown := [name for name in names if name not in declared]:
        raise ValueError(
            f"{folder}: the subfolders {preview(unknown)} are not among the classes "
            f"{preview(declared)}"
        )
    return declared


def _classes(folder: Path) -> dict[str, list[Path]]:
    return {
        entry.name: sorted(file for file in entry.rglob("*") if file.is_file())
        for entry in _subfolders(folder)
    }


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
