"""Class folders: the spellings of the parts, and the refusal of ambiguous folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkfc.app.readers.folders import part_folders
from dpkfc.app.readers.sources import load


def letters(
    folder: Path, *parts: str, classes: tuple[str, ...] = ("sad", "glad"), count: int = 3
) -> None:
    for part in parts:
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                (folder / part / name / f"{number}.txt").write_text(f"{name} {part} {number}")


@pytest.mark.parametrize(
    ("parts", "train", "test", "remark"),
    [
        (("train", "test"), "train", "test", None),
        (("Train", "TEST"), "Train", "TEST", None),
        (("training", "testing"), "training", "testing", None),
        (("train", "val"), "train", "val", "val/ is taken as the test part"),
        (("train", "Valid"), "train", "Valid", "Valid/ is taken as the test part"),
        (("train", "validation", "test"), "train", "test", "validation/ is not used"),
    ],
)
def test_parts_however_they_are_spelt(
    tmp_path: Path, parts: tuple[str, ...], train: str, test: str, remark: str | None
) -> None:
    letters(tmp_path, *parts)
    (tmp_path / ".cache").mkdir()
    assert part_folders(tmp_path)[0] == {"train": tmp_path / train, "test": tmp_path / test}
    found = load(tmp_path, features=16)
    assert (
        found.names == ("glad", "sad")
        and len(found.train) == 6
        and found.test is not None
        and len(found.test) == 6
    )
    assert remark is None or remark in found.remarks


@pytest.mark.parametrize("classes", [("car", "train"), ("exam", "test"), ("val", "vol")])
def test_a_class_may_be_called_train(tmp_path: Path, classes: tuple[str, ...]) -> None:
    letters(tmp_path, ".", classes=classes)
    assert load(tmp_path, test=0, features=16).names == classes


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("train",), "holds only train/: give .*train, of which a share"),
        (("test", "val"), "but no train: add train/"),
        (("train", "val", "valid"), "which is the validation part, 'val', 'valid'"),
        (("train", "Training", "test"), "which is the train part"),
    ],
)
def test_parts_that_are_not_clear(tmp_path: Path, parts: tuple[str, ...], message: str) -> None:
    letters(tmp_path, *parts)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
