"""Corpora are read the same from all formats, in an order that depends on their content alone."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from dpkfc.app.readers.corpora import CLASSES, Corpus, corpus
from dpkfc.app.readers.sources import load

Rows = list[tuple[str, int, str]]
REVIEWS: Rows = [("train", k % 2, f"film number {k}, with a comma") for k in range(6)]
REVIEWS += [("test", k % 2, f"other film {k}") for k in range(4)]


def table(rows: Rows, columns: tuple[str, ...] = ("split", "label", "text")) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(row[len(row) - len(columns) :] for row in rows)
    return stream.getvalue().encode()


def contents(found: Corpus) -> set[tuple[str, int, str]]:
    parts = (("train", found.train), ("test", found.test))
    return {
        (name, label, text)
        for name, p in parts
        for label, text in zip(p.labels.tolist(), p.texts, strict=True)
    }


def as_folder(folder: Path) -> None:
    for number, (part, label, text) in enumerate(REVIEWS):
        place = folder / "imdb" / "aclImdb" / part / ("neg", "pos")[label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}_1.txt").write_text(text)


FORMATS: dict[str, Callable[[Path], object]] = {
    "folder": as_folder,
    "csv": lambda folder: (folder / "imdb.csv").write_bytes(table(REVIEWS)),
    "gz": lambda folder: (folder / "imdb.csv.gz").write_bytes(gzip.compress(table(REVIEWS))),
    "xz": lambda folder: (folder / "imdb.csv.xz").write_bytes(lzma.compress(table(REVIEWS[::-1]))),
}


@pytest.mark.parametrize("name", FORMATS)
def test_imdb_in_every_format(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path)
    (tmp_path / "plain").mkdir()
    FORMATS["csv"](tmp_path / "plain")
    found, same = corpus("imdb", tmp_path), corpus("imdb", tmp_path / "plain")
    assert contents(found) == set(REVIEWS) and found.names == ("negative", "positive")
    assert found.train.texts == same.train.texts, "the order depends on the format"


def test_ag_news_as_its_authors_publish_it(tmp_path: Path) -> None:
    (tmp_path / "ag-news").mkdir()
    (tmp_path / "ag-news" / "train.csv").write_text(
        '"3","Oil, up","Prices rose."\n"1","Talks","They met."\n'
    )
    (tmp_path / "ag-news" / "test.csv").write_text('"4","Chips","Smaller."\n')
    expected = {
        ("train", 2, "Oil, up . Prices rose."),
        ("train", 0, "Talks . They met."),
        ("test", 3, "Chips . Smaller."),
    }
    assert contents(corpus("ag-news", tmp_path)) == expected


def test_sst2_as_glue_publishes_it(tmp_path: Path) -> None:
    (tmp_path / "sst-2").mkdir()
    (tmp_path / "sst-2" / "train.tsv").write_text(
        "sentence\tlabel\nno wit , only gags \t0\nbeautiful \t1\n"
    )
    (tmp_path / "sst-2" / "dev.tsv").write_text("sentence\tlabel\na charm\t1\n")
    expected = {
        ("train", 0, "no wit , only gags"),
        ("train", 1, "beautiful"),
        ("test", 1, "a charm"),
    }
    assert contents(corpus("sst-2", tmp_path)) == expected


def test_titles_without_a_split_are_split_by_their_content(tmp_path: Path) -> None:
    rows: Rows = [("", 1 + k % 20, f"question {k}") for k in range(300)]
    place = tmp_path / "stackoverflow.csv"
    place.write_bytes(table(rows, ("label", "title")))
    found = corpus("stackoverflow", tmp_path)
    expected = {(label - 1, text) for _, label, text in rows}
    assert {row[1:] for row in contents(found)} == expected and len(found.train) + len(
        found.test
    ) == 300
    assert 30 < len(found.test) < 90
    place.write_bytes(table(rows[1:], ("label", "title")))
    assert contents(found) - contents(corpus("stackoverflow", tmp_path)) in (
        {("train", 0, "question 0")},
        {("test", 0, "question 0")},
    ), "one record less moves no other"


def test_a_corpus_by_name_is_read_as_hashed_words(tmp_path: Path) -> None:
    FORMATS["csv"](tmp_path)
    found = load("imdb", data_dir=tmp_path, features=32)
    assert (found.kind, found.shape, found.classes, len(found.train)) == ("text", (32,), 2, 6)
    assert found.test is not None and len(found.test) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("imdb", b"split,label,body\ntrain,1,good\n", "it needs label and text"),
        ("imdb", b"split,label,text\ntrain,yes,good\n", "line 2: the class 'yes' is not a number"),
        ("imdb", b"split,label,text\nother,1,good\n", "neither train nor test"),
        ("imdb", b"split,label,text\ntrain,1,good\n", "the parts are 'train'"),
        ("imdb", b"split,label,text\ntrain,2,good\n", "the class 2 is not one of 0..1"),
        ("stackoverflow", b"label,title\n21,how\n", "the class 21 is not one of 1..20"),
        ("imdb", b"split,label,text\ntrain,1,\xff\xfe\n", "is damaged"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / f"{name}.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus(name, tmp_path)


@pytest.mark.parametrize("ending", [".csv.gz", ".csv.xz"])
def test_a_damaged_archive_is_said_to_be_one(tmp_path: Path, ending: str) -> None:
    packed = {".csv.gz": gzip.compress, ".csv.xz": lzma.compress}[ending](table(REVIEWS))
    (tmp_path / f"imdb{ending}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        corpus("imdb", tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_missing_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{name}.csv is missing"):
        corpus(name, tmp_path)


def test_a_folder_that_lacks_a_part(tmp_path: Path) -> None:
    (tmp_path / "imdb" / "train" / "neg").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"neg has no \.txt files"):
        corpus("imdb", tmp_path)
    (tmp_path / "ag-news").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train\.csv is missing"):
        corpus("ag-news", tmp_path)
