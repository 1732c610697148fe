"""The probe of a model that declares its inputs, and the error for one that does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dpkfc.app.models.cnn import paper_cnn
from dpkfc.app.models.mlp import mlp
from dpkfc.probes.infer import infer_probe
from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import call
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.tokens import Tokens


def runs(model: nn.Module) -> Any:
    """The output of the model on the probes that were inferred for it."""
    return call(model, infer_probe(model).draw(3, torch.Generator().manual_seed(0)).inputs)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (paper_cnn(), (1, 28, 28)),
        (nn.Conv1d(2, 3, 3), [2, 50]),
        (nn.Conv3d(1, 2, 2), (1, 4, 5, 6)),
    ],
)
def test_a_declared_grid_is_pink_noise(model: nn.Module, shape: Any) -> None:
    model.input_shape = shape
    probe = infer_probe(model)
    assert isinstance(probe, PinkNoise) and probe.shape == tuple(shape)
    assert len(runs(model)) == 3


def test_a_declared_width_is_tabular_and_comes_before_anything_else() -> None:
    model = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 2))
    model.input_shape = (7,)
    probe = infer_probe(model)
    assert isinstance(probe, Tabular) and probe.features == 7
    image = mlp([12, 2])
    image.input_shape = (3, 2, 2)
    assert isinstance(infer_probe(image), PinkNoise) and runs(image).shape == (3, 2)


def test_the_first_layer_tells() -> None:
    dense = infer_probe(mlp([784, 16, 10]))
    assert (
        isinstance(dense, Tabular)
        and dense.features == 784
        and runs(mlp([784, 16, 10])).shape == (3, 10)
    )
    words = nn.Sequential(nn.Embedding(40, 6, padding_idx=5), nn.Linear(6, 2))
    probe = infer_probe(words)
    assert isinstance(probe, Tokens) and (probe.vocabulary, probe.length, probe.pad) == (40, 32, 5)
    assert runs(words).shape == (3, 32, 2)


def test_hugging_face_text_models_declare_their_vocabulary() -> None:
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, max_position_embeddings=24, pad_token_id=7,
        )
    )  # fmt: skip
    probe = infer_probe(bert)
    assert isinstance(probe, Tokens) and (probe.vocabulary, probe.length, probe.pad) == (60, 24, 7)
    assert runs(bert).logits.shape == (3, 2)
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=60,
            n_positions=256,
            n_embd=8,
            n_layer=1,
            n_head=2,
            bos_token_id=59,
            eos_token_id=58,
        )
    )
    probe = infer_probe(gpt)
    assert isinstance(probe, Tokens) and (probe.length, probe.cls, probe.sep, probe.pad) == (
        128,
        59,
        58,
        None,
    )
    assert runs(gpt).logits.shape == (3, 128, 60)


def test_hugging_face_image_models_declare_their_images() -> None:
    transformers = pytest.importorskip("transformers")
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=(8, 12), patch_size=4, num_channels=2, hidden_size=8, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=8,
        )
    )  # fmt: skip
    probe = infer_probe(vit)
    assert isinstance(probe, PinkNoise) and probe.shape == (2, 8, 12)
    assert runs(vit).logits.shape == (3, 2)


def with_config(**config: Any) -> nn.Module:
    model = nn.Module()
    model.config = SimpleNamespace(**config)
    return model


def test_configurations_are_read_with_care() -> None:
    several = infer_probe(
        with_config(vocab_size=50, eos_token_id=[9, 8], pad_token_id=-1, bos_token_id=50)
    )
    assert isinstance(several, Tokens) and (several.sep, several.pad, several.cls) == (
        9,
        None,
        None,
    )
    assert several.length == 128
    square = infer_probe(with_config(image_size=16, num_channels=3))
    assert isinstance(square, PinkNoise) and square.shape == (3, 16, 16)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2)),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
        nn.MultiheadAttention(8, 2),  # its only leaf is its output map, which reads no input
        with_config(num_channels=3),
        with_config(vocab_size=50, image_size=16, num_channels=3),
        nn.Sequential(),
    ],
)
def test_a_model_that_does_not_declare_its_inputs_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"Pass probe=dpkfc.probes.PinkNoise\(shape=.*or set model.input_shape"
    ):
        infer_probe(model)


@pytest.mark.parametrize("shape", [28, (), (1, 2, 3, 4, 5), "28"])
def test_a_declaration_that_makes_no_sense_is_named(shape: Any) -> None:
    model = nn.Identity()
    model.input_shape = shape
    with pytest.raises(
        ValueError, match=r"model.input_shape=.*: give \(features,\) or \(channels, \*grid\)"
    ):
        infer_probe(model)


def test_nothing_is_run_and_nothing_is_drawn_while_inferring() -> None:
    model = mlp([4, 2])
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    before = torch.get_rng_state()
    infer_probe(model)
    assert torch.get_rng_state().equal(before)
