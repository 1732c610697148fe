"""Data sets of Hugging Face: a folder that `save_to_disk` wrote, or hf:NAME (hf:NAME:CONFIGURATION) by its name.

A column of images makes a data set of images, `--text` one of texts; anything else is a table, read by its schema. The
classes are the names of the label feature, which the data set publishes, unless they are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dpkfc.app.readers.images import as_tensor, image_probe
from dpkfc.app.readers.records import Read, Records, distinct, mark, numbered
from dpkfc.app.readers.tables import (
    Schema,
    from_columns,
    read_tabular,
    read_text_column,
    target_classes,
)
from dpkfc.app.readers.texts import Encoding
from dpkfc.errors import PrivacyError

PREFIX = "hf:"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def read_hugging_face(
    source: str,
    *,
    target: str | None,
    text: str | None,
    schema: Schema,
    declared: tuple[str, ...] | None,
    encoding: Callable[[], Encoding],
    size: int,
    grey: bool,
    indicators: bool,
) -> Read:
    parts = _open(source)
    features = parts["train"].features
    target = target or _only(features, "ClassLabel", source, "the class", "--target")
    if target not in features:
        raise PrivacyError(
            f"{source} has no column {target!r} (the target): it has {', '.join(features)}"
        )
    published = getattr(features[target], "names", None)
    names = declared or (
        distinct(published, source) if published else target_classes(schema, target)
    )
    pictures = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if pictures and text is None and not schema:
        image = _only(features, "Image", source, "the image", "a data set with one")
        found = {
            part: _images(rows, image, target, names, size, grey, source)
            for part, rows in parts.items()
        }
        shape = (1 if grey else 3, size, size)
        return Read(
            "images", names, found["train"], found.get("test"), image_probe(shape, len(names))
        )
    if text is None and not schema:
        raise PrivacyError(
            f"{source}: what is there to learn from? Give --text COLUMN or --schema FILE; it has {', '.join(features)}"
        )
    read = {}
    for part, rows in parts.items():
        columns = {name: rows[name] for name in features if name not in pictures}
        columns[target] = [_label(value, published) for value in columns[target]]
        table = from_columns(columns, Path(f"{source} ({part})"))
        read[part] = (
            read_tabular(table, target, schema, names, indicators)
            if text is None
            else read_text_column(table, text, target, names, encoding())
        )
    train, test = read["train"], read.get("test")
    return Read(
        train.kind, names, train.train, test.train if test else None, train.probe, train.remarks
    )


def _open(source: str) -> dict[str, Any]:
    """The parts "train" and, if there is one, "test"."""
    try:
        import datasets
    except ImportError:
        raise PrivacyError(
            f"{source}: data sets of Hugging Face need datasets: pip install datasets"
        ) from None
    try:
        if source.startswith(PREFIX):
            name, _, configuration = source.removeprefix(PREFIX).partition(":")
            found = datasets.load_dataset(name, configuration or None)
        else:
            found = datasets.load_from_disk(source)
    except Exception as problem:  # whatever its builders, readers and the network come up with
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise PrivacyError(
            f"{source} cannot be loaded as a data set of Hugging Face: {first}"
        ) from problem
    if not isinstance(found, Mapping):
        return {"train": found}
    if "train" not in found:
        raise PrivacyError(f"{source} has no part 'train': it has {', '.join(found)}")
    return {part: found[part] for part in ("train", "test") if part in found}


def _only(features: Mapping[str, Any], kind: str, source: str, role: str, option: str) -> str:
    found = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(found) != 1:
        raise PrivacyError(
            f"{source}: which column is {role}? Give {option}; it has {', '.join(features)}"
        )
    return found[0]


def _label(value: Any, published: list[str] | None) -> Any:
    return (
        published[value]
        if published and isinstance(value, int) and 0 <= value < len(published)
        else value
    )


def _images(
    rows: Any, image: str, target: str, names: tuple[str, ...], size: int, grey: bool, source: str
) -> Records:
    published = getattr(rows.features[target], "names", None)
    pixels, labels = [], []
    for row in rows:
        pixels.append(as_tensor(row[image], size, grey))
        labels.append(str(_label(row[target], published)))
    where = [f"{source}, row {place}" for place in range(1, len(labels) + 1)]
    marks = [
        mark(label.encode(), x.numpy().tobytes()) for label, x in zip(labels, pixels, strict=True)
    ]
    return Records(torch.stack(pixels), numbered(labels, names, where), marks)
