"""Downloads from a local server: complete and correct, or not kept."""

from __future__ import annotations

import gzip
import io
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from dpkfc.app.readers import download
from dpkfc.app.readers.download import KNOWN, Known, Remote, fetch, is_present

QUIET = Console(quiet=True)
CONTENT = bytes(range(256)) * 3000  # more than one chunk


def archive(names: list[str], link: bool = False) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as opened:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            opened.addfile(member, io.BytesIO(name.encode()))
        if link:
            member = tarfile.TarInfo("top/link.bin")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            opened.addfile(member)
    return file.getvalue()


TAR = archive(
    ["top/a.bin", "top/deep/b.bin", "top/notes.md", "top/../../escaped.bin", "../escaped.bin"],
    link=True,
)


class Server(ThreadingHTTPServer):
    """Responds with CONTENT, TAR, half of the announced bytes, or 404; counts requests."""

    asked = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        content = {"/file": CONTENT, "/half": CONTENT, "/tar": TAR}.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(
            (content or b"")[: len(CONTENT) // 2] if self.path == "/half" else content or b""
        )

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def known(monkeypatch: pytest.MonkeyPatch, *files: Remote) -> None:
    monkeypatch.setattr(download, "KNOWN", {"some": Known("some data", 1, files)})


def at(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{path}"


def everything(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())


def test_the_right_file_arrives_and_is_not_fetched_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, Remote(at(server, "file"), md5(CONTENT).hexdigest(), "some/data.gz"))
    assert not is_present("some", tmp_path)
    fetch("some", tmp_path, QUIET)
    assert (tmp_path / "some" / "data.gz").read_bytes() == CONTENT
    assert everything(tmp_path) == ["some/data.gz"] and is_present("some", tmp_path)
    fetch("some", tmp_path, QUIET)
    (tmp_path / "some" / "data.gz").rename(tmp_path / "some" / "data")  # unpacked by hand
    fetch("some", tmp_path, QUIET)
    assert server.asked == 1


@pytest.mark.parametrize(
    ("path", "sum_of", "message"),
    [
        ("file", b"another", "has the md5 .* Nothing was kept"),
        ("half", CONTENT, "cannot be fetched|has the md5"),
        ("nothing", CONTENT, "cannot be fetched .*Not Found.*put it there: .*some/data"),
    ],
)
def test_what_is_not_whole_or_not_right_leaves_nothing(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    sum_of: bytes,
    message: str,
) -> None:
    known(monkeypatch, Remote(at(server, path), md5(sum_of).hexdigest(), "some/data"))
    with pytest.raises(OSError, match=message):
        fetch("some", tmp_path, QUIET)
    assert everything(tmp_path) == []


def test_without_a_network_it_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x.tar.gz"
        known(monkeypatch, Remote(url, "0" * 32, "some", r"top/(.*)"))
        with pytest.raises(OSError) as caught:
            fetch("some", tmp_path, QUIET)
    assert url in str(caught.value) and "0" * 32 in str(caught.value)
    assert f"unpack it into the folder {tmp_path / 'some'}" in str(caught.value)
    assert everything(tmp_path) == []


def test_an_archive_is_unpacked_by_name_and_cannot_write_elsewhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "data"
    known(monkeypatch, Remote(at(server, "tar"), md5(TAR).hexdigest(), "some", r"top/(.*\.bin)"))
    fetch("some", place, QUIET)
    assert everything(tmp_path) == ["data/some/a.bin", "data/some/deep/b.bin"]
    assert (place / "some" / "deep" / "b.bin").read_text() == "top/deep/b.bin" and is_present(
        "some", place
    )
    fetch("some", place, QUIET)
    assert server.asked == 1


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [("file", CONTENT, "cannot be unpacked"), ("tar", TAR, "none of the expected files")],
)
def test_an_archive_that_is_none_leaves_nothing(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    content: bytes,
    message: str,
) -> None:
    known(monkeypatch, Remote(at(server, path), md5(content).hexdigest(), "some", r"other/(.*)"))
    with pytest.raises(OSError, match=message):
        fetch("some", tmp_path, QUIET)
    assert everything(tmp_path) == []


def test_names_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'minst' cannot be fetched \(did you mean 'mnist'\?\)"):
        fetch("minst", tmp_path, QUIET)
    with pytest.raises(ValueError, match="'letters' cannot be fetched: choose from mnist"):
        fetch("letters", tmp_path, QUIET)


def test_the_list_is_of_addresses_that_are_encrypted_and_of_checksums() -> None:
    files = [file for one in KNOWN.values() for file in one.files]
    assert all(
        file.url.startswith("https://") and len(bytes.fromhex(file.md5)) == 16 for file in files
    )
    assert len({file.to for file in files}) == len({file.md5 for file in files}) == len(files)


def test_files_lie_where_the_readers_look(tmp_path: Path) -> None:
    """Tiny MNIST files under the listed names can be read."""
    from dpkfc.app.readers.idx import idx_images

    for file in KNOWN["mnist"].files:
        target = tmp_path / file.to
        target.parent.mkdir(exist_ok=True)
        images = "images" in target.name
        shape = (2, 28, 28) if images else (2,)
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        target.write_bytes(gzip.compress(header + bytes(2 * 28 * 28 if images else 2)))
    train, test = idx_images("mnist", tmp_path)
    assert len(train) == len(test) == 2 and is_present("mnist", tmp_path)


@pytest.mark.parametrize("name", ["cifar-10", "cifar-100", "imdb"])
def test_archives_are_unpacked_to_where_the_readers_look(name: str) -> None:
    (file,) = KNOWN[name].files
    expected = {
        "cifar-10": {"cifar-10-batches-bin/data_batch_1.bin": "data_batch_1.bin"},
        "cifar-100": {
            "cifar-100-binary/train.bin": "train.bin",
            "cifar-100-binary/test.bin": "test.bin",
        },
        "imdb": {
            "aclImdb/train/pos/0_9.txt": "train/pos/0_9.txt",
            "aclImdb/train/unsup/0_0.txt": None,
        },
    }
    assert file.to == name and file.members is not None
    for inside, here in expected[name].items():
        found = re.fullmatch(file.members, inside)
        assert (found[1] if found else None) == here
