"""Text corpora that are known by name, in one of their usual formats, in a folder of the user.

    imdb            DATA/imdb/train/pos/*.txt, train/neg, test/pos, test/neg (also below aclImdb)
    ag-news         DATA/ag-news/train.csv, test.csv: class 1..4, title, description; no header
    sst-2           DATA/sst-2/train.tsv, dev.tsv: sentence and label
    stackoverflow   titles of questions with one of 20 tags, in a table as below

Instead, any of them may be a table DATA/NAME.csv, .csv.gz or .csv.xz with the columns label, text
(or title) and, except for stackoverflow, split. Where the source has no split, a fifth of the texts
is kept for the test, by a hash of their content. The texts are sorted by such a hash, so that every
slice of them is a random sample, whatever the format.
"""

from __future__ import annotations

import csv
import gzip
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from dpkfc.app.readers.directory import data_directory
from dpkfc.app.readers.records import Records, content_digest, split

TAGS = (
    "wordpress oracle svn apache excel matlab visual-studio cocoa osx bash "
    "spring hibernate scala sharepoint ajax qt drupal linq haskell magento"
)
CLASSES = {
    "imdb": ("negative", "positive"),
    "ag-news": ("World", "Sports", "Business", "Sci/Tech"),
    "sst-2": ("negative", "positive"),
    "stackoverflow": tuple(TAGS.split()),
}
FIRST_CLASS = {"stackoverflow": 1}  # the number of the first class in the files, if not 0
TEST_SHARE = 0.2
OPENERS: dict[str, Callable[..., TextIO]] = {
    ".csv": open,
    ".csv.gz": gzip.open,
    ".csv.xz": lzma.open,
}
TEXT_COLUMNS = ("text", "title", "sentence")
Rows = Iterable[tuple[str, int, str]]  # (part or "", class, text)


