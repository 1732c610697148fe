"""Hugging Face architectures in tiny configurations, with random weights and random records.

Nothing is downloaded. Dropout is off, so that a gradient has one value. The records have different
lengths where the architecture accepts padding. The number of tokens is a multiple of the number of
records in a trial: a tensor over token positions must not be taken for one over records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import dpkfc

ROWS = 6  # records
TOKENS = 8
VOCABULARY = 50
CLASSES = 3
RANK = 2  # of adapters

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE: dict[str, Any] = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 3}
TRANSLATION: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


# -- records


def _tokens() -> Batch:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    for row, length in enumerate((8, 4, 7, 8, 2, 5)):
        mask[row, length:] = 0
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    return {"input_ids": ids * mask, "attention_mask": mask}


def text() -> Batch:
    """Token ids and a class."""
    return {**_tokens(), "target": torch.randint(CLASSES, (ROWS,))}


def tokens() -> Batch:
    """Token ids, each with a token to predict."""
    return {**_tokens(), "target": torch.randint(VOCABULARY, (ROWS, TOKENS))}


def pairs_of_texts() -> Batch:
    """Token ids of an encoder and of a decoder."""
    decoder = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    return {**tokens(), "decoder_input_ids": decoder}


def images() -> Batch:
    """Images and a class."""
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8), "target": torch.randint(CLASSES, (ROWS,))}


def large_images() -> Batch:
    """Images of 32 x 32 pixels, for architectures that reduce the resolution."""
    return {**images(), "pixel_values": torch.randn(ROWS, 3, 32, 32)}


def images_with_captions() -> Batch:
    """Images and token ids, without a target."""
    return {**_tokens(), "pixel_values": torch.randn(ROWS, 3, 8, 8)}


def spectrograms() -> Batch:
    """Spectrograms, and tokens of a decoder."""
    return {
        "input_features": torch.randn(ROWS, 8, 2 * TOKENS),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, TOKENS)),
        "target": torch.randint(VOCABULARY, (ROWS, TOKENS)),
    }


def waveforms() -> Batch:
    """Sound, and a class."""
    return {"input_values": torch.randn(ROWS, 400), "target": torch.randint(CLASSES, (ROWS,))}


# -- losses


def _outputs(model: nn.Module, batch: Batch) -> Any:
    return model(**{name: x for name, x in batch.items() if name != "target"})


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a class."""
    return F.cross_entropy(_outputs(model, batch).logits, batch["target"])


