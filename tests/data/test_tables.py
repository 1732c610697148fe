"""Cells against their schema: what does not fit is counted, and numbers that are categories go by their value."""

from __future__ import annotations

from pathlib import Path

from dpkfc.data.sources import load
from dpkfc.data.tables import Misfits, declared_columns, misfits, read_table

SCHEMA = {"age": [0, 100], "sex": ["F", "M"], "stage": [1, 2, 3], "ill": ["no", "yes"]}
PEOPLE = "age,sex,stage,ill\n50,f,1.0,no\n150,m,2,yes\n,NA,03,no\n-7,,4,yes\n0,x,?,no\n"


def test_categories_that_are_numbers_go_by_their_value(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(PEOPLE)
    found = load(tmp_path / "people.csv", target="ill", schema=SCHEMA, test=0)
    stages = found.train.tensors[0][:, 3:].tolist()
    assert stages == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_texts_that_are_the_same_number_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("code,y\n01,0\n1,1\n1.0,1\n")
    found = load(tmp_path / "a.csv", target="y", schema={"code": ["01", "1"], "y": [0, 1]}, test=0)
    assert found.train.tensors[0].tolist() == [[1, 0], [0, 1], [0, 0]]


def test_what_the_schema_does_not_fit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(PEOPLE)
    assert misfits(read_table(tmp_path / "people.csv"), declared_columns(SCHEMA, "ill")) == [
        Misfits("age", 5, unknown=0, missing=1, clamped=2),
        Misfits("sex", 5, unknown=3, missing=2, clamped=0),
        Misfits("stage", 5, unknown=1, missing=1, clamped=0),
    ]
