"""Every kind of source is read without learning from the records; wrong files are refused."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpkfc.app.readers.records import Records, content_digest, split
from dpkfc.app.readers.schema_draft import suggest_schema
from dpkfc.app.readers.sources import load
from dpkfc.app.readers.texts import hashed
from dpkfc.probes.tabular import Tabular

SCHEMA: dict[str, Any] = {"age": [0, 100], "sex": ["f", "m"], "ill": ["no", "yes"]}
PEOPLE = "id,age,sex,ill\n1,50,f,no\n2,150,m,yes\n3,,x,no\n4,-7,,yes\n5,25,f,no\n"
RNG = np.random.default_rng(0)


def table(folder: Path, text: str = PEOPLE, name: str = "people.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_table_by_its_schema(tmp_path: Path) -> None:
    found = load(table(tmp_path), target="ill", schema=SCHEMA, test=0)
    expected = [[0, 1, 0], [1, 0, 1], [0, 0, 0], [-1, 0, 0], [-0.5, 1, 0]]
    assert found.train.tensors[0].tolist() == expected
    assert found.train.tensors[1].tolist() == [0, 1, 0, 1, 0]
    assert (found.kind, found.shape, found.classes, found.names) == (
        "tabular",
        (3,),
        2,
        ("no", "yes"),
    )
    assert found.test is None and any("'id'" in remark for remark in found.remarks)
    assert any("classes is treated as public" in remark for remark in found.remarks)


def test_missing_numbers_may_be_told_apart(tmp_path: Path) -> None:
    found = load(table(tmp_path), target="ill", schema=SCHEMA, test=0, indicators=True)
    assert found.train.tensors[0][:, 1].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators(tmp_path: Path, separator: str) -> None:
    path = table(tmp_path, PEOPLE.replace(",", separator), "people.tsv")
    assert len(load(path, target="ill", schema=SCHEMA, test=0).train) == 5


def test_test_records_of_another_file(tmp_path: Path) -> None:
    other = table(tmp_path, "ill,sex,age\nyes,f,100\n", "test.csv")
    found = load(table(tmp_path), target="ill", schema=SCHEMA, test=other)
    assert len(found.train) == 5 and found.test is not None
    assert found.test.tensors[0].tolist() == [[1, 1, 0]]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"age": [50, None, 25.5], "sex": ["f", "m", None], "ill": ["no", "yes", "no"]}
    parquet.write_table(arrow.table(columns), tmp_path / "people.parquet")
    found = load(tmp_path / "people.parquet", target="ill", schema=SCHEMA, test=0)
    assert found.train.tensors[0].tolist() == [
        [0, 1, 0],
        [0, 0, 1],
        [torch.tensor(-0.49).item(), 0, 0],
    ]


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'dpkfc\[data\]'"):
        load(table(tmp_path, name="people.parquet"), target="ill", schema=SCHEMA)


def test_text_of_a_column(tmp_path: Path) -> None:
    path = table(tmp_path, 'said,ill\n"Well, I am fine, fine",no\nI ache,yes\n,no\n')
    found = load(path, target="ill", text="said", classes=("no", "yes"), test=0, features=64)
    x, y = found.train.tensors
    assert found.kind == "text" and x.shape == (3, 64) and y.tolist() == [0, 1, 0]
    assert torch.allclose(
        x.norm(dim=1), torch.tensor([8.0, 8.0, 0.0])
    )  # √64: the mean square of a feature is 1
    assert isinstance(found.probe, Tabular) and found.probe.std == 1.0


def test_hashed_words_know_nothing_of_other_texts_and_use_both_signs() -> None:
    words = [f"word{number}" for number in range(200)]
    assert torch.equal(hashed(words)[7], hashed([words[7]])[0])
    assert 60 < int((hashed(words).sum(1) > 0).sum()) < 140


def test_text_folders(tmp_path: Path) -> None:
    for name in ("sad", "glad"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}")
    found = load(tmp_path, test=0)
    assert (found.kind, found.names, found.train.tensors[1].tolist()) == (
        "text",
        ("glad", "sad"),
        [0, 0, 0, 1, 1, 1],
    )


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("images", "labels"), (12, 6, 5), (1, 6, 5)),
        (("x", "y"), (12, 6, 5, 3), (3, 6, 5)),
        (("train_images", "train_labels", "test_images", "test_labels"), (12, 3, 6, 5), (3, 6, 5)),
        (("x_train", "y_train", "x_test", "y_test"), (12, 7), (7,)),
    ],
)
def test_arrays(
    tmp_path: Path, names: tuple[str, ...], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x, y = RNG.integers(0, 256, shape, dtype=np.uint8), (np.arange(12) % 3)[:, None]
    x.flat[0], x.flat[-1] = 0, 255
    np.savez(tmp_path / "a.npz", **dict(zip(names, (x, y, x[:4], y[:4]), strict=False)))
    found = load(tmp_path / "a.npz", test=0)
    assert (
        found.shape == expected
        and found.classes == 3
        and found.train.tensors[1].tolist() == [0, 1, 2] * 4
    )
    assert (found.test is None) == (len(names) == 2)
    least, most = (-1, 1) if len(expected) == 1 else (0, 1)
    assert (float(found.train.tensors[0].min()), float(found.train.tensors[0].max())) == (
        least,
        most,
    )
    assert any("--classes" in remark for remark in found.remarks)


def test_arrays_of_numbers_need_a_range(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[-1.0, 9.0], [np.nan, 2.0]]), y=np.array([0, 1]))
    with pytest.raises(ValueError, match="--range"):
        load(tmp_path / "a.npz")
    found = load(tmp_path / "a.npz", limits=(0, 4), test=0)
    assert found.train.tensors[0].tolist() == [[-1, 1], [0, 0]]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_a_folder_of_idx_files(tmp_path: Path) -> None:
    (tmp_path / "own-train-images-idx3-ubyte").write_bytes(
        idx(RNG.integers(0, 256, (6, 5, 4), dtype=np.uint8))
    )
    (tmp_path / "own-train-labels-idx1-ubyte").write_bytes(
        idx(np.array([0, 1, 2, 3, 0, 1], np.uint8))
    )
    found = load(tmp_path, test=0)
    assert found.shape == (1, 5, 4) and found.classes == 4 and len(found.train) == 6


@pytest.mark.parametrize("grey", [False, True])
def test_image_folders(tmp_path: Path, grey: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 3), ("test", 1)):
        for name, colour in (("cat", 0), ("dog", 255)):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (20 + number, 9), (colour,) * 3).save(
                    tmp_path / part / name / f"{number}.png"
                )
    found = load(tmp_path, size=8, grey=grey)
    assert found.shape == (1 if grey else 3, 8, 8) and found.names == ("cat", "dog")
    assert len(found.train) == 6 and found.test is not None and len(found.test) == 2
    assert [float(row.mean()) for row in found.train.tensors[0]] == [0, 0, 0, 1, 1, 1]
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"broken\.png is not a readable image"):
        load(tmp_path, size=8)


def test_a_data_set_by_its_name(tmp_path: Path) -> None:
    found = load("digits")
    assert (
        found.shape == (1, 8, 8)
        and found.classes == 10
        and found.test is not None
        and len(found.test) == 360
    )
    with pytest.raises(OSError, match="train-images-idx3-ubyte"):
        load("mnist", data_dir=tmp_path)


cells = st.one_of(
    st.sampled_from(["", "NA", "nan"]), st.integers(-50, 150).map(str), st.floats(0, 99).map(str)
)
rows = st.tuples(
    cells,
    st.sampled_from(["f", "m", "x", ""]),
    st.text("ab ", max_size=8),
    st.sampled_from(["no", "yes"]),
)


def features_of(
    folder: Path, people: list[tuple[str, ...]], text: bool, place: str
) -> list[tuple[object, ...]]:
    """The part, features and label of every record."""
    written = io.StringIO()
    csv.writer(written).writerows([("age", "sex", "said", "ill"), *people])
    path = table(folder, written.getvalue(), place)
    found = load(
        path, target="ill", schema=SCHEMA, text="said" if text else None, test=0.4, features=16
    )
    parts = [("train", found.train), ("test", found.test)]
    return [
        (name, y, tuple(x))
        for name, part in parts
        if part
        for x, y in zip(*(t.tolist() for t in part.tensors), strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(people=st.lists(rows, min_size=4, max_size=12), where=st.integers(0, 11), text=st.booleans())
def test_one_record_less_changes_nothing_for_the_others(
    tmp_path_factory: pytest.TempPathFactory, people: list[tuple[str, ...]], where: int, text: bool
) -> None:
    folder = tmp_path_factory.mktemp("neighbours")
    fewer = [person for place, person in enumerate(people) if place != where % len(people)]
    try:
        all_of_them, without = (
            features_of(folder, people, text, "all.csv"),
            features_of(folder, fewer, text, "few.csv"),
        )
    except ValueError:
        assume(False)  # all of so few are test records
    for one in without:
        all_of_them.remove(one)  # raises if its features, or the part it is in, have changed
    assert len(all_of_them) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 39))
def test_the_split_is_one_of_multisets(values: list[int], where: int) -> None:
    def parts(values: list[int]) -> tuple[list[int], list[int]]:
        x = torch.tensor(values)
        found = split(Records(x, x, [content_digest(bytes([value])) for value in values]), 0.5)
        return sorted(found[0].x.tolist()), sorted(found[1].x.tolist())

    whole = parts(values)
    fewer = parts([value for i, value in enumerate(values) if i != where % len(values)])
    lost = [len(a) - len(b) for a, b in zip(whole, fewer, strict=True)]
    assert sorted(lost) == [0, 1] and whole[lost.index(0)] == fewer[lost.index(0)]
    assert parts(values[::-1]) == whole


def test_the_split_has_the_size_that_was_asked_for() -> None:
    x = torch.arange(4000)
    train, test = split(Records(x, x, [content_digest(b"the same")] * 4000), 0.2)
    assert 700 < len(test) < 900 and len(train) + len(test) == 4000


def test_a_suggested_schema_can_be_used(tmp_path: Path) -> None:
    text = "id,age,sex,ill,same\n" + "".join(
        f"p{n},{17 + n},{'fm'[n % 2]},{n % 2},1\n" for n in range(60)
    )
    path = table(tmp_path, text)
    schema, left_out = suggest_schema(path, "ill")
    assert schema == {"age": [10, 80], "sex": ["f", "m"], "ill": ["0", "1"]} and left_out == [
        "id",
        "same",
    ]
    assert load(path, target="ill", schema=schema).shape == (3,)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (PEOPLE, {}, "Give --target; it has id, age, sex, ill"),
        (PEOPLE, {"target": "ill"}, "--suggest-schema"),
        (PEOPLE, {"target": "sick", "schema": {**SCHEMA, "sick": ["no"]}}, "no column 'sick'"),
        (PEOPLE, {"target": "ill", "schema": {"age": [0, 1]}}, "classes of 'ill' are not declared"),
        (PEOPLE, {"target": "ill", "schema": {**SCHEMA, "height": [0, 2]}}, "no column 'height'"),
        (PEOPLE, {"target": "ill", "schema": {"ill": ["no", "yes"]}}, "no column but the target"),
        (PEOPLE, {"target": "ill", "schema": {**SCHEMA, "age": [9, 3]}}, "not a range"),
        (PEOPLE, {"target": "ill", "schema": {**SCHEMA, "sex": {"f": 1}}}, "schema, 'sex'"),
        (PEOPLE, {"target": "ill", "schema": {**SCHEMA, "sex": ["f", "f"]}}, "listed twice"),
        (
            PEOPLE,
            {"target": "ill", "schema": {**SCHEMA, "ill": ["no", "maybe"]}},
            "line 3: the class 'yes' is not",
        ),
        (
            PEOPLE,
            {"target": "ill", "schema": {**SCHEMA, "ill": ["no"]}, "classes": ("no",)},
            "'yes' is not one of",
        ),
        (PEOPLE, {"target": "ill", "schema": SCHEMA, "test": 1.5}, "test=1.5"),
        (
            PEOPLE,
            {"target": "ill", "schema": SCHEMA, "test": "nowhere.csv"},
            "there is no nowhere.csv",
        ),
        (
            PEOPLE.replace("50", "fifty"),
            {"target": "ill", "schema": SCHEMA},
            "line 2, column 'age': 'fifty' is not",
        ),
        (
            PEOPLE + "1,2\n",
            {"target": "ill", "schema": SCHEMA},
            "line 7: 2 values, but the header names 4",
        ),
        ("age,age\n1,2\n", {"target": "age", "schema": SCHEMA}, "same name"),
        ("age,ill\n", {"target": "ill", "schema": SCHEMA}, "no records"),
        ("", {"target": "ill", "schema": SCHEMA}, "is empty"),
    ],
)
def test_a_table_that_cannot_be(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load(table(tmp_path, text), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"a": [1]}, {}, "name the arrays images and labels"),
        ({"x": np.zeros((3, 4), np.uint8), "y": np.zeros(2, int)}, {}, "3 inputs, but 2 labels"),
        ({"x": np.zeros((3, 4), np.uint8), "y": np.zeros((3, 2), int)}, {}, "one whole number"),
        ({"x": np.zeros((3, 4), np.uint8), "y": np.array([0, 1, -1])}, {}, "a label is -1"),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.array([0, 1, 7])},
            {"classes": ("a", "b")},
            "'7' is not one of",
        ),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(3, int)},
            {"test": 0},
            "1 class is not enough",
        ),
        ({"x": np.zeros((3, 4, 5, 2, 2), np.uint8), "y": np.arange(3)}, {}, "give images"),
        ({"x": np.zeros((3, 5, 5, 7), np.uint8), "y": np.arange(3)}, {}, "channels"),
        (
            {"x": np.uint8(7), "y": np.arange(3)},
            {},
            r"inputs of type uint8 and shape \(\): give real numbers",
        ),
        ({"x": np.zeros((3, 4), np.uint8), "y": np.int64(0)}, {}, "one whole number"),
        (
            {"x": np.zeros((3, 4), complex), "y": np.arange(3)},
            {"limits": (0, 1)},
            "type complex128",
        ),
        ({"x": np.full((3, 4), "a"), "y": np.arange(3)}, {"limits": (0, 1)}, "type <U1"),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.array([0, 1, 10**12])},
            {},
            "a label is 1000000000000: classes",
        ),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.array([0, 1, 2**63], np.uint64)},
            {},
            "a label is 922337203",
        ),
    ],
)
def test_arrays_that_cannot_be(
    tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.npz", **options)


@pytest.mark.parametrize(
    ("misspelt", "meant"), [("fasion-mnist", "fashion-mnist"), ("CIFAR10", "cifar-10")]
)
def test_the_nearest_known_name_is_suggested(misspelt: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"there is no {misspelt} \(did you mean '{meant}'\?\)"):
        load(misspelt)


def test_the_nearest_column_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'sick' .*: it has 'id'"):
        load(table(tmp_path), target="sick", schema={**SCHEMA, "sick": ["no", "yes"]})
    with pytest.raises(ValueError, match=r"no column 'Ill' .* \(did you mean 'ill'\?\)"):
        load(table(tmp_path), target="Ill", schema={**SCHEMA, "Ill": ["no", "yes"]})


def test_places_that_hold_no_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.doc").touch()
    (tmp_path / "b.npz").write_bytes(b"nothing")
    (tmp_path / "c.npz").touch()
    np.save(tmp_path / "d.npy", np.zeros(3))
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    for place, message in {
        "nowhere": "there is no",
        "empty": "no data",
        "a.doc": ".doc",
        "b.npz": "not a read",
        "c.npz": "not a read",
        "d.npz": "is one array",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(tmp_path / place)
