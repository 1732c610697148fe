"""Private records from the user's own files, read so that nothing is learned from them on the way.

Epsilon covers the training. A mean, a vocabulary or a list of categories computed from the records
would reveal something about them that no epsilon covers. So pixels are scaled by the range of their
format, table columns by a declared schema, and words by a fixed hash. The features of a record
depend on that record alone.
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
from dpkfc.app.readers.records import (
    Kind,
    ParsedSource,
    Records,
    check_distinct,
    concatenate,
    split,
)
from dpkfc.app.suggestions import did_you_mean
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
TrainAndTest = tuple[TensorDataset, TensorDataset]
# Public data sets by name: the names of their classes, and a reader, called with the data folder.
NAMED: dict[str, tuple[tuple[str, ...], Callable[[Path | None], TrainAndTest]]] = {
    "digits": (DIGITS, lambda data_dir: digits()),
    "mnist": (DIGITS, partial(idx_images, "mnist")),
    "fashion-mnist": (FASHION, partial(idx_images, "fashion-mnist")),
    "cifar-10": (CIFAR10, cifar10),
    "cifar-100": (CIFAR100, cifar100),
    **{
        name: (classes, partial(medmnist.medmnist, name))
        for name, classes in medmnist.CLASSES.items()
    },
    **{
        name: (classes, partial(texts.hashed_corpus, name))
        for name, classes in corpora.CLASSES.items()
    },
}
TEST_SHARE = 0.2
LARGE_BYTES = 8 * 2**30  # inputs that take more memory get a remark


@dataclass(frozen=True)
class Loaded:
    """Training and test records, and the facts about them that are treated as public."""

    train: TensorDataset
    test: TensorDataset | None
    kind: Kind
    shape: tuple[int, ...]  # of one input
    classes: int
    names: tuple[str, ...]  # of the classes
    remarks: tuple[str, ...]
    probe: Probe  # resembles the inputs, from declared facts alone
    source: Mapping[str, Any] = field(default_factory=dict)  # arguments of `load`, for config.json

    def all_remarks(self, records: int | None = None) -> tuple[str, ...]:
        """The remarks, with one about the number of records.

        Args:
            records: the number that was stated instead of the true one, if any.
        """
        if records is None:
            count = f"the number of training records, {len(self.train)}, is treated as public"
        else:
            count = (
                f"the number of training records is stated as {records}, which is public; the true "
                "number is private"
            )
        return (count, *self.remarks)


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source: the arguments of `load`, checked."""

    target: str | None
    text: str | None
    schema: tables.Schema
    classes: tuple[str, ...] | None
    features: int
    tokenizer: str | None
    limits: images.Limits | None
    size: int
    grey: bool
    indicators: bool
    data_dir: Path | None

    def encoding(self) -> texts.Encoding:
        """How texts become inputs. Called when there are texts: it may load a tokenizer."""
        return (
            texts.words(self.features) if self.tokenizer is None else texts.tokens(self.tokenizer)
        )


