"""Download public data sets into the folder where the readers expect them.

A file appears under its name only after it has arrived completely with the right checksum. The
checksums are those of torchvision, torchtext and MedMNIST.
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

from dpkfc.app.suggestions import did_you_mean

TIMEOUT = 30  # seconds without a byte
CHUNK = 2**18  # bytes


@dataclass(frozen=True)
class Remote:
    """A file or an archive.

    Args:
        to: the path below the data directory: of the file, or of the folder of the archive's files.
        members: a pattern for the files of an archive that are kept; its group is their new name.
    """

    url: str
    md5: str
    to: str
    members: str | None = None


@dataclass(frozen=True)
class Known:
    """A data set that can be fetched."""

    content: str
    megabytes: int
    files: tuple[Remote, ...]


def _idx(folder: str, base: str, sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    names = [
        f"{part}-{content}-ubyte.gz"
        for part in ("train", "t10k")
        for content in ("images-idx3", "labels-idx1")
    ]
    return tuple(
        Remote(base + name, checksum, f"{folder}/{name}")
        for name, checksum in zip(names, sums, strict=True)
    )


TORONTO = "https://www.cs.toronto.edu/~kriz"
FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
ZENODO = "https://zenodo.org/records/10519652/files"
AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
KNOWN = {
    "mnist": Known(
        "70,000 handwritten digits, 28 x 28",
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
        "60,000 photographs of 10 classes, 32 x 32",
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
        "60,000 photographs of 100 classes, 32 x 32",
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
        "107,180 images of 9 kinds of tissue, 28 x 28",
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
        "5,856 chest X-rays, normal or pneumonia, 28 x 28",
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
        "50,000 film reviews, positive or negative",
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
        "127,600 news articles of 4 topics",
        31,
        (
            Remote(f"{AG_NEWS}/train.csv", "b1a00f826fdfbd249f79597b59e1dc12", "ag-news/train.csv"),
            Remote(f"{AG_NEWS}/test.csv", "d52ea96a97a2d943681189a97654912d", "ag-news/test.csv"),
        ),
    ),
}


def is_present(name: str, data_dir: Path) -> bool:
    """Whether the data set is there, downloaded or not, in a format that its reader knows."""
    return all(_exists(data_dir / file.to) for file in KNOWN[name].files) or any(
        data_dir.glob(f"{name}.csv*")
    )


def fetch(name: str, data_dir: Path, console: Console) -> None:
    """Download the files that are missing. An incomplete or wrong file is not kept."""
    if name not in KNOWN:
        raise ValueError(
            f"{name!r} cannot be fetched{did_you_mean(name, KNOWN)}: choose from {', '.join(KNOWN)}"
        )
    for file in KNOWN[name].files:
        target = data_dir / file.to
        if _exists(target):
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


def _exists(target: Path) -> bool:
    """Whether there is the file, also unpacked, or a folder that is not empty."""
    if target.is_dir():
        return any(target.iterdir())
    return target.is_file() or (target.suffix == ".gz" and target.with_suffix("").is_file())


def _download(file: Remote, target: Path, part: Path, console: Console) -> None:
    try:
        with urlopen(file.url, timeout=TIMEOUT) as response, part.open("wb") as output:
            size = int(response.headers.get("Content-Length", 0)) or None
            checksum = _copy(response, output, target.name, size, console)
    except (OSError, HTTPException) as problem:
        how = (
            f"put it there: {target}"
            if file.members is None
            else f"unpack it into the folder {target}"
        )
        raise OSError(
            f"{file.url} cannot be fetched ({getattr(problem, 'reason', problem)}). Fetch it where "
            f"there is a network, check that its md5 is {file.md5}, and {how}"
        ) from problem
    if checksum != file.md5:
        raise OSError(
            f"{file.url} has the md5 {checksum}, not {file.md5}: it was damaged on its way, or is "
            "another file now. Nothing was kept; try again"
        )


def _copy(
    response: IO[bytes], output: IO[bytes], name: str, size: int | None, console: Console
) -> str:
    """Copy with a progress bar; returns the md5 of the content."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    digest = md5(usedforsecurity=False)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(name, total=size)
        while chunk := response.read(CHUNK):
            digest.update(chunk)
            output.write(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def _unpack(members: str, archive: Path, target: Path, console: Console) -> None:
    """Unpack the files that match, under the names that the pattern gives them.

    No other path can be written to.
    """
    fresh = target.with_name(f".{target.name}.unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with console.status(f"unpacking into {target}"), tarfile.open(archive) as opened:
            for member in opened:
                match = re.fullmatch(members, member.name.removeprefix("./"))
                if not match or not member.isfile() or ".." in member.name:
                    continue
                if content := opened.extractfile(member):
                    file = fresh / match[1]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("wb") as output:
                        shutil.copyfileobj(content, output)
        if not fresh.exists():
            raise OSError(f"the archive for {target} holds none of the expected files")
        os.replace(fresh, target)
    except tarfile.TarError as problem:
        reason = str(problem).splitlines()[0]
        raise OSError(
            f"the archive for {target} cannot be unpacked ({reason}): try again"
        ) from problem
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