@dataclass(frozen=True)
class Texts:
    """Texts and their class numbers."""

    texts: list[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Corpus:
    """Training and test texts, and the names of the classes."""

    names: tuple[str, ...]
    train: Texts
    test: Texts


def corpus(name: str, data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """Read imdb, ag-news, sst-2 or stackoverflow. `data_dir` is $DPKFC_DATA by default."""
    directory = data_directory(data_dir)
    folder = directory / name
    tables = [directory / f"{name}{ending}" for ending in OPENERS]
    readers = {"imdb": _imdb, "ag-news": _ag_news, "sst-2": _sst2}
    if table := next((table for table in tables if table.is_file()), None):
        rows = _table(table, FIRST_CLASS.get(name, 0))
    elif name in readers and folder.is_dir():
        rows = readers[name](folder)
    else:
        raise FileNotFoundError(f"{tables[0]} is missing, and so is {folder}. {_advice(name)}")
    return _corpus(name, rows, directory)


def _advice(name: str) -> str:
    folders = {
        "imdb": "the folder aclImdb of ai.stanford.edu/~amaas/data/sentiment",
        "ag-news": "a folder with train.csv and test.csv",
        "sst-2": "a folder with train.tsv and dev.tsv of gluebenchmark.com",
    }
    columns = "label, title" if name == "stackoverflow" else "split, label, text"
    table = f"a table with the columns {columns} (also compressed, .csv.gz or .csv.xz)"
    return f"Put there {table}" + (f", or {folders[name]}" if name in folders else "")


def _corpus(name: str, rows: Rows, directory: Path) -> Corpus:
    names = CLASSES[name]
    parts: dict[str, list[tuple[bytes, int, str]]] = {}
    for part, label, text in rows:
        if not 0 <= label < len(names):
            low = FIRST_CLASS.get(name, 0)
            raise ValueError(
                f"{directory}, {name}: the class {label + low} is not one of "
                f"{low}..{low + len(names) - 1}"
            )
        digest = content_digest(str(label).encode(), text.encode(errors="replace"))
        parts.setdefault(part, []).append((digest, label, text))
    ordered = {part: sorted(content) for part, content in parts.items()}
    if list(ordered) == [""]:
        return Corpus(names, *_split_by_content(ordered[""]))
    if set(ordered) != {"train", "test"}:
        raise ValueError(
            f"{directory}, {name}: the parts are {', '.join(map(repr, ordered))}, not 'train' and "
            "'test'"
        )
    return Corpus(names, *(_texts(ordered[part]) for part in ("train", "test")))


def _texts(rows: list[tuple[bytes, int, str]]) -> Texts:
    return Texts([text for _, _, text in rows], torch.tensor([label for _, label, _ in rows]))


def _split_by_content(rows: list[tuple[bytes, int, str]]) -> tuple[Texts, Texts]:
    digests = [digest for digest, _, _ in rows]
    labels = torch.tensor([label for _, label, _ in rows])
    positions = Records(torch.arange(len(rows)), labels, digests)
    train, test = (
        _texts([rows[row] for row in part.x.tolist()]) for part in split(positions, TEST_SHARE)
    )
    return train, test


def _part(split_name: str, where: str) -> str:
    """Map names such as train10k and dev to "train" and "test"."""
    for beginning, part in (("train", "train"), ("test", "test"), ("dev", "test"), ("val", "test")):
        if split_name.startswith(beginning):
            return part
    raise ValueError(f"{where}: the split {split_name!r} is neither train nor test")


def _table(file: Path, first: int) -> Iterator[tuple[str, int, str]]:
    with _opened(file) as stream:
        reader = csv.DictReader(stream)
        columns = reader.fieldnames or []
        text = next((name for name in TEXT_COLUMNS if name in columns), None)
        if text is None or "label" not in columns:
            raise ValueError(
                f"{file} has the columns {', '.join(columns)}: it needs label and text"
            )
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            part = _part(row["split"] or "", where) if "split" in columns else ""
            yield part, _number(row["label"], where) - first, row[text] or ""


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    csv.field_size_limit(2**31 - 1)
    ending = next(ending for ending in OPENERS if file.name.endswith(ending))
    with OPENERS[ending](file, "rt", encoding="utf-8", newline="") as stream:
        try:
            yield stream
        except (
            UnicodeDecodeError,
            csv.Error,
            EOFError,
            lzma.LZMAError,
            gzip.BadGzipFile,
        ) as problem:
            raise ValueError(f"{file} is damaged ({problem}): fetch it again") from problem


def _number(label: str | None, where: str) -> int:
    try:
        return int(label or "")
    except ValueError:
        raise ValueError(f"{where}: the class {label!r} is not a number") from None


def _imdb(folder: Path) -> Iterator[tuple[str, int, str]]:
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    for part in ("train", "test"):
        for label, name in enumerate(("neg", "pos")):
            files = sorted((folder / part / name).glob("*.txt"))
            if not files:
                raise FileNotFoundError(
                    f"{folder / part / name} has no .txt files. {_advice('imdb')}"
                )
            for file in files:
                yield part, label, file.read_text(encoding="utf-8", errors="replace")


def _ag_news(folder: Path) -> Iterator[tuple[str, int, str]]:
    for part in ("train", "test"):
        file = _existing(folder / f"{part}.csv")
        with _opened(file) as stream:
            for row in (reader := csv.reader(stream)):
                if row:
                    label = _number(row[0], f"{file}, line {reader.line_num}") - 1
                    yield part, label, " . ".join(row[1:])


def _sst2(folder: Path) -> Iterator[tuple[str, int, str]]:
    for part, name in (("train", "train.tsv"), ("test", "dev.tsv")):
        file = _existing(folder / name)
        lines = file.read_text(encoding="utf-8").splitlines()[1:]
        for number, line in enumerate(lines, 2):
            sentence, _, label = line.rpartition("\t")
            yield part, _number(label, f"{file}, line {number}"), sentence.strip()


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: fetch the data set again")
    return file