def load(
    source: str | Path,
    *,
    target: str | None = None,
    text: str | None = None,
    schema: tables.Schema | None = None,
    classes: tuple[str, ...] | None = None,
    test: float | str | Path = TEST_SHARE,
    features: int = texts.FEATURES,
    tokenizer: str | None = None,
    limits: images.Limits | None = None,
    size: int = images.SIZE,
    grey: bool = False,
    indicators: bool = False,
    data_dir: Path | None = None,
) -> Loaded:
    """Read the records of a file, a folder, or a data set known by name.

    Args:
        source: a .csv, .tsv or .parquet table; an .npz file of arrays; a folder of idx files; a
            folder with one subfolder of images or .txt files per class; a Hugging Face data set,
            saved in a folder or as hf:NAME; or a name in `NAMED`.
        target, text: columns of a table: the class, and the text if the model learns from text.
        schema: ranges and categories of the columns, and the classes: see `readers.tables`.
        classes: the names of the classes, if neither the schema nor the folders declare them.
        test: the share of the records that is kept for the test, or the path of test records. A
            test part of the source is used instead of a share. 0 for no test.
        features: the number of features of hashed words.
        tokenizer: a pretrained model. Texts become its token ids instead of hashed words.
        limits: the smallest and the largest value of arrays that are not bytes.
        size, grey: image files are resized to size x size pixels, in greyscale if `grey`.
        indicators: add features that say where a number is missing.
        data_dir: the folder of the data sets known by name; $DPKFC_DATA by default.

    Raises:
        ValueError: the content or an argument is wrong, or a needed declaration is missing.
        OSError: a file is missing or cannot be read.
    """
    if limits is not None and not limits[0] < limits[1]:
        raise ValueError(
            f"range {limits[0]:g},{limits[1]:g}: give the smallest and the largest value, in that "
            "order"
        )
    declared = None if classes is None else check_distinct(classes, "classes")
    options = ReadOptions(
        target,
        text,
        schema or {},
        declared,
        features,
        tokenizer,
        limits,
        size,
        grey,
        indicators,
        data_dir,
    )
    share, test_path = _parse_test(test)
    try:
        parsed = _read(source, options)
        other = None if test_path is None else _read(test_path, options)
    except OSError as problem:
        raise OSError(f"{source} cannot be read: {problem}") from problem
    except UnicodeError as problem:
        raise ValueError(f"{source} cannot be read: {problem}") from problem
    arguments = {
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
        _check_agreement(other, parsed, test_path)
        train = parsed.train
        held_out = concatenate([other.train, other.test])
        remark = f"test records are those of {test_path}"
    elif parsed.test is not None:
        train, held_out = parsed.train, parsed.test
        remark = "the source has a test part of its own"
    else:
        train, held_out = split(parsed.train, share)
        remark = f"a share of {share:g} is kept for the test, by a hash of each record's content"
    return _loaded(parsed, arguments, train, held_out, remark)


def _parse_test(test: float | str | Path) -> tuple[float, str | Path | None]:
    """A share, or a path."""
    try:
        share = float(test)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0, test  # type: ignore[return-value]
    if not 0 <= share < 1:
        raise ValueError(
            f"test={share:g}: give a share of the records, from 0 to below 1, or the path of test "
            "records"
        )
    return share, None


def _read(source: str | Path, options: ReadOptions) -> ParsedSource:
    path = Path(source)
    if str(source).startswith(hugging_face.PREFIX) or hugging_face.is_saved(path):
        return hugging_face.read_hugging_face(
            str(source),
            target=options.target,
            text=options.text,
            schema=options.schema,
            declared=options.classes,
            encoding=options.encoding,
            size=options.size,
            grey=options.grey,
            indicators=options.indicators,
        )
    if not path.exists():
        if str(source) in NAMED:
            return _read_named(str(source), options)
        raise ValueError(
            f"there is no {path}{did_you_mean(str(source), NAMED)}: give a file, a folder, or one "
            f"of {', '.join(NAMED)}"
        )
    if path.is_dir():
        return _read_folder(path, options)
    ending = path.suffix.lower()
    if ending == ".npz":
        return images.read_npz(path, options.classes, options.limits)
    if ending in TABLES:
        return _read_table(path, options)
    raise ValueError(
        f"{path}: {path.suffix or 'no ending'}: give a folder, or one of {', '.join(TABLES)}, .npz"
    )


def _read_named(name: str, options: ReadOptions) -> ParsedSource:
    if name in corpora.CLASSES:
        return texts.read_corpus(name, options.data_dir, options.encoding())
    names, read = NAMED[name]
    train, test = (_records(part) for part in read(options.data_dir))
    probe = images.image_probe(tuple(train.x.shape[1:]), len(names))
    return ParsedSource("images", names, train, test, probe)


def _records(part: TensorDataset) -> Records:
    """Records of a public data set. Its authors split it, so no digests are needed."""
    x, y = part.tensors
    return Records(x.to(torch.float32), y, [b""] * len(y))


def _read_folder(folder: Path, options: ReadOptions) -> ParsedSource:
    if any(folder.glob("*train-images*idx3*")):
        return images.read_idx_folder(folder, options.classes)
    parts, are_texts, remarks = folders.class_folders(folder)
    names = folders.class_list(parts, options.classes, folder)
    parsed = (
        texts.read_text_folders(parts, names, options.encoding())
        if are_texts
        else images.read_image_folders(parts, names, options.size, options.grey)
    )
    return replace(parsed, remarks=(*parsed.remarks, *remarks))


def _read_table(path: Path, options: ReadOptions) -> ParsedSource:
    table = tables.read_table(path)
    target, schema = options.target, options.schema
    if target is None:
        raise ValueError(
            f"{path}: which column is the class? Give --target; it has {', '.join(table.header)}"
        )
    if options.text is None and not schema:
        raise ValueError(
            f"{path}: ranges and categories must be declared, since reading them from the records "
            f"would not be private: give --schema FILE (`dpkfc data {path} --target {target} "
            "--suggest-schema FILE` drafts one for you to check), or --text COLUMN"
        )
    names = options.classes
    if names is None:
        names = tables.target_classes(schema, target)
    if options.text is not None:
        return tables.read_text_column(table, options.text, target, names, options.encoding())
    return tables.read_tabular(table, target, schema, names, options.indicators)


def _check_agreement(other: ParsedSource, parsed: ParsedSource, where: str | Path | None) -> None:
    shape = tuple(parsed.train.x.shape[1:])
    other_shape = tuple(other.train.x.shape[1:])
    if other_shape != shape or other.names != parsed.names:
        raise ValueError(
            f"{where}: inputs of shape {other_shape} and {len(other.names)} classes, but the "
            f"training records have {shape} and {len(parsed.names)}: they must agree"
        )


def _loaded(
    parsed: ParsedSource,
    arguments: Mapping[str, Any],
    train: Records,
    test: Records | None,
    remark: str,
) -> Loaded:
    if test is not None and not len(test):
        test = None
    if not len(train):
        raise ValueError(
            "there are no training records: check the source, or keep fewer for the test "
            "(--test 0.1)"
        )
    if len(parsed.names) < 2:
        raise ValueError(
            f"{len(parsed.names)} class is not enough to learn from: declare at least two"
        )
    remarks = [
        f"the list of {len(parsed.names)} classes is treated as public",
        *parsed.remarks,
        remark if test is not None else "there is no test part",
    ]
    size = train.x.numel() * 4
    if size > LARGE_BYTES:
        remarks.append(f"the inputs take {size / 2**30:.1f} GB of memory")
    return Loaded(
        TensorDataset(train.x, train.y),
        None if test is None else TensorDataset(test.x, test.y),
        parsed.kind,
        tuple(train.x.shape[1:]),
        len(parsed.names),
        parsed.names,
        tuple(remarks),
        parsed.probe,
        arguments,
    )
