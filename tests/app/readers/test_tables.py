"""Tables and schemas: misfits are counted, and numeric categories are compared by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpkfc.app.readers.schema_draft import suggest_schema
from dpkfc.app.readers.sources import load
from dpkfc.app.readers.tables import (
    Misfits,
    count_misfits,
    declared_columns,
    read_schema,
    read_table,
)

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
    assert count_misfits(read_table(tmp_path / "people.csv"), declared_columns(SCHEMA, "ill")) == [
        Misfits("age", 5, unknown=0, missing=1, clamped=2),
        Misfits("sex", 5, unknown=3, missing=2, clamped=0),
        Misfits("stage", 5, unknown=1, missing=1, clamped=0),
    ]


def test_a_schema_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    assert read_schema(tmp_path / "schema.json") == SCHEMA


def test_a_target_of_many_numbers_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,price\n" + "".join(f"{n},{n / 7}\n" for n in range(60)))
    with pytest.raises(
        ValueError, match="'price' has 60 different numbers. That looks like regression"
    ):
        suggest_schema(tmp_path / "a.csv", "price")
    (tmp_path / "b.csv").write_text("age,kind\n" + "".join(f"{n},{n % 60}\n" for n in range(900)))
    assert suggest_schema(tmp_path / "b.csv", "kind")[0]["kind"] == [str(n) for n in range(60)]
