"""Hugging Face data sets: a folder of `save_to_disk`, or hf:NAME (hf:NAME:CONFIGURATION).

With a column of images it is a data set of images, with `--text` one of texts; anything else is a
table, read by its schema. The classes are the names of the label feature, which the data set
publishes, unless they are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dpkfc.app.readers.images import as_tensor, image_probe
from dpkfc.app.readers.records import (
    ParsedSource,
    Records,
    check_distinct,
    class_numbers,
    content_digest,
)
from dpkfc.app.readers.tables import (
    Schema,
    from_columns,
    read_tabular,
    read_text_column,
    target_classes,
)
from dpkfc.app.readers.texts import Encoding
from dpkfc.app.suggestions import did_you_mean

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
) -> ParsedSource:
    """Read the parts "train" and, if there is one, "test". The arguments are those of `load`."""
    parts = _open(source)
    features = parts["train"].features
    target = target or _only_column(features, "ClassLabel", source, "the class", "--target")
    if target not in features:
        raise ValueError(
            f"{source} has no column {target!r} (the target){did_you_mean(target, features)}: it "
            f"has {', '.join(features)}"
        )
    published = getattr(features[target], "names", None)
    names = declared or (
        check_distinct(published, source) if published else target_classes(schema, target)
    )
    pictures = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if pictures and text is None and not schema:
        image = _only_column(features, "Image", source, "the image", "a data set with one")
        records = {
            part: _read_images(rows, image, target, names, size, grey, source)
            for part, rows in parts.items()
        }
        probe = image_probe((1 if grey else 3, size, size), len(names))
        return ParsedSource("images", names, records["train"], records.get("test"), probe)
    if text is None and not schema:
        raise ValueError(
            f"{source}: which columns shall be learned from? Give --text COLUMN or --schema FILE; "
            f"it has {', '.join(features)}"
        )
    sources = {}
    for part, rows in parts.items():
        columns = {name: rows[name] for name in features if name not in pictures}
        columns[target] = [_label(value, published) for value in columns[target]]
        table = from_columns(columns, Path(f"{source} ({part})"))
        sources[part] = (
            read_tabular(table, target, schema, names, indicators)
            if text is None
            else read_text_column(table, text, target, names, encoding())
        )
    train = sources["train"]
    test = sources["test"].train if "test" in sources else None
    return ParsedSource(train.kind, names, train.train, test, train.probe, train.remarks)


def _open(source: str) -> dict[str, Any]:
    """The parts "train" and, if there is one, "test"."""
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{source}: Hugging Face data sets need datasets: pip install datasets"
        ) from None
    try:
        if source.startswith(PREFIX):
            name, _, configuration = source.removeprefix(PREFIX).partition(":")
            dataset = datasets.load_dataset(name, configuration or None)
        else:
            dataset = datasets.load_from_disk(source)
    except Exception as problem:  # its builders, its readers and the network raise anything
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(
            f"{source} cannot be loaded as a Hugging Face data set: {reason}"
        ) from problem
    if not isinstance(dataset, Mapping):
        return {"train": dataset}
    if "train" not in dataset:
        raise ValueError(f"{source} has no part 'train': it has {', '.join(dataset)}")
    return {part: dataset[part] for part in ("train", "test") if part in dataset}


def _only_column(
    features: Mapping[str, Any], kind: str, source: str, role: str, option: str
) -> str:
    """The only column of a kind."""
    names = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(names) != 1:
        raise ValueError(
            f"{source}: which column is {role}? Give {option}; it has {', '.join(features)}"
        )
    return names[0]


def _label(value: Any, published: list[str] | None) -> Any:
    """The published name of a class number, or the value itself."""
    if published and isinstance(value, int) and 0 <= value < len(published):
        return published[value]
    return value


def _read_images(
    rows: Any, image: str, target: str, names: tuple[str, ...], size: int, grey: bool, source: str
) -> Records:
    published = getattr(rows.features[target], "names", None)
    pixels, labels = [], []
    for row in rows:
        pixels.append(as_tensor(row[image], size, grey))
        labels.append(str(_label(row[target], published)))
    where = [f"{source}, row {number}" for number in range(1, len(labels) + 1)]
    digests = [
        content_digest(label.encode(), x.numpy().tobytes())
        for label, x in zip(labels, pixels, strict=True)
    ]
    return Records(torch.stack(pixels), class_numbers(labels, names, where), digests)