def predict_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of tokens, averaged within each record first."""
    # prompts that an adapter put in front have no target
    logits = _outputs(model, batch).logits[:, -TOKENS:]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none")
    mask = batch.get("attention_mask", torch.ones_like(batch["target"]))
    return dpkfc.losses.mean_over_records(losses, mask)


def match_captions(model: nn.Module, batch: Batch) -> Tensor:
    """The scaled similarity of an image and its own caption; contrastive losses mix records."""
    return F.softplus(-_outputs(model, batch).logits_per_image.diagonal()).mean()


# -- architectures


@dataclass(frozen=True)
class Architecture:
    """A row of the matrix.

    Args:
        model: the name of the class in transformers.
        config: the name of its configuration class.
        sizes: arguments of the configuration.
        records: draws the records.
        loss: a mean over records.
        last: what is trained in the column "frozen parts": names of modules of the last block and
            the head.
        lora: `target_modules` of LoRA.
    """

    model: str
    config: str
    sizes: Mapping[str, Any]
    records: Callable[[], Batch]
    loss: Loss
    last: tuple[str, ...] = ("layer.1", "classifier")
    lora: str | tuple[str, ...] = "all-linear"

    def build(self) -> nn.Module:
        """The model, in training mode."""
        config = getattr(transformers, self.config)(**self.sizes)
        for each in (config, *(getattr(config, name) for name in config.sub_configs)):
            without_dropout(each)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()


def without_dropout(config: Any) -> None:
    """Set every rate of dropout, and of skipped layers, to zero."""
    for name, value in config.to_dict().items():
        is_rate = "drop" in name or name.endswith("pdrop")
        if is_rate and isinstance(value, float):
            setattr(config, name, 0.0)


def _encoder(name: str, last: tuple[str, ...] = ("layer.1", "classifier"), **sizes: Any) -> Any:
    text_sizes = {**TEXT, "num_labels": CLASSES, **sizes}
    model, config = f"{name}ForSequenceClassification", f"{name}Config"
    return Architecture(model, config, text_sizes, text, classify, last)


def _decoder(name: str, last: tuple[str, ...] = ("layers.1",), **sizes: Any) -> Architecture:
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    return Architecture(f"{name}ForCausalLM", config, sizes, tokens, predict_tokens, last)


def _translator(name: str, model: str, sizes: Mapping[str, Any], *last: str) -> Architecture:
    return Architecture(model, f"{name}Config", sizes, pairs_of_texts, predict_tokens, last)


def _vision(
    name: str, records: Callable[[], Batch] = images, last: str = "layer.1", **sizes: Any
) -> Architecture:
    image_sizes = {**IMAGE, "num_labels": CLASSES, **sizes}
    model, config = f"{name}ForImageClassification", f"{name}Config"
    return Architecture(model, config, image_sizes, records, classify, (last, "classifier"))


MIXTRAL = _decoder("Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
ARCHITECTURES: dict[str, Architecture] = {
    "BERT": _encoder("Bert"),
    "DistilBERT": _encoder("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    "RoBERTa": _encoder("Roberta", pad_token_id=1),
    "ALBERT": _encoder("Albert", ("pooler", "classifier"), embedding_size=8),
    "ELECTRA": _encoder("Electra", embedding_size=8),
    "DeBERTa-v2": _encoder(
        "DebertaV2",
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=16,
    ),
    "MPNet": _encoder("MPNet", pad_token_id=1),
    "ModernBERT": _encoder("ModernBert", ("layers.1", "classifier"), cls_token_id=1),
    "GPT-2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16},
        tokens,
        predict_tokens,
        ("h.1",),
    ),
    "GPT-NeoX": _decoder("GPTNeoX", **TEXT),
    "OPT": _decoder("OPT", **TEXT, ffn_dim=24, word_embed_proj_dim=16),
    "BLOOM": _decoder(
        "Bloom", ("h.1",), hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCABULARY
    ),
    "Llama": _decoder("Llama", **GROUPED),
    "Mistral": _decoder("Mistral", **GROUPED),
    "Qwen2": _decoder("Qwen2", **GROUPED),
    "Qwen3": _decoder("Qwen3", **GROUPED),
    "Gemma 2": _decoder("Gemma2", **GROUPED),
    "Gemma 3": _decoder("Gemma3", **GROUPED),
    "Phi": _decoder("Phi", **TEXT),
    "Falcon": _decoder("Falcon", ("h.1",), **TEXT),
    "Mixtral": MIXTRAL,
    "Mixtral, LoRA of attention": replace(MIXTRAL, lora=("q_proj", "k_proj", "v_proj", "o_proj")),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY},
        tokens,
        predict_tokens,
        ("layers.1",),
        ("in_proj", "x_proj"),
    ),
    "T5": _translator("T5", "T5ForConditionalGeneration", T5_SIZES, "block.1"),
    "mT5": _translator("MT5", "MT5ForConditionalGeneration", T5_SIZES, "block.1", "lm_head"),
    "BART": _translator("Bart", "BartForConditionalGeneration", TRANSLATION, "layers.1"),
    "Pegasus": _translator("Pegasus", "PegasusForConditionalGeneration", TRANSLATION, "layers.1"),
    "ViT": _vision("ViT"),
    "DeiT": _vision("DeiT"),
    "BEiT": _vision("Beit", use_relative_position_bias=True),
    "DINOv2": _vision("Dinov2"),
    "Swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        large_images,
        classify,
        ("layers.1", "classifier"),
    ),
    "ConvNeXt": _vision(
        "ConvNext", large_images, "stages.1", depths=[1, 1], hidden_sizes=[8, 16], num_stages=2
    ),
    "ResNet": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES},
        large_images,
        classify,
        ("stages.1", "classifier"),
        ("convolution",),
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **TRANSLATION,
            "num_mel_bins": 8,
            "max_source_positions": TOKENS,
            "max_target_positions": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        spectrograms,
        predict_tokens,
        ("layers.1",),
    ),
    "Wav2Vec2": Architecture(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **SIZES,
            "conv_dim": (8, 8),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
            "num_labels": CLASSES,
            "mask_time_prob": 0.0,
        },
        waveforms,
        classify,
        ("layers.1", "projector", "classifier"),
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "eos_token_id": 2},
            "vision_config": IMAGE,
            "projection_dim": 8,
        },
        images_with_captions,
        match_captions,
        ("layers.1", "visual_projection", "text_projection"),
    ),
}


# -- what is trained


def full(architecture: Architecture) -> nn.Module:
    """Every parameter."""
    return architecture.build()


def frozen_parts(architecture: Architecture) -> nn.Module:
    """The last block and the head."""
    model = architecture.build()
    for name, p in model.named_parameters():
        p.requires_grad_(any(f".{last}." in f".{name}" for last in architecture.last))
    return model


def lora(architecture: Architecture) -> nn.Module:
    """Low-rank adapters of the linear layers."""
    named = architecture.lora
    targets = named if isinstance(named, str) else list(named)
    return adapted(architecture, peft.LoraConfig(r=RANK, target_modules=targets))


def adapted(architecture: Architecture, config: Any) -> nn.Module:
    """Adapters of PEFT, all of whose parameters are random.

    At their initialisation, half of the gradients would be zero.
    """
    model: nn.Module = peft.get_peft_model(architecture.build(), config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.train()


TRAINED: dict[str, Callable[[Architecture], nn.Module]] = {
    "full": full,
    "LoRA": lora,
    "frozen parts": frozen_parts,
}


@dataclass(frozen=True)
class Adapter:
    """A method of PEFT: its configuration, and what differs between BERT and GPT-2."""

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)

    def build(self, name: str) -> nn.Module:
        """The architecture with this adapter."""
        task = {"BERT": "SEQ_CLS", "GPT-2": "CAUSAL_LM"}[name]
        settings = {**self.settings, **self.targets.get(name, {}), "task_type": task}
        return adapted(ARCHITECTURES[name], getattr(peft, self.config)(**settings))


ATTENTION = {
    "BERT": {"target_modules": ["query", "value"]},
    "GPT-2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
}
PROMPTS = {"num_virtual_tokens": 4}
ADAPTERS: dict[str, Adapter] = {
    "DoRA": Adapter("LoraConfig", {"r": RANK, "use_dora": True}, ATTENTION),
    "IA3": Adapter(
        "IA3Config",
        {},
        {
            "BERT": {
                "target_modules": ["key", "value", "output.dense"],
                "feedforward_modules": ["output.dense"],
            },
            "GPT-2": {
                "target_modules": ["c_attn", "mlp.c_proj"],
                "feedforward_modules": ["mlp.c_proj"],
                "fan_in_fan_out": True,
            },
        },
    ),
    "embedding LoRA": Adapter(
        "LoraConfig",
        {"r": RANK},
        {
            "BERT": {"target_modules": ["word_embeddings", "query"]},
            "GPT-2": {"target_modules": ["wpe", "c_attn"], "fan_in_fan_out": True},
        },
    ),
    "prompt tuning": Adapter("PromptTuningConfig", PROMPTS),
    "prefix tuning": Adapter("PrefixTuningConfig", PROMPTS),
    "P-tuning": Adapter("PromptEncoderConfig", {**PROMPTS, "encoder_hidden_size": 8}),
    "VeRA": Adapter("VeraConfig", {"r": RANK}, ATTENTION),
}
