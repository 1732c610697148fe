"""Data sets as public features: the vocabulary is public, proxies have the same features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.common.data import featured
from experiments.common.data.featured import FEATURED, features_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(featured.VOCABULARIES, "tfidf-2000", ("sst-2", 3))
    featured._vocabulary.cache_clear()
    write(tmp_path, "sst-2", ["a good film", "a bad film", "good music"])
    write(tmp_path, "imdb", ["secret secret secret", "good secret", "a bad film"])
    write(tmp_path, "ag-news", ["oil prices", "good oil", "music"])
    return tmp_path


def write(folder: Path, name: str, texts: list[str]) -> None:
    lines = [
        f"{part},{number % 2},{text}"
        for part in ("train", "test")
        for number, text in enumerate(texts)
    ]
    (folder / f"{name}.csv").write_text("split,label,text\n" + "\n".join(lines) + "\n")


def test_the_words_are_those_of_the_public_texts(folder: Path) -> None:
    names, read = FEATURED["imdb/tfidf-2000"]
    train, test = read(folder)
    assert names == ("negative", "positive") and train.tensors[0].shape == (3, 3)
    assert featured._vocabulary("tfidf-2000", folder).words == ("film", "good", "bad")
    known = {tuple(row.nonzero().flatten().tolist()) for row in train.tensors[0]}
    assert known == {(), (1,), (0, 2)}, "a secret is not a feature"
    assert torch.equal(test.tensors[0], train.tensors[0])


def test_a_proxy_has_the_same_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FEATURED["ag-news/tfidf-2000"][1](folder)[0]
    assert proxy.tensors[0].shape == (3, 3) and int((proxy.tensors[0] > 0).sum()) == 1
    monkeypatch.setattr(featured, "PUBLIC", 2)
    assert len(FEATURED["ag-news/tfidf-2000"][1](folder)[0]) == 2
    assert len(FEATURED["imdb/tfidf-2000"][1](folder)[0]) == 3, "private records are all used"


def test_where_features_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPKFC_CACHE", raising=False)
    assert features_folder(tmp_path) == tmp_path / "features"
    monkeypatch.setenv("DPKFC_CACHE", str(tmp_path / "elsewhere"))
    assert features_folder(tmp_path) == tmp_path / "elsewhere"


def test_images_and_noise_have_the_same_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        featured.backbone_features, "image_features", lambda images: images.flatten(1)[:, :5]
    )
    monkeypatch.setattr(featured, "NOISE", 6)
    record = bytes([0, 7]) + bytes(range(256)) * 12
    (tmp_path / "cifar-100").mkdir()
    for part, count in (("train", 3), ("test", 2)):
        (tmp_path / "cifar-100" / f"{part}.bin").write_bytes(record * count)
    train, test = FEATURED["cifar-100/efficientnet"][1](tmp_path)
    assert train.tensors[0].shape == (3, 5) and test.tensors[1].tolist() == [7, 7]
    torch.testing.assert_close(train.tensors[0][0], torch.arange(5.0) / 255)
    noise = FEATURED["pink/efficientnet"][1](tmp_path)[0].tensors[0]
    assert noise.shape == (6, 5) and noise.min() >= 0 and noise.max() <= 1
