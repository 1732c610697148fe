"""Saved Hugging Face data sets: images, texts and tables, with and without a test part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkfc.app.readers.sources import load
from dpkfc.app.readers.texts import hashed

datasets = pytest.importorskip("datasets")
LABEL = datasets.ClassLabel(names=["well", "ill"])


def saved(
    folder: Path, train: dict[str, Any], test: dict[str, Any] | None, features: dict[str, Any]
) -> Path:
    made = datasets.Dataset.from_dict(train, features=datasets.Features(features))
    if test is not None:
        other = datasets.Dataset.from_dict(test, features=datasets.Features(features))
        made = datasets.DatasetDict({"train": made, "test": other})
    made.save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("grey", [False, True])
def test_images(tmp_path: Path, grey: bool) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
    columns = {"picture": [Image.fromarray(x) for x in pixels], "label": [0, 1, 1, 0, 1]}
    path = saved(tmp_path, columns, columns, {"picture": datasets.Image(), "label": LABEL})
    found = load(path, size=6, grey=grey)
    x, y = found.train.tensors
    assert (
        found.names == ("well", "ill") and y.tolist() == [0, 1, 1, 0, 1] and found.kind == "images"
    )
    assert found.test is not None and found.test.tensors[0].equal(x), "the test part is its own"
    if grey:
        want = pixels @ np.array([0.299, 0.587, 0.114]) / 255
        torch.testing.assert_close(x[:, 0], torch.from_numpy(want).float(), rtol=0, atol=1 / 255)
    else:
        assert x.equal(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)


def test_texts_are_hashed_and_split_by_their_content(tmp_path: Path) -> None:
    texts = [f"patient {place} says no" for place in range(40)]
    columns = {"said": texts, "label": [place % 2 for place in range(40)]}
    path = saved(tmp_path, columns, None, {"said": datasets.Value("string"), "label": LABEL})
    found = load(path, text="said", features=4096)
    assert found.test is not None and len(found.train) + len(found.test) == 40
    rows = {tuple(row.tolist()): place % 2 for place, row in enumerate(hashed(texts, 4096))}
    for part in (found.train, found.test):
        assert all(rows[tuple(x.tolist())] == int(y) for x, y in zip(*part.tensors, strict=True))


def test_a_table_by_its_schema(tmp_path: Path) -> None:
    columns = {
        "age": [0.0, 120.0, None, 60.0],
        "sex": ["f", "m", "f", "x"],
        "state": ["a", "b", "a", "b"],
    }
    kinds = {
        "age": datasets.Value("float64"),
        "sex": datasets.Value("string"),
        "state": datasets.Value("string"),
    }
    path = saved(tmp_path, columns, None, kinds)
    schema = {"age": [0, 120], "sex": ["f", "m"], "state": ["a", "b"]}
    found = load(path, target="state", schema=schema, test=0)
    assert found.train.tensors[0].tolist() == [[-1, 1, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert found.train.tensors[1].tolist() == [0, 1, 0, 1]
    declared = load(path, target="state", schema={"age": [0, 120]}, classes=("b", "a"), test=0)
    assert declared.train.tensors[1].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "which columns shall be learned from\\? Give --text COLUMN or --schema FILE; "
            "it has said, label",
        ),
        ({"target": "none"}, "has no column 'none' \\(the target\\): it has said, label"),
        ({"text": "none"}, "no column 'none' \\(the text\\)"),
        (
            {"text": "said", "classes": ("yes", "no")},
            "saved \\(train\\), row 1: the class 'well' is not one of",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = saved(
        tmp_path,
        {"said": ["no"], "label": [0]},
        None,
        {"said": datasets.Value("string"), "label": LABEL},
    )
    with pytest.raises(ValueError, match=message):
        load(path, **options)


def test_which_column_is_the_class_must_be_said(tmp_path: Path) -> None:
    columns = {"said": ["no"], "one": [0], "two": [1]}
    path = saved(
        tmp_path, columns, None, {"said": datasets.Value("string"), "one": LABEL, "two": LABEL}
    )
    with pytest.raises(
        ValueError, match="which column is the class\\? Give --target; it has said, one, two"
    ):
        load(path, text="said")


def test_by_name_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = datasets.DatasetDict({"validation": datasets.Dataset.from_dict({"said": ["a"]})})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or made)
    with pytest.raises(ValueError, match="hf:glue:sst2 has no part 'train': it has validation"):
        load("hf:glue:sst2")
    assert asked == [("glue", "sst2")]
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded as a Hugging Face data set"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load("hf:imdb")
