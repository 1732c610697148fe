"""Pretrained networks, here tiny random ones: trained weights, inputs, refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import backbone
from dpkfc.app.models.backbone import (
    MODES,
    classifier,
    features,
    image_encoder,
    parse,
    text_encoder,
    text_tokenizer,
)
from dpkfc.app.models.default import build
from dpkfc.app.readers.sources import load
from dpkfc.app.workflow.fit import fit
from dpkfc.app.workflow.settings import Settings

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "it",
    "all",
]
TEXTS = ["the cat sat on a mat", "a mat", "it saw the cat and all it sat on"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
    )
    transformers.ViTModel(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}'
    )
    return str(folder)


def test_a_text_is_read_without_its_padding(bert: str) -> None:
    encode, noise = text_tokenizer(bert)
    encoder = text_encoder(bert, noise.pad).eval()
    ids = encode(TEXTS)
    assert ids.shape == (3, 12) and (ids[:, 0] == WORDS.index("[CLS]")).all()
    model = transformers.BertModel.from_pretrained(bert).eval()
    for text, found in zip(TEXTS, encoder(ids), strict=True):
        own = encode([text])
        hidden = model(own[own != 0][None]).last_hidden_state[0].mean(0)
        want = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + 1e-5).sqrt()
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_normalised_as_its_model_says(vit: str, channels: int) -> None:
    encoder = image_encoder(vit).eval()
    images = torch.rand(2, channels, 8, 8)
    pixels = (
        images.expand(-1, 3, -1, -1) - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    ) / torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
    hidden = transformers.ViTModel.from_pretrained(vit).eval()(pixels).last_hidden_state.mean(1)
    torch.testing.assert_close(encoder(images), F.layer_norm(hidden, (8,)))


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained_is_what_was_asked_for_and_learns_privately(
    bert: str, vit: str, mode: str, kind: str
) -> None:
    torch.manual_seed(1)
    if kind == "text":
        encode, probe = text_tokenizer(bert)
        encoder = text_encoder(bert, probe.pad)
        x: Tensor = encode(TEXTS * 4)
        geometry = dpkfc.KFC(probe=probe, every=1, probes=8)
    else:
        encoder = image_encoder(vit)  # type: ignore[assignment]
        x = torch.rand(12, 3, 8, 8)
        geometry = dpkfc.KFC(probe=dpkfc.probes.PinkNoise((3, 8, 8), classes=2), every=1, probes=8)
    model = classifier(encoder, 2, mode)
    names = trainable(model)
    assert {"1.weight", "1.bias"} <= names and not any("pooler" in name for name in names)
    if mode == "frozen":
        assert names == {"1.weight", "1.bias"}
    elif mode == "lora":
        assert all("lora_" in name for name in names - {"1.weight", "1.bias"}) and len(names) > 2
    else:
        assert all("lora_" not in name for name in names) and any(
            "attention" in name for name in names
        )
    assert not model(x).any(), "it begins with no preference"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = dpkfc.make_private(
        model,
        optimizer,
        TensorDataset(x, torch.arange(12) % 2),
        noise_multiplier=1.0,
        delta=1e-5,
        steps=2,
        batch_size=6,
        geometry=geometry,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    for records, labels in private.loader:
        F.cross_entropy(model(records), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    private.detach()
    moved = {
        name for name, parameter in model.named_parameters() if not parameter.equal(before[name])
    }
    assert moved == names


def test_features_are_those_of_each_record_alone(bert: str) -> None:
    encode, noise = text_tokenizer(bert)
    encoder = text_encoder(bert, noise.pad)
    compute, ids = features(encoder.train(), batch=2), encode(TEXTS)
    together = compute(ids)
    assert not together.requires_grad
    for row, alone in zip(together, ids, strict=True):
        torch.testing.assert_close(row, compute(alone[None])[0], rtol=1e-4, atol=1e-5)


def test_token_noise_is_of_the_models_own_ids(bert: str) -> None:
    _, noise = text_tokenizer(bert)
    encoder = text_encoder(bert, noise.pad)
    ids = noise.draw(50, torch.Generator().manual_seed(0)).inputs
    assert isinstance(ids, Tensor) and ids.shape == (50, 12)
    assert (ids[:, 0] == 2).all() and int(ids.max()) < len(WORDS) and (ids == 0).any()
    assert encoder(ids).shape == (50, 8)


def test_a_tokenizer_without_padding_pads_with_its_end(
    bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transformers.BertTokenizer.from_pretrained(bert)
    made.pad_token, made.eos_token = None, "[SEP]"
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: made)
    encode, noise = text_tokenizer(bert)
    assert (encode(["the cat"])[0, -5:] == 3).all()
    assert noise.sep is None and noise.pad == 3
    made = transformers.BertTokenizer.from_pretrained(bert)
    made.pad_token = None
    with pytest.raises(ValueError, match="no padding token"):
        text_tokenizer(bert)


class Timm:
    """The used part of timm: a network that pools its output, and its pixel statistics."""

    data = SimpleNamespace(
        resolve_model_data_config=lambda model: {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    )

    @staticmethod
    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        if name != "tiny":
            raise ValueError(f"Unknown model ({name})")
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        setattr(model, "num_features", 5)  # noqa: B010
        return model


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Timm)  # type: ignore[arg-type]
    encoder = image_encoder("timm/tiny")
    images = torch.rand(2, 3, 9, 9)
    torch.testing.assert_close(
        encoder(images), F.layer_norm(encoder.backbone((images - 0.5) / 0.25), (5,))
    )
    with pytest.raises(ValueError, match="timm/huge is not a model that can be loaded here"):
        image_encoder("timm/huge")


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 5, 4, 3)], ids=["tokens", "places"])
def test_whatever_is_left_is_averaged(shape: tuple[int, ...]) -> None:
    hidden = torch.randn(shape)
    encoder = backbone.ImageEncoder(nn.Identity(), 5, (0.0,), (1.0,))
    encoder.backbone = Fixed(hidden)
    want = hidden.mean(1) if len(shape) == 3 else hidden.mean((2, 3))
    torch.testing.assert_close(encoder(torch.zeros(2, 1, 8, 8)), F.layer_norm(want, (5,)))


class Fixed(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.hidden)


@pytest.mark.parametrize(
    ("missing", "make"),
    [
        ("transformers", lambda: text_encoder("x", 0)),
        ("timm", lambda: image_encoder("timm/x")),
        (
            "peft",
            lambda: classifier(
                backbone.ImageEncoder(nn.Linear(2, 2), 2, (0.0,), (1.0,)), 2, "lora"
            ),
        ),
    ],
)
def test_a_missing_package_is_named(
    missing: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=f"pip install {missing}"):
        make()


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a model that can be loaded here"):
        text_encoder(str(tmp_path), 0)


def test_names() -> None:
    assert [parse(f"{mode}:a/b") for mode in MODES] == [(mode, "a/b") for mode in MODES]
    assert parse("linear") is None and parse("net.py:frozen") is None


@pytest.mark.parametrize("mode", MODES)
def test_from_a_table_of_texts_to_a_private_model(bert: str, tmp_path: Path, mode: str) -> None:
    rows = [
        f"{'the cat sat' if place % 2 else 'a mat and all'} {place % 5},{place % 2}"
        for place in range(60)
    ]
    (tmp_path / "texts.csv").write_text("\n".join(["said,ill", *rows]))
    loaded = load(
        tmp_path / "texts.csv", text="said", target="ill", classes=("0", "1"), tokenizer=bert
    )
    assert loaded.shape == (12,) and loaded.train.tensors[0].dtype == torch.long
    settings = Settings(
        epsilon=8.0,
        delta=1e-3,
        epochs=2,
        batch_size=20,
        noise="independent",
        seed=0,
        model=f"{mode}:{bert}",
    )
    assert fit(loaded, settings, tmp_path / "run", console=Console(quiet=True))
    assert (tmp_path / "run" / "result.json").is_file()


def test_from_images_to_a_private_model(vit: str, tmp_path: Path) -> None:
    images, labels = (
        np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8),
        np.arange(60) % 2,
    )
    np.savez(tmp_path / "scans.npz", images=images, labels=labels)
    settings = Settings(
        epsilon=8.0,
        delta=1e-3,
        epochs=1,
        batch_size=20,
        noise="independent",
        seed=0,
        model=f"frozen:{vit}",
    )
    assert fit(
        load(tmp_path / "scans.npz"), settings, tmp_path / "run", console=Console(quiet=True)
    )
    with pytest.raises(ValueError, match="does not take inputs of shape"):
        build(f"full:{vit}", "images", (1, 9, 9), 2, dpkfc.probes.PinkNoise((1, 9, 9)))


def test_what_does_not_go_together(bert: str) -> None:
    with pytest.raises(ValueError, match="not for tabular data"):
        build(f"lora:{bert}", "tabular", (4,), 2, dpkfc.probes.Tabular(4))
    with pytest.raises(ValueError, match="the texts are hashed words: load with tokenizer="):
        build(f"lora:{bert}", "text", (64,), 2, dpkfc.probes.Tabular(64))
