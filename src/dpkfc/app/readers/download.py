"""Public data sets from the places where they are published, checked, and put where the readers look for them.

A file appears under its name only when all of it has arrived and its checksum is right. The checksums are those of
torchvision, torchtext and MedMNIST.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from dataclasses import dataclass
from hashlib import md5
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dpkfc.errors import PrivacyError

SECONDS = 30  # without a byte, after which the network counts as gone
CHUNK = 2**18


@dataclass(frozen=True)
class Remote:
    """A file, or an archive: then `members` matches the files that are kept, and its group is what they are called."""

    url: str
    md5: str
    to: str  # below the data directory: the file, or the folder of the archive's files
    members: str | None = None


@dataclass(frozen=True)
class Known:
    """A data set that can be fetched."""

    what: str
    megabytes: int
    files: tuple[Remote, ...]


def _idx(folder: str, base: str, sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    names = [
        f"{part}-{what}-ubyte.gz"
        for part in ("train", "t10k")
        for what in ("images-idx3", "labels-idx1")
    ]
    return tuple(
        Remote(base + name, one, f"{folder}/{name}") for name, one in zip(names, sums, strict=True)
    )


TORONTO = "https://www.cs.toronto.edu/~kriz"
FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
ZENODO = "https://zenodo.org/records/10519652/files"
AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
KNOWN = {
    "mnist": Known(
        "70,000 written digits, 28 x 28",
        12,
        _idx(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion-mnist": Known(
        "70,000 pieces of clothing, 28 x 28",
        31,
        _idx(
            "fashion-mnist",
            FASHION,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "cifar-10": Known(
        "60,000 photographs of 10 things, 32 x 32",
        170,
        (
            Remote(
                f"{TORONTO}/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                "cifar-10",
                r"cifar-10-batches-bin/([^/]+\.(?:bin|txt|html))",
            ),
        ),
    ),
    "cifar-100": Known(
        "60,000 photographs of 100 things, 32 x 32",
        169,
        (
            Remote(
                f"{TORONTO}/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                "cifar-100",
                r"cifar-100-binary/([^/]+\.(?:bin|txt))",
            ),
        ),
    ),
    "pathmnist": Known(
        "107,180 pieces of tissue of 9 kinds, 28 x 28",
        206,
        (
            Remote(
                f"{ZENODO}/pathmnist.npz?download=1",
                "a8b06965200029087d5bd730944a56c1",
                "pathmnist.npz",
            ),
        ),
    ),
    "pneumoniamnist": Known(
        "5,856 X-rays of lungs, ill or not, 28 x 28",
        4,
        (
            Remote(
                f"{ZENODO}/pneumoniamnist.npz?download=1",
                "28209eda62fecd6e6a2d98b1501bb15f",
                "pneumoniamnist.npz",
            ),
        ),
    ),
    "imdb": Known(
        "50,000 reviews of films, for or against",
        84,
        (
            Remote(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "7c2ac02c03563afcf9b574c7e56c153a",
                "imdb",
                r"aclImdb/((?:train|test)/(?:pos|neg)/[^/]+\.txt)",
            ),
        ),
    ),
    "ag-news": Known(
        "127,600 pieces of news of 4 kinds",
        31,
        (
            Remote(f"{AG_NEWS}/train.csv", "b1a00f826fdfbd249f79597b59e1dc12", "ag-news/train.csv"),
            Remote(f"{AG_NEWS}/test.csv", "d52ea96a97a2d943681189a97654912d", "ag-news/test.csv"),
        ),
    ),
}


def is_present(name: str, data_dir: Path) -> bool:
    """Whether the data set is there, fetched or put there by hand, in a form that its reader knows."""
    return all(_is_there(data_dir / file.to) for file in KNOWN[name].files) or any(
        data_dir.glob(f"{name}.csv*")
    )


def fetch(name: str, data_dir: Path, console: Console) -> None:
    """Download what is not there yet. A file that does not arrive whole, or is not the right one, leaves nothing."""
    if name not in KNOWN:
        raise PrivacyError(f"{name!r} cannot be fetched: choose from {', '.join(KNOWN)}")
    for file in KNOWN[name].files:
        target = data_dir / file.to
        if _is_there(target):
            console.print(
                f"{target} is there already", markup=False, highlight=False, soft_wrap=True
            )
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            _download(file, target, part, console)
            if file.members is None:
                os.replace(part, target)
            else:
                _unpack(file.members, part, target, console)
        finally:
            part.unlink(missing_ok=True)
        console.print(f"fetched {target}", markup=False, highlight=False, soft_wrap=True)


def _is_there(target: Path) -> bool:
    """The file, also unpacked, or a folder with anything in it."""
    if target.is_dir():
        return any(target.iterdir())
    return target.is_file() or (target.suffix == ".gz" and target.with_suffix("").is_file())


def _download(file: Remote, target: Path, part: Path, console: Console) -> None:
    try:
        with urlopen(file.url, timeout=SECONDS) as answer, part.open("wb") as into:
            found = _copy(
                answer,
                into,
                target.name,
                int(answer.headers.get("Content-Length", 0)) or None,
                console,
            )
    except (OSError, HTTPException) as problem:
        how = (
            f"put it there: {target}"
            if file.members is None
            else f"unpack it into the folder {target}"
        )
        raise PrivacyError(
            f"{file.url} cannot be fetched ({getattr(problem, 'reason', problem)}). Fetch it where there is a network, "
            f"check that its md5 is {file.md5}, and {how}"
        ) from problem
    if found != file.md5:
        raise PrivacyError(
            f"{file.url} has the md5 {found}, not {file.md5}: it was damaged on its way, or is another file now. "
            "Nothing was kept; try again"
        )


def _copy(answer: IO[bytes], into: IO[bytes], name: str, size: int | None, console: Console) -> str:
    """The md5 of what came."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    digest = md5(usedforsecurity=False)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(name, total=size)
        while some := answer.read(CHUNK):
            digest.update(some)
            into.write(some)
            progress.advance(task, len(some))
    return digest.hexdigest()


def _unpack(members: str, archive: Path, target: Path, console: Console) -> None:
    """The files that match, by the names that the pattern gives them: no other path can be written to."""
    fresh = target.with_name(f".{target.name}.unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with console.status(f"unpacking into {target}"), tarfile.open(archive) as opened:
            for member in opened:
                name = re.fullmatch(members, member.name.removeprefix("./"))
                content = (
                    opened.extractfile(member)
                    if name and member.isfile() and ".." not in member.name
                    else None
                )
                if name and content:
                    into = fresh / name[1]
                    into.parent.mkdir(parents=True, exist_ok=True)
                    with into.open("wb") as file:
                        shutil.copyfileobj(content, file)
        if not fresh.exists():
            raise PrivacyError(
                f"the archive for {target} holds none of the files that were expected"
            )
        os.replace(fresh, target)
    except tarfile.TarError as problem:
        raise PrivacyError(
            f"the archive for {target} cannot be unpacked ({problem}): try again"
        ) from problem
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
