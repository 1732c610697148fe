"""Private records from a user's own files, read so that nothing is learned from them on the way.

Epsilon covers the training. A mean, a vocabulary or a list of categories that was computed from the records would
tell something of them that no epsilon covers. So pixels are scaled by the range of their format, table columns by a
schema that was declared, words by a fixed hash; and the features of a record depend on that record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from dpkfc.app.readers import corpora, folders, hugging_face, images, medmnist, tables, texts
from dpkfc.app.readers.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from dpkfc.app.readers.digits import digits
from dpkfc.app.readers.idx import idx_images
from dpkfc.app.readers.records import Kind, Read, Records, distinct, joined, split
from dpkfc.errors import PrivacyError
from dpkfc.probes.probe import Probe

TABLES = (".csv", ".tsv", ".parquet")
FASHION = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
DIGITS = tuple(map(str, range(10)))
Pair = tuple[TensorDataset, TensorDataset]
Encode = Callable[[], texts.Encoding]  # made when texts are found
NAMED: dict[str, tuple[tuple[str, ...], Callable[[Path | None], Pair]]] = {
    "digits": (DIGITS, lambda data_dir: digits()),
    "mnist": (DIGITS, lambda data_dir: idx_images("mnist", data_dir)),
    "fashion-mnist": (FASHION, lambda data_dir: idx_images("fashion-mnist", data_dir)),
    "cifar-10": (CIFAR10, cifar10),
    "cifar-100": (CIFAR100, cifar100),
    "pathmnist": (
        medmnist.CLASSES["pathmnist"],
        lambda data_dir: medmnist.medmnist("pathmnist", data_dir),
    ),
    "pneumoniamnist": (
        medmnist.CLASSES["pneumoniamnist"],
        lambda data_dir: medmnist.medmnist("pneumoniamnist", data_dir),
    ),
    **{
        name: (classes, partial(texts.hashed_corpus, name))
        for name, classes in corpora.CLASSES.items()
    },
}
SHARE = 0.2
BYTES = 8 * 2**30  # of inputs that are held in memory without a word


@dataclass(frozen=True)
class Loaded:
    """Training and test records, and what is taken as public of them."""

    train: TensorDataset
    test: TensorDataset | None
    kind: Kind
    shape: tuple[int, ...]  # of one input
    classes: int
    names: tuple[str, ...]  # of the classes
    remarks: tuple[str, ...]
    probe: Probe  # what inputs look like, told by no record
    source: Mapping[str, Any] = field(
        default_factory=dict
    )  # how `load` was called, as config.json has it

    def all_remarks(self, records: int | None = None) -> tuple[str, ...]:
        """With one on the number of records: the true one, or `records`, which is stated instead of it."""
        if records is None:
            count = f"the number of records, {len(self.train)} to train on, is taken as public"
        else:
            count = f"the number of records to train on is stated as {records}, which is public; the true one is not"
        return (count, *self.remarks)


def load(
    source: str | Path,
    *,
    target: str | None = None,
    text: str | None = None,
    schema: tables.Schema | None = None,
    classes: tuple[str, ...] | None = None,
    test: float | str | Path = SHARE,
    features: int = texts.FEATURES,
    tokenizer: str | None = None,
    limits: images.Limits | None = None,
    size: int = images.SIZE,
    grey: bool = False,
    indicators: bool = False,
    data_dir: Path | None = None,
) -> Loaded:
    """The records of a file, a folder, or a data set known by name.

    Args:
        source: a .csv, .tsv or .parquet table; an .npz file of arrays; a folder of idx files, or with a subfolder of
            images or .txt files for each class; a data set of Hugging Face, saved in a folder or as hf:NAME; or a name
            in `NAMED`.
        target, text: columns of a table: the class, and the text if that is what to learn from.
        schema: ranges and categories of the columns, and the classes: see `data.tables`.
        classes: their names, if neither the schema nor the folders are to say.
        test: the share of the records that is kept for the test, or where the test records are. A source with a test
            part of its own keeps that. 0 for none.
        features: that words are hashed into.
        tokenizer: a pretrained model whose token ids texts become instead: see `models.backbone`.
        limits: the smallest and largest value of arrays that are not bytes.
        size, grey: what image files are brought to.
        indicators: features that say where a number is missing.
        data_dir: where the data sets known by name are; $DPKFC_DATA by default.
    """
    declared = None if classes is None else distinct(classes, "classes")

    def encoding() -> texts.Encoding:
        return texts.words(features) if tokenizer is None else texts.tokens(tokenizer)

    if limits is not None and not limits[0] < limits[1]:
        raise PrivacyError(
            f"range {limits[0]:g},{limits[1]:g}: give the smallest and the largest value, in that order"
        )

    def read(place: str | Path) -> Read:
        path = Path(place)
        if str(place).startswith(hugging_face.PREFIX) or hugging_face.is_saved(path):
            return hugging_face.read_hugging_face(
                str(place),
                target=target,
                text=text,
                schema=schema or {},
                declared=declared,
                encoding=encoding,
                size=size,
                grey=grey,
                indicators=indicators,
            )
        if not path.exists():
            if str(place) in NAMED:
                return _named(str(place), data_dir, encoding)
            raise PrivacyError(
                f"there is no {path}: give a file, a folder, or one of {', '.join(NAMED)}"
            )
        if path.is_dir():
            return _folder(path, declared, encoding, size, grey)
        if path.suffix.lower() == ".npz":
            return images.read_npz(path, declared, limits)
        if path.suffix.lower() in TABLES:
            return _table(path, target, text, schema or {}, declared, encoding, indicators)
        raise PrivacyError(
            f"{path}: {path.suffix or 'no ending'}: give a folder, or one of {', '.join(TABLES)}, .npz"
        )

    share, elsewhere = _parse_test(test)
    try:
        found = read(source)
        other = None if elsewhere is None else _agreeing(read(elsewhere), found, elsewhere)
    except (OSError, UnicodeError) as problem:
        raise PrivacyError(f"{source} cannot be read: {problem}") from problem
    called = {
        "path": str(source),
        "target": target,
        "text": text,
        "schema": None if schema is None else dict(schema),
        "classes": None if declared is None else list(declared),
        "test": str(test),
        "limits": None if limits is None else list(limits),
        "size": size,
        "grey": grey,
        "features": features,
        "indicators": indicators,
        "data_dir": None if data_dir is None else str(data_dir),
        **({} if tokenizer is None else {"tokenizer": tokenizer}),
    }
    if other is not None:
        parts = (
            found.train,
            joined([other.train, other.test]),
            f"test records are those of {elsewhere}",
        )
    elif found.test is not None:
        parts = (found.train, found.test, "the source has a test part of its own")
    else:
        remark = (
            f"a share of {share:g} is kept for the test, chosen by a hash of each record's content"
        )
        parts = (*split(found.train, share), remark)
    return _loaded(found, called, *parts)


def _parse_test(test: float | str | Path) -> tuple[float, str | Path | None]:
    """The share of a number, or a path."""
    try:
        share = float(test)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0, test  # type: ignore[return-value]
    if not 0 <= share < 1:
        raise PrivacyError(
            f"test={share:g}: a share of the records, from 0 to below 1, or the path of test records"
        )
    return share, None


def _agreeing(other: Read, found: Read, where: str | Path) -> Read:
    if other.train.x.shape[1:] != found.train.x.shape[1:] or other.names != found.names:
        raise PrivacyError(
            f"{where}: inputs of shape {tuple(other.train.x.shape[1:])} and {len(other.names)} classes, but the "
            f"training records have {tuple(found.train.x.shape[1:])} and {len(found.names)}: they must agree"
        )
    return other


def _loaded(
    found: Read, called: Mapping[str, Any], train: Records, test: Records | None, remark: str
) -> Loaded:
    if test is not None and not len(test):
        test = None
    if not len(train):
        raise PrivacyError(
            "there are no training records: check the source, or keep fewer for the test (--test 0.1)"
        )
    if len(found.names) < 2:
        raise PrivacyError(
            f"{len(found.names)} class is not enough to learn from: declare at least two"
        )
    public = f"the list of {len(found.names)} classes is taken as public"
    size = train.x.numel() * 4
    large = (f"the inputs take {size / 2**30:.1f} GB of memory",) if size > BYTES else ()
    return Loaded(
        TensorDataset(train.x, train.y),
        None if test is None else TensorDataset(test.x, test.y),
        found.kind,
        tuple(train.x.shape[1:]),
        len(found.names),
        found.names,
        (public, *found.remarks, remark if test is not None else "there is no test part", *large),
        found.probe,
        called,
    )


def _named(name: str, data_dir: Path | None, encoding: Encode) -> Read:
    names, read = NAMED[name]
    if name in corpora.CLASSES:
        return texts.read_corpus(name, data_dir, encoding())
    try:
        train, test = (_records(part) for part in read(data_dir))
    except ValueError as problem:
        raise PrivacyError(str(problem)) from problem
    return Read(
        "images", names, train, test, images.image_probe(tuple(train.x.shape[1:]), len(names))
    )


def _records(part: TensorDataset) -> Records:
    x, y = part.tensors
    return Records(
        x.to(torch.float32), y, [b""] * len(y)
    )  # split by its authors: no marks are needed


def _folder(
    folder: Path, declared: tuple[str, ...] | None, encoding: Encode, size: int, grey: bool
) -> Read:
    if any(folder.glob("*train-images*idx3*")):
        return images.read_idx_folder(folder, declared)
    parts, are_texts, remarks = folders.class_folders(folder)
    names = folders.class_list(parts, declared, folder)
    read = (
        texts.read_text_folders(parts, names, encoding())
        if are_texts
        else images.read_image_folders(parts, names, size, grey)
    )
    return replace(read, remarks=(*read.remarks, *remarks))


def _table(
    path: Path,
    target: str | None,
    text: str | None,
    schema: tables.Schema,
    declared: tuple[str, ...] | None,
    encoding: Encode,
    indicators: bool,
) -> Read:
    table = tables.read_table(path)
    if target is None:
        raise PrivacyError(
            f"{path}: which column is the class? Give --target; it has {', '.join(table.header)}"
        )
    if text is None and not schema:
        raise PrivacyError(
            f"{path}: ranges and categories must be declared, since the records must not tell: give --schema FILE "
            f"(`dpkfc data {path} --target {target} --suggest-schema FILE` drafts one for you to check), or --text COL"
        )
    names = tables.target_classes(schema, target) if declared is None else declared
    if text is not None:
        return tables.read_text_column(table, text, target, names, encoding())
    return tables.read_tabular(table, target, schema, names, indicators)
