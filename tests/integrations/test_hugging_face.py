"""Randomly initialised Hugging Face models, unpatched, equal one autograd pass a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import mapped
from torch import Tensor, nn

import dpkfc
from oracle import (
    captured_norms,
    private_sum,
    reference_grads,
    reference_norms,
    reference_sum,
    relative_error,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
BATCH, LENGTH, VOCABULARY = 5, 9, 50
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def masked_bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=16
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        **SIZES,
        image_size=8,
        patch_size=4,
        num_channels=3,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def lora() -> nn.Module:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_proj"], lora_dropout=0.0, fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(
                p, std=0.1
            )  # zero at the start, which would make half of the gradients zero
    return model


def tokens() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, length in enumerate((9, 4, 7, 9, 2)):
        mask[row, length:] = 0
    return {"input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH)), "attention_mask": mask}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8)}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "target"}
    return F.cross_entropy(model(**inputs).logits, batch["target"])


def predict_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Masked token loss, averaged within each record first."""
    inputs = {k: v for k, v in batch.items() if k != "target"}
    losses = F.cross_entropy(
        model(**inputs).logits.transpose(1, 2), batch["target"], reduction="none"
    )
    return dpkfc.losses.mean_over_records(losses, batch["attention_mask"])


CASES = {
    "bert": (bert, tokens, classify),
    "bert_masked_lm": (masked_bert, tokens, predict_tokens),
    "gpt2": (gpt2, tokens, predict_tokens),
    "llama": (llama, tokens, predict_tokens),
    "vit": (vit, images, classify),
    "lora": (lora, tokens, predict_tokens),
}


def make(name: str) -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(2)
    build, inputs, loss = CASES[name]
    model, batch = build().train(), inputs()
    batch["target"] = (
        torch.randint(VOCABULARY, (BATCH, LENGTH))
        if loss is predict_tokens
        else torch.randint(3, (BATCH,))
    )
    return model, batch, loss


@pytest.mark.parametrize("name", CASES)
def test_full_fine_tuning_equals_one_pass_a_sample(name: str) -> None:
    model, batch, loss = make(name)
    grads = reference_grads(model, loss, batch, BATCH)
    norms = reference_norms(grads)
    torch.testing.assert_close(
        captured_norms(model, loss, batch, BATCH).double(), norms, rtol=1e-5, atol=0
    )

    clip = float(norms.median())
    got = private_sum(model, loss, batch, BATCH, clip, chunk=3)
    for key, want in reference_sum(grads, clip).items():
        if want.norm() > 1e-7 * clip:
            assert relative_error(got[key], want) < 5e-5, key


@pytest.mark.parametrize(
    "options", [{"factors": "AG", "damping": 0.1}, {"rank": 3}], ids=["AG", "low rank"]
)
@pytest.mark.parametrize("name", CASES)
def test_an_inferred_geometry_equals_naively_mapped_gradients(
    name: str, options: dict[str, Any]
) -> None:
    """`KFC()` reads the probe off the model's config.

    The map is then that of each layer, Conv1D and LoRA included.
    """
    model, batch, loss = make(name)
    model, batch = (
        model.double(),
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()},
    )
    grads = reference_grads(model, loss, batch, BATCH)
    geometry = dpkfc.KFC(**options, probes=16)
    private_sum(model, loss, batch, BATCH, 1.0, geometry=geometry)
    assert len(geometry._maps) > 5
    naive = mapped(geometry, model, grads)
    clip = float(reference_norms(naive).median())
    got = private_sum(model, loss, batch, BATCH, clip, 3, geometry)
    want = reference_sum(naive, clip)
    assert got.keys() == want.keys()
    for key in want:
        assert (got[key] - want[key]).norm() < 1e-5 * clip, key


@pytest.mark.parametrize("name", CASES)
def test_the_loss_passes_the_trial_before_training(name: str) -> None:
    model, batch, loss = make(name)
    records = [{k: v[i] for k, v in batch.items()} for i in range(BATCH)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 1, "batch_size": BATCH}
    dpkfc.make_private(model, optimizer, records, **settings, loss=loss)


@pytest.mark.parametrize("name", ["bert_masked_lm", "gpt2", "llama"])
def test_a_loss_averaged_over_all_tokens_of_the_batch_is_refused(name: str) -> None:
    """Hugging Face's own loss divides by the tokens of all records.

    One record's length would weigh on the others.
    """
    model, batch, _ = make(name)
    labels = batch["target"].masked_fill(batch["attention_mask"] == 0, -100)
    records = [
        {**{k: v[i] for k, v in batch.items() if k != "target"}, "labels": labels[i]}
        for i in range(BATCH)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 1, "batch_size": BATCH}
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records|mean_over_records"):
        dpkfc.make_private(model, optimizer, records, **settings, loss=lambda m, b: m(**b).loss)
    # not declared, it is found at the first batch
    private = dpkfc.make_private(model, optimizer, records, **settings, loss="unchecked")
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        for part in private.loader:
            model(**part)
    assert private.epsilon() == 0
